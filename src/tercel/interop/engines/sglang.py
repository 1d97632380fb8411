"""SGLang (0.5.23: `server_args`)."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tercel.errors import TercelError
from tercel.interop.engines.base import ExportJob, FolderEngine, Layout, eagle_config, plain_config

if TYPE_CHECKING:
    from tercel.draft import HeadConfig
    from tercel.draft.shape import TreeShape
    from tercel.interop.loaders import EngineView

# families whose ids are not outputs of layers unless the first id is 1, that is, unless input 2 comes first
_NOT_OUTPUTS = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2")

_MEETING = 20000  # port at which its nodes meet


class Sglang(FolderEngine):
    name = "sglang"
    title = "SGLang"
    lacks = ("norm_before_residual", "attention_bias")
    ids_are_outputs = True
    wide_fc = False
    own_embeddings = False
    drafts_trees = True
    serve_command = True
    tells_counters = True
    port = 30000
    image = "lmsysorg/sglang:v0.5.23"

    def spread(self, layout: Layout, node: int) -> list[str]:
        """It drafts in no pipeline, and copies the target on one machine only."""
        if layout.pipeline > 1:
            raise TercelError("SGLang does not draft with a pipeline; let tensor parallelism have all GPUs instead")
        if layout.data > 1 and layout.nodes > 1:
            raise TercelError(
                "SGLang copies a target on one machine only; start the line for one machine on each of them and put "
                "SGLang's router before them"
            )
        sizes = {"--tp-size": layout.tensor, "--dp-size": layout.data}
        words = [word for name, size in sizes.items() if size > 1 for word in (name, str(size))]
        if layout.nodes == 1:
            return words
        there = f"[{layout.address}]" if ":" in str(layout.address) else str(layout.address)
        words += ["--nnodes", str(layout.nodes), "--node-rank", str(node), "--dist-init-addr", f"{there}:{_MEETING}"]
        return words

    def unwritable_ids(self, layers: tuple[int, ...], target_type: str | None) -> str | None:
        if layers[0] == 2 or target_type not in _NOT_OUTPUTS:
            return None
        return (
            f"SGLang takes the layer ids of a {target_type} target for outputs only if the first one is 1, so that "
            f"inputs {', '.join(map(str, layers))} cannot be written; train with feature layer 2 first"
        )

    def doubts(self, c: HeadConfig, target_type: str | None) -> tuple[str, ...]:
        if c.feature_layers[0] == 2:
            return ()
        return (
            "SGLang's models differ on ids whose first is not 1: Llama and Qwen targets add 1, as written here; "
            "DeepSeek and GLM-4-lite targets would capture one layer too early",
        )

    def config(self, public: dict[str, Any], c: HeadConfig, job: ExportJob) -> dict[str, Any]:
        ids = list(self.ids(c.feature_layers))
        eagle = {**eagle_config(c), "eagle_aux_hidden_state_layer_ids": ids}
        return {**plain_config(public, c), "eagle_config": eagle}

    def launch(self, head: str, target: str, shape: TreeShape, dtype: str = "bfloat16") -> str:
        return " \\\n  ".join(
            [
                f"python -m sglang.launch_server --model-path {shlex.quote(target)} --dtype {dtype}",
                f"--speculative-algorithm EAGLE3 --speculative-draft-model-path {shlex.quote(head)}",
                f"--speculative-num-steps {shape.depth} --speculative-eagle-topk {shape.top_k} "
                f"--speculative-num-draft-tokens {shape.nodes}",
            ]
        )

    def view(self, folder: Path, num_layers: int, target_type: str | None = None) -> EngineView:
        from tercel.interop.loaders.sglang import view_sglang

        return view_sglang(folder, num_layers, target_type)
