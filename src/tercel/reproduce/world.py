"""What an experiment measures with: a target, questions, heads, and a place for what is measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tercel.decode.engine import Engine
from tercel.decode.proposer import Proposer
from tercel.decode.proposers import VANILLA, make_proposer, proposer_kind
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import Request
from tercel.draft import DraftModel
from tercel.draft.shape import TreeShape, parse_shape
from tercel.errors import TercelError
from tercel.measure.acceptance import count_alpha
from tercel.measure.bench import BenchSettings, OnAnswer, run_bench
from tercel.measure.bench_journal import open_journal
from tercel.measure.entrants import Heads, make_methods, what_answers_depend_on
from tercel.measure.manifest import Entry
from tercel.measure.methods import EngineMethod, Method
from tercel.measure.samples import SPEED, Column, Samples, samples_of
from tercel.measure.summary import BenchReport
from tercel.measure.tasks import Task, first_prompts, prompt_ids
from tercel.reproduce.heads import Workshop
from tercel.reproduce.scales import Scale, with_paper_tree
from tercel.target_model.model import Target

Say = Callable[[str], None]


@dataclass(frozen=True)
class World:
    """target: verifies; model: a second one that drafts, None without; workshop: what heads there are; tasks: by name;
    journals: a folder for what is interrupted; say: a line for the user."""

    target: Target
    model: Target | None
    heads: Heads
    workshop: Workshop
    tasks: Mapping[str, Task]
    journals: Path
    say: Say = lambda line: None
    progress: OnAnswer = lambda answer: None
    missing: dict[str, str] = field(default_factory=dict)
    made: dict[tuple[tuple[str, Entry], ...], dict[str, Method]] = field(default_factory=dict)

    @property
    def scale(self) -> Scale:
        return self.workshop.scale

    def there(self, names: Sequence[str]) -> dict[str, Entry]:
        """Those of `names` that can be measured; of the others it is said why not, once."""
        found = {}
        for name in names:
            reason = self.workshop.lacks(name) or self._unfit(name)
            if reason is None:
                found[name] = self.workshop.entry(name)
            elif name not in self.missing:
                self.missing[name] = reason
                self.say(f"note: {name} is left out: {reason}")
        return found

    def some(self, names: Sequence[str], times: int = 1) -> list[Task]:
        """The first questions of those tasks that are there, `times` as many as the scale has. Raises `TercelError` if
        none is."""
        found = [self.tasks[name] for name in names if name in self.tasks]
        if not found:
            raise TercelError(f"none of the tasks {', '.join(names)} is there; name their folder with --data-dir")
        count = self.scale.questions * times
        return [replace(task, questions=task.questions[:count]) for task in found]

    def bench(
        self, name: str, entries: Mapping[str, Entry], tasks: Sequence[Task], temperature: float, *, sized: bool = False
    ) -> BenchReport:
        """All of them and vanilla on all questions; it goes on where an earlier run stopped. sized: with drafts as
        large as pays instead of the papers' trees."""
        all_entries = {VANILLA: Entry(VANILLA), **entries}
        if not sized:
            all_entries = {key: with_paper_tree(entry) for key, entry in all_entries.items()}
        methods = self._methods(all_entries)
        repeats = self.scale.seeds if temperature else 1
        settings = BenchSettings(self.params(temperature), repeats)
        key = what_answers_depend_on(self.target, all_entries, self.heads, self.model, tasks, settings.params)
        self.journals.mkdir(parents=True, exist_ok=True)
        path = self.journals / f"{name}-T{temperature:g}{'-sized' if sized else ''}.jsonl"
        with open_journal(path, key) as journal:
            return run_bench(self.target, methods, tasks, settings, self.progress, journal)

    def _methods(self, entries: Mapping[str, Entry]) -> dict[str, Method]:
        """Made once for all temperatures, the costs that size drafts among them."""
        key = tuple(entries.items())
        if key not in self.made:
            while len(self.made) > 1:  # an experiment has them in the papers' trees, and as large as pays
                self.made.pop(next(iter(self.made)))
            self.made[key] = make_methods(list(entries), entries, self.target, self.heads, self._made, self.model)
        return self.made[key]

    def params(self, temperature: float) -> SamplingParams:
        return SamplingParams(temperature=temperature, max_new_tokens=self.scale.tokens, seed=0)

    def alphas(
        self, entries: Mapping[str, Entry], tasks: Sequence[Task], temperature: float, depth: int
    ) -> Samples:
        """`alphaN/NAME/T`: right drafts at depth N of a chain, and how many were tried there, for every prompt."""
        columns: dict[str, dict[str, Column]] = {}
        for name, entry in entries.items():
            chain = make_proposer(
                entry.method, self.target, head=self.heads.of(entry), shape=TreeShape.chain(depth)
            )
            engine = Engine(self.target, chain)
            for task in tasks:
                counts = []
                for index, prompt in enumerate(first_prompts(self.target.tokenizer, [task])):
                    if len(prompt.tokens) < self.target.context_length:
                        params = replace(self.params(temperature), seed=index)
                        counts.append(count_alpha(engine.generate([Request(prompt.tokens, params)]), depth))
                for n in range(depth):
                    column = tuple(float(c.right[n]) for c in counts), tuple(float(c.seen[n]) for c in counts)
                    columns.setdefault(f"alpha{n}/{name}/T{temperature:g}", {})[task.name] = column
        return Samples(columns)

    def throughputs(self, entries: Mapping[str, Entry], tasks: Sequence[Task], batches: Sequence[int]) -> Samples:
        """`speed/NAME/bB`: tokens and seconds of each round, B requests in flight; all methods take turns."""
        prompts = [prompt_ids(self.target.tokenizer, q) for task in tasks for q in task.questions]
        params = self.params(0.0)
        columns: dict[str, dict[str, Column]] = {}
        for batch in batches:
            asked = [prompts[place % len(prompts)] for place in range(batch)]
            engines = {}
            for name, entry in {VANILLA: Entry(VANILLA), **entries}.items():
                proposer = self._made(entry, self.target, self.heads.of(entry), None, batch)
                engines[name] = EngineMethod(Engine(self.target, proposer, slots=batch))
            rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
            for number in range(self.scale.rounds + 1):  # the first is a warm-up
                names = list(engines)
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    runs = engines[name].run_together(asked, [params] * batch)
                    if number:
                        rounds[name].append((sum(len(r.tokens) for r in runs), sum(r.seconds for r in runs)))
            for name, found in rounds.items():
                tokens, seconds = zip(*found, strict=True)
                columns[f"{SPEED}/{name}/b{batch}"] = {"rounds": (tuple(map(float, tokens)), tuple(seconds))}
            self.say(f"batch {batch}: measured")
        return Samples(columns)

    def _made(
        self, entry: Entry, target: Target, head: DraftModel | None, model: Target | None, slots: int = 1
    ) -> Proposer:
        shape = None if entry.tree is None else parse_shape(entry.tree)
        return make_proposer(entry.method, target, head=head, model=model, shape=shape, slots=slots)

    def _unfit(self, name: str) -> str | None:
        """Why a head that is there cannot draft so, as a clause."""
        entry = self.workshop.entry(name)
        try:
            if proposer_kind(entry.method).takes_head(entry.head is not None):
                self.heads.of(entry)
        except TercelError as error:
            return str(error)
        return None


def at_temperature(report: BenchReport, kind: str, temperature: float) -> Samples:
    """`KIND/NAME/T` of a benchmark; kind: `tau` or `speed`."""
    columns = samples_of(report).only(kind).columns
    return Samples({f"{name}/T{temperature:g}": column for name, column in columns.items()})
