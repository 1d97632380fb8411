"""Variants of a recipe on equal data and budget, and a page for each question with what came of it.

    tercel features TARGET --data DATA --out FEATURES --all-tokens
    python bench/ablations.py TARGET DATA OUT --base BASE.yaml [--features FEATURES] [--steps 60] [--seeds 0 1]
        [--variants bench/ablations.txt] [--only NAME …] [--stores float8 int8] [--pages docs/experiments] [--keep]
        [--list]

The base is a settings file of `tercel train`; the variants are a table, one a line: name, question, settings that
differ from the base (`ablations.txt`). Each is trained for as many optimizer steps with every seed, one after the
other. Every last head is measured on the same held-out conversations, in greedy chains as long as the base's, and on as
many that it learned from; the first draft's acceptance at temperature 1 is the overlap of both distributions. Intervals
are over held-out conversations, in pairs with the base's.

Everything lies in OUT and goes on where it stopped: the same command again. A question's page is written when all of
its variants are measured, with the verdict in its title (`ablations_page.py` says when a difference is one). Of a run
that is measured the numbers stay; --keep keeps the run too (25 bytes a weight). Features from files that do not fit a
variant (other layers, answers alone) are left out for it, and the target is run.

--stores asks what it costs to keep features in 8 bits: the base once more, learning from features that are made in OUT
and kept so. All are measured on features as they are, which is what decoding has.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from ablations_page import Measured, Setting, write_page
from recipe import of_steps, settings_of

from tercel import Target
from tercel.chat import TokenizedChat, load_chats
from tercel.draft import DraftModel, Eagle3Head, load_head
from tercel.draft.alignment import imitated, plan_rows
from tercel.errors import TercelError
from tercel.files import write_json
from tercel.reading import read_json
from tercel.target_model.protocol import TargetModel
from tercel.train.acceptance import simulate_batch, walk_all
from tercel.train.batches import Split, data_digest, plan_steps, split, usable
from tercel.train.config import TrainConfig
from tercel.train.feature_store import FeatureStore
from tercel.train.features import FeatureSupply
from tercel.train.goals import Batch
from tercel.train.lesson import lesson_of
from tercel.train.loop import train
from tercel.train.losses import CHUNK_ROWS
from tercel.train.make_features import make_features
from tercel.train.packing import PACKINGS
from tercel.train.ttt import roll_out

BASE = "base"
KEPT = "What does it cost to keep features in 8 bits?"
TABLE = Path(__file__).with_name("ablations.txt")
EQUAL = ("epochs", "max_steps", "max_length", "eval_share", "seed")  # budget, and what is held out


@dataclass(frozen=True)
class Variant:
    """settings: those that differ from the base, by the names of `TrainConfig`. store: how the features that it learns
    from are kept (`PACKINGS`); None: as the base's."""

    name: str
    question: str
    settings: Mapping[str, Any]
    store: str | None = None

    @property
    def told(self) -> Mapping[str, Any]:
        """All that differs from the base."""
        return self.settings if self.store is None else {**self.settings, "store": self.store}


def read_table(file: Path) -> list[Variant]:
    """Raises `TercelError` for a line that is none, and a name that is there twice."""
    found: dict[str, Variant] = {}
    for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        parts = [part.strip() for part in line.split("|", 2)]
        if len(parts) != 3 or not all(parts):
            raise TercelError(f"{file}, line {number}: give name | question | settings")
        if parts[0] in found or parts[0] == BASE:
            raise TercelError(f"{file}, line {number}: the name {parts[0]} is taken")
        found[parts[0]] = Variant(parts[0], parts[1], settings_of(f"{{{parts[2]}}}", f"{file}, line {number}"))
    return list(found.values())


@dataclass(frozen=True)
class Trials:
    """Variants of one recipe on the same chats. out: where runs and what was measured lie."""

    target: TargetModel
    chats: Sequence[TokenizedChat]
    base: TrainConfig
    out: Path
    features: Path | None = None
    keep: bool = False

    @cached_property
    def data_key(self) -> str:
        return data_digest(self.chats)

    @cached_property
    def data(self) -> Split:
        longest = min(self.base.max_length, self.target.context_length)
        kept = usable(self.chats, longest, self.target.vocab_size)
        return split(kept, self.base.eval_share)

    def config(self, variant: Variant | None, seed: int) -> TrainConfig:
        """Of the base where there is no variant. Raises `TercelError` for settings that cannot be."""
        settings = {} if variant is None else variant.settings
        if own := [name for name in EQUAL if name in settings]:
            raise TercelError(f"{', '.join(own)} cannot differ: all have one budget, and one set that is held out")
        return of_steps(replace(self.base, **{**settings, "seed": seed}), self.chats, self.base.max_steps)

    def measure(self, variant: Variant | None, seed: int) -> Measured:
        """Train, or go on, and measure the last head; or read what was measured. Raises `TercelError` if the variant
        cannot be trained."""
        config = self.config(variant, seed)
        key = config.digest(self.data_key, self.target.fingerprint)[:8]
        name = f"{BASE if variant is None else variant.name}-seed-{seed}-chain-{self.base.ttt_steps}-{key}"
        kept = self.out / f"{name}.json"
        if kept.is_file():
            return Measured.from_json(read_json(kept))
        store = self._store(config)
        files = None if store is None else store.folder
        if variant is not None and variant.store is not None:
            files = self._kept(config, variant.store)
        summary = train(self.target, self.chats, config, self.out / name, features=files)
        model = load_head(self.out / name / "last", dtype=self.target.dtype)
        held_out, known = (self._conversations(model, config, chats, store) for chats in self.sides(config))
        found = Measured(
            seed=seed,
            **held_out,
            known_tokens=known["tokens"],
            known_steps=known["steps"],
            seconds=summary.seconds,
            train_tokens=summary.tokens,
            weights=model.head.num_parameters(),
        )
        write_json(kept, {**asdict(found), "settings": config.values()})
        if not self.keep:
            shutil.rmtree(self.out / name)
        return found

    def sides(self, config: TrainConfig) -> tuple[Sequence[TokenizedChat], Sequence[TokenizedChat]]:
        """What is held out, and as many conversations that the run learned from: a short one does not come to all."""
        plan = plan_steps([len(chat) for chat in self.data.train], config)
        seen = sorted({place for step in plan for batch in step for place in batch})
        return self.data.held_out, [self.data.train[place] for place in seen[: len(self.data.held_out)]]

    def _layers(self, config: TrainConfig) -> tuple[int, ...]:
        """The layers that the run's features are of."""
        size = config.draft_vocab or self.target.vocab_size
        return lesson_of(config).new_config(self.target, size).feature_layers

    def _kept(self, config: TrainConfig, store: str) -> Path:
        """Where the run's features are, kept so; made, where they are not there."""
        folder, whole = self.out / f"features-{store}", config.prompt_weight > 0
        layers, longest = self._layers(config), config.max_length
        make_features(self.target, self.chats, layers, folder, max_length=longest, store=store, all_tokens=whole)
        return folder

    def _store(self, config: TrainConfig) -> FeatureStore | None:
        """The features, if they are those that the run needs."""
        if self.features is None:
            return None
        store = FeatureStore(self.features)
        try:
            store.require_of(self.target, self._layers(config))
            store.require([*self.data.train, *self.data.held_out], all_tokens=config.prompt_weight > 0)
        except TercelError as error:
            print(f"the target is run: {error}", flush=True)
            return None
        return store

    def _conversations(
        self, model: DraftModel, config: TrainConfig, chats: Sequence[TokenizedChat], store: FeatureStore | None
    ) -> dict[str, Any]:
        """Of each conversation: tokens and steps of a walk in chains as long as the base's, right and tried drafts by
        depth, and what the first draft's acceptance at temperature 1 sums to, with its rows."""
        lesson = lesson_of(replace(config, ttt_steps=self.base.ttt_steps))
        supply = FeatureSupply(self.target, model.head, model.vocabulary, store, keeps_hidden=True)
        found: dict[str, list[Any]] = {name: [] for name in ("tokens", "steps", "right", "tried", "overlap", "rows")}
        for chat in chats:
            batch = supply.batch([chat])
            chains = simulate_batch(lesson, model.head, batch, supply.to_draft).chains
            walked, _ = walk_all(chains)
            counts = walked.count(self.base.ttt_steps)
            overlap = self._overlap(model, batch)
            for name, value in (
                ("tokens", sum(len(chain.runs) for chain in chains)),
                ("steps", len(walked.runs)),
                ("right", list(counts.right)),
                ("tried", list(counts.seen)),
                ("overlap", float(overlap.sum())),
                ("rows", len(overlap)),
            ):
                found[name].append(value)
        return found

    @torch.no_grad()
    def _overlap(self, model: DraftModel, batch: Batch) -> torch.Tensor:
        """float32 `[R]`: how likely each row's first draft is accepted at temperature 1, `sum_j min(p_j, q_j)` over the
        draft vocabulary, `p` the target's distribution over its whole vocabulary. None of heads of another kind."""
        head = model.head
        if not isinstance(head, Eagle3Head):
            return torch.zeros(0)
        assert batch.hidden is not None
        plan = plan_rows(batch.supervised.cpu(), batch.lengths, 1)
        outputs = next(iter(roll_out(head, batch, plan)), None)
        if outputs is None:
            return torch.zeros(0)
        taught, ids = batch.taught[imitated(plan.rows[0], 0)], model.vocabulary.ids
        parts = []
        for said, rows in zip(outputs.split(CHUNK_ROWS), taught.split(CHUNK_ROWS), strict=True):
            q = torch.softmax(head.logits(said).float(), -1)
            p = torch.softmax(self.target.logits(batch.hidden[rows]).float(), -1)[:, ids]
            parts.append(torch.minimum(p, q).sum(-1))
        return torch.cat(parts)


def run_all(
    trials: Trials, variants: Sequence[Variant], seeds: Sequence[int], told: Setting, pages: Path
) -> Iterator[Path]:
    """Train and measure all, and give the pages of questions as they are answered."""
    base = [trials.measure(None, seed) for seed in seeds]
    for question in dict.fromkeys(variant.question for variant in variants):
        measured: dict[str, tuple[Mapping[str, Any], list[Measured] | str]] = {}
        for variant in (one for one in variants if one.question == question):
            same = all(vars(trials.base)[name] == value for name, value in variant.settings.items())
            if same and variant.store is None:
                continue  # the base itself
            try:
                runs = [trials.measure(variant, seed) for seed in seeds]
            except TercelError as error:
                measured[variant.name] = (variant.told, str(error))
            else:
                measured[variant.name] = (variant.told, runs)
        if any(not isinstance(runs, str) for _, runs in measured.values()):
            yield write_page(pages, question, told, base, measured)


def _command(asked: argparse.Namespace) -> str:
    """What was asked for, with names in place of this machine's folders."""
    told = ["python", "bench/ablations.py", asked.target, Path(asked.data).name, "OUT"]
    for name in ("base", "features", "variants"):
        if (file := getattr(asked, name)) not in (None, TABLE):
            told += [f"--{name}", file.name]
    told += ["--steps", str(asked.steps), "--seeds", *map(str, asked.seeds)]
    told += ["--limit", str(asked.limit)] if asked.limit else []
    told += ["--stores", *asked.stores] if asked.stores else []
    return shlex.join(told + (["--only", *asked.only] if asked.only is not None else []))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("data")
    parser.add_argument("out", type=Path)
    parser.add_argument("--base", type=Path, help="settings of the base, a YAML file")
    parser.add_argument("--features", type=Path, help="what tercel features made of the data")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of every run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--variants", type=Path, default=TABLE)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="these variants alone; no name is none")
    parser.add_argument("--stores", nargs="+", default=[], choices=list(PACKINGS), help="ways of keeping features")
    parser.add_argument("--limit", type=int, help="read at most that many conversations")
    parser.add_argument("--pages", type=Path, default=Path("docs/experiments"))
    parser.add_argument("--keep", action="store_true", help="keep runs and heads that are measured")
    parser.add_argument("--list", action="store_true", help="only show what would be tried")
    asked = parser.parse_args()
    variants = [one for one in read_table(asked.variants) if asked.only is None or one.name in asked.only]
    if missing := set(asked.only or ()) - {one.name for one in variants}:
        raise TercelError(f"{asked.variants} has no {', '.join(sorted(missing))}")
    variants += [Variant(f"kept-{store}", KEPT, {}, store) for store in asked.stores]
    given = settings_of(asked.base.read_text("utf-8"), str(asked.base)) if asked.base else {}
    base = TrainConfig(**{**given, "max_steps": asked.steps, "eval_every": 10**6, "save_every": 50})
    if asked.list:
        for one in variants:
            print(f"{one.name:16} {one.question:56} {dict(one.told)}")
        return
    target = Target.load(asked.target, dtype=torch.bfloat16)
    chats, _ = load_chats([asked.data], target.tokenizer, max_length=base.max_length, limit=asked.limit)
    trials = Trials(target, chats, base, asked.out, asked.features, asked.keep)
    told = Setting.of(
        command=_command(asked),
        target=asked.target,
        data=Path(asked.data).name,
        base=given,
        steps=asked.steps,
        chain=base.ttt_steps,
        learned=len(trials.data.train),
        supervised=sum(int(chat.supervised.sum()) for chat in trials.data.train),
        held_out=len(trials.data.held_out),
    )
    for page in run_all(trials, variants, asked.seeds, told, asked.pages):
        print(page, flush=True)


if __name__ == "__main__":
    try:
        main()
    except TercelError as error:
        sys.exit(f"error: {error}")
