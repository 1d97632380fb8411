"""One TensorRT-LLM run for `prove.py`, inside TensorRT-LLM's own environment: a job file in, a result file out.

With a head, each answer carries the engine's own counts of drafts made and taken by position. Written from the sources
of mid-2026 (main, after pull request 17082) and not yet run: the project is developed without a GPU.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import tensorrt_llm
import yaml
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


def load(job: dict[str, Any]) -> LLM:
    settings: dict[str, Any] = {
        "dtype": job["dtype"],
        "max_batch_size": 1,
        "max_seq_len": job["context"],
        "cuda_graph_config": None,
        "kv_cache_config": KvCacheConfig(enable_block_reuse=False),
    }
    if job["head"] is not None:
        settings["speculative_config"] = speculative(job["head"], job["k"])
    return LLM(job["target"], **settings)


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


def main(job_file: Path, result_file: Path) -> None:
    job = json.loads(job_file.read_text())
    params = SamplingParams(temperature=0.0, max_tokens=job["max_new_tokens"])
    with load(job) as llm:

        def answer(tokens: list[int]) -> Any:
            return llm.generate(tokens, params, use_tqdm=False)

        answer(job["prompts"][0])  # warm-up
        results, seconds = [], []
        for prompt in job["prompts"]:
            start = time.perf_counter()
            results.append(answer(prompt))
            seconds.append(time.perf_counter() - start)
        answers = [list(done.outputs[0].token_ids) for done in results]
        result: dict[str, Any] = {"version": tensorrt_llm.__version__, "answers": answers, "seconds": seconds}
        if job["head"] is not None:
            found = [counters(done, job["k"]) for done in results]
            result["drafts"] = sum(made for made, _ in found)
            result["accepted"] = [sum(taken[place] for _, taken in found) for place in range(job["k"])]
    result_file.write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
