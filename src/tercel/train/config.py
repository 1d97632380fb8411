"""Everything `tercel train` can be told; YAML keys and flags have these names."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tercel.errors import TercelError

LossKind = Literal["soft", "hard", "lk"]


@dataclass(frozen=True)
class Objective:
    """How the steps' losses are made and summed (spec section 5).

    steps `S`; decay `w` of `sum_s w^s loss_s` (`None`: the plain mean of the paper's formula); kind of loss;
    oov: whether rows whose target argmax the head cannot propose are dropped; average over the rows of a
    sequence first, or over all rows at once.
    """

    steps: int = 7
    decay: float | None = 0.8
    kind: LossKind = "soft"
    oov: str = "drop"
    average: str = "sequence"

    def step_weight(self, step: int) -> float:
        return 1.0 / self.steps if self.decay is None else self.decay**step


@dataclass(frozen=True)
class TrainConfig:
    """Recipe of one training run; defaults follow the paper where the scale allows it (spec section 7).

    max_steps: end there, schedule included, however many epochs there are (0: no limit).
    batch_tokens: packed tokens of one optimizer step's micro-batch; accumulate: micro-batches a step.
    lr: peak of a linear warm-up (share `warmup` of all steps) and a cosine down to `final_lr` of it.
    ttt_steps: `S`; decay: weight of step `s` is `decay^s` (0: the plain mean of the paper's formula).
    start_from: a head (folder, or name of a target with a shipped one) whose weights and draft vocabulary this run
    begins with, under a schedule of its own.
    freeze_lm_head: keep the target's output rows as they are, as in the paper's text (with draft_vocab 0: its whole
    output layer); otherwise they are only the start.
    draft_vocab: `W` (0: the target's whole vocabulary).
    """

    epochs: int = 2
    max_steps: int = 0
    batch_tokens: int = 2048
    accumulate: int = 1
    lr: float = 5e-4
    final_lr: float = 0.05
    warmup: float = 0.04
    weight_decay: float = 0.0
    clip: float = 0.5
    max_length: int = 2048
    ttt_steps: int = 7
    decay: float = 0.8
    loss: str = "soft"
    oov: str = "drop"
    average: str = "sequence"
    draft_vocab: int = 8192
    feature_layers: tuple[int, ...] = ()
    freeze_lm_head: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    start_from: str = ""
    seed: int = 0
    eval_share: float = 0.02
    eval_every: int = 100
    save_every: int = 100

    def __post_init__(self) -> None:
        for name in (
            "epochs",
            "batch_tokens",
            "accumulate",
            "max_length",
            "ttt_steps",
            "eval_every",
            "save_every",
        ):
            if getattr(self, name) < 1:
                raise TercelError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name, allowed in (
            ("loss", ("soft", "hard", "lk")),
            ("oov", ("drop", "keep")),
            ("average", ("sequence", "token")),
        ):
            if getattr(self, name) not in allowed:
                raise TercelError(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")
        if not 0 < self.eval_share < 1:
            raise TercelError(f"eval_share must lie between 0 and 1, not {self.eval_share}")
        if not 0 < self.lr < math.inf:
            raise TercelError(f"lr must be positive, not {self.lr}")
        if not 0 < self.clip < math.inf:
            raise TercelError(f"clip must be positive, not {self.clip}")
        if not 0 <= self.seed < 2**40:  # an epoch's order takes a million times the seed, in 64 bits
            raise TercelError(f"seed must lie between 0 and 2**40 - 1, not {self.seed}")
        for name in ("final_lr", "warmup", "decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise TercelError(f"{name} must lie between 0 and 1, not {getattr(self, name)}")
        for name in ("draft_vocab", "weight_decay", "max_steps"):
            if not 0 <= getattr(self, name) < math.inf:  # NaN neither
                raise TercelError(f"{name} must be at least 0, but is {getattr(self, name)}")

    @property
    def objective(self) -> Objective:
        return Objective(
            steps=self.ttt_steps,
            decay=self.decay or None,
            kind=self.loss,  # type: ignore[arg-type]  # checked above
            oov=self.oov,
            average=self.average,
        )

    def learning_rate(self, step: int, steps: int) -> float:
        """For optimizer step `step` (from 0) of `steps`: linear warm-up, then a cosine."""
        warmup = max(1, int(self.warmup * steps))
        if step < warmup:
            return self.lr * (step + 1) / warmup
        progress = (step - warmup) / max(1, steps - warmup)
        return self.lr * (self.final_lr + (1 - self.final_lr) * 0.5 * (1 + math.cos(math.pi * progress)))

    def digest(self, data: str, target: str) -> str:
        """Key of a run: what a resumed run must share with the one it continues."""
        values: dict[str, Any] = {**asdict(self), "data": data, "target": target}
        values["best_by"] = "walk"  # runs of earlier versions chose their best head by another, higher τ
        for free in ("eval_every", "save_every"):  # they change what is written, not what is learned
            values.pop(free)
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
