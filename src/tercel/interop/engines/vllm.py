"""vLLM (0.32: `EngineArgs`, `SpeculativeConfig`), and the speculators format, which it takes in place of the target."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tercel.interop.engines.base import ExportJob, FolderEngine, Layout, eagle_config, plain_config

if TYPE_CHECKING:
    from tercel.draft import HeadConfig
    from tercel.draft.shape import TreeShape
    from tercel.interop.loaders import EngineView

IDS = "eagle_aux_hidden_state_layer_ids"
_OF_THE_SPECULATOR = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "draft_vocab_size")


class _Served(FolderEngine):
    """What runs in `vllm serve`."""

    image = "vllm/vllm-openai:v0.32.0"
    entry = 2
    deep = True  # each layer behind the first an ordinary one

    def spread(self, layout: Layout, node: int) -> list[str]:
        sizes = {"tensor": layout.tensor, "pipeline": layout.pipeline, "data": layout.data}
        words = [word for name, size in sizes.items() if size > 1 for word in (f"--{name}-parallel-size", str(size))]
        if layout.nodes > 1:
            words += ["--nnodes", str(layout.nodes), "--node-rank", str(node), "--master-addr", str(layout.address)]
        return [*words, "--headless"] if node else words


class Vllm(_Served):
    name = "vllm"
    title = "vLLM"
    serve_command = True
    tells_counters = True

    def config(self, public: dict[str, Any], c: HeadConfig, job: ExportJob) -> dict[str, Any]:
        """Its two runners look for ids in two places."""
        ids = list(self.ids(c.feature_layers))
        return {**plain_config(public, c), IDS: ids, "eagle_config": {**eagle_config(c), IDS: ids}}

    def launch(self, head: str, target: str, shape: TreeShape, dtype: str = "bfloat16") -> str:
        """A chain of `depth`: vLLM drafts no trees with EAGLE-3."""
        return _serve(target, dtype, {"method": "eagle3", "model": head, "num_speculative_tokens": shape.depth})

    def view(self, folder: Path, num_layers: int, target_type: str | None = None) -> EngineView:
        from tercel.interop.loaders.vllm import view_vllm

        return view_vllm(folder, num_layers)


class Speculators(_Served):
    name = "speculators"
    title = "the speculators format"
    other_widths = False
    names_target = True
    keeps_names = False

    @property
    def run_by(self) -> str:
        return Vllm.name

    def config(self, public: dict[str, Any], c: HeadConfig, job: ExportJob) -> dict[str, Any]:
        """No `model_type` at the top: with one vLLM would not translate the rest."""
        elsewhere = (*_OF_THE_SPECULATOR, "target_hidden_size", "eagle_config", "architectures")
        layer = {key: value for key, value in public.items() if key not in elsewhere}
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.9.0",
            "speculators_config": {
                "algorithm": "eagle3",
                "proposal_methods": [
                    {"proposal_type": "greedy", "speculative_tokens": job.shape.depth, "verifier_accept_k": 1}
                ],
                "default_proposal_method": "greedy",
                "verifier": {"name_or_path": job.target_name, "architectures": list(job.architectures)},
            },
            # vLLM builds fc for three layers unless the layer's own part says otherwise
            "transformer_layer_config": {**layer, "num_aux_hidden_states": c.num_features},
            "draft_vocab_size": c.draft_vocab_size,
            "target_hidden_size": c.target_hidden_size,
            IDS: list(self.ids(c.feature_layers)),
            "norm_before_residual": c.norm_before_residual,
            "norm_before_fc": c.norm_before_fc,
            "fc_norm": c.fc_norm,
            "norm_output": c.norm_output,
            "tie_word_embeddings": False,
            "torch_dtype": public["torch_dtype"],
            "embed_requires_grad": job.embeddings_learn,  # which speculators asks when it trains on
        }

    def tensor_name(self, name: str) -> str:
        return name.replace("midlayer.", "layers.0.")

    def launch(self, head: str, target: str, shape: TreeShape, dtype: str = "bfloat16") -> str:
        """The folder names its target itself, and the number of tokens, which the option overrides."""
        return _serve(head, dtype, {"num_speculative_tokens": shape.depth})

    def view(self, folder: Path, num_layers: int, target_type: str | None = None) -> EngineView:
        from tercel.interop.loaders.vllm import view_speculators

        return view_speculators(folder, num_layers)


def _serve(model: str, dtype: str, speculative: dict[str, Any]) -> str:
    option = shlex.quote(json.dumps(speculative))
    return f"vllm serve {shlex.quote(model)} --dtype {dtype} --speculative-config {option}"
