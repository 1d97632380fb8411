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
import shutil
import subprocess
import sys
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from tercel.decode.compat import load_draft
from tercel.decode.engine import Engine
from tercel.decode.proposers import EAGLE3, VANILLA, make_proposer
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import Request
from tercel.draft import DraftModel
from tercel.draft.acceptance import count_chains
from tercel.draft.shape import TreeShape
from tercel.files import write_json
from tercel.interop.engines import ENGINES
from tercel.interop.export import export_head
from tercel.measure.intervals import proportion, speedup
from tercel.measure.tasks import first_prompts, parse_tasks
from tercel.target_model.model import Target
from tercel.target_model.stored import StoredTarget

HERE = Path(__file__).resolve().parent
VENVS = {name: f".venv-{engine.run_by}" for name, engine in ENGINES.items()}
ON_CPU = ("vllm", "speculators", "openvino", "llamacpp")  # the other two need a GPU
CONTEXT = 2048


@dataclass(frozen=True)
class Reference:
    """What this package makes of the prompts in float32: texts, and a chain's drafts and takings by position."""

    prompts: list[list[int]]
    answers: list[list[int]]
    drafts: int
    accepted: list[int]


@dataclass(frozen=True)
class Places:
    """Folders of a run: exports and job files in `work`, engines' environments beside each other in `venvs`."""

    work: Path
    venvs: Path
    target: Path


def reference(target: Target, model: DraftModel, tasks: str, max_new_tokens: int, k: int) -> Reference:
    prompts = [list(p.tokens) for p in first_prompts(target.tokenizer, parse_tasks(tasks, ()))]
    asked = [Request(tuple(p), SamplingParams(max_new_tokens=max_new_tokens)) for p in prompts]
    answers = [list(r.tokens) for r in Engine(target, make_proposer(VANILLA, target)).generate(asked)]
    chain = Engine(target, make_proposer(EAGLE3, target, head=model, shape=TreeShape.chain(k))).generate(asked)
    steps = [taken for result in chain for taken in result.accepted]
    assert [list(r.tokens) for r in chain] == answers, "this package's own chain is not lossless"
    return Reference(prompts, answers, len(steps), list(count_chains(steps, [k] * len(steps), k).right))


def run_engine(engine: str, places: Places, reference: Reference, args: argparse.Namespace, **job: Any) -> Any:
    """One run of an engine's runner in its own environment."""
    job = {
        "prompts": reference.prompts,
        "max_new_tokens": args.max_new_tokens,
        "k": args.k,
        "context": CONTEXT,
        "threads": args.threads,
        "speculators": engine == "speculators",
        **job,
    }
    stem = f"{engine}-{job['dtype']}-{'eagle3' if job['head'] else 'vanilla'}"
    job_file, result_file = places.work / f"{stem}.job.json", places.work / f"{stem}.json"
    job_file.write_text(json.dumps(job))
    result_file.unlink(missing_ok=True)
    python = places.venvs / VENVS[engine] / "bin" / "python"
    log = places.work / f"{stem}.out"
    with log.open("w") as stream:
        code = subprocess.run(
            [python, HERE / f"run_{ENGINES[engine].run_by}.py", job_file, result_file],
            env=environment(engine, places.venvs / VENVS[engine], args.threads),
            stdout=stream,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    if code or not result_file.exists():
        raise SystemExit(f"{engine} ended with code {code}; its output is in {log}")
    return json.loads(result_file.read_text())


def environment(engine: str, venv: Path, threads: int) -> dict[str, str]:
    plain = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    if engine not in ("vllm", "speculators"):
        return plain
    preload = [path for path in (venv / "lib" / "libiomp5.so", *tcmalloc()) if path.exists()]  # for speed only
    return {
        **plain,
        "LD_PRELOAD": ":".join(map(str, preload)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_NO_USAGE_STATS": "1",
    }


def tcmalloc() -> list[Path]:
    return sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))[:1]


def call(places: Places, engine: str, *command: str | Path) -> None:
    """A tool of an engine's environment; its output is shown only if it fails."""
    program = places.venvs / VENVS[engine] / "bin" / str(command[0])
    done = subprocess.run([program, *command[1:]], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{program.name} failed:\n{(done.stdout + done.stderr)[-3000:]}")


def prepare(engine: str, dtype: str, model: DraftModel, places: Places, k: int) -> dict[str, Any]:
    """Export the head for `engine` and make what it needs beside it; the job's `target`, `head` and so on."""
    out = places.work / f"head-{engine}-{dtype}"
    shutil.rmtree(out, ignore_errors=True)
    target = StoredTarget.find(str(places.target), ask_hub=False)
    shared: dict[str, Any] = {"target": target, "shape": TreeShape.chain(k)}
    if engine == "llamacpp":
        kind = {"float32": "f32", "bfloat16": "bf16"}[dtype]
        gguf = places.work / f"target-{kind}.gguf"
        if not gguf.exists():
            source = places.venvs / VENVS[engine] / "llama.cpp"
            call(places, engine, "python", source / "convert_hf_to_gguf.py", places.target, "--outtype", kind,
                 "--outfile", gguf)  # fmt: skip
        export_head(model, engine, out, target_gguf=gguf, **shared)
        program = places.venvs / VENVS[engine] / "bin" / "llama-server"
        return {"target": str(gguf), "head": str(next(out.glob("*.gguf"))), "program": str(program)}
    export_head(model, engine, out, **shared)
    if engine == "openvino":
        return {"layers": json.loads((out / "openvino.json").read_text())["hidden_layers_list"],
                **converted(places, out)}  # fmt: skip
    return {"target": str(places.target), "head": str(out)}


def converted(places: Places, head: Path) -> dict[str, str]:
    """OpenVINO's graphs of target and head, in float32: the precision of a run is set when it is loaded."""
    task = ("--task", "text-generation-with-past", "--weight-format", "fp32")
    target_ov, head_ov = places.work / "target-ov", Path(f"{head}-ov")
    if not target_ov.exists():
        call(places, "openvino", "optimum-cli", "export", "openvino", "-m", places.target, *task, target_ov)
    shutil.rmtree(head_ov, ignore_errors=True)
    call(places, "openvino", "optimum-cli", "export", "openvino", "-m", head, *task, "--trust-remote-code", head_ov)
    return {"target": str(target_ov), "head": str(head_ov)}


def prove(engine: str, model: DraftModel, reference: Reference, places: Places, args: argparse.Namespace) -> Any:
    """One engine's entry of the report."""
    exact = prepare(engine, "float32", model, places, args.k)
    alone = run_engine(engine, places, reference, args, dtype="float32", **{**exact, "head": None})
    drafted = run_engine(engine, places, reference, args, dtype="float32", **exact)
    fast = prepare(engine, "bfloat16", model, places, args.k) if engine == "llamacpp" else exact
    base = run_engine(engine, places, reference, args, dtype="bfloat16", **{**fast, "head": None})
    quick = run_engine(engine, places, reference, args, dtype="bfloat16", **fast)
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
    parser.add_argument("--engines", default=",".join(ON_CPU), help=f"some of {', '.join(VENVS)}")
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
    unknown = set(args.engines.split(",")) - set(VENVS)
    if unknown:
        sys.exit(f"there is no engine {sorted(unknown)[0]}; choose among {', '.join(VENVS)}")
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    target = Target.load(args.target, dtype=torch.float32)
    model = load_draft(args.head, target)
    known = json.loads(args.out.read_text()) if args.out.exists() else {}
    print(f"{args.target} decodes {args.tasks} here …", flush=True)
    found = reference(target, model, args.tasks, args.max_new_tokens, args.k)
    places = Places(args.work.resolve(), args.venvs.resolve(), Path(target.source.path))
    for engine in args.engines.split(","):
        print(f"{engine} …", flush=True)
        known[engine] = prove(engine, model, found, places, args)
        write_json(args.out, known)
        print(json.dumps(known[engine], indent=1), flush=True)
    failed = [e for e in args.engines.split(",") if not (known[e]["same_text"] and known[e]["same_acceptance"])]
    if failed:
        sys.exit(f"{', '.join(failed)}: text or acceptance is not this package's; see {args.out}")


if __name__ == "__main__":
    main()
