"""Everything `tercel train` can be told; YAML keys and flags have these names."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tercel.errors import TercelError
from tercel.file_set import HEAD_FILES, RECORD, read_manifest, refuse_foreign, remove_set, settle
from tercel.files import write_json
from tercel.locks import OURS, folder_lock
from tercel.train.state import STATE, other_run
from tercel.train.ttt import Objective


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


@dataclass(frozen=True)
class RunFolder:
    """Where a run keeps its things. The folder itself is the best head so far.

    A marker with the run's key makes a folder a run. Only files that runs write are ever replaced or removed, by name;
    whatever else is put there stays.
    """

    out: Path

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the folder for this process, and finish what a killed one left half done there.

        Raises `TercelError` if another process holds it, if it is neither empty nor a run's, or files of somebody else
        are in the way.
        """
        self._check()
        with folder_lock(self.out):
            self._check()
            for folder, files in ((self.out, HEAD_FILES), (self.last, HEAD_FILES), (self.training, (STATE,))):
                settle(folder)
                refuse_foreign(folder, files)
            yield

    def begin(self, key: str, overwrite: bool) -> None:
        """Mark the folder as that of the run `key`; `overwrite` removes the files of the run that is there.

        Raises `TercelError` if it is another run's, or one whose state is gone.
        """
        found = self._key()
        heads, state = read_manifest(self.out) is not None, read_manifest(self.training) is not None
        if not overwrite and found not in (None, key) and (heads or state):  # a run that saved nothing binds nobody
            raise TercelError(other_run(self.out))
        if not overwrite and heads and not state:
            raise TercelError(
                f"{self.out} holds a head of this run, but {self.training} is gone, so it cannot go on; bring it back "
                "from a copy, or begin anew with --overwrite"
            )
        if found != key:
            write_json(self.marker, {"format": 1, "key": key}, held=True)
        if overwrite:
            self._clear()

    def _key(self) -> str | None:
        """The key of the run that is here; None if there is no run."""
        if not os.path.lexists(self.marker):
            return None
        try:
            key = json.loads(self.marker.read_text(encoding="utf-8"))["key"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise TercelError(
                f"{self.marker}, which says whose run this is, cannot be read; bring it back or choose another --out"
            ) from error
        return str(key)

    def _check(self) -> None:
        """Raises `TercelError` unless the folder is missing, empty, or a run's."""
        try:
            found = sorted(name for name in os.listdir(self.out) if not name.startswith(OURS))
        except FileNotFoundError:
            return
        except NotADirectoryError as error:
            raise TercelError(f"{self.out} is a file; choose another --out") from error
        except OSError as error:
            raise TercelError(f"cannot use {self.out}: {error.strerror or error}; choose another --out") from error
        if self._key() is not None or not found:
            return
        if (self.training / STATE).is_file() and (self.out / RECORD).is_file():
            raise TercelError(
                f"{self.out} holds a run of an earlier version, which this one neither continues nor replaces; "
                "choose another --out"
            )
        raise TercelError(
            f"{self.out} is not empty and holds no training run (it has {found[0]}); choose another --out"
        )

    def _clear(self) -> None:
        for folder in (self.out, self.last, self.training):  # the state goes last: it says whose the rest was
            remove_set(folder)
        for file in (self.metrics, self.curves):
            file.unlink(missing_ok=True)
        for folder in (self.last, self.training):
            with suppress(OSError):
                folder.rmdir()

    @property
    def marker(self) -> Path:
        return self.out / f"{OURS}run.json"

    @property
    def last(self) -> Path:
        return self.out / "last"

    @property
    def training(self) -> Path:
        return self.out / "training"

    @property
    def state(self) -> Path:
        return self.training / STATE

    @property
    def metrics(self) -> Path:
        return self.training / "metrics.jsonl"

    @property
    def curves(self) -> Path:
        return self.training / "curves.png"
