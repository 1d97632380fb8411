"""The proof that an exported head works where it is deployed: the real engine against this package's own decoding.

    python engines/prove.py --engines vllm,speculators,openvino,llamacpp --out docs/engines.json

For each engine the shipped head is exported, and the engine, in an environment of its own (`make vllm-venv`, …),
answers a few prompts greedily: in float32 alone and with the head, for the text and the counters, and in bfloat16 for
the speed. The text must be this package's token-by-token text, and the share of drafts taken at each position that of
this package's own chain on the same prompts. SGLang and TensorRT-LLM need a GPU machine and environments made there
(docs/engines.md).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from engine_files import GGUF_TYPES, HERE, RUN_BY, Places, head_for, start, target_for
from line_protocol import Job, Question

from tercel.decode.compat import load_draft
from tercel.decode.engine import Engine
from tercel.decode.proposers import EAGLE3, VANILLA, make_proposer
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import Request
from tercel.draft import DraftModel
from tercel.draft.acceptance import count_chains
from tercel.draft.shape import TreeShape
from tercel.errors import TercelError
from tercel.files import write_json
from tercel.measure.intervals import proportion, speedup
from tercel.measure.tasks import first_prompts, parse_tasks
from tercel.target_model.model import Target

ON_CPU = ("vllm", "speculators", "openvino", "llamacpp")  # the other two need a GPU
CONTEXT = 2048


@dataclass(frozen=True)
class Reference:
    """What this package makes of the prompts in float32: texts, and a chain's drafts and takings by position."""

    prompts: list[list[int]]
    eos: list[int]
    answers: list[list[int]]
    drafts: int
    accepted: list[int]


def reference(target: Target, model: DraftModel, tasks: str, max_new_tokens: int, k: int) -> Reference:
    prompts = [list(p.tokens) for p in first_prompts(target.tokenizer, parse_tasks(tasks, ()))]
    asked = [Request(tuple(p), SamplingParams(max_new_tokens=max_new_tokens)) for p in prompts]
    answers = [list(r.tokens) for r in Engine(target, make_proposer(VANILLA, target)).generate(asked)]
    chain = Engine(target, make_proposer(EAGLE3, target, head=model, shape=TreeShape.chain(k))).generate(asked)
    steps = [taken for result in chain for taken in result.accepted]
    assert [list(r.tokens) for r in chain] == answers, "this package's own chain is not lossless"
    right = count_chains(steps, [k] * len(steps), k).right
    return Reference(prompts, list(target.eos_token_ids), answers, len(steps), list(right))


def run_engine(engine: str, places: Places, reference: Reference, args: argparse.Namespace, **job: Any) -> Any:
    """One run of an engine in its own environment: every prompt once, after a warm-up."""
    job = {
        "k": args.k,
        "context": CONTEXT,
        "threads": args.threads,
        "eos": reference.eos,
        "speculators": engine == "speculators",
        "compiled": False,
        **job,
    }
    log = places.work / f"{engine}-{job['dtype']}-{job['method']}.out"
    process = start(engine, places.tool(engine, "python"), job, log, places.venv(engine))
    try:
        process.ask(Question(reference.prompts[0], args.max_new_tokens))  # warm-up
        answers = [process.ask(Question(prompt, args.max_new_tokens)) for prompt in reference.prompts]
    finally:
        process.close()
    found: dict[str, Any] = {
        "version": process.version,
        "answers": [answer.tokens for answer in answers],
        "seconds": [answer.seconds for answer in answers],
    }
    if job["method"] == "eagle3":
        found["drafts"] = sum(answer.drafts or 0 for answer in answers)
        found["accepted"] = [sum(counts) for counts in zip(*(answer.accepted or () for answer in answers), strict=True)]
    return found


def prove(engine: str, model: DraftModel, reference: Reference, places: Places, args: argparse.Namespace) -> Any:
    """One engine's entry of the report."""

    def job(dtype: str, head: Job) -> Job:
        method = "eagle3" if head else "vanilla"
        own = {"dtype": dtype, "method": method, "cache": GGUF_TYPES[dtype]}
        return {**own, **target_for(engine, dtype, places), **head}

    exact = head_for(engine, "float32", model, places, args.k)
    alone = run_engine(engine, places, reference, args, **job("float32", {}))
    drafted = run_engine(engine, places, reference, args, **job("float32", exact))
    base = run_engine(engine, places, reference, args, **job("bfloat16", {}))
    # a GGUF file has one precision; of everything else the precision is set when it is loaded
    fast = head_for(engine, "bfloat16", model, places, args.k) if engine == "llamacpp" else exact
    quick = run_engine(engine, places, reference, args, **job("bfloat16", fast))
    return entry(engine, reference, alone, drafted, base, quick, args)


def entry(
    engine: str, reference: Reference, alone: Any, drafted: Any, base: Any, quick: Any, args: argparse.Namespace
) -> dict[str, Any]:
    theirs = [proportion(count, drafted["drafts"]) for count in drafted["accepted"]]
    ours = [proportion(count, reference.drafts) for count in reference.accepted]
    gain = speedup(counts(quick), quick["seconds"], counts(base), base["seconds"])
    exact_gain = speedup(counts(drafted), drafted["seconds"], counts(alone), alone["seconds"])
    return {
        "version": drafted["version"],
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {args.threads} threads",
        "loads": True,
        "same_text": same(drafted["answers"], reference.answers),
        "same_text_without_head": same(alone["answers"], reference.answers),
        "drafts_engine": drafted["drafts"],
        "drafts_tercel": reference.drafts,
        "acceptance_engine": [share.value for share in theirs],
        "acceptance_tercel": [share.value for share in ours],
        "acceptance_tercel_ci95": [share.ci95 for share in ours],
        "same_acceptance": all(o.low <= t.value <= o.high for t, o in zip(theirs, ours, strict=True)),
        "speedup_there": gain.value,
        "speedup_there_ci95": gain.ci95,
        "speedup_there_float32": exact_gain.value,
        "tokens_per_s": {
            "float32": [rate(alone), rate(drafted)],
            "bfloat16": [rate(base), rate(quick)],
        },
        "command": f"python engines/prove.py --engines {engine} --tasks {args.tasks} "
        f"--max-new-tokens {args.max_new_tokens} --k {args.k}",
    }


def counts(run: Any) -> list[int]:
    return [len(answer) for answer in run["answers"]]


def rate(run: Any) -> float:
    return float(sum(counts(run)) / sum(run["seconds"]))


def same(answers: list[list[int]], wanted: list[list[int]]) -> bool:
    """Token by token; some engines leave out the token that ends an answer."""
    return all(a in (w, w[:-1]) for a, w in zip(answers, wanted, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default=",".join(ON_CPU), help=f"some of {', '.join(RUN_BY)}")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--head", default=None, help="any HEAD; the target's shipped one if left out")
    parser.add_argument("--tasks", default="demo:6")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--k", type=int, default=4, help="drafted tokens a step")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--venvs", type=Path, default=HERE.parent, help="where the engines' environments are")
    parser.add_argument("--work", type=Path, default=HERE.parent / "out" / "engines")
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "engines.json")
    args = parser.parse_args()
    unknown = set(args.engines.split(",")) - set(RUN_BY)
    if unknown:
        sys.exit(f"there is no engine {sorted(unknown)[0]}; choose among {', '.join(RUN_BY)}")
    torch.set_num_threads(args.threads)
    target = Target.load(args.target, dtype=torch.float32)
    model = load_draft(args.head, target)
    known = json.loads(args.out.read_text()) if args.out.exists() else {}
    print(f"{args.target} decodes {args.tasks} here …", flush=True)
    found = reference(target, model, args.tasks, args.max_new_tokens, args.k)
    places = Places.of(target, args.work, args.venvs)
    for engine in args.engines.split(","):
        print(f"{engine} …", flush=True)
        try:
            known[engine] = prove(engine, model, found, places, args)
        except TercelError as error:
            sys.exit(str(error))
        write_json(args.out, known)
        print(json.dumps(known[engine], indent=1), flush=True)
    failed = [e for e in args.engines.split(",") if not (known[e]["same_text"] and known[e]["same_acceptance"])]
    if failed:
        sys.exit(f"{', '.join(failed)}: text or acceptance is not this package's; see {args.out}")


if __name__ == "__main__":
    main()
