"""One OpenVINO GenAI run for `prove.py`, inside its own environment: a job file in, a result file out."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

HINTS = {"float32": "f32", "bfloat16": "bf16"}


def load(job: dict[str, Any]) -> genai.LLMPipeline:
    kind = HINTS[job["dtype"]]
    # the cache's default precision is a lossy one
    settings = {
        "INFERENCE_NUM_THREADS": job["threads"],
        "INFERENCE_PRECISION_HINT": kind,
        "KV_CACHE_PRECISION": kind,
        "scheduler_config": genai.SchedulerConfig(),
    }
    settings["scheduler_config"].cache_size = 1  # GB
    if job["head"] is not None:
        own = {name: value for name, value in settings.items() if name != "scheduler_config"}
        settings["draft_model"] = genai.draft_model(job["head"], "CPU", **own)
    return genai.LLMPipeline(job["target"], "CPU", **settings)


def put_layers(head: str, layers: list[int]) -> None:
    """Write the captured layers (outputs) into the converted head, once."""
    done = Path(head) / "layers.json"
    if done.exists():
        return
    model = ov.Core().read_model(f"{head}/openvino_model.xml")
    model.set_rt_info(layers, "hidden_layers_list")
    ov.save_model(model, f"{head}/with_layers.xml", compress_to_fp16=False)
    del model
    for end in ("xml", "bin"):
        Path(head, f"with_layers.{end}").replace(Path(head, f"openvino_model.{end}"))
    done.write_text(json.dumps(layers))


def taken(metrics: genai.SDPerModelsPerfMetrics) -> list[int]:
    """Drafts taken in each run of the target behind the prompt's: what it appended, less its own token."""
    sizes = list(metrics.main_model_metrics.raw_metrics.m_batch_sizes)
    return [size - 1 for size in sizes[1:]]


def main(job_file: Path, result_file: Path) -> None:
    job = json.loads(job_file.read_text())
    if job["head"] is not None:
        put_layers(job["head"], job["layers"])
    pipe = load(job)
    config = pipe.get_generation_config()
    config.max_new_tokens = job["max_new_tokens"]
    config.do_sample = False
    config.apply_chat_template = False
    if job["head"] is not None:
        config.num_assistant_tokens = job["k"]

    def answer(tokens: list[int]) -> genai.EncodedResults:
        return pipe.generate(ov.Tensor(np.array([tokens], dtype=np.int64)), config)

    answer(job["prompts"][0])  # warm-up
    answers, seconds, accepted, drafted, counted = [], [], [], 0, 0
    for prompt in job["prompts"]:
        start = time.perf_counter()
        done = answer(prompt)
        seconds.append(time.perf_counter() - start)
        answers.append(list(done.tokens[0]))
        if job["head"] is not None:
            accepted += taken(done.extended_perf_metrics)
            drafted += done.extended_perf_metrics.get_num_draft_tokens()
            counted += done.extended_perf_metrics.get_num_accepted_tokens()
    result: dict[str, Any] = {"version": genai.get_version(), "answers": answers, "seconds": seconds}
    if job["head"] is not None:
        result["drafts"] = len(accepted)
        result["accepted"] = [sum(count > place for count in accepted) for place in range(job["k"])]
        result["totals"] = {"drafted": drafted, "accepted": counted}
    result_file.write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
