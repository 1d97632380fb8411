"""vLLM, driven line by line, inside its own environment: method "vanilla", "lookup" (what it calls n-gram) or "eagle3".

The job's `speculators` says that the head is a folder that names target and method itself; `compiled` that the model is
compiled when it is loaded. The engine's own counters say how many drafts it made and took at each position.
"""

from __future__ import annotations

import time
from typing import Any

import vllm
from line_protocol import Answer, Job, Loaded, Question, serve
from vllm import LLM, SamplingParams

LONGEST_NGRAM = 3


def settings(job: Job) -> dict[str, Any]:
    """What `LLM` is given beside the model."""
    given: dict[str, Any] = {
        "dtype": job["dtype"],
        "max_model_len": job["context"],
        "enforce_eager": not job["compiled"],
        "max_num_seqs": 1,
        "enable_prefix_caching": False,  # every answer pays for its prompt, as everywhere
        "disable_log_stats": False,
    }
    k = job["k"]
    if job["method"] == "lookup":
        given["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": k,
            "prompt_lookup_max": LONGEST_NGRAM,
            "prompt_lookup_min": 1,
        }
    elif job["method"] == "eagle3" and not job["speculators"]:
        given["speculative_config"] = {"method": "eagle3", "model": job["head"], "num_speculative_tokens": k}
    return given


class Vllm(Loaded):
    def __init__(self, job: Job) -> None:
        self.job, self.version, self.settings = job, vllm.__version__, settings(job)
        own = job["method"] == "eagle3" and job["speculators"]
        self.llm = LLM(job["head"] if own else job["target"], **self.settings)

    def counters(self) -> tuple[int, list[int]]:
        found = {metric.name: metric for metric in self.llm.get_metrics()}
        per_position = found["vllm:spec_decode_num_accepted_tokens_per_pos"].values
        return found["vllm:spec_decode_num_drafts"].value, list(per_position)

    def answer(self, question: Question) -> Answer:
        params = SamplingParams(
            temperature=question.temperature,
            seed=question.seed,
            max_tokens=question.max_new_tokens,
            stop_token_ids=self.job["eos"],
        )
        before = None if self.job["method"] == "vanilla" else self.counters()
        start = time.perf_counter()
        (done,) = self.llm.generate({"prompt_token_ids": question.prompt}, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = list(done.outputs[0].token_ids)
        if before is None:
            return Answer(tokens, seconds, len(tokens) - 1)
        drafts, per_position = self.counters()
        accepted = [now - old for now, old in zip(per_position, before[1], strict=True)]
        # not every step has a draft; drafts that were right beyond the end of the answer count here all the same
        return Answer(tokens, seconds, max(0, len(tokens) - 1 - sum(accepted)), drafts - before[0], accepted)


if __name__ == "__main__":
    serve(Vllm)
