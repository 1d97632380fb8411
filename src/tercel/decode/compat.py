"""A draft head by its name, beside the target that will verify what it drafts."""

from __future__ import annotations

from tercel.draft import DraftModel
from tercel.draft.binding import bind
from tercel.draft.misfits import misfits
from tercel.errors import TercelError
from tercel.heads import resolve_head
from tercel.interop.formats.read import LayerIds, read_head
from tercel.target_model.protocol import TargetModel


def load_draft(
    name: str | None, target: TargetModel, *, force: bool = False, layer_ids: LayerIds = "auto"
) -> DraftModel:
    """Load a head (a folder in any format, `owner/name` on the Hub, the name of a target with a shipped head, or None
    for this target's shipped one) in the target's precision, bound to the target.

    force: take a head that was trained for other weights of the same shape (a fine-tuned target, say).
    layer_ids: what the ids in files of other makers mean, where that is doubted.
    Raises `TercelError` if there is no such head, it is damaged, or it is another target's.
    """
    path = resolve_head(name, target.source.name)
    model = read_head(
        path, dtype=target.dtype, device=str(target.device), num_layers=target.num_layers, layer_ids=layer_ids
    )
    for misfit in () if force else misfits(model, target):
        if misfit.severity != "note":
            raise TercelError(str(misfit) + ("; --force-head uses it anyway" if misfit.severity == "warn" else ""))
    return bind(model, target)
