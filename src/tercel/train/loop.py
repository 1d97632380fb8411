"""The training loop: batches, optimizer, held-out acceptance, checkpoints, exact resume."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from tercel.chat.conversation import TokenizedChat
from tercel.draft import (
    DraftModel,
    DraftVocabulary,
    Eagle3Head,
    HeadConfig,
    HeadInfo,
    TargetIdentity,
    save_head,
)
from tercel.errors import TercelError
from tercel.target.model import Target, default_feature_layers
from tercel.train.acceptance import Acceptance, simulate
from tercel.train.batches import Split, data_digest, plan_batches, split, supervised_counts
from tercel.train.card import model_card
from tercel.train.config import RunFolder, TrainConfig
from tercel.train.features import FeatureSupply
from tercel.train.precision import MasterWeights
from tercel.train.state import TrainState, load_state, save_state
from tercel.train.ttt import training_time_test

EVAL_BATCH_TOKENS = 4096


class Watcher(Protocol):
    """Who wants to know how training goes (a progress bar, a tracker)."""

    def started(self, step: int, steps: int, facts: dict[str, Any]) -> None: ...
    def stepped(self, step: int, metrics: dict[str, float]) -> None: ...
    def evaluated(self, step: int, acceptance: Acceptance) -> None: ...


@dataclass(frozen=True)
class TrainSummary:
    """What a finished run gave."""

    out: Path
    steps: int
    seconds: float
    tokens: int
    supervised_tokens: int
    best: Acceptance
    history: list[dict[str, Any]] = field(default_factory=list)


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
    stop_after: int | None = None,
) -> TrainSummary:
    """Train a head for `target` on tokenised chats and write it to `out`; goes on where an interrupted run
    stopped.

    stop_after: leave after this many optimizer steps in all, as an interruption would (the state is saved).
    Raises `TercelError` if the data does not fit the target or `out` belongs to another run.
    """
    return _Run(target, chats, config, RunFolder(out), watcher, feature_cache, overwrite, data_names).run(
        stop_after
    )


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
        data_names: Sequence[str],
    ) -> None:
        self.target, self.config, self.folder, self.watcher = target, config, folder, watcher
        self.data_names = data_names
        chats = [chat.cut(config.max_length) for chat in chats]
        self.data: Split = split(chats, config.eval_share)
        counts = supervised_counts(self.data.train, target.vocab_size)
        self.vocabulary = DraftVocabulary.most_frequent(
            counts, config.draft_vocab or target.vocab_size, always=target.eos_token_ids
        )
        self.coverage = self.vocabulary.coverage(counts)
        self.supervised_tokens = int(counts.sum())
        self.key = config.digest(data_digest(chats), target.fingerprint)
        if overwrite:
            shutil.rmtree(folder.out, ignore_errors=True)
        elif folder.out.exists() and any(folder.out.iterdir()) and not folder.state.exists():
            raise TercelError(f"{folder.out} is not empty and holds no training run; choose another --out")

        torch.manual_seed(config.seed)
        head = self._new_head().to(target.device)
        self.weights = MasterWeights(head, target.dtype)
        self.optimizer = torch.optim.AdamW(
            head.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay, fused=True
        )
        self.supply = FeatureSupply(target, self.weights.working, self.vocabulary, feature_cache)
        lengths = [len(chat) for chat in self.data.train]
        micro = plan_batches(lengths, config.batch_tokens, config.epochs, config.seed)
        self.plan = [micro[i : i + config.accumulate] for i in range(0, len(micro), config.accumulate)]
        self.step, self.seconds, self.best_tau = 0, 0.0, -1.0
        self._restore()

    def _new_head(self) -> Eagle3Head:
        config, target = self.config, self.target
        head = Eagle3Head(
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
        with torch.no_grad():  # the target's own rows: a random output layer costs data (spec section 2)
            rows = target.output_layer.linear.weight[self.vocabulary.ids.to(target.device)]
            head.lm_head.weight.copy_(rows)
        return head

    def _restore(self) -> None:
        state = load_state(self.folder.state, self.key)
        if state is None:
            return
        self.weights.master.load_state_dict(state.head)
        self.weights.refresh()
        self.optimizer.load_state_dict(state.optimizer)
        torch.set_rng_state(state.rng)
        self.step, self.seconds, self.best_tau = state.step, state.seconds, state.best
        _keep_lines(self.folder.metrics, state.step)

    def run(self, stop_after: int | None) -> TrainSummary:
        total = len(self.plan)
        if self.watcher:
            self.watcher.started(self.step, total, self._facts())
        last = min(total, stop_after or total)
        started = time.monotonic() - self.seconds
        try:
            while self.step < last:
                metrics = self._train_step(self.plan[self.step])
                self.step += 1
                self.seconds = time.monotonic() - started
                self._record({"step": self.step, **metrics})
                if self.watcher:
                    self.watcher.stepped(self.step, metrics)
                if self.step % self.config.eval_every == 0 or self.step == total:
                    self._evaluate()
                if self.step % self.config.save_every == 0 or self.step == last:
                    self._save()
        except KeyboardInterrupt:
            self._save()
            raise
        return self._summary()

    def _train_step(self, micro_batches: list[list[int]]) -> dict[str, float]:
        started = time.monotonic()
        rate = self._learning_rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        sequences = sum(len(batch) for batch in micro_batches)
        loss, rows, right, tokens = 0.0, 0, 0, 0
        for indices in micro_batches:
            batch = self.supply.batch([self.data.train[i] for i in indices])
            result = training_time_test(
                self.weights.working, batch, self.supply.to_draft, self.config.objective, sequences=sequences
            )
            if not result.loss.requires_grad:
                continue  # no supervised row survived the cut to max_length
            result.loss.backward()
            self.weights.collect_gradients()
            loss += float(result.loss.detach())
            tokens += len(batch.tokens)
            if result.steps:
                rows += len(result.steps[0].correct)
                right += int(result.steps[0].correct.sum())
        norm = torch.nn.utils.clip_grad_norm_(self.weights.master.parameters(), self.config.clip)
        if not math.isfinite(loss) or not math.isfinite(float(norm)):
            raise TercelError(
                f"the loss became {loss} at step {self.step + 1}; resume with a lower --lr from the last checkpoint"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.weights.refresh()
        return {
            "loss": loss,
            "accuracy": right / max(rows, 1),
            "lr": rate,
            "grad_norm": float(norm),
            "tokens": tokens,
            "seconds": time.monotonic() - started,
        }

    def _learning_rate(self, step: int) -> float:
        config, total = self.config, len(self.plan)
        warmup = max(1, int(config.warmup * total))
        if step < warmup:
            return config.lr * (step + 1) / warmup
        progress = (step - warmup) / max(1, total - warmup)
        return config.lr * (
            config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * progress))
        )

    def _evaluate(self) -> Acceptance:
        held = self.data.held_out
        plan = plan_batches([len(chat) for chat in held], EVAL_BATCH_TOKENS, 1, 0)
        acceptance = simulate(
            self.weights.working,
            (self.supply.batch([held[i] for i in indices]) for indices in plan),
            self.supply.to_draft,
            self.config.objective,
        )
        self._record({"step": self.step, "eval": asdict(acceptance)})
        if self.watcher:
            self.watcher.evaluated(self.step, acceptance)
        if acceptance.tau > self.best_tau:
            self.best_tau = acceptance.tau
            self._write_head(self.folder.out, acceptance)
        self._acceptance = acceptance
        return acceptance

    def _write_head(self, path: Path, acceptance: Acceptance | None) -> None:
        measured = {"held_out": asdict(acceptance)} if acceptance else {}
        info = HeadInfo(self._identity(), {**self._facts(), "step": self.step}, measured)
        model = DraftModel(self.weights.master, self.vocabulary, info)
        save_head(model, path, card=model_card(model, self.config), keep=("last", "training"))

    def _save(self) -> None:
        self._write_head(self.folder.last, None)
        save_state(
            TrainState(
                key=self.key,
                step=self.step,
                seconds=self.seconds,
                best=self.best_tau,
                head=self.weights.master.state_dict(),
                optimizer=self.optimizer.state_dict(),
                rng=torch.get_rng_state(),
            ),
            self.folder.state,
        )

    def _identity(self) -> TargetIdentity:
        return TargetIdentity(self.target.source.name, self.target.fingerprint, self.target.tokenizer_digest)

    def _facts(self) -> dict[str, Any]:
        data = self.data.train
        return {
            "data": list(self.data_names),
            "conversations": len(data),
            "held_out_conversations": len(self.data.held_out),
            "tokens": sum(len(chat) for chat in data),
            "supervised_tokens": self.supervised_tokens,
            "draft_vocabulary_coverage": self.coverage,
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "steps": len(self.plan),
            "recipe": asdict(self.config),
        }

    def _record(self, row: dict[str, Any]) -> None:
        self.folder.metrics.parent.mkdir(parents=True, exist_ok=True)
        with self.folder.metrics.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")

    def _summary(self) -> TrainSummary:
        history = [json.loads(line) for line in self.folder.metrics.read_text(encoding="utf-8").splitlines()]
        evals = [row["eval"] for row in history if "eval" in row]
        best = max(evals, key=lambda row: row["tau"], default=None)
        return TrainSummary(
            out=self.folder.out,
            steps=self.step,
            seconds=self.seconds,
            tokens=int(sum(row.get("tokens", 0) for row in history)),
            supervised_tokens=self.supervised_tokens,
            best=Acceptance(**{**best, "alpha": tuple(best["alpha"])}) if best else self._evaluate(),
            history=history,
        )


def _keep_lines(path: Path, step: int) -> None:
    """Drop metrics of steps after `step`: they will be made again."""
    if not path.is_file():
        return
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    path.write_text(
        "".join(line + "\n" for line in lines if json.loads(line)["step"] <= step), encoding="utf-8"
    )
