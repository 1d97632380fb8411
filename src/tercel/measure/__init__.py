"""Tasks, paired timing, acceptance, intervals, and the proof of losslessness."""
