"""What an engine cannot express of a head: refused with the reason and the nearest setting, never approximated."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tercel.errors import TercelError
from tercel.interop.engines import ENGINES, ServingEngine

if TYPE_CHECKING:
    from tercel.draft import DraftVocabulary, HeadConfig
from tercel.draft.config import LAST_HIDDEN

_WORDS = ("no", "one", "two", "three", "four", "five")


def check_expressible(
    engine: ServingEngine, c: HeadConfig, vocabulary: DraftVocabulary, target_type: str | None = None
) -> tuple[str, ...]:
    """Raises `TercelError` for the first thing about a placed head that `engine` cannot express.

    target_type: the target's `model_type`, None if it is not known. Returns what a user should know although it can be
    expressed.
    """
    who = engine.title
    if not c.own_output:
        raise TercelError(
            "the head drafts with its target's output layer, and an export holds a head's own; give it that layer with "
            "`tercel.save_pretrained(tercel.load_draft(HEAD, target), DIR)` in Python, then export DIR"
        )
    for flag in engine.lacks:
        if c.to_dict()[flag]:
            raise TercelError(
                f"{who} has no {flag}, which this head was trained with; export it to {_that_have(flag)}, or train a "
                "head without it"
            )
    if c.num_decoder_layers > 1 and not engine.deep:
        raise TercelError(
            f"{who} builds a head of one decoder layer, and this one has {c.num_decoder_layers}; export it to "
            f"{_first(lambda e: e.deep, 2)}, or train one with head-layers 1"
        )
    _check_layers(engine, c)
    _check_widths(engine, c)
    kind = c.rope_parameters.get("rope_type", "default")
    if kind not in engine.ropes:
        raise TercelError(
            f"the head's RoPE scaling {kind!r} cannot be written for {who} and checked; {', '.join(engine.ropes)} can"
        )
    if not vocabulary.pruned and int(vocabulary.d2t.abs().max()) > 0:
        raise TercelError(
            f"the head drafts all {len(vocabulary):,} tokens in another order than the target's; {who} takes such a "
            "head's ids for the target's own, so reorder the rows of lm_head first"
        )
    unwritable = engine.unwritable_ids(c.feature_layers, target_type)
    if unwritable is not None:
        raise TercelError(f"{unwritable}, or export it to {_first(lambda e: not e.ids_are_outputs)}")
    return engine.doubts(c, target_type)


def _first(able: Callable[[ServingEngine], bool], count: int = 1) -> str:
    """Names of the first engines that are able, for a sentence."""
    return " or ".join([engine.name for engine in ENGINES.values() if able(engine)][:count])


def _that_have(flag: str) -> str:
    """Two engines with this option of the layer, those that lack least first."""
    able = sorted((e for e in ENGINES.values() if flag not in e.lacks), key=lambda e: len(e.lacks))
    return " or ".join(engine.name for engine in able[:2])


def _check_layers(engine: ServingEngine, c: HeadConfig) -> None:
    who, layers = engine.title, c.feature_layers
    if c.reads_last_hidden:
        raise TercelError(
            f"{who} captures inputs of layers, but this head reads {LAST_HIDDEN}; train one with other feature-layers"
        )
    listed = ", ".join(map(str, layers))
    if engine.captures is not None and len(layers) != engine.captures:
        number = _WORDS[engine.captures]
        raise TercelError(
            f"{who} captures exactly {number} layers, but this head takes {len(layers)} ({listed}); export it to "
            f"{_first(lambda e: e.captures is None, 2)}, or train one with {number} feature-layers"
        )
    if len(set(layers)) != len(layers):
        raise TercelError(f"feature layers {listed} name one twice, which {who} would capture once; train another head")
    if engine.sorts_layers and list(layers) != sorted(layers):
        raise TercelError(
            f"{who} captures layers in their own order, but fc of this head takes them as {listed}; train a head "
            f"whose feature layers ascend, or {_in_any_order()}"
        )
    if min(layers, default=engine.first_layer) < engine.first_layer:
        raise TercelError(
            f"{who} captures outputs of layers, so not the input of layer 0; export it to "
            f"{_first(lambda e: e.first_layer == 0)}, or train a head that begins at layer 1 or later"
        )
    if not engine.single_layer and len(layers) == 1:
        raise TercelError(
            f"{who} has no fc for a single captured layer; export it to {_first(lambda e: e.single_layer)}"
        )


def _in_any_order() -> str:
    engine = next(engine for engine in ENGINES.values() if not engine.sorts_layers)
    condition = "" if engine.captures is None else f"(with {_WORDS[engine.captures]}) "
    return f"{condition}export it to {engine.name}"


def _check_widths(engine: ServingEngine, c: HeadConfig) -> None:
    who = engine.title
    if c.hidden_size % c.num_attention_heads:
        raise TercelError(
            f"{who} reads the head as a Llama layer, whose width {c.hidden_size} its {c.num_attention_heads} heads "
            "must divide; train a head of another shape"
        )
    narrower = c.hidden_size != c.target_hidden_size
    if narrower and not engine.other_widths:
        raise TercelError(
            f"{who} has no head of another width ({c.hidden_size}) than its target ({c.target_hidden_size}); export it "
            f"to {_first(lambda e: e.other_widths, 2)}"
        )
    if c.own_embeddings and not narrower and not engine.own_embeddings:
        raise TercelError(
            f"{who} puts the target's embeddings in place of the head's own where both have one width; export it to "
            f"{_first(lambda e: e.own_embeddings, 2)}"
        )
    if not engine.wide_fc and len(c.feature_layers) * c.target_hidden_size == c.hidden_size:
        raise TercelError(
            f"{who} leaves fc out where all captured layers are as wide as the head; export it to "
            f"{_first(lambda e: e.wide_fc)}"
        )
