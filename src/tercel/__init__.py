"""tercel trains, proves, measures and runs EAGLE-3 draft heads for Hugging Face causal language models.

The names below are the Python API; they are imported when first used, so that `tercel --help` need not wait
for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tercel.decode.compat import load_draft
    from tercel.decode.draft_tree import DraftTree
    from tercel.decode.eagle3 import Eagle3
    from tercel.decode.engine import Engine
    from tercel.decode.generation_config import sampling_for
    from tercel.decode.proposer import Proposer
    from tercel.decode.proposers import ProposerKind, make_proposer
    from tercel.decode.sampled_chain import SampledChain
    from tercel.decode.sampling import SamplingParams
    from tercel.decode.types import Event, GenerationResult, Proposal, Request
    from tercel.decode.vanilla import Vanilla
    from tercel.draft.shape import TreeShape
    from tercel.errors import TercelError
    from tercel.interop.export import export_head
    from tercel.interop.hub import from_pretrained, push_to_hub, save_pretrained
    from tercel.target_model.backends import load_target
    from tercel.target_model.model import Target

_HOMES = {
    "DraftTree": "tercel.decode.draft_tree",
    "Eagle3": "tercel.decode.eagle3",
    "Engine": "tercel.decode.engine",
    "Event": "tercel.decode.types",
    "GenerationResult": "tercel.decode.types",
    "Proposal": "tercel.decode.types",
    "Proposer": "tercel.decode.proposer",
    "ProposerKind": "tercel.decode.proposers",
    "Request": "tercel.decode.types",
    "SampledChain": "tercel.decode.sampled_chain",
    "SamplingParams": "tercel.decode.sampling",
    "Target": "tercel.target_model.model",
    "TercelError": "tercel.errors",
    "TreeShape": "tercel.draft.shape",
    "Vanilla": "tercel.decode.vanilla",
    "export_head": "tercel.interop.export",
    "from_pretrained": "tercel.interop.hub",
    "load_draft": "tercel.decode.compat",
    "load_target": "tercel.target_model.backends",
    "make_proposer": "tercel.decode.proposers",
    "push_to_hub": "tercel.interop.hub",
    "sampling_for": "tercel.decode.generation_config",
    "save_pretrained": "tercel.interop.hub",
}

__all__ = [
    "DraftTree",
    "Eagle3",
    "Engine",
    "Event",
    "GenerationResult",
    "Proposal",
    "Proposer",
    "ProposerKind",
    "Request",
    "SampledChain",
    "SamplingParams",
    "Target",
    "TercelError",
    "TreeShape",
    "Vanilla",
    "export_head",
    "from_pretrained",
    "load_draft",
    "load_target",
    "make_proposer",
    "push_to_hub",
    "sampling_for",
    "save_pretrained",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tercel' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
