"""OpenVINO GenAI, driven line by line, inside its own environment: method "vanilla", "lookup" or "eagle3".

The job's `layers` are the captured layers (outputs) that the head's graph has to name.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from line_protocol import Answer, Job, Loaded, Question, serve

HINTS = {"float32": "f32", "bfloat16": "bf16"}
LONGEST_NGRAM = 3
CACHE_GB = 1


def put_layers(head: str, layers: list[int]) -> None:
    """Write the captured layers into the converted head, once."""
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


class OpenVino(Loaded):
    def __init__(self, job: Job) -> None:
        self.job, self.version = job, genai.get_version()
        kind = HINTS[job["dtype"]]
        # the cache's default precision is a lossy one
        own = {
            "INFERENCE_NUM_THREADS": job["threads"],
            "INFERENCE_PRECISION_HINT": kind,
            "KV_CACHE_PRECISION": kind,
        }
        self.settings: dict[str, Any] = dict(own)
        given: dict[str, Any] = {**own, "scheduler_config": genai.SchedulerConfig()}
        given["scheduler_config"].cache_size = CACHE_GB
        given["scheduler_config"].enable_prefix_caching = False  # every answer pays for its prompt, as everywhere
        if job["method"] == "eagle3":
            put_layers(job["head"], job["layers"])
            given["draft_model"] = genai.draft_model(job["head"], "CPU", **own)
        elif job["method"] == "lookup":
            given["prompt_lookup"] = True
            self.settings["max_ngram_size"] = LONGEST_NGRAM
        if job["method"] != "vanilla":
            self.settings["num_assistant_tokens"] = job["k"]
        self.pipe = genai.LLMPipeline(job["target"], "CPU", **given)

    def config(self, question: Question) -> genai.GenerationConfig:
        config = genai.GenerationConfig()
        config.max_new_tokens = question.max_new_tokens
        config.set_eos_token_id(self.job["eos"][0])
        config.stop_token_ids = set(self.job["eos"])
        config.apply_chat_template = False
        if question.temperature:
            config.do_sample, config.temperature = True, question.temperature
            config.top_k, config.top_p, config.rng_seed = 0, 1.0, question.seed
        if self.job["method"] != "vanilla":
            config.num_assistant_tokens = self.job["k"]
        if self.job["method"] == "lookup":
            config.max_ngram_size = LONGEST_NGRAM
        return config

    def answer(self, question: Question) -> Answer:
        prompt, config = ov.Tensor(np.array([question.prompt], dtype=np.int64)), self.config(question)
        start = time.perf_counter()
        done = self.pipe.generate(prompt, config)
        seconds = time.perf_counter() - start
        tokens = list(done.tokens[0])
        if self.job["method"] != "eagle3":
            return Answer(tokens, seconds, len(done.perf_metrics.raw_metrics.m_batch_sizes) - 1)
        # tokens that each run of the target behind the prompt's appended, less its own
        sizes = list(done.extended_perf_metrics.main_model_metrics.raw_metrics.m_batch_sizes)
        taken = [size - 1 for size in sizes[1:]]
        accepted = [sum(count > place for count in taken) for place in range(self.job["k"])]
        return Answer(tokens, seconds, len(taken), len(taken), accepted)


if __name__ == "__main__":
    serve(OpenVino)
