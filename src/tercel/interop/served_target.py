"""A head beside the target that it will be served with: the one that is named, or the one that the head records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tercel.draft import DraftModel
from tercel.errors import TercelError
from tercel.interop.formats.read import LayerIds, read_head
from tercel.target_model.stored import StoredTarget
from tercel.wheels import OnBytes


def read_beside(
    path: Path,
    target: str | None,
    layer_ids: LayerIds = "auto",
    on_bytes: OnBytes | None = None,
    *,
    ask_hub: bool,
) -> tuple[DraftModel, StoredTarget]:
    """The EAGLE-3 head in a folder as its files have it, and `served_target`; whether the two fit is not asked yet."""
    model = read_head(path, layer_ids=layer_ids)
    model = replace(model, head=model.eagle3)
    served = served_target(model, target, on_bytes, ask_hub=ask_hub)
    if model.head.config.target_num_layers is None and served.num_layers is not None:
        # what a foreign folder's layer ids mean may depend on it
        model = read_head(path, layer_ids=layer_ids, num_layers=served.num_layers)
    return model, served


def served_target(
    model: DraftModel, given: str | None, on_bytes: OnBytes | None = None, *, ask_hub: bool
) -> StoredTarget:
    """The target `given`, else the head's own by its record; `ask_hub` as in `StoredTarget.find`.

    Raises `TercelError` if there is no such target, or none is given and none recorded.
    """
    if given is not None:
        return StoredTarget.find(given, on_bytes, ask_hub=ask_hub)
    recorded = model.info.target_name
    if not recorded:
        raise TercelError("the head does not record its target; give the target")
    try:
        return StoredTarget.find(recorded, on_bytes, ask_hub=ask_hub)
    except TercelError as error:
        raise TercelError(f"the target that the head records is not to be had ({error}); give the target") from error
