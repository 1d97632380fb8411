"""What a training run will take, before it runs: time, disk, memory and τ.

Time is that of a few real steps on this machine, per token, for all tokens of the plan; memory is the process's own
peak in them, the largest micro-batch included; disk follows from sizes; τ comes from runs that were measured elsewhere
(`scaling.json`), so it is the least certain.
"""

from __future__ import annotations

import math
import random
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tercel.chat.conversation import TokenizedChat
from tercel.measure.expected_tau import Expected, Runs, expected_tau
from tercel.measure.intervals import Interval, ratio_of_totals
from tercel.memory import available_memory
from tercel.target_model.protocol import TargetModel
from tercel.train.acceptance import simulate
from tercel.train.config import TrainConfig
from tercel.train.learner import Learner
from tercel.train.packing import PACKINGS
from tercel.train.prepare import Prepared
from tercel.train.run_writer import bytes_a_weight

SECONDS = 20.0  # of calibration at most, beside the one step that finds out what a step takes
HELD_OUT_TOKENS = 1024
JOURNAL_BYTES = 200  # of a step


@dataclass(frozen=True)
class Calibration:
    """Of `micro_batches` on this machine. second_a_token, target_share: of a whole step, and how much of that the
    target takes; update_seconds: of the optimizer, once a step; evaluation: seconds a held-out token; memory: peak of
    the process (on a GPU: of its memory), in bytes."""

    micro_batches: int
    second_a_token: Interval
    target_share: float
    update_seconds: float
    evaluation: float
    memory: int


@dataclass(frozen=True)
class Forecast:
    """Of a whole run from its first step. seconds, tokens_per_s: with 95 % intervals, as the measured micro-batches
    differ. features: bytes of their files, 0 without. free, available: bytes on the disk and of memory now.
    """

    steps: int
    tokens: int
    supervised_tokens: int
    evaluations: int
    seconds: Interval
    tokens_per_s: Interval
    calibration: Calibration
    run_bytes: int
    features: int
    free: int
    available: int | None
    weights: int
    expected: Expected

    def to_json(self) -> dict[str, Any]:
        c, tau = self.calibration, self.expected.tau
        return {
            "steps": self.steps,
            "tokens": self.tokens,
            "supervised_tokens": self.supervised_tokens,
            "seconds": self.seconds.value,
            "seconds_ci95": self.seconds.ci95,
            "tokens_per_s": self.tokens_per_s.value,
            "tokens_per_s_ci95": self.tokens_per_s.ci95,
            "disk_mb": {"run": self.run_bytes / 1e6, "features": self.features / 1e6, "free": self.free / 1e6},
            "memory_mb": {"peak": c.memory / 1e6, "available": self.available and self.available / 1e6},
            "tau": None if tau is None else tau.value,
            "tau_ci95": None if tau is None else tau.ci95,
            "tau_from": self.expected.told,
            "weights": self.weights,
            "evaluations": self.evaluations,
            "calibration": {
                "micro_batches": c.micro_batches,
                "target_share": c.target_share,
                "update_seconds": c.update_seconds,
                "evaluation_seconds_a_token": c.evaluation,
            },
        }


def forecast(
    target: TargetModel,
    ready: Prepared,
    config: TrainConfig,
    out: Path,
    *,
    cached: bool,
    runs: Runs | None = None,
    seconds: float = SECONDS,
) -> Forecast:
    """What the run would take. out: where it would go; nothing is written there. cached: whether features are made
    once and read from files. runs: the measured ones that τ comes from, by default the shipped."""
    calibration = calibrate(target, ready, config, seconds)
    lengths = [len(chat) for chat in ready.data.train]
    tokens = sum(lengths[chat] for step in ready.plan for micro in step for chat in micro)
    encoded = sum(lengths[chat] for chat in {c for step in ready.plan for micro in step for c in micro})
    share = calibration.target_share
    worth = tokens * (1 - share) + (encoded if cached else tokens) * share  # in tokens of a whole step
    evaluations = math.ceil(len(ready.plan) / config.eval_every)
    beside = len(ready.plan) * calibration.update_seconds
    beside += evaluations * sum(map(len, ready.data.held_out)) * calibration.evaluation
    rate = calibration.second_a_token
    total = Interval(*(bound * worth + beside for bound in (rate.value, rate.low, rate.high)))
    weights = sum(p.numel() for p in ready.head.parameters())
    supervised = int(ready.counts.sum())
    return Forecast(
        steps=len(ready.plan),
        tokens=tokens,
        supervised_tokens=supervised,
        evaluations=evaluations,
        seconds=total,
        tokens_per_s=Interval(tokens / total.value, tokens / total.high, tokens / total.low),
        calibration=calibration,
        run_bytes=weights * bytes_a_weight(averaged=config.ema > 0) + len(ready.plan) * JOURNAL_BYTES,
        features=_feature_bytes(ready, config.prompt_weight > 0) if cached else 0,
        free=shutil.disk_usage(_existing(out)).free,
        available=available_memory(target.device),
        weights=weights,
        expected=expected_tau(config, supervised, supervised * tokens / sum(lengths), runs),
    )


def calibrate(target: TargetModel, ready: Prepared, config: TrainConfig, seconds: float) -> Calibration:
    """Learn from a few micro-batches of the plan, the largest first, on `ready.head`, whose weights stay as they are.

    The rate is that of micro-batches by chance, unless there is no time for another than the largest.
    """
    micro = [batch for step in ready.plan for batch in step]
    size = [sum(len(ready.data.train[i]) for i in batch) for batch in micro]
    order = random.Random(0).sample(range(len(micro)), min(len(micro), 200))
    order = [size.index(max(size)), *order]
    learner = Learner(ready.head, ready.vocabulary, target, ready.data.train, config, [[micro[i]] for i in order])
    _clear_peak(target.device)
    learner.gradients(min(range(1, len(order)), key=lambda i: size[order[i]], default=0))  # what is made once
    _updated(learner)
    tokens, spent, updates = list[int](), list[float](), list[float]()
    began = time.perf_counter()
    for number in range(len(order)):
        if number > 0 and time.perf_counter() - began + max(spent) > 0.75 * seconds:
            break
        at = time.perf_counter()
        learner.gradients(number)
        spent.append(_now(target.device) - at)
        tokens.append(size[order[number]])
        updates.append(_updated(learner))
    measured = min(len(spent) - 1, 1)  # the largest only if it is the only one
    chats = [ready.data.train[i] for i in micro[order[measured]]]
    at = time.perf_counter()
    learner.supply.encode(chats)
    encoding = _now(target.device) - at
    held = _first(ready.data.held_out, HELD_OUT_TOKENS)
    at = time.perf_counter()
    simulate(learner.lesson, learner.weights.working, [learner.supply.batch(held)], learner.supply.to_draft)
    evaluation = (_now(target.device) - at) / sum(map(len, held))
    return Calibration(
        micro_batches=len(spent),
        second_a_token=ratio_of_totals(spent[measured:], tokens[measured:]),
        target_share=min(1.0, encoding / spent[measured]),
        update_seconds=sum(updates) / len(updates),
        evaluation=evaluation,
        memory=_peak(target.device),
    )


def _updated(learner: Learner) -> float:
    """Seconds of an update that moves no weight: the moments are made, as in training."""
    at = time.perf_counter()
    learner.update(0.0)
    return time.perf_counter() - at


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _clear_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not on Windows

    told = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return told if sys.platform == "darwin" else told << 10


def _first(chats: Sequence[TokenizedChat], tokens: int) -> list[TokenizedChat]:
    """The first of the chats, at least one, up to so many tokens."""
    kept, total = [chats[0]], len(chats[0])
    for chat in chats[1:]:
        if (total := total + len(chat)) > tokens:
            break
        kept.append(chat)
    return kept


def _feature_bytes(ready: Prepared, all_tokens: bool) -> int:
    """Of the files of all chats in 16 bits: features of every token, last hidden states where one is taught after
    it."""
    tokens = taught = 0
    for chat in ready.chats:
        tokens += len(chat)
        taught += len(chat) - 1 if all_tokens else int(chat.supervised[1:].sum())
    layers, width = len(ready.head.config.feature_layers), ready.head.config.target_hidden_size
    packing = PACKINGS["bf16"]
    return tokens * packing.bytes_of(layers, width) + taught * packing.bytes_of(1, width)


def _existing(path: Path) -> Path:
    """The nearest folder that is there."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())
