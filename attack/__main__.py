"""The command line of the campaign."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from attack.campaign import Result, campaign, endless, line, order
from attack.inputs import Kind
from attack.kills import kill_all
from attack.kinds import KINDS
from attack.report import merged, report, table, write_json, write_table


def main() -> int:
    """Run what the arguments ask for; 1 if any input was not clean."""
    args = _arguments()
    if args.only:
        return show(args.only, args.seed)
    started = time.monotonic()
    work = partial(_part, args, started + 60 * args.minutes if args.minutes else None)
    with ProcessPoolExecutor(args.jobs, get_context("fork")) as pool:
        found = merged(list(pool.map(work, range(args.jobs))))
    found["seconds"] = round(time.monotonic() - started)
    found["command"] = shlex.join(["python", "-m", "attack", *sys.argv[1:]])
    if args.json:
        write_json(found, args.json)
    if args.write:
        write_table(found, args.write)
    print(table(found))
    return 0 if found["clean"] == found["inputs"] and not any(kill["fault"] for kill in found["kills"]) else 1


def _part(args: argparse.Namespace, until: float | None, part: int) -> dict[str, Any]:
    """One process's share of the inputs, one after another, and then of the kills."""
    kinds, jobs = _chosen(args.kinds), args.jobs
    results, kills = [], []
    with campaign(args.seed) as attack:
        for result in attack.try_all(order(kinds, args.quick)[part::jobs], until):
            results.append(result)
            _say(result, args.verbose)
        if until is not None:  # time is left: as many further inputs as it holds
            start = {kind.name: max(kind.numbers(quick=False)) + 1 + part for kind in kinds}
            for result in attack.try_all(endless(kinds, start, jobs), until):
                results.append(result)
                _say(result, args.verbose)
        if not (args.quick or args.kinds):
            for kill in kill_all(attack.path / "kills", part=part, parts=jobs):
                kills.append(kill)
                print(f"{'FAIL' if kill.fault else 'ok  '} killed: {kill.name} {kill.fault}", flush=True)
    return report(results, kills, kinds, args.seed)


def show(id: str, seed: int) -> int:
    """One input with all it printed."""
    name, _, number = id.partition(":")
    (kind,) = _chosen(name)
    with campaign(seed) as attack:
        result, ended = attack.attempt(kind, int(number))
    print(f"tercel {shlex.join(map(repr, result.arguments))}")
    print(f"--- standard output ({len(ended.out):,} bytes)\n{_readable(ended.out)}")
    print(f"--- standard error ({len(ended.err):,} bytes)\n{_readable(ended.err)}")
    print(f"--- code {ended.code}, signal {ended.signal}, {ended.cpu:.1f} s of processor time, {ended.grown >> 20} MiB")
    print(line(result))
    for fault in result.faults:
        print(f"  {fault!r}")
    return 0 if result.clean else 1


def _readable(data: bytes) -> str:
    """Without anything that a terminal would obey."""
    text = data[:20_000].decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def _say(result: Result, verbose: bool) -> None:
    if verbose or not result.clean:
        print(_readable(line(result).encode("utf-8", "backslashreplace")), flush=True)


def _chosen(names: str) -> Sequence[Kind]:
    known = {kind.name: kind for kind in KINDS}
    wanted = names.split(",") if names else list(known)
    if unknown := [name for name in wanted if name not in known]:
        raise SystemExit(f"there is no kind {unknown[0]}; known are {', '.join(known)}")
    return [known[name] for name in wanted]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m attack", description=__doc__)
    parser.add_argument("--json", type=Path, help="write all counts and every input that was not clean there")
    parser.add_argument("--write", type=Path, help="put the table into this page, between its marks")
    parser.add_argument("--kinds", default="", help="only these, with commas between")
    parser.add_argument("--seed", type=int, default=0, help="other inputs of the same kinds")
    parser.add_argument("--quick", action="store_true", help="a few of every kind: what the test suite runs")
    parser.add_argument("--minutes", type=float, help="stop after so long; go on with further inputs until then")
    parser.add_argument("--only", metavar="KIND:NUMBER", help="one input, with all that it printed")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side; each takes a core")
    parser.add_argument("--verbose", action="store_true", help="a line for every input, clean ones too")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
