"""The training loop: optimizer steps, held-out acceptance, checkpoints, exact resume."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import torch

from tercel.chat.conversation import TokenizedChat
from tercel.draft import DraftModel, HeadInfo, MeasuredRecord, TrainingRecord
from tercel.draft.history import HeldOut
from tercel.stopping import uninterrupted
from tercel.target_model.protocol import TargetModel
from tercel.train.acceptance import simulate
from tercel.train.batches import data_digest, plan_batches
from tercel.train.config import TrainConfig
from tercel.train.facts import begun_record, identity, run_target
from tercel.train.failure import NotFiniteError
from tercel.train.learner import Learner
from tercel.train.prepare import prepare
from tercel.train.run_folder import RunFolder
from tercel.train.run_writer import RunWriter

EVAL_BATCH_TOKENS = 4096


class Watcher(Protocol):
    """Who wants to know how training goes (a progress bar, a tracker)."""

    def started(self, step: int, steps: int, record: TrainingRecord) -> None: ...
    def warned(self, sentence: str) -> None: ...
    def stepped(self, step: int, metrics: dict[str, float]) -> None: ...
    def evaluated(self, step: int, held_out: HeldOut) -> None: ...


@dataclass(frozen=True)
class TrainSummary:
    """What a finished run gave. notes: what was found damaged on the way, and made again."""

    out: Path
    steps: int
    seconds: float
    tokens: int
    supervised_tokens: int
    best: HeldOut
    history: list[dict[str, Any]] = field(default_factory=list)
    notes: tuple[str, ...] = ()


def train(
    target: TargetModel,
    chats: Sequence[TokenizedChat],
    config: TrainConfig,
    out: Path,
    *,
    watcher: Watcher | None = None,
    feature_cache: Path | None = None,
    overwrite: bool = False,
    data_names: Sequence[str] = (),
    data_licence: str = "",
    rendered_at: datetime | None = None,
    stop_after: int | None = None,
) -> TrainSummary:
    """Train a head for `target` on tokenised chats and write it to `out`; goes on where a stopped run was.

    data_names, data_licence: for the card. rendered_at: what the chats' template took for now, if it writes the date; a
    run that goes on has to be given chats of the same moment (`recorded_moment`). stop_after: leave after this
    many optimizer steps in all, as an interruption would (the state is saved).
    Raises `TercelError` before the first step if the data does not fit the target, or `out` belongs to another run, is
    in use by another process, holds anything that is no run, or has no room for what a run writes.
    """
    origins = TrainingRecord(
        data=tuple(data_names),
        data_licence=data_licence,
        rendered_at=None if rendered_at is None else rendered_at.isoformat(timespec="seconds"),
    )
    folder = RunFolder(out)
    with folder.held():
        return _Run(target, chats, config, folder, watcher, feature_cache, overwrite, origins).run(stop_after)


class _Run:
    """One run in a folder that is held. This process is its only rank, so that it has the writer."""

    def __init__(
        self,
        target: TargetModel,
        chats: Sequence[TokenizedChat],
        config: TrainConfig,
        folder: RunFolder,
        watcher: Watcher | None,
        feature_cache: Path | None,
        overwrite: bool,
        origins: TrainingRecord,
    ) -> None:
        self.target, self.config, self.watcher = target, config, watcher
        ready = prepare(target, chats, config)
        self.data, self.plan = ready.data, ready.plan
        self.vocabulary, self.warnings = ready.vocabulary, ready.warnings
        self.learner = Learner(
            ready.head, ready.vocabulary, target, ready.data.train, config, ready.plan, feature_cache=feature_cache
        )
        self.record = begun_record(
            origins,
            target,
            config,
            self.data,
            ready.head,
            supervised_tokens=int(ready.counts.sum()),
            coverage=self.vocabulary.coverage(ready.counts),
            steps=len(self.plan),
        )
        self.step, self.seconds = 0, 0.0
        key = config.digest(data_digest(ready.chats), run_target(target))
        self.writer = RunWriter(folder, key)
        folder.begin(key, overwrite)
        self._restore()

    def _restore(self) -> None:
        state = self.writer.found(sum(p.numel() for p in self.learner.weights.master.parameters()))
        if state is None:
            self.writer.begin(self.record.rendered_at)
            self._save(heads=False)  # a full disk shows before the work, not after it
            return
        self.learner.restore(state.head, state.optimizer)
        torch.set_rng_state(state.rng)
        self.step, self.seconds = state.step, state.seconds
        self.writer.go_on(state, self._model(None))

    def run(self, stop_after: int | None) -> TrainSummary:
        total = len(self.plan)
        if self.watcher:
            self.watcher.started(self.step, total, self.record)
            for sentence in self.warnings:
                self.watcher.warned(sentence)
        last = min(total, stop_after or total)
        began = time.monotonic() - self.seconds
        try:
            if not self.writer.is_evaluated(self.step):  # the run was stopped in the middle of it
                self._evaluate_if_due()
            stalled = self.writer.stalled(self.config.patience)
            while self.step < last and not stalled:
                metrics = self._train_step(began)
                if self.watcher:
                    self.watcher.stepped(self.step, metrics)
                stalled = self._evaluate_if_due() and self.writer.stalled(self.config.patience)
                if self.step % self.config.save_every == 0 or self.step == last or stalled:
                    self._save()
        except KeyboardInterrupt:
            with uninterrupted():
                self._save()
            raise
        return self._summary()

    def _train_step(self, began: float) -> dict[str, float]:
        """One optimizer step of a run that began at `began`, and what is noted of it:

            gradients = those of the step's micro-batches, summed over all ranks and clipped   (`Learner.gradients`)
            without an interruption in between:
                master  = optimizer(master, gradients)      float32 weights and moments        (`Learner.update`)
                working = master in the working dtype
                step, seconds, journal                      so that no state knows half a step
        """
        started = time.monotonic()
        try:
            learned = self.learner.gradients(self.step)
        except NotFiniteError as error:
            raise error.kept(self.learner, self.writer.folder.failure) from error
        metrics: dict[str, float] = asdict(learned)
        with uninterrupted():
            self.learner.update(learned.lr)
            self.step += 1
            self.seconds = time.monotonic() - began
            metrics["seconds"] = time.monotonic() - started
            self.writer.add_step(self.step, metrics)
        return metrics

    def _evaluate_if_due(self) -> bool:
        """Whether it was due."""
        due = self.step == len(self.plan) or (self.step > 0 and self.step % self.config.eval_every == 0)
        if not due:
            return False
        held_out = self._measure()
        if self.watcher:
            self.watcher.evaluated(self.step, held_out)
        self.writer.add_evaluation(self.step, held_out, self._model(held_out))
        return True

    def _measure(self) -> HeldOut:
        held, supply = self.data.held_out, self.learner.supply
        plan = plan_batches([len(chat) for chat in held], EVAL_BATCH_TOKENS, 1, 0)
        batches = (supply.batch([held[i] for i in indices]) for indices in plan)
        return simulate(self.learner.weights.working, batches, supply.to_draft, self.config.objective)

    def _model(self, held_out: HeldOut | None) -> DraftModel:
        """The head as it is now."""
        record = replace(self.record, step=self.step)
        info = HeadInfo(identity(self.target), record, MeasuredRecord(held_out=held_out))
        return DraftModel(self.learner.weights.master, self.vocabulary, info)

    def _save(self, heads: bool = True) -> None:
        self.writer.save(self.step, self.seconds, self.learner, self._model(None) if heads else None)

    def _summary(self) -> TrainSummary:
        again = self.learner.supply.made_again
        cache = [f"{again} files of the feature cache were damaged or of an earlier version and are written again"]
        patience, steps = self.config.patience, len(self.plan)
        early = [f"ended after step {self.step} of {steps}: {patience} evaluations brought no better τ"]
        stalled = self.step < steps and self.writer.stalled(patience)
        history = self.writer.journal.entries()
        return TrainSummary(
            out=self.writer.folder.out,
            steps=self.step,
            seconds=self.seconds,
            tokens=int(sum(entry.get("tokens", 0) for entry in history)),
            supervised_tokens=self.record.supervised_tokens or 0,
            best=self.writer.heads.best_held_out() or self._measure(),
            history=history,
            notes=(*self.writer.notes, *(cache if again else ()), *(early if stalled else ())),
        )
