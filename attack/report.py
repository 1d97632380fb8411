"""What a campaign found, as JSON and as the table in the documentation."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from attack.campaign import Result
from attack.inputs import Kind
from attack.kills import Killed

BEGIN, END = "<!-- table: written by `make attack` -->", "<!-- end of the table -->"


def report(
    results: Sequence[Result],
    kills: Sequence[Killed],
    kinds: Sequence[Kind],
    seed: int,
) -> dict[str, Any]:
    """Of a campaign, or a part of one: counts by kind, what was not clean in full, kills, and under which conditions;
    the caller adds how many seconds it took and the command."""
    rows = {kind.name: [result for result in results if result.kind == kind.name] for kind in kinds}
    return {
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, CPU",
        "seed": seed,
        "inputs": len(results),
        "clean": sum(result.clean for result in results),
        "kinds": {
            kind.name: {
                "about": kind.about,
                "inputs": len(rows[kind.name]),
                "clean": sum(result.clean for result in rows[kind.name]),
                "refused": sum(result.code == 2 for result in rows[kind.name]),
                "programs": sum(result.program for result in rows[kind.name]),
            }
            for kind in kinds
        },
        "kills": [asdict(kill) for kill in kills],
        "slowest": {r.id: r.cpu for r in sorted(results, key=lambda result: -result.cpu)[:20]},
        "not_clean": [result.to_json() for result in results if not result.clean],
    }


def merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The reports of the parts of one campaign as one."""
    kinds: dict[str, Any] = {}
    for part in parts:
        for name, counts in part["kinds"].items():
            have = kinds.setdefault(name, {"about": counts["about"]})
            have |= {key: have.get(key, 0) + value for key, value in counts.items() if key != "about"}
    slowest = sorted((pair for part in parts for pair in part["slowest"].items()), key=lambda pair: -pair[1])
    return {
        **parts[0],
        "inputs": sum(part["inputs"] for part in parts),
        "clean": sum(part["clean"] for part in parts),
        "kinds": kinds,
        "kills": [kill for part in parts for kill in part["kills"]],
        "slowest": dict(slowest[:20]),
        "not_clean": [row for part in parts for row in part["not_clean"]],
    }


def table(found: dict[str, Any]) -> str:
    lines = ["| what is attacked | inputs | refused in one sentence | clean | not clean |", "|---|---|---|---|---|"]
    for counts in found["kinds"].values():
        bad = counts["inputs"] - counts["clean"]
        lines.append(
            f"| {counts['about']} | {counts['inputs']:,} | {counts['refused']:,} | {counts['clean']:,} | {bad:,} |"
        )
    refused = sum(counts["refused"] for counts in found["kinds"].values())
    bad = found["inputs"] - found["clean"]
    lines.append(f"| **all** | **{found['inputs']:,}** | **{refused:,}** | **{found['clean']:,}** | **{bad:,}** |")
    if found["kills"]:
        lines += ["", *_kills(found["kills"])]
    minutes = found["seconds"] / 60
    lines += [
        "",
        f"{found['date']}, {found['machine']}, seed {found['seed']}, {minutes:.0f} minutes: `{found['command']}`.",
    ]
    if found["not_clean"]:
        ids = ", ".join(f"`{row['id']}`" for row in found["not_clean"])
        lines.append(f"Not clean: {ids}; `python -m attack --only KIND:NUMBER --seed {found['seed']}` shows one.")
    return "\n".join(lines)


def _kills(kills: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["| what is killed | points where it touches the disk | killed at | survived |", "|---|---|---|---|"]
    for kill in kills:
        survived = "all" if not kill["fault"] else f"not: {kill['fault']}"
        lines.append(f"| {kill['name']} | {kill['points'] or '?'} | {kill['tried'] or '?'} | {survived} |")
    total = sum(kill["tried"] for kill in kills)
    whole = not any(kill["fault"] for kill in kills)
    lines.append(f"| **all** | | **{total:,}** | **{f'{total:,}' if whole else 'not all'}** |")
    return lines


def write_json(found: dict[str, Any], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found, indent=1, ensure_ascii=False, default=str) + "\n", "utf-8", "backslashreplace")


def write_table(found: dict[str, Any], file: Path) -> None:
    """Replace the table between its marks; the rest of the page is written by hand.

    Raises `ValueError` for a page without the marks.
    """
    before, begin, rest = file.read_text("utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{file} has no {BEGIN} … {END}")
    file.write_text(f"{before}{begin}\n{table(found)}\n{end}{after}", "utf-8")
