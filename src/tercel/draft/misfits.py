"""Does this head fit this target? The one place that knows, for every verb that puts the two together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from tercel.draft.checkpoint import DraftModel
from tercel.errors import TercelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tercel.target_model.sources import Source


class KnownTarget(Protocol):
    """As much of a target as a head is compared with, whether it is loaded or only lies there; None is what is not
    known of it, and what is not known is not compared."""

    @property
    def source(self) -> Source: ...
    @property
    def num_layers(self) -> int | None: ...
    @property
    def hidden_size(self) -> int | None: ...
    @property
    def vocab_size(self) -> int | None: ...
    @property
    def tokenizer_or_none(self) -> PreTrainedTokenizerBase | None: ...
    @property
    def tokenizer_digest(self) -> str: ...
    def is_recorded_as(self, weights: str) -> bool | None: ...
    def is_rounded_from(self, weights: str) -> bool: ...


@dataclass(frozen=True)
class Misfit:
    """One thing in which a head and a target differ.

    what: "sizes", "feature layers", "tokenizer" or "weights". severity: "refuse" where drafts would be nonsense or
    nothing would run, "warn" where only acceptance may suffer, "note" where that was asked for. found, advice: what is
    wrong and what to do, which together are a sentence.
    """

    what: str
    severity: Literal["refuse", "warn", "note"]
    found: str
    advice: str

    def __str__(self) -> str:
        return f"{self.found}; {self.advice}"


def misfits(model: DraftModel, target: KnownTarget) -> tuple[Misfit, ...]:
    """All differences between what the head was made for and the target, what is refused first; empty if it fits."""
    return (*_sizes(model, target), *_layers(model, target), *_tokenizer(model, target), *_weights(model, target))


def check_fits(model: DraftModel, target: KnownTarget) -> tuple[str, ...]:
    """What is to be said of a head that can stand beside the target, in sentences.

    Raises `TercelError` with the first misfit for which it cannot.
    """
    found = misfits(model, target)
    for misfit in found:
        if misfit.severity == "refuse":
            raise TercelError(str(misfit))
    return tuple(map(str, found))


def _sizes(model: DraftModel, target: KnownTarget) -> Iterator[Misfit]:
    head, where, name = model.head.config, _where(model), target.source.name
    advice = f"give a head made for {name}, or this head's own target"
    if target.hidden_size not in (None, head.target_hidden_size):
        found = f"{where} takes features of width {head.target_hidden_size}, but {name} has width {target.hidden_size}"
        yield Misfit("sizes", "refuse", found, advice)
    if target.vocab_size not in (None, head.vocab_size):
        found = f"{where} is for a vocabulary of {head.vocab_size} tokens, but {name} has {target.vocab_size}"
        yield Misfit("sizes", "refuse", found, advice)
    if None not in (target.num_layers, head.target_num_layers) and target.num_layers != head.target_num_layers:
        found = f"{where} is for a target of {head.target_num_layers} layers, but {name} has {target.num_layers}"
        yield Misfit("sizes", "refuse", found, advice)


def _layers(model: DraftModel, target: KnownTarget) -> Iterator[Misfit]:
    """Only of heads that do not say how deep their target is."""
    head, depth, name = model.head.config, target.num_layers, target.source.name
    if depth is None or head.target_num_layers is not None:
        return
    if beyond := head.beyond(depth):
        found = f"{_where(model)} reads the input of layer {beyond[0]}, but {name} has layers 0..{depth - 1}"
        advice = "give this head's own target"
        if max(beyond) == depth and _taken_as_outputs(model):  # one less would do
            advice += ", or say --layer-ids input if that is what its list means"
        yield Misfit("feature layers", "refuse", found, advice)


def _tokenizer(model: DraftModel, target: KnownTarget) -> Iterator[Misfit]:
    own, name = model.info.target, target.source.name
    if own is None or target.tokenizer_or_none is None or own.tokenizer == target.tokenizer_digest:
        return
    yield Misfit(
        "tokenizer",
        "refuse",
        f"{_where(model)} was trained with the tokenizer of {own.name}, but {name} has another one, so that its drafts "
        "would be other tokens",
        f"give a head made for {name}, or this head's own target",
    )


def _weights(model: DraftModel, target: KnownTarget) -> Iterator[Misfit]:
    own, name = model.info.target, target.source.name
    if own is None or target.is_recorded_as(own.weights) is not False:
        return
    if target.is_rounded_from(own.weights):
        found = f"{_where(model)} was trained for {own.name} with its own weights, and here they are int8"
        yield Misfit("weights", "note", found, "a few more drafts may be refused than without --weights")
        return
    yield Misfit(
        "weights",
        "warn",
        f"{_where(model)} was trained for {own.name}, whose weights or settings are not those of {name}",
        "acceptance may be poor, so give this head's own target, or train the head on for this one (--start-from)",
    )


def _taken_as_outputs(model: DraftModel) -> bool:
    return any(c.name == "layer ids" and c.value.startswith("outputs") for c in model.conventions)


def _where(model: DraftModel) -> str:
    return str(model.path) if model.path is not None else "the head"
