"""One vLLM run for `prove.py`, inside vLLM's own environment: a job file in, a result file out.

With a head, the engine's own counters say how many drafts it made and how many tokens it took at each position.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import vllm
from vllm import LLM, SamplingParams


def counters(llm: LLM) -> dict[str, Any]:
    found = {metric.name: metric for metric in llm.get_metrics()}
    return {
        "drafts": found["vllm:spec_decode_num_drafts"].value,
        "accepted": list(found["vllm:spec_decode_num_accepted_tokens_per_pos"].values),
    }


def load(job: dict[str, Any]) -> LLM:
    common = {"dtype": job["dtype"], "max_model_len": job["context"], "enforce_eager": True, "max_num_seqs": 1}
    if job["head"] is None:
        return LLM(job["target"], **common)
    if job["speculators"]:  # the head's own configuration names the target and the method
        return LLM(job["head"], disable_log_stats=False, **common)
    settings = {"method": "eagle3", "model": job["head"], "num_speculative_tokens": job["k"]}
    return LLM(job["target"], speculative_config=settings, disable_log_stats=False, **common)


def main(job_file: Path, result_file: Path) -> None:
    job = json.loads(job_file.read_text())
    llm = load(job)
    params = SamplingParams(temperature=0.0, max_tokens=job["max_new_tokens"])

    def answer(tokens: list[int]) -> list[int]:
        (done,) = llm.generate({"prompt_token_ids": tokens}, params, use_tqdm=False)
        return list(done.outputs[0].token_ids)

    answer(job["prompts"][0])  # warm-up
    before = counters(llm) if job["head"] is not None else None
    answers, seconds = [], []
    for prompt in job["prompts"]:
        start = time.perf_counter()
        answers.append(answer(prompt))
        seconds.append(time.perf_counter() - start)
    result: dict[str, Any] = {"version": vllm.__version__, "answers": answers, "seconds": seconds}
    if before is not None:
        after = counters(llm)
        result["drafts"] = after["drafts"] - before["drafts"]
        result["accepted"] = [b - a for a, b in zip(before["accepted"], after["accepted"], strict=True)]
    result_file.write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
