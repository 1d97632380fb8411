"""One SGLang run for `prove.py`, inside SGLang's own environment: a job file in, a result file out.

With a head, each answer carries a histogram of how many drafts its verifications took; the counts by position are
rebuilt from it. Written from the sources of SGLang 0.5.23 and not yet run: the project is developed without a GPU.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import sglang


def load(job: dict[str, Any]) -> sglang.Engine:
    settings: dict[str, Any] = {
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
        settings["attention_backend"] = "triton"
    if job["head"] is not None:
        settings |= {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": job["head"],
            "speculative_num_steps": job["k"],
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": job["k"] + 1,  # the root is counted
        }
    return sglang.Engine(**settings)


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


def main(job_file: Path, result_file: Path) -> None:
    job = json.loads(job_file.read_text())
    params = {"temperature": 0.0, "max_new_tokens": job["max_new_tokens"]}
    with load(job) as engine:

        def answer(tokens: list[int]) -> dict[str, Any]:
            return engine.generate(input_ids=tokens, sampling_params=params)

        answer(job["prompts"][0])  # warm-up
        results, seconds = [], []
        for prompt in job["prompts"]:
            start = time.perf_counter()
            results.append(answer(prompt))
            seconds.append(time.perf_counter() - start)
    answers = [list(done["output_ids"]) for done in results]
    result: dict[str, Any] = {"version": sglang.__version__, "answers": answers, "seconds": seconds}
    if job["head"] is not None:
        found = [histogram(done, job["k"]) for done in results]
        total = [sum(counts) for counts in zip(*found, strict=True)]
        result["drafts"] = sum(total)
        result["accepted"] = [sum(total[place + 1 :]) for place in range(job["k"])]
    result_file.write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
