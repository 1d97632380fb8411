"""TensorRT-LLM (1.4: `Eagle3DecodingConfig`)."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tercel.interop.engines.base import ExportJob, FolderEngine, eagle_config, plain_config

if TYPE_CHECKING:
    from torch import Tensor

    from tercel.draft import DraftVocabulary, HeadConfig
    from tercel.draft.shape import TreeShape
    from tercel.interop.loaders import EngineView

OPTIONS = "trtllm.yaml"


class TensorRtLlm(FolderEngine):
    name = "trtllm"
    title = "TensorRT-LLM"
    lacks = ("norm_before_residual",)
    ids_are_outputs = True
    first_layer = 1
    single_layer = False
    wide_fc = False
    own_embeddings = False
    serve_command = True

    def doubts(self, c: HeadConfig, target_type: str | None) -> tuple[str, ...]:
        if not (c.fc_norm or c.norm_output):
            return ()
        return ("fc_norm and norm_output are read by TensorRT-LLM 1.4; releases without them ignore the flags",)

    def config(self, public: dict[str, Any], c: HeadConfig, job: ExportJob) -> dict[str, Any]:
        """Layers are named in the options alone."""
        return {**plain_config(public, c), "eagle_config": eagle_config(c)}

    def maps(self, vocabulary: DraftVocabulary) -> dict[str, Tensor]:
        return {"d2t": vocabulary.d2t} if vocabulary.pruned else {}

    def more_files(self, c: HeadConfig, job: ExportJob) -> dict[str, str]:
        return {OPTIONS: options(str(job.out), job.shape, self.ids(c.feature_layers))}

    def launch(self, head: str, target: str, shape: TreeShape, dtype: str = "bfloat16") -> str:
        file = f"{head.rstrip('/')}/{OPTIONS}"
        return f"trtllm-serve {shlex.quote(target)} --extra_llm_api_options {shlex.quote(file)}"

    def beside_launch(self, job: ExportJob) -> str | None:
        outputs = self.ids(job.model.head.config.feature_layers)
        return (
            f"`{OPTIONS}` names this folder where it was written; if it moves, change `speculative_model`:\n"
            f"```yaml\n{options(str(job.out), job.shape, outputs)}```"
        )

    def unstartable(self, folder: Path) -> str | None:
        if (folder / OPTIONS).is_file():
            return None
        return f"the folder has no {OPTIONS} with TensorRT-LLM's settings"

    def view(self, folder: Path, num_layers: int, target_type: str | None = None) -> EngineView:
        from tercel.interop.loaders.trtllm import view_trtllm

        return view_trtllm(folder, num_layers)


def options(head: str, shape: TreeShape, outputs: Sequence[int]) -> str:
    """YAML; `outputs` are the layers whose outputs are captured. A chain of `depth`."""
    import yaml

    speculative = {
        "decoding_type": "Eagle3",
        "max_draft_len": shape.depth,
        "speculative_model": head,
        "eagle3_layers_to_capture": list(outputs),
    }
    return yaml.safe_dump({"speculative_config": speculative}, sort_keys=False)
