"""SGLang, driven line by line, inside its own environment: method "vanilla" or "eagle3".

With a head, each answer carries a histogram of how many drafts its verifications took; the counts by position are
rebuilt from it. Written from the sources of SGLang 0.5.23 and not yet run: the project is developed without a GPU.
"""

from __future__ import annotations

import os
import time
from typing import Any

import sglang
from line_protocol import Answer, Job, Loaded, Question, serve


def settings(job: Job) -> dict[str, Any]:
    """What its `Engine` is given."""
    given: dict[str, Any] = {
        "model_path": job["target"],
        "dtype": job["dtype"],
        "context_length": job["context"],
        "max_running_requests": 1,
        "disable_radix_cache": True,
        "disable_decode_cuda_graph": True,
        "disable_prefill_cuda_graph": True,
    }
    if job["dtype"] == "float32":
        # the default attention kernels know half precisions only; Triton's products are TF32 unless told otherwise
        os.environ["TRITON_F32_DEFAULT"] = "ieee"
        given["attention_backend"] = "triton"
    if job["method"] == "eagle3":
        given |= {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": job["head"],
            "speculative_num_steps": job["k"],
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": job["k"] + 1,  # the root is counted
        }
    return given


def histogram(done: dict[str, Any], k: int) -> list[int]:
    """How many verifications of one answer took 0, 1, …, k drafts; none for an answer that the prompt's run ended."""
    told = done["meta_info"]
    if len(done["output_ids"]) == 1 and "spec_verify_ct" not in told:
        return [0] * (k + 1)
    for name in ("spec_verify_ct", "spec_num_correct_drafts", "spec_correct_drafts_histogram"):
        if name not in told:
            raise SystemExit(f"SGLang {sglang.__version__} gave an answer without the counter {name}")
    counts = list(told["spec_correct_drafts_histogram"])
    taken = sum(size * count for size, count in enumerate(counts))
    if len(counts) > k + 1 or sum(counts) != told["spec_verify_ct"] or taken != told["spec_num_correct_drafts"]:
        raise SystemExit(f"SGLang's counters do not agree for a chain of {k}: {told}")
    return counts + [0] * (k + 1 - len(counts))


class Sglang(Loaded):
    def __init__(self, job: Job) -> None:
        self.job, self.version, self.settings = job, sglang.__version__, settings(job)
        self.engine = sglang.Engine(**self.settings)

    def answer(self, question: Question) -> Answer:
        params = {
            "temperature": question.temperature,
            "max_new_tokens": question.max_new_tokens,
            "stop_token_ids": self.job["eos"],
        }
        start = time.perf_counter()
        done = self.engine.generate(input_ids=question.prompt, sampling_params=params)
        seconds = time.perf_counter() - start
        tokens = list(done["output_ids"])
        if self.job["method"] == "vanilla":
            return Answer(tokens, seconds, len(tokens) - 1)
        counts = histogram(done, self.job["k"])
        accepted = [sum(counts[place + 1 :]) for place in range(self.job["k"])]
        return Answer(tokens, seconds, sum(counts), sum(counts), accepted)

    def close(self) -> None:
        self.engine.shutdown()


if __name__ == "__main__":
    serve(Sglang)
