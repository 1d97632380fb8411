"""Heads of three trainers on equal data, compared by what they accept: SpecForge's recipe, speculators' and this one's.

    make trainers-venv
    tercel features TARGET --data DATA --out FEATURES
    python bench/heads.py TARGET DATA OUT --features FEATURES --steps 600 --tasks mt_bench:20,gsm8k:20 --data-dir DIR

All learn from the same features, in the same micro-batches, as many optimizer steps, with one draft vocabulary and one
seed. Loss, steps of training-time test and their weights, optimizer, rate, schedule, clipping and norms are each
maker's defaults (`trainer_specforge.py`, `trainer_speculators.py`; here `tercel train`'s). A rate of one's own goes
behind the name: `--heads tercel specforge specforge@5e-4 speculators`. Then every last head, read as its makers wrote
it, is measured here: τ of chains on held-out conversations, and real greedy decoding of the tasks with a chain and with
the paper's tree. Nothing else tells heads apart.

Everything lies in OUT and is kept: the same command goes on where it was stopped, and `--stages train` (or `tau`,
`decode`) or `--heads` does a part. OUT/heads.json has it all.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from given import SIZES
from safetensors.torch import save_file
from training import ROOT, Trainer

from tercel import Engine, Request, SamplingParams, Target, load_draft, make_proposer
from tercel.chat import TokenizedChat, load_chats
from tercel.draft import DraftModel
from tercel.draft.acceptance import tokens_of_steps
from tercel.draft.shape import parse_shape
from tercel.errors import TercelError
from tercel.files import write_json
from tercel.measure.intervals import ratio_of_totals, speedup
from tercel.measure.tasks import parse_tasks, prompt_ids
from tercel.reading import read_json
from tercel.train.acceptance import simulate
from tercel.train.batches import plan_batches
from tercel.train.config import TrainConfig
from tercel.train.encoding import before_supervised
from tercel.train.feature_store import FeatureStore
from tercel.train.features import FeatureSupply
from tercel.train.lesson import lesson_of
from tercel.train.loop import EVAL_BATCH_TOKENS, train
from tercel.train.prepare import Prepared, prepare

OURS = "tercel"
TTT_STEPS = {"specforge": 7, "speculators": 3}  # of training-time test, by their defaults
HEADS = (OURS, *TTT_STEPS)
STAGES = ("train", "tau", "decode")
CHAIN = 7  # drafts of the chains on held-out conversations
SHAPES = (f"chain:{CHAIN}", "10x8x60")
SAVE_EVERY = 25


@dataclass(frozen=True)
class Comparison:
    """target, chats and settings that all heads share; `out`: where everything goes."""

    target: Target
    chats: Sequence[TokenizedChat]
    config: TrainConfig
    features: Path
    out: Path

    @cached_property
    def store(self) -> FeatureStore:
        return FeatureStore(self.features)

    @cached_property
    def prepared(self) -> Prepared:
        return prepare(self.target, self.chats, self.config, self.store)

    def folder(self, head: str) -> Path:
        """Where the trained head is."""
        return self.out / head / ("last" if head == OURS else "head")

    def learn(self, head: str, threads: int, venvs: Path) -> None:
        """Train it, or go on. Raises `TercelError` if its trainer cannot run."""
        if head == OURS:
            train(self.target, self.chats, self.config, self.out / OURS, features=self.features)
        elif not self.folder(head).exists():
            self._learn_there(head, threads, venvs)

    def _learn_there(self, head: str, threads: int, venvs: Path) -> None:
        folder, plan = self.out / head, self.prepared.plan
        folder.mkdir(parents=True, exist_ok=True)
        kept = folder / "progress.json"
        done = read_json(kept) if kept.exists() else {"steps": 0, "seconds": 0.0, "losses": []}
        state, batch = folder / f"state-{done['steps']}.pt", folder / "batch.safetensors"
        trainer = Trainer(head.partition("@")[0], self._job(head, threads), folder / "trainer.log", venvs)
        try:
            if done["steps"]:
                trainer.tell({"load": str(state)})
            for number in range(done["steps"], len(plan)):
                ((indices,),) = [plan[number]]
                self._write_batch([self.prepared.data.train[i] for i in indices], batch)
                done["seconds"] += trainer.step(batch)
                done["losses"].append(trainer.losses[-1])
                if (number + 1) % SAVE_EVERY == 0 or number + 1 == len(plan):
                    before, state = state, folder / f"state-{number + 1}.pt"
                    trainer.tell({"save": str(state)})
                    write_json(kept, {**done, "steps": number + 1, "settings": trainer.settings})
                    before.unlink(missing_ok=True)
                    print(f"{head}: step {number + 1} of {len(plan)}, loss {trainer.losses[-1]:.3f}", file=sys.stderr)
            part = folder / "part-head"
            shutil.rmtree(part, ignore_errors=True)
            trainer.tell({"head": str(part)})
            part.rename(self.folder(head))
        finally:
            trainer.close()
        state.unlink(missing_ok=True)
        batch.unlink(missing_ok=True)

    def _job(self, head: str, threads: int) -> dict[str, Any]:
        name, _, rate = head.partition("@")
        c, given = self.prepared.head.config, self.out / "target.safetensors"
        if not given.exists():
            every = torch.arange(self.target.vocab_size)
            tensors = {"embeddings": self.target.embed(every), "output": self.target.output_rows(every)}
            tensors = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
            save_file({**tensors, "ids": self.prepared.vocabulary.ids.contiguous()}, given)
        sizes = (*SIZES, "vocab_size", "rms_norm_eps", "max_position_embeddings", "rope_parameters", "feature_layers")
        return {
            **{size: getattr(c, size) for size in sizes},
            "trainer": name,
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "threads": threads,
            "steps": TTT_STEPS[name],
            "target": str(given),
            "recipe": {"total_steps": len(self.prepared.plan)} | ({"lr": float(rate)} if rate else {}),
        }

    def _write_batch(self, chats: Sequence[TokenizedChat], file: Path) -> None:
        encoded = [self.store.read(chat, self.target.dtype) for chat in chats]
        taught = torch.cat([before_supervised(chat) for chat in chats])
        last = torch.zeros(len(taught), self.target.hidden_size, dtype=self.target.dtype)
        last[taught] = torch.cat([one.hidden for one in encoded])
        tensors = {
            "tokens": torch.cat([torch.from_numpy(chat.tokens).long() for chat in chats]),
            "lengths": torch.tensor([len(chat) for chat in chats]),
            "supervised": torch.cat([torch.from_numpy(chat.supervised) for chat in chats]),
            "taught": taught,
            "features": torch.cat([one.features for one in encoded]),
            "last": last,
        }
        save_file(tensors, file)

    def read(self, head: str) -> DraftModel:
        """As anybody's head is read. Raises `TercelError` if it is not trained."""
        if not self.folder(head).exists():
            raise TercelError(f"{head} is not trained; do the stage train first")
        model = load_draft(str(self.folder(head)), self.target)
        if model.eagle3.config.feature_layers != self.prepared.head.config.feature_layers:
            raise TercelError(f"{head} was read as one of other layers: {model.eagle3.config.feature_layers}")
        return model

    def tau(self, model: DraftModel) -> dict[str, Any]:
        """Of greedy chains on the conversations that are held out."""
        held_out = self.prepared.data.held_out
        supply = FeatureSupply(self.target, model.head, model.vocabulary, self.store)
        plan = plan_batches([len(chat) for chat in held_out], EVAL_BATCH_TOKENS, 1, 0)
        batches = (supply.batch([held_out[i] for i in indices]) for indices in plan)
        chains = lesson_of(replace(self.config, ttt_steps=CHAIN))
        found = simulate(chains, model.head, batches, supply.to_draft)
        return {"tau": found.tau, "alpha": list(found.alpha), "conversations": len(held_out)}


def decode(
    target: Target, model: DraftModel, shape: str, asked: Mapping[str, Sequence[tuple[int, ...]]], tokens: int
) -> dict[str, list[list[int]]]:
    """Tokens behind the prompt's own and steps of every greedy answer, by task."""
    engine = Engine(target, make_proposer("eagle3", target, head=model, shape=parse_shape(shape)))
    params = SamplingParams(max_new_tokens=tokens)
    found = {}
    for task, prompts in asked.items():
        answers = [engine.generate([Request(prompt, params)])[0].require() for prompt in prompts]
        found[task] = [[tokens_of_steps(answer.tokens), answer.steps] for answer in answers if answer.steps]
    return found


def mean_tau(rows: Mapping[str, Sequence[Sequence[int]]]) -> float:
    """Mean over tasks."""
    return fmean(ratio_of_totals(*zip(*answers, strict=True)).value for answers in rows.values() if answers)


def table(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line a head, and this package's beside the best of the others."""
    lines = [f"{'head':<20} {'held out':>9}" + "".join(f" {shape:>10}" for shape in SHAPES)]
    for head, one in found.items():
        chains = one.get("held_out", {}).get("tau", math.nan)
        decoded = [mean_tau(one["decode"][shape]) if shape in one.get("decode", {}) else math.nan for shape in SHAPES]
        lines.append(f"{head:<20} {chains:9.3f}" + "".join(f" {value:10.3f}" for value in decoded))
    for shape in SHAPES:
        peers = {name: one["decode"][shape] for name, one in found.items() if shape in one.get("decode", {})}
        own = peers.pop(OURS, None)
        if own is None or not peers:
            continue
        best = max(peers, key=lambda name: mean_tau(peers[name]))
        ours, theirs = ([row for rows in one.values() for row in rows] for one in (own, peers[best]))
        paired = speedup(*zip(*ours, strict=True), *zip(*theirs, strict=True))
        means = mean_tau(own) / mean_tau(peers[best])
        lines.append(
            f"{shape}: mean τ of the tasks {means:.3f} x that of {best}; over all answers {paired.value:.3f} "
            f"[{paired.low:.3f}, {paired.high:.3f}]"
        )
    return lines


def run(args: argparse.Namespace) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    kept = args.out / "heads.json"
    found: dict[str, dict[str, Any]] = read_json(kept) if kept.exists() else {}
    target = Target.load(args.target, dtype=torch.bfloat16)
    chats, _ = load_chats([args.data], target.tokenizer, max_length=args.max_length, limit=args.limit)
    passes = 2 * math.ceil(args.steps * args.batch_tokens / max(1, sum(map(len, chats)))) + 1
    config = TrainConfig(
        epochs=passes, max_steps=args.steps, batch_tokens=args.batch_tokens, max_length=args.max_length,
        draft_vocab=args.draft_vocab, eval_share=args.eval_share, seed=args.seed, eval_every=10**6,
    )  # fmt: skip
    comparison = Comparison(target, chats, config, args.features, args.out)
    tasks = parse_tasks(args.tasks, args.data_dir) if "decode" in args.stages else ()
    asked = {task.name: [prompt_ids(target.tokenizer, q) for q in task.questions] for task in tasks}
    for head in args.heads:
        one = found.setdefault(head, {})
        if "train" in args.stages:
            comparison.learn(head, args.threads, args.venvs)
        if "tau" in args.stages and "held_out" not in one:
            one["held_out"] = comparison.tau(comparison.read(head))
            write_json(kept, found)
        for shape in SHAPES if asked else ():
            if shape not in one.setdefault("decode", {}):
                one["decode"][shape] = decode(target, comparison.read(head), shape, asked, args.tokens)
                write_json(kept, found)
    print("\n".join(table(found)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("target")
    add("data")
    add("out", type=Path)
    add("--features", type=Path, required=True, help="what tercel features made of the data")
    add("--heads", nargs="+", default=list(HEADS), help="NAME or NAME@RATE")
    add("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    add("--steps", type=int, default=600, help="optimizer steps of each")
    add("--batch-tokens", type=int, default=2048)
    add("--max-length", type=int, default=2048)
    add("--draft-vocab", type=int, default=8192)
    add("--eval-share", type=float, default=0.02)
    add("--limit", type=int, help="read so many conversations alone")
    add("--seed", type=int, default=0)
    add("--tasks", default="demo", help="such as mt_bench:20,gsm8k:20")
    add("--data-dir", type=Path, nargs="+", default=[], help="where tasks lie")
    add("--tokens", type=int, default=128, help="of an answer")
    add("--threads", type=int, default=os.cpu_count() or 1)
    add("--venvs", type=Path, default=ROOT, help="where the peers' environment is")
    args = parser.parse_args()
    for head in args.heads:
        if head.partition("@")[0] not in HEADS or head.startswith(f"{OURS}@"):
            parser.error(
                f"{head}: a head is one of {', '.join(HEADS)}; a rate goes behind a peer's, as in specforge@5e-4"
            )
    try:
        run(args)
    except TercelError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
