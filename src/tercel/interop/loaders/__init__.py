"""What each engine would make of an exported folder: its loader imitated, one module an engine.

A view answers what a user cannot see in a running server, where a wrong reading only lowers acceptance: which layers
are captured, which tensors stay random, which flags hold, whose embeddings are used. Nothing here uses this project's
head, its readers or its writers, nor a constant of theirs: these are second readers, and a mistake in those must not
hide in both.
"""

from tercel.interop.loaders.chain import draft_logits, frequencies_of, look_up
from tercel.interop.loaders.parts import EngineView

__all__ = ["EngineView", "draft_logits", "frequencies_of", "look_up"]
