"""TensorRT-LLM, driven line by line, inside its own environment: method "vanilla" or "eagle3".

With a head, each answer carries the engine's own counts of drafts made and taken by position. Written from the sources
of mid-2026 (main, after pull request 17082) and not yet run: the project is developed without a GPU.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import tensorrt_llm
import yaml
from line_protocol import Answer, Job, Loaded, Question, serve
from tensorrt_llm import LLM, SamplingParams
from tensorrt_llm.llmapi import KvCacheConfig


def speculative(head: str, k: int) -> dict[str, Any]:
    """The settings that the export wrote beside the head."""
    settings: dict[str, Any] = yaml.safe_load(Path(head, "trtllm.yaml").read_text())["speculative_config"]
    if settings["max_draft_len"] != k:
        raise SystemExit(f"{head}/trtllm.yaml drafts {settings['max_draft_len']} tokens a step, and the job {k}")
    if Path(settings["speculative_model"]).resolve() != Path(head).resolve():
        raise SystemExit(f"{head}/trtllm.yaml names another head, {settings['speculative_model']}; export it again")
    return settings


def settings(job: Job) -> dict[str, Any]:
    """What `LLM` is given beside the model."""
    given: dict[str, Any] = {
        "dtype": job["dtype"],
        "max_batch_size": 1,
        "max_seq_len": job["context"],
        "cuda_graph_config": None,
    }
    if job["method"] == "eagle3":
        given["speculative_config"] = speculative(job["head"], job["k"])
    return given


def counters(done: Any, k: int) -> tuple[int, list[int]]:
    """Drafts made for one answer, and how many of them were taken at each of the k positions."""
    version = tensorrt_llm.__version__
    try:
        made, taken, totals = done.per_pos_drafted, done.per_pos_accepted, done.spec_dec_totals
    except AttributeError as error:
        raise SystemExit(f"TensorRT-LLM {version} does not count drafts by position: {error}") from None
    if made is None or taken is None:
        raise SystemExit(f"TensorRT-LLM {version} gave an answer without its counts by position")
    # no totals means that nothing was drafted: an answer that the prompt's run ended
    if len(taken) < k or [sum(taken), sum(made)] != list(totals or (0, 0)) or sum(taken[k:]) or sum(made[k:]):
        raise SystemExit(f"TensorRT-LLM's counts do not agree for a chain of {k}: {made}, {taken}, {totals}")
    if not made[0] and len(done.outputs[0].token_ids) > 1:
        raise SystemExit(f"TensorRT-LLM {version} drafted nothing for a whole answer")
    return int(made[0]), [int(count) for count in taken[:k]]


class TensorRtLlm(Loaded):
    def __init__(self, job: Job) -> None:
        self.job, self.version, self.settings = job, tensorrt_llm.__version__, settings(job)
        # every answer pays for its prompt, as everywhere
        self.llm = LLM(job["target"], kv_cache_config=KvCacheConfig(enable_block_reuse=False), **self.settings)

    def answer(self, question: Question) -> Answer:
        params = SamplingParams(
            temperature=question.temperature,
            seed=question.seed,
            max_tokens=question.max_new_tokens,
            stop_token_ids=self.job["eos"],
        )
        start = time.perf_counter()
        done = self.llm.generate(question.prompt, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = list(done.outputs[0].token_ids)
        if self.job["method"] == "vanilla":
            return Answer(tokens, seconds, len(tokens) - 1)
        drafts, accepted = counters(done, self.job["k"])
        return Answer(tokens, seconds, drafts, drafts, accepted)

    def close(self) -> None:
        self.llm.shutdown()


if __name__ == "__main__":
    serve(TensorRtLlm)
