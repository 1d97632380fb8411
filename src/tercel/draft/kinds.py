"""The kinds of draft heads: the one place where a further kind is entered."""

from __future__ import annotations

import importlib
from typing import Any

from tercel.draft.config import HeadConfig
from tercel.draft.head import DraftHead
from tercel.draft.history import TrainingRecord
from tercel.errors import TercelError

# By the name in `HeadConfig.kind` and in tercel.json, where the class stands: imported when it is needed, so that a
# kind may stand in a later room, with its objective and its proposer.
KINDS: dict[str, str] = {
    "eagle3": "tercel.draft.eagle3:Eagle3Head",
    "eagle1": "tercel.draft.eagle1:Eagle1Head",
    "medusa": "tercel.methods.medusa:MedusaHead",
    "hydra": "tercel.methods.hydra:HydraHead",
    "mtp": "tercel.methods.mtp.module:MtpHead",
    "p-eagle": "tercel.methods.p_eagle.module:PEagleHead",
}
# The methods that a head of a kind is of (`decode/proposers.py`), the usual one first. HASS teaches heads of EAGLE's.
METHODS_OF: dict[str, tuple[str, ...]] = {
    "eagle3": ("eagle3", "eagle3-sampled-chain"),
    "eagle1": ("eagle", "eagle2"),
    "medusa": ("medusa", "medusa-typical"),
    "hydra": ("hydra",),
    "mtp": ("mtp",),
    "p-eagle": ("p-eagle",),
}
HASS = "hass"


def methods_of(kind: str, training: TrainingRecord) -> tuple[str, ...]:
    """The methods that a head is of, by its kind and by how it was trained; none for a kind that is not known."""
    if training.recipe is not None and training.recipe.method == HASS:
        return (HASS,)
    return METHODS_OF.get(kind, ())


def head_class(kind: str) -> type[DraftHead]:
    """Raises `TercelError` for a kind that is not known."""
    if kind not in KINDS:
        raise TercelError(f"there is no kind of head {kind!r}; known are {', '.join(KINDS)}; update tercel")
    module, _, name = KINDS[kind].partition(":")
    found: type[DraftHead] = getattr(importlib.import_module(module), name)
    return found


def new_head(config: HeadConfig) -> DraftHead:
    """A head of `config`, as it is before anything was learned."""
    return head_class(config.kind)(config)


def config_of(values: dict[str, Any]) -> HeadConfig:
    """The settings that `HeadConfig.to_dict` gave; raises `TercelError` for an unknown kind and for wrong ones."""
    kind = values.get("kind", HeadConfig.kind)
    return head_class(str(kind)).config_class.from_dict(values)
