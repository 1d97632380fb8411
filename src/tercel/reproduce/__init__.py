"""The experiments of the EAGLE-3 paper at three scales, and its claims, judged by rules that stand before the run."""
