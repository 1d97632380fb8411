"""The training loop: batches, optimizer, held-out acceptance, checkpoints, exact resume."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import torch

from tercel.chat import dates
from tercel.chat.conversation import TokenizedChat
from tercel.draft import (
    DraftModel,
    DraftVocabulary,
    Eagle3Head,
    HeadConfig,
    HeadInfo,
    MeasuredRecord,
    TrainingRecord,
)
from tercel.draft.history import HeldOut
from tercel.errors import TercelError
from tercel.files import require_room
from tercel.heads import resolve_head
from tercel.interop.formats.read import read_head
from tercel.interop.output_rows import lend_output_layer
from tercel.target_model.model import Target, default_feature_layers
from tercel.train.acceptance import simulate
from tercel.train.batches import Split, data_digest, plan_batches, split, supervised_counts, usable
from tercel.train.config import TrainConfig
from tercel.train.facts import begun_record, identity, run_target
from tercel.train.features import Encoded, FeatureSupply
from tercel.train.initial import head_from, initialise_from_target
from tercel.train.journal import Journal
from tercel.train.precision import MasterWeights
from tercel.train.run_folder import RunFolder
from tercel.train.run_heads import RunHeads
from tercel.train.state import TrainState, load_state, save_state, uninterrupted
from tercel.train.ttt import Extent, training_time_test

EVAL_BATCH_TOKENS = 4096
# Of a weight: a state has it and two moments in float32 and the best head's two bytes; heads have two bytes. While one
# is replaced it is there twice.
BYTES_TO_BEGIN, BYTES_TO_GO_ON = 2 * (14 + 2 + 2), 14 + 2


class Watcher(Protocol):
    """Who wants to know how training goes (a progress bar, a tracker)."""

    def started(self, step: int, steps: int, record: TrainingRecord) -> None: ...
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
    target: Target,
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
    run that goes on has to be given chats of the same moment (`Journal.rendered_at`). stop_after: leave after this
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
    def __init__(
        self,
        target: Target,
        chats: Sequence[TokenizedChat],
        config: TrainConfig,
        folder: RunFolder,
        watcher: Watcher | None,
        feature_cache: Path | None,
        overwrite: bool,
        origins: TrainingRecord,
    ) -> None:
        self.target, self.config, self.folder, self.watcher = target, config, folder, watcher
        chats = usable(chats, min(config.max_length, target.context_length), target.vocab_size)
        self.data: Split = split(chats, config.eval_share)
        counts = supervised_counts(self.data.train, target.vocab_size)
        origin = None
        if config.start_from:
            origin = lend_output_layer(read_head(resolve_head(config.start_from, config.start_from)), target)
        self.vocabulary = (
            origin.vocabulary
            if origin is not None
            else DraftVocabulary.most_frequent(
                counts, config.draft_vocab or target.vocab_size, always=target.eos_token_ids
            )
        )
        self.key = config.digest(data_digest(chats), run_target(target))
        self.journal = Journal(folder.metrics)
        torch.manual_seed(config.seed)
        head = self._new_head(origin).to(target.device)
        if origin is None:
            initialise_from_target(head, target, self.vocabulary, self.data.train)
        head.lm_head.requires_grad_(not config.freeze_lm_head)
        self.weights = MasterWeights(head, target.dtype)
        self.optimizer = torch.optim.AdamW(
            [p for p in head.parameters() if p.requires_grad],
            lr=config.lr,
            betas=(0.9, 0.95),
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.supply = FeatureSupply(target, self.weights.working, self.vocabulary, feature_cache)
        lengths = [len(chat) for chat in self.data.train]
        micro = plan_batches(lengths, config.batch_tokens, config.epochs, config.seed)
        self.plan = [micro[i : i + config.accumulate] for i in range(0, len(micro), config.accumulate)]
        if config.max_steps:
            self.plan = self.plan[: config.max_steps]
        self.record = begun_record(
            origins,
            target,
            config,
            self.data,
            head,
            supervised_tokens=int(counts.sum()),
            coverage=self.vocabulary.coverage(counts),
            steps=len(self.plan),
        )
        self.step, self.seconds = 0, 0.0
        self.heads = RunHeads(folder)
        folder.begin(self.key, overwrite)
        self._restore()

    def _new_head(self, origin: DraftModel | None) -> Eagle3Head:
        config, target = self.config, self.target
        if origin is not None:
            return head_from(
                origin,
                target,
                feature_layers=config.feature_layers,
                fc_norm=config.fc_norm,
                norm_output=config.norm_output,
            )
        return Eagle3Head(
            HeadConfig.for_target(
                target.config,
                feature_layers=config.feature_layers or default_feature_layers(target.num_layers),
                vocab_size=target.vocab_size,
                draft_vocab_size=len(self.vocabulary),
                max_position_embeddings=target.context_length,
                fc_norm=config.fc_norm,
                norm_output=config.norm_output,
            )
        )

    def _restore(self) -> None:
        state = load_state(self.folder.training, self.key)
        weights = sum(p.numel() for p in self.weights.master.parameters())
        require_room(self.folder.out, weights * (BYTES_TO_BEGIN if state is None else BYTES_TO_GO_ON))
        if state is None:
            self.journal.cut(0)
            if self.record.rendered_at is not None and self.journal.rendered_at() is None:
                self.journal.add({"step": 0, dates.RECORD: self.record.rendered_at})
            self._save_state()  # a full disk shows before the work, not after it
            return
        self.weights.master.load_state_dict(state.head)
        self.weights.refresh()
        self.optimizer.load_state_dict(state.optimizer)
        torch.set_rng_state(state.rng)
        self.step, self.seconds = state.step, state.seconds
        self.journal.cut(state.step)
        self.heads.restore(state.best, state.best_head, self._model(None), state.step)

    def run(self, stop_after: int | None) -> TrainSummary:
        total = len(self.plan)
        if self.watcher:
            self.watcher.started(self.step, total, self.record)
        last = min(total, stop_after or total)
        started = time.monotonic() - self.seconds
        try:
            self._evaluate_if_due()  # where the run was stopped in the middle of it
            while self.step < last:
                metrics = self._train_step(self.plan[self.step], started)
                if self.watcher:
                    self.watcher.stepped(self.step, metrics)
                self._evaluate_if_due()
                if self.step % self.config.save_every == 0 or self.step == last:
                    self._save()
        except KeyboardInterrupt:
            self._save()
            raise
        return self._summary()

    def _train_step(self, micro_batches: list[list[int]], run_started: float) -> dict[str, float]:
        started = time.monotonic()
        rate = self.config.learning_rate(self.step, len(self.plan))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss, rows, right, tokens = 0.0, 0, 0, 0
        groups = [[self.data.train[i] for i in indices] for indices in micro_batches]
        whole, encoded = self._whole(groups)
        for chats, ready in zip(groups, encoded, strict=True):
            batch = self.supply.batch(chats, ready)
            result = training_time_test(
                self.weights.working, batch, self.supply.to_draft, self.config.objective, whole=whole
            )
            result.loss.backward()
            self.weights.collect_gradients()
            loss += float(result.loss.detach())
            tokens += len(batch.tokens)
            rows += len(result.steps[0].correct)
            right += int(result.steps[0].correct.sum())
        norm = float(torch.nn.utils.clip_grad_norm_(self.weights.master.parameters(), self.config.clip))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise TercelError(
                f"the loss became {loss} and its gradient {norm} at step {self.step + 1}; "
                "start again with a lower --lr, or in bfloat16 if this was float16"
            )
        metrics = {
            "loss": loss,
            "accuracy": right / rows,
            "lr": rate,
            "grad_norm": norm,
            "tokens": tokens,
        }
        with uninterrupted():
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.weights.refresh()
            self.step += 1
            self.seconds = time.monotonic() - run_started
            metrics["seconds"] = time.monotonic() - started
            self.journal.add({"step": self.step, **metrics})
        return metrics

    def _whole(
        self, groups: list[list[TokenizedChat]]
    ) -> tuple[Extent | None, Sequence[Sequence[Encoded] | None]]:
        """What the micro-batches of an optimizer step are averaged over together, and what the target gave for each,
        where it had to be asked: which rows count hangs on its choices, and a mean over rows needs all of them first.
        """
        objective = self.config.objective
        if objective.average == "sequence":
            return Extent(sum(map(len, groups))), [None] * len(groups)
        if len(groups) == 1:
            return None, [None]
        encoded = [self.supply.encode(chats) for chats in groups]
        extents = [
            Extent.of(self.supply.batch(chats, ready), self.supply.to_draft, objective)
            for chats, ready in zip(groups, encoded, strict=True)
        ]
        return sum(extents[1:], extents[0]), encoded

    def _evaluate_if_due(self) -> None:
        due = self.step == len(self.plan) or (self.step > 0 and self.step % self.config.eval_every == 0)
        if not due or any(row["step"] == self.step for row in self.journal.evaluations()):
            return
        held_out = self._measure()
        if self.watcher:
            self.watcher.evaluated(self.step, held_out)
        self.heads.offer(self._model(held_out), held_out.tau)
        self.journal.add({"step": self.step, "eval": held_out.to_json()})

    def _measure(self) -> HeldOut:
        held = self.data.held_out
        plan = plan_batches([len(chat) for chat in held], EVAL_BATCH_TOKENS, 1, 0)
        return simulate(
            self.weights.working,
            (self.supply.batch([held[i] for i in indices]) for indices in plan),
            self.supply.to_draft,
            self.config.objective,
        )

    def _model(self, held_out: HeldOut | None) -> DraftModel:
        """The head as it is now."""
        record = replace(self.record, step=self.step)
        info = HeadInfo(identity(self.target), record, MeasuredRecord(held_out=held_out))
        return DraftModel(self.weights.master, self.vocabulary, info)

    def _save(self) -> None:
        self._save_state()
        self.heads.write_last(self._model(None))

    def _save_state(self) -> None:
        self.journal.sync()
        save_state(
            TrainState(
                key=self.key,
                step=self.step,
                seconds=self.seconds,
                best=self.heads.best,
                head=self.weights.master.state_dict(),
                optimizer=self.optimizer.state_dict(),
                rng=torch.get_rng_state(),
                best_head=self.heads.best_files,
            ),
            self.folder.training,
        )

    def _summary(self) -> TrainSummary:
        again = self.supply.made_again
        cache = [f"{again} files of the feature cache were damaged or of an earlier version and are written again"]
        history = self.journal.rows()
        evals = [row["eval"] for row in history if "eval" in row]
        best = max(evals, key=lambda row: row["tau"], default=None)
        return TrainSummary(
            out=self.folder.out,
            steps=self.step,
            seconds=self.seconds,
            tokens=int(sum(row.get("tokens", 0) for row in history)),
            supervised_tokens=self.record.supervised_tokens or 0,
            best=HeldOut.from_json(best, "eval", self.journal.path) if best else self._measure(),
            history=history,
            notes=(*self.heads.notes, *self.journal.notes, *(cache if again else ())),
        )
