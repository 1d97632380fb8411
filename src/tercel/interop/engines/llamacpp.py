"""llama.cpp of mid-2026 (`common/arg.cpp`): target and draft are GGUF files."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from tercel.errors import TercelError
from tercel.interop.engines.base import ExportJob, ServingEngine

if TYPE_CHECKING:
    from tercel.draft.shape import TreeShape
    from tercel.interop.loaders import EngineView

DRAFT_FILE = "draft.gguf"


class LlamaCpp(ServingEngine):
    name = "llamacpp"
    title = "llama.cpp"
    lacks = ("norm_output", "fc_norm", "attention_bias")
    ropes = ("default", "linear", "llama3")
    sorts_layers = False
    captures = 3
    takes_gguf = True
    tells_counters = True
    port = 8080

    def loads_as_target(self, target_name: str, target_gguf: Path | None) -> str:
        return str(_given(target_gguf))

    def write(self, job: ExportJob, folder: Path) -> None:
        """One file, with the target's tokenizer in it."""
        from tercel.interop.engines.gguf_draft import write_gguf

        write_gguf(job.model, folder / DRAFT_FILE, job.dtype, job.target_name, _given(job.target_gguf))

    def launch(self, head: str, target: str, shape: TreeShape, dtype: str = "bfloat16") -> str:
        """A chain of `depth`; `head` is the draft's file, and both run in what their files hold."""
        return (
            f"llama-server -m {shlex.quote(target)} -md {shlex.quote(head)} "
            f"--spec-type draft-eagle3 --spec-draft-n-max {shape.depth}"
        )

    def start(self, out: Path, target: str, shape: TreeShape) -> str:
        return self.launch(str(out / DRAFT_FILE), target, shape)

    def view(self, folder: Path, num_layers: int, target_type: str | None = None) -> EngineView:
        from tercel.interop.loaders.llamacpp import view_llamacpp

        return view_llamacpp(folder, num_layers)


def _given(target_gguf: Path | None) -> Path:
    if target_gguf is None:
        raise TercelError(
            "llama.cpp's draft carries the target's tokenizer; give the target as FILE.gguf, the one that llama-server "
            "will run"
        )
    return target_gguf
