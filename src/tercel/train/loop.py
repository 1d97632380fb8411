"""The training loop: optimizer steps, held-out acceptance, checkpoints, exact resume."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import torch

from tercel.chat.conversation import TokenizedChat
from tercel.draft import DraftModel, HeadInfo, MeasuredRecord, TrainingRecord
from tercel.draft.history import HeldOut
from tercel.errors import TercelError
from tercel.stopping import uninterrupted
from tercel.target_model.protocol import TargetModel
from tercel.train.acceptance import held_out_of, simulate_batch
from tercel.train.batches import data_digest, plan_batches
from tercel.train.config import TrainConfig
from tercel.train.facts import begun_record, identity, run_target
from tercel.train.failure import NotFiniteError
from tercel.train.feature_store import FeatureStore
from tercel.train.learner import Learner
from tercel.train.prepare import prepare
from tercel.train.ranks import Alone, RankLostError, Ranks, Step, collected, dealt
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
    """What a finished run gave. history: the journal's entries, for the first of several ranks; notes: what was found
    damaged on the way, and made again."""

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
    features: Path | None = None,
    overwrite: bool = False,
    data_names: Sequence[str] = (),
    data_licence: str = "",
    rendered_at: datetime | None = None,
    stop_after: int | None = None,
    ranks: Ranks | None = None,
) -> TrainSummary:
    """Train a head for `target` on tokenised chats and write it to `out`; goes on where a stopped run was.

    features: a folder of what the target gives for the chats (`make_features`); its blocks are then not run.
    data_names, data_licence: for the card. rendered_at: what the chats' template took for now, if it writes the date; a
    run that goes on has to be given chats of the same moment (`recorded_moment`). stop_after: leave after this
    many optimizer steps in all, as an interruption would (the state is saved). ranks: of how many processes this is
    which (`group.joined`); all call this with the same data and settings, and the first alone writes to `out`.
    Raises `TercelError` before the first step if the data does not fit the target, or `out` belongs to another run, is
    in use by another process, holds anything that is no run, or has no room for what a run writes; and `RankLostError`
    if another rank ends.
    """
    ranks = ranks or Alone()
    origins = TrainingRecord(
        data=tuple(data_names),
        data_licence=data_licence,
        rendered_at=None if rendered_at is None else rendered_at.isoformat(timespec="seconds"),
    )
    folder = RunFolder(out)
    with folder.held() if ranks.rank == 0 else nullcontext():
        run = _Run(target, chats, config, folder, watcher, features, overwrite, origins, ranks)
        summary = run.run(stop_after)
        ranks.gather(None)  # none has done before the first one has written all
        return summary


class _Run:
    """One run, as one of its ranks sees it. The first has the writer, in a folder that is held, and is where the others
    take from what a state says."""

    def __init__(
        self,
        target: TargetModel,
        chats: Sequence[TokenizedChat],
        config: TrainConfig,
        folder: RunFolder,
        watcher: Watcher | None,
        features: Path | None,
        overwrite: bool,
        origins: TrainingRecord,
        ranks: Ranks,
    ) -> None:
        self.target, self.config, self.watcher, self.ranks = target, config, watcher, ranks
        store = None if features is None else FeatureStore(features)
        ready = prepare(target, chats, config, store)
        self.data, self.plan = ready.data, ready.plan
        self.vocabulary, self.warnings = ready.vocabulary, ready.warnings + _idle(ready.plan, ranks.count)
        self.learner = Learner(
            ready.head,
            ready.vocabulary,
            target,
            ready.data.train,
            config,
            ready.plan,
            features=store,
            ranks=ranks,
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
        key = config.digest(data_digest(ready.chats), run_target(target, store))
        _check_alike(ranks.gather(key))
        self.out = folder.out
        self.writer = RunWriter(folder, key) if ranks.rank == 0 else None
        if self.writer:
            folder.begin(key, overwrite)
            self._restore(self.writer)
        self.step, self.seconds, rng = ranks.gather((self.step, self.seconds, torch.get_rng_state()))[0]
        torch.set_rng_state(rng)
        self.learner.take_first()

    def _restore(self, writer: RunWriter) -> None:
        weights = self.learner.weights
        state = writer.found(sum(p.numel() for p in weights.master.parameters()), averaged=weights.mean is not None)
        if state is None:
            writer.begin(self.record.rendered_at)
            self._save(heads=False)  # a full disk shows before the work, not after it
            return
        self.learner.restore(state.head, state.optimizer, state.mean)
        torch.set_rng_state(state.rng)
        self.step, self.seconds = state.step, state.seconds
        writer.go_on(state, self._model(None))

    def run(self, stop_after: int | None) -> TrainSummary:
        total = len(self.plan)
        if self.watcher:
            self.watcher.started(self.step, total, self.record)
            for sentence in self.warnings:
                self.watcher.warned(sentence)
        last = min(total, stop_after or total)
        began = time.monotonic() - self.seconds
        try:
            evaluated = self.writer is None or self.writer.is_evaluated(self.step)
            if not self.ranks.gather(evaluated)[0]:  # the run was stopped in the middle of it
                self._evaluate_if_due()
            if self.step == 0 and self.config.start_from:
                with self._failures_kept():
                    self.learner.settle()
            stalled = self._is_stalled()
            while self.step < last and not stalled:
                metrics = self._train_step(began)
                if self.watcher:
                    self.watcher.stepped(self.step, metrics)
                stalled = self._evaluate_if_due() and self._is_stalled()
                if self.step % self.config.save_every == 0 or self.step == last or stalled:
                    self._save()
        except (KeyboardInterrupt, RankLostError):
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
                mean    = a little more of master, where one is kept                           (`MasterWeights.follow`)
                step, seconds, journal                      so that no state knows half a step
        """
        started = time.monotonic()
        with self._failures_kept():
            learned = self.learner.gradients(self.step)
        metrics: dict[str, float] = asdict(learned)
        with uninterrupted():
            self.learner.update(learned.lr)
            self.step += 1
            self.learner.weights.follow(self.step)
            self.seconds = time.monotonic() - began
            metrics["seconds"] = time.monotonic() - started
            if self.writer:
                self.writer.add_step(self.step, metrics)
        return metrics

    @contextmanager
    def _failures_kept(self) -> Iterator[None]:
        """Where a loss or gradient is no number, keep what gave it beside the run, and say so."""
        try:
            yield
        except NotFiniteError as error:
            if self.writer is None:
                raise
            raise error.kept(self.learner, self.writer.folder.failure) from error

    def _evaluate_if_due(self) -> bool:
        """Whether it was due."""
        due = self.step == len(self.plan) or (self.step > 0 and self.step % self.config.eval_every == 0)
        if not due:
            return False
        held_out = self._measure()
        if self.watcher:
            self.watcher.evaluated(self.step, held_out)
        if self.writer:
            self.writer.add_evaluation(self.step, held_out, self._model(held_out))
        return True

    def _is_stalled(self) -> bool:
        """Whether the run is to end early, as the first rank's journal says."""
        return self.ranks.gather(self.writer is not None and self.writer.stalled(self.config.patience))[0]

    def _measure(self) -> HeldOut:
        """On all held-out chats, of which each rank takes its share; all ranks get what one alone would."""
        learner, parts = self.learner, []
        head = learner.weights.to_measure()
        plan = plan_batches([len(chat) for chat in self.data.held_out], EVAL_BATCH_TOKENS, 1, 0)
        for indices in dealt(plan, self.ranks.rank, self.ranks.count):
            chats = [self.data.held_out[i] for i in indices]
            encoded = learner.of_answers.encode(chats)
            if chats:
                batch = learner.of_answers.batch(chats, encoded)
                parts.append(simulate_batch(learner.lesson, head, batch, learner.supply.to_draft))
        return held_out_of(collected(self.ranks.gather(parts)), learner.lesson.objective)

    def _model(self, held_out: HeldOut | None) -> DraftModel:
        """The head as it is now."""
        record = replace(self.record, step=self.step)
        info = HeadInfo(identity(self.target), record, MeasuredRecord(held_out=held_out))
        return DraftModel(self.learner.weights.shown, self.vocabulary, info)

    def _save(self, heads: bool = True) -> None:
        if self.writer:
            self.writer.save(self.step, self.seconds, self.learner, self._model(None) if heads else None)

    def _summary(self) -> TrainSummary:
        patience, steps = self.config.patience, len(self.plan)
        early = [f"ended after step {self.step} of {steps}: {patience} evaluations brought no better τ"]
        stalled = self.step < steps and self._is_stalled()
        history = self.writer.journal.entries() if self.writer else []
        best = self.ranks.gather(self.writer.heads.best_held_out() if self.writer else None)[0]
        return TrainSummary(
            out=self.out,
            steps=self.step,
            seconds=self.seconds,
            tokens=int(sum(entry.get("tokens", 0) for entry in history)),
            supervised_tokens=self.record.supervised_tokens or 0,
            best=best or self._measure(),
            history=history,
            notes=(*(self.writer.notes if self.writer else ()), *(early if stalled else ())),
        )


def _check_alike(keys: Sequence[str]) -> None:
    """Raises `TercelError` if the ranks were given different runs."""
    for rank, key in enumerate(keys):
        if key != keys[0]:
            raise TercelError(
                f"process {rank} has other settings, data or target than process 0; give all processes of a run the "
                "same command, and the same files"
            )


def _idle(plan: Sequence[Step], ranks: int) -> tuple[str, ...]:
    """What to say where an optimizer step has fewer micro-batches than there are ranks."""
    most = max(map(len, plan))
    if most >= ranks:
        return ()
    return (
        f"a step has {most} micro-batches for {ranks} processes, so that some have nothing to do; "
        f"put accumulate: {ranks}, or a multiple of it, into the settings",
    )
