"""This package beside its peers on a CPU: the same prompts, checkpoint, head, precision and threads, in turns.

    python bench/peers.py --data-dir DIR --json out/peers.json            # 13 peers, an hour on two cores
    python bench/peers.py --data-dir DIR --json out/peers.json --quick    # about five minutes on two cores

A peer is ENGINE-METHOD: docs/peers.md says what each does. Those that are not installed are left out with a line that
says how to install them. Nothing else may run on the machine meanwhile; the report says what did.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "engines"))

from engine_files import GGUF_TYPES, RUN_BY, Places, head_for, start, target_for  # noqa: E402
from engine_process import EngineProcess  # noqa: E402
from interleaved import Asked, Interleaved, Round  # noqa: E402
from line_protocol import Job, Question  # noqa: E402
from peers_report import report, table  # noqa: E402
from surprise import judged  # noqa: E402

from tercel.decode.compat import load_draft  # noqa: E402
from tercel.draft import DraftModel  # noqa: E402
from tercel.draft.shape import CHAIN_DEPTH  # noqa: E402
from tercel.errors import TercelError  # noqa: E402
from tercel.files import write_json  # noqa: E402
from tercel.measure.machine import describe, versions  # noqa: E402
from tercel.measure.tasks import DEMO, first_prompts, parse_tasks  # noqa: E402
from tercel.target_model.backend_names import AUTO, BACKENDS  # noqa: E402
from tercel.target_model.model import Target  # noqa: E402
from tercel.target_model.sources import parse_dtype  # noqa: E402

PEERS = {
    "transformers": ("vanilla", "lookup", "assisted"),
    "tercel": ("vanilla", "eagle3", "chain"),
    "vllm": ("vanilla", "lookup", "eagle3"),
    "openvino": ("vanilla", "lookup", "eagle3"),
    "llamacpp": ("vanilla", "eagle3"),
}
WITH_HEAD = ("eagle3", "chain")
SETS = ("mt_bench", "humaneval", "gsm8k", "alpaca", "cnn_dm")
CONTEXT_STEP = 256


class Makers:
    """How every peer of one run is started: what it needs is made when it is its turn."""

    def __init__(
        self, args: argparse.Namespace, target: Target, model: DraftModel | None, questions: Sequence[Asked]
    ) -> None:
        self.args, self.model = args, model
        self.places = Places.of(target, args.work, args.venvs)
        longest = max(len(asked.question.prompt) for asked in questions) + room(args)
        self.shared: Job = {
            "dtype": args.dtype,
            "k": args.speculative_tokens,
            "context": min(-(-longest // CONTEXT_STEP) * CONTEXT_STEP, target.context_length),
            "threads": args.threads,
            "eos": list(target.eos_token_ids),
        }

    def start(self, engine: str, method: str) -> EngineProcess:
        job = {**self.shared, "method": method, "head": None, **self.own(engine, method)}
        inside = engine in RUN_BY
        python = self.places.tool(engine, "python") if inside else Path(sys.executable)
        log = self.places.work / f"{engine}-{method}.log"
        return start(engine, python, job, log, self.places.venv(engine) if inside else None)

    def own(self, engine: str, method: str) -> Job:
        args = self.args
        if engine == "tercel":
            return {"target": args.target, "head": args.head, "backend": args.backend}
        if engine == "transformers":
            return {"target": str(self.places.target), "assistant": args.assistant}
        job = target_for(engine, args.dtype, self.places)
        if engine == "vllm":
            job |= {"compiled": not args.eager, "speculators": False}
        elif engine == "llamacpp":
            job["cache"] = args.llamacpp_cache or {"bfloat16": "f16"}.get(args.dtype, GGUF_TYPES[args.dtype])
        if method == "eagle3":
            assert self.model is not None
            job |= head_for(engine, args.dtype, self.model, self.places, args.speculative_tokens)
        return job


def missing(engine: str, method: str, args: argparse.Namespace) -> str | None:
    """Why that peer cannot run here."""
    if engine in RUN_BY and not (args.venvs / f".venv-{RUN_BY[engine]}" / ".ready").exists():
        return f"not installed; install it with: make {RUN_BY[engine]}-venv"
    if method == "assisted" and args.assistant is None:
        return "no small model of the target's vocabulary is given; name one with --assistant"
    return None


def room(args: argparse.Namespace) -> int:
    """Tokens behind a prompt: the answer, and a draft that reaches beyond it."""
    return int(args.max_new_tokens + args.speculative_tokens + 1)


def ask_for(target: Target, args: argparse.Namespace) -> tuple[list[Asked], list[str]]:
    """First turns of all questions, and those that do not fit into the target's context."""
    each = f":{args.questions}"
    spec = args.tasks or (",".join(name + each for name in SETS) if args.data_dir else DEMO + each)
    asked, too_long = [], []
    for number, prompt in enumerate(first_prompts(target.tokenizer, parse_tasks(spec, args.data_dir))):
        task, _, name = prompt.id.partition("/")
        if len(prompt.tokens) + room(args) > target.context_length:
            too_long.append(prompt.id)
            continue
        question = Question(list(prompt.tokens), args.max_new_tokens, args.temperature, args.seed + number)
        asked.append(Asked(task, name, question))
    if not asked:
        raise TercelError(f"every question fills the context of {args.target}; choose tasks with shorter prompts")
    return asked, too_long


def chosen(text: str | None) -> list[tuple[str, str]]:
    """`"tercel,vllm-eagle3"`: engines and peers; all if left out. Raises `TercelError` for what is neither."""
    names = {f"{engine}-{method}": (engine, method) for engine, methods in PEERS.items() for method in methods}
    found: dict[str, None] = {}
    for part in names if text is None else text.split(","):
        own = [name for name, (engine, _) in names.items() if part.strip() in (name, engine)]
        if not own:
            raise TercelError(f"there is no peer {part.strip()!r}; choose engines ({', '.join(PEERS)}) or of "
                              f"{', '.join(names)}")  # fmt: skip
        found.update(dict.fromkeys(own))
    return [names[name] for name in found]


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = found.add_argument
    add("--target", default="smollm2-135m")
    add("--head", default=None, help="any HEAD that every engine can express; the target's shipped one if left out")
    add("--peers", default=None, help=f"engines or peers, by commas; all of {', '.join(PEERS)} if left out")
    add("--data-dir", type=Path, action="append", default=[], help="where the evaluation sets are")
    add("--tasks", default=None, help="as of `tercel bench`; the five sets if there is a folder, else the demo")
    add("--questions", type=int, default=None, help="of each task, if --tasks is left out (10; quick: 2)")
    add("--max-new-tokens", type=int, default=None, help="(128; quick: 64)")
    add("--dtype", default="bfloat16", choices=list(GGUF_TYPES))
    add("--temperature", type=float, default=0.0)
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=os.cpu_count() or 1)
    add("--speculative-tokens", type=int, default=CHAIN_DEPTH, help="drafted a step, where a peer drafts chains")
    add("--backend", default=AUTO, choices=list(BACKENDS), help="what computes this package's target")
    add("--assistant", default=None, help="folder of a small model, for transformers' assisted generation")
    add("--eager", action="store_true", help="do not let vLLM compile, which takes a minute at every start")
    add("--llamacpp-cache", default=None, help="type of its cache; f16 for bfloat16, f32 for float32 if left out")
    add("--quick", action="store_true", help="two questions a task, short answers, vLLM as with --eager")
    add("--json", type=Path, default=None)
    add("--venvs", type=Path, default=ROOT, help="where the engines' environments are")
    add("--work", type=Path, default=ROOT / "out" / "peers", help="what is converted for the engines, and their logs")
    return found


def settings(argv: Sequence[str] | None) -> argparse.Namespace:
    args = parser().parse_args(argv)
    args.questions = args.questions or (2 if args.quick else 10)
    args.max_new_tokens = args.max_new_tokens or (64 if args.quick else 128)
    args.eager = args.eager or args.quick
    return args


def compare(
    starters: dict[str, Callable[[], EngineProcess]],
    asked: Sequence[Asked],
    about: dict[str, Any],
    say: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None],
) -> tuple[list[Round], dict[str, Any]]:
    """All rounds, and the report. keep: given what there is of it whenever a task is done. about: what else stands in
    it."""
    running = Interleaved(starters, asked[0].question, say)
    try:
        rounds: list[Round] = []
        found: dict[str, Any] = {}
        for _, questions in groupby(asked, key=lambda one: one.task):
            rounds += running.rounds(list(questions))
            found = {
                **report(rounds, greedy=asked[0].question.temperature == 0),
                "peers": running.about,
                "failed": running.failed,
                "quiet": running.quiet.to_json(),
                **about,
            }
            keep(found)
        return rounds, found
    finally:
        running.close()


def run(args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    torch.set_num_threads(1)  # the peers compute; this process only reads the clock
    reasons = {peer: missing(*peer, args) for peer in chosen(args.peers)}
    left_out = {"-".join(peer): reason for peer, reason in reasons.items() if reason is not None}
    for name, reason in left_out.items():
        say(f"{name} is left out: {reason}")
    runs = [peer for peer, reason in reasons.items() if reason is None]
    target = Target.load(args.target, dtype=parse_dtype(args.dtype))
    model = load_draft(args.head, target) if any(method in WITH_HEAD for _, method in runs) else None
    asked, too_long = ask_for(target, args)
    makers = Makers(args, target, model, asked)
    starters = {"-".join(peer): partial(makers.start, *peer) for peer in runs}
    given = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    given["data_dir"] = [str(folder) for folder in args.data_dir]
    about = {
        "left_out": left_out,
        "too_long": too_long,
        "settings": {**given, **makers.shared, "checkpoint": "one for all, as stored; rounded to dtype by each engine"},
        "machine": describe(torch.device("cpu")),
        "versions": versions(),
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    del target  # the peers have their own, and memory is needed for a dozen

    def keep(found: dict[str, Any]) -> None:
        if args.json is not None:
            write_json(args.json, found)

    rounds, found = compare(starters, asked, about, say, keep)
    if args.temperature:
        found["sampled"] = judged(Target.load(args.target, dtype=torch.float32), rounds)
        keep(found)
    return found


def main() -> None:
    args = settings(None)
    try:
        found = run(args, lambda line: print(line, file=sys.stderr, flush=True))
    except TercelError as error:
        sys.exit(str(error))
    print(table(found))
    others = found["quiet"]["others_share"]
    print(f"\nProcessor time of other programs meanwhile: {others:.1%}" + ("; measure again" if others > 0.03 else ""))
    for name, reason in {**found["left_out"], **found["failed"]}.items():
        print(f"{name}: {reason}")
    for name, seen in found.get("sampled", {}).items():
        if not seen["follows"]:
            wrong = f"{seen['excess_nats']:+.2f} nats a token"
            print(f"{name}: its texts do not follow the target's distribution ({wrong}), so its speed means nothing")
    if not found["all"]:
        sys.exit("nothing was measured")


if __name__ == "__main__":
    main()
