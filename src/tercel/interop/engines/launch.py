"""How to start each engine with a head: exact command lines and configuration files, as text.

Flags as of vLLM 0.32 (`EngineArgs`, `SpeculativeConfig`), SGLang 0.5.23 (`server_args`), TensorRT-LLM 1.4
(`Eagle3DecodingConfig`), optimum-intel 2.2 with OpenVINO GenAI 2026.4, and llama.cpp of mid-2026 (`common/arg.cpp`).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

import yaml

from tercel.draft.shape import TreeShape
from tercel.errors import TercelError


def vllm_command(head: str, target: str, shape: TreeShape, dtype: str) -> str:
    """A chain of `depth`: vLLM drafts no trees with EAGLE-3."""
    speculative = json.dumps({"method": "eagle3", "model": head, "num_speculative_tokens": shape.depth})
    return f"vllm serve {shlex.quote(target)} --dtype {dtype} --speculative-config {shlex.quote(speculative)}"


def speculators_command(head: str, shape: TreeShape, dtype: str) -> str:
    """The folder names its target itself, and the number of tokens, which the option overrides."""
    speculative = json.dumps({"num_speculative_tokens": shape.depth})
    return f"vllm serve {shlex.quote(head)} --dtype {dtype} --speculative-config {shlex.quote(speculative)}"


def sglang_command(head: str, target: str, shape: TreeShape, dtype: str) -> str:
    return " \\\n  ".join(
        [
            f"python -m sglang.launch_server --model-path {shlex.quote(target)} --dtype {dtype}",
            f"--speculative-algorithm EAGLE3 --speculative-draft-model-path {shlex.quote(head)}",
            f"--speculative-num-steps {shape.depth} --speculative-eagle-topk {shape.top_k} "
            f"--speculative-num-draft-tokens {shape.nodes}",
        ]
    )


def trtllm_options(head: str, shape: TreeShape, outputs: Sequence[int]) -> str:
    """YAML; `outputs` are the layers whose outputs are captured. A chain of `depth`."""
    speculative = {
        "decoding_type": "Eagle3",
        "max_draft_len": shape.depth,
        "speculative_model": head,
        "eagle3_layers_to_capture": list(outputs),
    }
    return yaml.safe_dump({"speculative_config": speculative}, sort_keys=False)


def trtllm_command(options_file: str, target: str) -> str:
    return f"trtllm-serve {shlex.quote(target)} --extra_llm_api_options {shlex.quote(options_file)}"


def openvino_conversion(head: str, target: str, weight_format: str) -> str:
    """Both graphs, into the folders target-ov and head-ov of the working directory."""
    task = f"--task text-generation-with-past --weight-format {weight_format}"
    return "\n".join(
        [
            f"optimum-cli export openvino -m {shlex.quote(target)} {task} target-ov",
            f"optimum-cli export openvino -m {shlex.quote(head)} {task} --trust-remote-code head-ov",
        ]
    )


def openvino_layers(layers_file: str) -> str:
    """Python that puts the captured layers into the converted head, once.

    They cannot be given where the pipeline is made: Python's integers arrive as another type than it asks for.
    """
    return f"""import json, os, openvino as ov
draft = ov.Core().read_model("head-ov/openvino_model.xml")
draft.set_rt_info(json.load(open({json.dumps(layers_file)}))["hidden_layers_list"], "hidden_layers_list")
ov.save_model(draft, "head-ov/draft.xml", compress_to_fp16=False)
for end in ("xml", "bin"):
    os.replace(f"head-ov/draft.{{end}}", f"head-ov/openvino_model.{{end}}")"""


def openvino_python(shape: TreeShape) -> str:
    """A chain of `depth`."""
    return f"""import openvino_genai as genai
pipe = genai.LLMPipeline("target-ov", "CPU", draft_model=genai.draft_model("head-ov", "CPU"))
print(pipe.generate("Why is the sky blue?", max_new_tokens=100, num_assistant_tokens={shape.depth}))"""


def llamacpp_command(draft: str, target: str, shape: TreeShape) -> str:
    """A chain of `depth`; both files are GGUF."""
    return (
        f"llama-server -m {shlex.quote(target)} -md {shlex.quote(draft)} "
        f"--spec-type draft-eagle3 --spec-draft-n-max {shape.depth}"
    )


def launch(engine: str, head: str, target: str, shape: TreeShape, dtype: str = "bfloat16") -> str:
    """The whole of what starts `engine` with the exported folder `head` (for llamacpp, its GGUF file).

    Raises `TercelError` for an engine that is not known.
    """
    if engine == "vllm":
        return vllm_command(head, target, shape, dtype)
    if engine == "speculators":
        return speculators_command(head, shape, dtype)
    if engine == "sglang":
        return sglang_command(head, target, shape, dtype)
    if engine == "trtllm":
        return trtllm_command(f"{head.rstrip('/')}/trtllm.yaml", target)
    if engine == "openvino":
        weight_format = "fp32" if dtype == "float32" else "fp16"
        layers, run = openvino_layers(f"{head.rstrip('/')}/openvino.json"), openvino_python(shape)
        conversion = openvino_conversion(head, target, weight_format)
        return f"{conversion}\npython - <<'END'\n{layers}\nEND\npython - <<'END'\n{run}\nEND"
    if engine == "llamacpp":
        return llamacpp_command(head, target, shape)
    raise TercelError(f"there is no engine {engine!r} to start; choose vllm, sglang, trtllm, openvino or llamacpp")
