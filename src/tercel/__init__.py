"""tercel trains, proves, measures and runs EAGLE-3 draft heads for Hugging Face causal language models."""
