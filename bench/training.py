"""One optimizer step of this package and of its peers: tokens per second and peak memory, in turns.

    make trainers-venv                                        # the peers' environment
    python bench/training.py --json out/training.json         # half an hour on two cores
    python bench/training.py --json out/training.json --quick # 512 tokens, three steps each

What a step is, `trainers.py` says. Every trainer has a process of its own for each precision and length, and steps on
one made-up sequence again and again, so that its loss falls; while one works, the others are paused. A peer that cannot
run is null, and `why` says why. Nothing else may run meanwhile. Linux only. Their heads on equal data: `heads.py`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "engines"))

from engine_files import environment  # noqa: E402
from engine_process import ANSWER_SECONDS, EngineProcess  # noqa: E402
from line_protocol import Job  # noqa: E402

from tercel.errors import TercelError  # noqa: E402
from tercel.files import write_json  # noqa: E402
from tercel.measure.machine import describe, versions  # noqa: E402

TRAINERS = ("tercel", "specforge", "speculators")
DTYPES = ("float32", "bfloat16")
SIZES = {  # the default target's
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "num_layers": 30,
    "vocab_size": 49152,
    "draft_vocab_size": 8192,
    "feature_layers": [2, 15, 27],
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
RECIPE = {"optimizer": "adamw", "lr": 1e-4, "scheduler": "constant", "warmup": 0.0, "total_steps": 1000}
NO_TAU = "heads on equal data are trained and compared by bench/heads.py; this measures single steps"


class Trainer(EngineProcess):
    """A trainer that has been loaded. losses: of all its steps."""

    def __init__(self, name: str, job: Job, log: Path, venvs: Path) -> None:
        self.losses: list[float] = []
        command = [python_of(name, venvs), Path(__file__).with_name("trainers.py")]
        super().__init__(name, command, job, log, environment(name, None, job["threads"]))

    def step(self, batch: Path | None = None) -> float:
        """Seconds of an optimizer step, on the file of a micro-batch or what was made up."""
        told = self.tell({} if batch is None else {"batch": str(batch)})
        self.losses.append(float(told["loss"]))
        return float(told["seconds"])

    def tell(self, line: Mapping[str, str]) -> dict[str, Any]:
        return self._exchange(line, ANSWER_SECONDS)


def python_of(trainer: str, venvs: Path) -> Path:
    """Raises `TercelError` if its environment is not there."""
    if trainer == "tercel":
        return Path(sys.executable)
    folder = venvs / ".venv-trainers"
    if not (folder / ".ready").exists():
        raise TercelError("not installed; install it with: make trainers-venv")
    return folder / "bin" / "python"


def started(trainer: str, dtype: str, length: int, args: argparse.Namespace) -> Trainer:
    """Raises `TercelError` if it cannot run here."""
    job = {**SIZES, "trainer": trainer, "dtype": dtype, "length": length, "steps": args.steps, "threads": args.threads}
    args.work.mkdir(parents=True, exist_ok=True)
    return Trainer(trainer, {**job, "recipe": RECIPE}, args.work / f"{trainer}-{dtype}-{length}.log", args.venvs)


def setting(dtype: str, length: int, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What each trainer took: `seconds` of its steps, `losses` from the first on, `peak_mb`; or `why` it could not."""
    running: dict[str, Trainer] = {}
    found: dict[str, dict[str, Any]] = {}
    try:
        for trainer in args.trainers:
            try:
                running[trainer] = started(trainer, dtype, length, args)
                running[trainer].step()  # the first one is slower
                running[trainer].pause()
                found[trainer] = {"version": running[trainer].version, "settings": running[trainer].settings}
                found[trainer] |= {"seconds": [], "losses": running[trainer].losses}
            except TercelError as error:
                found[trainer] = {"why": str(error)}
        for _ in range(args.rounds):
            for trainer, process in list(running.items()):
                if "why" in found[trainer]:
                    continue
                process.resume()
                try:
                    found[trainer]["seconds"].append(process.step())
                    process.pause()
                    found[trainer]["peak_mb"] = process.peak_bytes() / 1e6
                except TercelError as error:
                    found[trainer] = {"why": str(error)}
    finally:
        for process in running.values():
            process.close()
    return found


def rates(found: Mapping[str, Mapping[str, Any]], length: int) -> dict[str, float | None]:
    return {name: length / median(one["seconds"]) if "seconds" in one else None for name, one in found.items()}


def ratios(found: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """This package beside each peer. speed: of the medians, `[lowest, highest]` round's beside it; memory: of the
    peaks."""
    own = found["tercel"]
    told = {}
    for name, peer in found.items():
        if name == "tercel" or "why" in peer or "why" in own:
            continue
        rounds = [theirs / ours for theirs, ours in zip(peer["seconds"], own["seconds"], strict=True)]
        told[name] = {
            "speed": median(peer["seconds"]) / median(own["seconds"]),
            "speed_range": [min(rounds), max(rounds)],
            "memory": own["peak_mb"] / peer["peak_mb"],
        }
    return told


def growth(args: argparse.Namespace) -> list[list[float]]:
    """This package's peak at each length, in the last precision."""
    found = []
    for length in args.growth:
        process = started("tercel", args.dtypes[-1], length, args)
        try:
            process.step()
            process.step()
            found.append([length, process.peak_bytes() / 1e6])
        finally:
            process.close()
    return found


def run(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)  # the trainers compute; this process only reads the clock
    report: dict[str, Any] = {
        "tokens_per_s": {},
        "peak_mb": {},
        "tau": dict.fromkeys(args.trainers),
        "memory_growth": [],
        "budget": {"rounds": args.rounds, "ttt_steps": args.steps, "threads": args.threads, **SIZES},
        "why": {"tau": NO_TAU},
        "by_length": {},
        "machine": describe(torch.device("cpu")),
        "versions": versions(),
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    for length in args.lengths:
        for dtype in args.dtypes:
            found = setting(dtype, length, args)
            speed, peaks = rates(found, length), {name: one.get("peak_mb") for name, one in found.items()}
            beside = ratios(found) if "tercel" in found else {}
            report["by_length"].setdefault(str(length), {})[dtype] = {
                "tokens_per_s": speed,
                "peak_mb": peaks,
                "ratios": beside,
                "rounds": found,
            }
            report["why"] |= {f"{name} {dtype} {length}": one["why"] for name, one in found.items() if "why" in one}
            if length == args.lengths[0]:
                report["tokens_per_s"][dtype], report["peak_mb"][dtype] = speed, peaks
            _tell(dtype, length, found, beside)
            write_json(args.json, report)
    report["memory_growth"] = growth(args)
    write_json(args.json, report)
    return report


def _tell(dtype: str, length: int, found: Mapping[str, Mapping[str, Any]], beside: Mapping[str, Any]) -> None:
    for name, one in found.items():
        if "why" in one:
            print(f"{dtype} {length} {name}: {one['why']}", file=sys.stderr)
            continue
        speed = length / median(one["seconds"])
        first, last = one["losses"][0], one["losses"][-1]
        line = f"{speed:,.0f} tokens/s, {one['peak_mb']:,.0f} MB, loss {first:.4g} to {last:.4g}"
        if name in beside:
            line += f"; tercel {beside[name]['speed']:.2f} x its speed, {beside[name]['memory']:.2f} x its memory"
        print(f"{dtype} {length} {name}: {line}", file=sys.stderr)


def settings(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--json", type=Path, required=True)
    add("--quick", action="store_true", help="512 tokens only, three rounds")
    add("--trainers", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    add("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    add("--lengths", nargs="+", type=int, default=None, help="tokens of a step (512 2048)")
    add("--growth", nargs="+", type=int, default=None, help="at which lengths memory is read (512 1024 2048 4096)")
    add("--rounds", type=int, default=None, help="measured steps of each (7; quick: 3)")
    add("--steps", type=int, default=7, help="of training-time test")
    add("--threads", type=int, default=os.cpu_count() or 1)
    add("--venvs", type=Path, default=ROOT, help="where the peers' environment is")
    add("--work", type=Path, default=ROOT / "out" / "training", help="the trainers' logs")
    args = parser.parse_args(argv)
    args.lengths = args.lengths or ([512] if args.quick else [512, 2048])
    args.growth = args.growth or [512, 1024, 2048, 4096]
    args.rounds = args.rounds or (3 if args.quick else 7)
    return args


if __name__ == "__main__":
    try:
        run(settings())
    except TercelError as error:
        sys.exit(str(error))
