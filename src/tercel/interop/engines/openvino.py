"""OpenVINO: optimum-intel 2.2 converts target and head, OpenVINO GenAI 2026.4 runs them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tercel.files import as_json
from tercel.interop.engines.base import ExportJob, FolderEngine, eagle_config, plain_config

if TYPE_CHECKING:
    from torch import Tensor

    from tercel.draft import DraftVocabulary, HeadConfig
    from tercel.draft.shape import TreeShape
    from tercel.interop.loaders import EngineView

LAYERS = "openvino.json"


class OpenVino(FolderEngine):
    name = "openvino"
    title = "OpenVINO"
    lacks = ("norm_before_residual", "norm_before_fc", "norm_output", "fc_norm", "attention_bias")
    ids_are_outputs = True
    first_layer = 1
    captures = 3
    other_widths = False
    own_embeddings = False

    def config(self, public: dict[str, Any], c: HeadConfig, job: ExportJob) -> dict[str, Any]:
        """Layers are named in a file of their own, which the converted head has to be given."""
        return {**plain_config(public, c), "eagle_config": eagle_config(c)}

    def maps(self, vocabulary: DraftVocabulary) -> dict[str, Tensor]:
        """Its model has both as buffers, filled with nothing in particular if the file lacks them."""
        return {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}

    def more_files(self, c: HeadConfig, job: ExportJob) -> dict[str, str]:
        return {LAYERS: as_json({"hidden_layers_list": list(self.ids(c.feature_layers))})}

    def launch(self, head: str, target: str, shape: TreeShape, dtype: str = "bfloat16") -> str:
        made = conversion(head, target, "fp32" if dtype == "float32" else "fp16")
        layers, run = place_layers(f"{head.rstrip('/')}/{LAYERS}"), run_chain(shape)
        return f"{made}\npython - <<'END'\n{layers}\nEND\npython - <<'END'\n{run}\nEND"

    def beside_launch(self, job: ExportJob) -> str | None:
        return (
            "The conversion needs optimum-intel and an installed diffusers. Without the second step GenAI captures the "
            "outputs of layers 2, L/2 and L-3, one layer later than other engines; converting again undoes it."
        )

    def view(self, folder: Path, num_layers: int, target_type: str | None = None) -> EngineView:
        from tercel.interop.loaders.openvino import view_openvino

        return view_openvino(folder, num_layers)


def conversion(head: str, target: str, weight_format: str) -> str:
    """Both graphs, into the folders target-ov and head-ov of the working directory."""
    task = f"--task text-generation-with-past --weight-format {weight_format}"
    return "\n".join(
        [
            f"optimum-cli export openvino -m {shlex.quote(target)} {task} target-ov",
            f"optimum-cli export openvino -m {shlex.quote(head)} {task} --trust-remote-code head-ov",
        ]
    )


def place_layers(layers_file: str) -> str:
    """Python that puts the captured layers into the converted head, once.

    They cannot be given where the pipeline is made: Python's integers arrive as another type than it asks for.
    """
    return f"""import json, os, openvino as ov
draft = ov.Core().read_model("head-ov/openvino_model.xml")
draft.set_rt_info(json.load(open({json.dumps(layers_file)}))["hidden_layers_list"], "hidden_layers_list")
ov.save_model(draft, "head-ov/draft.xml", compress_to_fp16=False)
for end in ("xml", "bin"):
    os.replace(f"head-ov/draft.{{end}}", f"head-ov/openvino_model.{{end}}")"""


def run_chain(shape: TreeShape) -> str:
    """Python that answers with a chain of `depth`."""
    return f"""import openvino_genai as genai
pipe = genai.LLMPipeline("target-ov", "CPU", draft_model=genai.draft_model("head-ov", "CPU"))
print(pipe.generate("Why is the sky blue?", max_new_tokens=100, num_assistant_tokens={shape.depth}))"""
