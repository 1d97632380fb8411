"""What steps cost, found by running them: once for a target on a machine, then kept in the cache.

Everything is run in turn, a few times; what else runs on a machine only ever adds to a time, so that the faster runs
count. A table from a machine too busy for that is used and not kept. What is still wrong the running loop puts right
(`LiveCosts`).
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tercel.decode.costs import HeadCosts, StepCosts
from tercel.decode.head_proposer import HeadProposer
from tercel.decode.pieces import COMMITTED, Context, HeadContext, Piece
from tercel.decode.proposer import Proposer, innermost
from tercel.decode.sampling import best_tokens
from tercel.decode.sps import SpeculativeSampling
from tercel.decode.stopwatch import Patience, time_in_turn
from tercel.errors import TercelError
from tercel.files import atomic_file, cache_dir, put_text
from tercel.locks import made_once
from tercel.reading import read_json
from tercel.target_model.protocol import TargetModel

FORMAT = 6
WIDTHS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
FAR_WIDTHS = (1, 8, 32)  # measured behind a long context too
LEVELS = (1, 4, 8, 16)
LEVEL = 1  # the depth below which a level is measured
NEAR, FAR = 64, 1024  # tokens of context
NEAR_IN_BATCHES = 16
TOKENS = 512  # of all rows together, most
ROWS = 4  # times as many rows, from one measured number to the next
PATIENCE = Patience(seconds=1.5, least=3, most=9)
PREFILL_SECONDS = 1.5  # for a long context
STEADY = 0.5  # the fastest run over the usual one: what a machine does that has little else to do
MONTH = 30 * 86400.0
OnProgress = Callable[[int, int], None]


def step_costs(
    target: TargetModel,
    proposer: Proposer,
    slots: int = 1,
    progress: OnProgress = lambda done, total: None,
) -> StepCosts:
    """From the cache, or measured and put there; for up to `slots` rows.

    Where there is no cache they are measured every time.
    """
    drafting = innermost(proposer)
    head = drafting if isinstance(drafting, HeadProposer) else None
    model = drafting.model if isinstance(drafting, SpeculativeSampling) else None
    key = _key(target, head, model, slots)
    try:
        file = cache_dir() / "costs" / f"{_digest(key)}.json"
        with made_once(file):  # two at once would only measure each other
            known = kept_costs(file, key)
            if known is None:
                with target.beside():
                    known, steadiness = measure_costs(target, head, slots, progress, model=model)
                if steadiness >= STEADY:
                    keep_costs(file, key, known)
            return known
    except TercelError:
        with target.beside():
            return measure_costs(target, head, slots, progress, model=model)[0]


def kept_costs(file: Path, key: Mapping[str, Any]) -> StepCosts | None:
    """What was measured for `key`; None if nothing was, it is old, or is no table of costs."""
    try:
        if time.time() - file.stat().st_mtime > MONTH:
            return None
        value = read_json(file)
        return StepCosts.from_json(value["costs"]) if value.get("key") == key else None
    except (OSError, TercelError, KeyError):
        return None


def keep_costs(file: Path, key: Mapping[str, Any], costs: StepCosts) -> None:
    """Whoever calls holds the file's lock. Raises `TercelError` if it cannot be written."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(file, durable=False, held=True) as partial:
        put_text(partial, json.dumps({"key": key, "costs": costs.to_json()}, indent=1))


@torch.no_grad()
def measure_costs(
    target: TargetModel,
    head: HeadProposer | None,
    slots: int = 1,
    progress: OnProgress = lambda done, total: None,
    patience: Patience = PATIENCE,
    model: TargetModel | None = None,
) -> tuple[StepCosts, float]:
    """The table, and how steady the machine was while it was made: the fastest runs over the usual ones.

    model: a second one that drafts, whose levels cost what a head's do elsewhere: a forward over a level's nodes.
    progress: pieces run, and at most to run.
    """
    before = target.expect_many()  # costs are those of a run that goes on for a while
    capture = () if head is None else head.feature_layers
    longest = max(1, target.context_length - WIDTHS[-1] - 1)
    widths = [width for width in WIDTHS if width < target.context_length] if target.tree_support.chain else [1]
    near = Context(target, min(NEAR, longest), widths[-1], capture=capture)
    works: dict[tuple[str, int, int], Piece] = {("near", 1, n): _forward(near, n, capture) for n in widths}
    far = _far_context(target, min(FAR, longest), widths[-1], capture)
    if far.length > near.length:
        works |= {("far", 1, n): _forward(far, n, capture) for n in FAR_WIDTHS if n in widths}
    for rows in _row_counts(slots):
        context = Context(target, min(NEAR_IN_BATCHES, longest), widths[-1], capture=capture, rows=rows)
        works |= {("rows", rows, n): _forward(context, n, capture) for n in widths if rows * n <= TOKENS or n == 1}
    if head is not None:
        pieces = HeadContext(head, near)
        works |= {("keep up", 1, 1): lambda: (pieces.commit(), pieces.first_level())}
        works |= {("level", 1, n): pieces.level(n, LEVEL) for n in LEVELS}
    if model is not None:
        own = Context(model, max(1, min(NEAR, model.context_length - LEVELS[-1])), LEVELS[-1])
        works |= {("keep up", 1, 1): _forward(own, COMMITTED, ())}
        works |= {("level", 1, n): _forward(own, n, ()) for n in LEVELS}
    taken = time_in_turn(works, target.device, patience, progress)
    target.expect_many(before)
    ms = {work: sorted(values)[len(values) // 4] for work, values in taken.items()}
    steady = [min(values) / statistics.median(values) for values in taken.values()]
    return replace(_table(ms, near.length, far.length), widths=target.block_widths), statistics.median(steady)


def _table(ms: Mapping[tuple[str, int, int], float], near: int, far: int) -> StepCosts:
    def of(kind: str, rows: int = 1) -> dict[int, float]:
        return {n: value for (what, many, n), value in ms.items() if (what, many) == (kind, rows)}

    behind_little, behind_much, levels = of("near"), of("far"), of("level")
    per_token = {n: max(0.0, (behind_much[n] - behind_little[n]) / (far - near)) for n in behind_much}
    forward = {1: behind_little} | {rows: of("rows", rows) for what, rows, _ in ms if what == "rows"}
    for rows, table in forward.items():  # all as behind the same context
        lift = rows * (near - min(near, NEAR_IN_BATCHES)) * per_token.get(1, 0.0) if rows > 1 else 0.0
        forward[rows] = {n: value + lift for n, value in table.items()}
    head = HeadCosts(ms["keep up", 1, 1], levels) if levels else None
    return StepCosts(forward, near, per_token, head)


def _row_counts(slots: int) -> list[int]:
    """Of batches that are measured: 4, 16, … and `slots` itself."""
    counts, rows = [], ROWS
    while rows < slots:
        counts.append(rows)
        rows *= ROWS
    return [*counts, slots] if slots > 1 else []


def _far_context(target: TargetModel, length: int, room: int, capture: Sequence[int]) -> Context:
    """As long as is soon made: a large target on a slow machine is not kept waiting."""
    begun, now = time.monotonic(), min(length, 4 * NEAR)
    context = Context(target, now, room, capture=capture)
    each = (time.monotonic() - begun) / now
    if now == length or each * length > PREFILL_SECONDS:
        return context
    return Context(target, length, room, capture=capture)


def _forward(context: Context, nodes: int, capture: Sequence[int]) -> Piece:
    """With the output layer, and the choice of tokens that verification makes."""
    forward, target = context.forward(nodes, capture), context.target
    return lambda: best_tokens(target.logits(forward().hidden))


def _key(target: TargetModel, head: HeadProposer | None, model: TargetModel | None, slots: int) -> dict[str, Any]:
    """All that costs hang on: a head's weights do not, its sizes do."""
    return {
        "format": FORMAT,
        "target": target.fingerprint,
        "head": None if head is None else [type(head.head).__name__, repr(head.head.config), str(head.head.dtype)],
        "model": None if model is None else [model.fingerprint, str(model.dtype), model.backend],
        "device": f"{target.device} {_processor(target.device)}",
        "backend": target.backend,
        "dtype": str(target.dtype),
        "threads": torch.get_num_threads(),
        "slots": slots,
        "versions": {name: version(name) for name in ("torch", "transformers", "tercel")},
    }


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} processors"


def _digest(key: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
