"""Methods by name, ready to be compared, and why some cannot be.

Names are those that `bench --methods` takes: of proposers, of a manifest's entries, and of stock `generate()`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tercel.decode.engine import Engine
from tercel.decode.oracle import Oracle
from tercel.decode.outcomes import digest_of
from tercel.decode.proposer import Proposer, innermost
from tercel.decode.proposers import proposer_kind
from tercel.heads import known_as
from tercel.measure.manifest import Entry
from tercel.measure.methods import EngineMethod, Method, TransformersMethod
from tercel.measure.summary import TRANSFORMERS

if TYPE_CHECKING:
    from tercel.decode.sampling import SamplingParams
    from tercel.draft import DraftModel
    from tercel.measure.tasks import Task
    from tercel.target_model.model import Target

OpenHead = Callable[[str | None], "DraftModel"]
MakeProposer = Callable[[Entry, "Target", "DraftModel | None", "Target | None"], Proposer]


class Heads:
    """Draft heads by name, each loaded once, however many methods draft with it."""

    def __init__(self, load: OpenHead) -> None:
        self._load = load
        self._loaded: dict[str | None, DraftModel] = {}

    def get(self, name: str | None) -> DraftModel:
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def of(self, entry: Entry) -> DraftModel | None:
        """What `entry` drafts with; None where it needs no head."""
        takes = proposer_kind(entry.method).takes_head(entry.head is not None)
        return self.get(entry.head) if takes else None


def make_methods(
    names: Sequence[str],
    entries: Mapping[str, Entry],
    target: Target,
    heads: Heads,
    make: MakeProposer,
    model: Target | None = None,
) -> dict[str, Method]:
    """Methods by name, in this order. entries: by name, of all but stock generation; model: what those draft with that
    need a second one.

    Raises `TercelError` if a part that a method needs is missing.
    """
    methods: dict[str, Method] = {}
    for name in names:
        if name == TRANSFORMERS:
            methods[name] = TransformersMethod(target)
        else:
            entry = entries[name]
            proposer = make(entry, target, heads.of(entry), model)
            rule = proposer.lossy
            method = EngineMethod(
                Engine(target, proposer),
                coupled=not proposer_kind(entry.method).draws and rule is None,
                lossy=None if rule is None else rule.title,
            )
            drafting = innermost(proposer)
            methods[name] = replace(method, rehearse=drafting.rehearse) if isinstance(drafting, Oracle) else method
    return methods


def proposers_of(methods: Mapping[str, Method]) -> list[Proposer]:
    engines = [method.engine for method in methods.values() if isinstance(method, EngineMethod)]
    return [engine.proposer for engine in engines if isinstance(engine, Engine)]


def names_of_heads(entries: Mapping[str, Entry], heads: Heads) -> dict[str, str]:
    """What the heads of these methods are called beside their numbers."""
    found = {name: heads.of(entry) for name, entry in entries.items()}
    return {name: known_as(head.path) for name, head in found.items() if head is not None}


def what_answers_depend_on(
    target: Target,
    entries: Mapping[str, Entry],
    heads: Heads,
    model: Target | None,
    tasks: Sequence[Task],
    params: SamplingParams,
) -> dict[str, Any]:
    """The key of a journal, as JSON: all but the temperatures and seeds, which its lines tell."""
    found = {name: heads.of(entry) for name, entry in entries.items()}
    return {
        "target": [target.source.name, target.fingerprint],
        "computed": [str(target.dtype), str(target.device), target.backend, target.weights],
        "template": dict(target.template_arguments),
        "methods": {name: [entry.method, entry.tree] for name, entry in entries.items()},
        "heads": {name: digest_of(head.head) for name, head in found.items() if head is not None},
        "draft model": None if model is None else model.fingerprint,
        "questions": {task.name: digest_of_questions(task) for task in tasks},
        "sampling": repr(replace(params, temperature=0.0, seed=0, top_k=0, top_p=1.0, min_p=0.0)),
    }


def digest_of_questions(task: Task) -> str:
    return hashlib.sha256(repr(task.questions).encode()).hexdigest()[:16]
