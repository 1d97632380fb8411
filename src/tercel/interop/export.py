"""Write a head as an engine loads it, and prove it before the folder appears."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tercel.draft import DraftModel
from tercel.draft.binding import fitted, share_embeddings
from tercel.draft.history import TRAINED
from tercel.draft.shape import TreeShape
from tercel.errors import TercelError
from tercel.file_set import CARD, file_set, interrupted, may_replace_card, read_manifest, refuse_foreign, settle
from tercel.files import put_text
from tercel.interop.engines import ExportJob, find
from tercel.interop.engines.limits import check_expressible
from tercel.interop.engines.weights import smallest_exact
from tercel.interop.export_readme import readme
from tercel.interop.proof import Proven, prove
from tercel.locks import OURS, folder_lock
from tercel.target_model.stored import StoredTarget

KIND = "export"


@dataclass(frozen=True)
class ExportReport:
    """What was written and found right.

    files: name and bytes; dtype: of the matrices in the file; layers: feature layers as inputs, written_ids: as this
    engine's files have them, which are `ids_mean`; command: how to start the engine.
    """

    engine: str
    out: Path
    target: str
    files: tuple[tuple[str, int], ...]
    dtype: str
    layers: tuple[int, ...]
    written_ids: tuple[int, ...]
    ids_mean: str
    checks: tuple[Proven, ...]
    command: str
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "out": str(self.out), "files": dict(self.files)}


def export_head(
    model: DraftModel,
    engine: str,
    out: Path,
    target: StoredTarget,
    *,
    target_gguf: Path | None = None,
    shape: TreeShape | None = None,
    overwrite: bool = False,
) -> ExportReport:
    """Write `model` to the folder `out` for one of the `engines.ENGINES`, by name.

    target: what the engine will load; target_gguf: its GGUF file, for an engine that takes such.
    The written folder is read back as the engine would (`loaders`) and compared with `model`: tensors, layers, flags,
    vocabulary, RoPE, draft logits. `out` is whole and proven, or it is not there (or as it was);
    other files in it stay.
    Raises `TercelError` if the head does not fit the target, for what the engine cannot express, for a place that is
    taken, and for any difference.
    """
    written_for = find(engine)
    model, warnings = fitted(replace(model, head=model.eagle3), target)
    if model.head.config.target_num_layers is None:
        raise target.unread or TercelError(
            "the head does not say how many layers its target has, so its feature layers are not settled; give the "
            "target"
        )
    if (embeddings := target.embeddings()) is not None:
        model = share_embeddings(model, embeddings)
    warnings += check_expressible(written_for, model.head.config, model.vocabulary, target.model_type)
    if written_for.names_target and Path(target.address).is_absolute():
        warnings += (
            f"the folder names its target by a path of this machine, {target.address}; give the target as owner/name",
        )
    job = ExportJob(
        model,
        out,
        smallest_exact(model),
        target.address,
        target_gguf,
        tuple((target.settings and target.settings.architectures) or ()),
        shape or TreeShape.chain(),
        model.info.training.embeddings == TRAINED,
    )
    engine_target = written_for.loads_as_target(target.address, target_gguf)
    command = written_for.start(out, engine_target, job.shape)
    with folder_lock(out), _opened(out, model.path, overwrite) as partial:
        written_for.write(job, partial)
        checks = prove(model, engine, partial, target.model_type)
        card = readme(job, written_for, engine_target, command, checks, warnings)
        put_text(partial / CARD, card)
        files = tuple((file.name, file.stat().st_size) for file in sorted(partial.iterdir()))
    return ExportReport(
        engine=engine,
        out=out,
        target=engine_target,
        files=files,
        dtype=str(job.dtype).removeprefix("torch."),
        layers=model.head.config.feature_layers,
        written_ids=written_for.ids(model.head.config.feature_layers),
        ids_mean=written_for.ids_mean,
        checks=checks,
        command=command,
        warnings=warnings,
    )


def _opened(out: Path, source: Path | None, overwrite: bool) -> AbstractContextManager[Path]:
    """Where to write the files of `out`. Raises `TercelError` unless `out` is free, or holds an export that may be
    overwritten (one that was interrupted always may).
    """
    if source is not None and out.resolve() == source.resolve():
        raise TercelError(f"{out} is the head's own folder, which an export would replace; give another")
    unfinished = interrupted(out)
    settle(out)
    manifest = read_manifest(out)
    free = manifest is None and all(name.startswith(OURS) for name in os.listdir(out))
    if not free and (manifest is None or manifest.kind != KIND):
        raise TercelError(
            f"{out} holds other things than an export of this version, so nothing is written there; give another folder"
        )
    if manifest is not None:
        if not overwrite and not unfinished:
            raise TercelError(f"{out} is taken; give another folder, or overwrite to replace the export there")
        refuse_foreign(out, manifest.files)
        if not may_replace_card(out):
            raise TercelError(f"{CARD} in {out} was edited since it was written; move it away or give another folder")
    return file_set(out, KIND)
