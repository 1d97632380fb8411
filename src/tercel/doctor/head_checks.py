"""A head beside its target: sizes, layers, norms, RoPE, positions, identity; what fails or costs acceptance."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tercel.doctor.findings import Finding
from tercel.draft import DraftModel
from tercel.draft.config import LAST_HIDDEN, engine_default_layers
from tercel.draft.eagle3 import Eagle3Head
from tercel.draft.misfits import misfits
from tercel.interop.engines import ENGINES, SERVED_AND_ASKED, ServingEngine
from tercel.interop.formats.head_files import HeadFiles
from tercel.measure.variants import rope_of
from tercel.target_model.protocol import TargetModel

_PROBE = "measure it: `tercel inspect HEAD --target TARGET --probe`"
_LIMIT = "max_position_embeddings"


def fit_findings(model: DraftModel, target: TargetModel) -> Iterator[Finding]:
    """Whether this is the target that the head was made for: every misfit, and what was compared and is the same."""
    found = misfits(model, target)
    for misfit in found:
        yield Finding(misfit.what, "problem" if misfit.severity == "refuse" else "warning", misfit.found, misfit.advice)
    wrong = {misfit.what for misfit in found}
    if "sizes" not in wrong:
        yield Finding("sizes", "ok", f"width {target.hidden_size}, {target.vocab_size} tokens: as the target's")
    trained_for = model.info.target
    if trained_for is None:
        yield Finding(
            "identity",
            "note",
            "the head does not record its target",
            f"make sure that it was trained for {target.source.name}; {_PROBE}",
        )
        return
    if target.tokenizer_or_none is not None and "tokenizer" not in wrong:
        yield Finding("tokenizer", "ok", f"the same tokens as in training ({trained_for.name})")
    if "weights" not in wrong:
        yield Finding("weights", "ok", f"exactly the weights that the head was trained for ({trained_for.name})")


def layer_findings(model: DraftModel, target: TargetModel, files: HeadFiles) -> Iterator[Finding]:
    """Feature layers: whether they look like ids of another convention, and whether config.json says others."""
    check, depth, config = "feature layers", target.num_layers, model.head.config
    layers = config.captured(depth)
    if config.beyond(depth):
        return  # said already
    if config.reads_last_hidden:
        yield Finding(check, "ok", f"{LAST_HIDDEN}, behind all {depth} layers")
    elif doubt := _doubt(layers, engine_default_layers(depth)):
        yield Finding(check, "warning", f"the inputs of layers {_listed(layers)} are captured; {doubt}", _PROBE)
    elif fixed := [engine for engine in ENGINES.values() if engine.captures not in (None, len(layers))]:
        yield Finding(
            check,
            "note",
            f"{len(layers)} layers are captured ({_listed(layers)})",
            _of_any_number(fixed),
        )
    else:
        yield Finding(check, "ok", f"the inputs of layers {_listed(layers)} of {depth}")
    if model.format == "tercel" and isinstance(model.head, Eagle3Head) and files.config:
        said = files.layer_ids() or {"": engine_default_layers(depth)}
        if other := next((ids for place, ids in said.items() if layers not in _meant(place, ids)), None):
            yield _contradiction(check, _listed(other), _listed(layers))


def _meant(place: str, ids: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The layers whose inputs a list may mean in a folder of this package, or in an export: at the top of config.json
    ids are inputs; elsewhere some engines take them for outputs."""
    return (ids, tuple(i + 1 for i in ids)) if place else (ids,)


def _doubt(layers: tuple[int, ...], default: tuple[int, ...]) -> str:
    if layers == tuple(i - 1 for i in default):
        return "each is one below what engines take by default, as if output ids had been read as input ids"
    if layers == tuple(i + 1 for i in default):
        return "each is one above what engines take by default, as if input ids had been read as output ids"
    if tuple(sorted(set(layers))) != layers:
        return "they do not ascend, and engines may sort them"
    return ""


def _of_any_number(fixed: list[ServingEngine]) -> str:
    """Which engine to take where some capture another number of layers."""
    who = " and ".join(sorted((engine.title for engine in fixed), key=str.lower))
    numbers = " or ".join(sorted({str(engine.captures) for engine in fixed}))
    free = " or ".join(ENGINES[name].title for name in SERVED_AND_ASKED if ENGINES[name].captures is None)
    return f"{who} take exactly {numbers}; serve with {free}"


def norm_findings(model: DraftModel, files: HeadFiles) -> Iterator[Finding]:
    """norm_before_residual: engines' defaults differ, so it has to be said."""
    check, value = "norm_before_residual", model.head.config.norm_before_residual
    said = files.settings(check)
    if any(stated is not value for stated in said.values()):
        yield _contradiction(check, str(next(iter(said.values()))).lower(), str(value).lower())
    elif "" in said:
        yield Finding(check, "ok", f"config.json says {str(value).lower()}")
    elif "speculators_model_type" in files.config:
        yield Finding(
            check,
            "warning",
            f"config.json does not say it: vLLM then takes true, speculators false (read here as {str(value).lower()})",
            f"write it into config.json; which one is right, {_PROBE.removeprefix('measure it: ')} tells",
        )
    else:
        yield Finding(check, "note", "config.json does not say it, which vLLM and SGLang take as false", _PROBE)


def rope_findings(model: DraftModel, target: TargetModel, files: HeadFiles) -> Iterator[Finding]:
    """RoPE base and scaling: of config.json within itself, of the head, and of the target."""
    check, rope = "rope", model.head.config.rope_parameters
    theta, wanted = float(rope["rope_theta"]), rope_of(target)
    stated = files.rope_thetas()
    odd = next(((where, value) for where, value in stated.items() if not math.isclose(value, theta)), None)
    if odd:
        where, value = odd
        yield Finding(
            check,
            "problem",
            f"config.json has {where} {value:g}, but the head works with {theta:g}; engines read config.json",
            "export the head again, or write the base it was trained with into every place",
        )
    elif not stated and files.config and not math.isclose(theta, 10_000):
        yield Finding(
            check,
            "problem",
            f"config.json names no rope_theta, so engines take 10000 where the head works with {theta:g}",
            "export the head again with `tercel export`",
        )
    kind, its_kind = rope.get("rope_type", "default"), wanted.get("rope_type", "default")
    if math.isclose(theta, float(wanted["rope_theta"])) and kind == its_kind:
        yield Finding(check, "ok", f"base {theta:g}, {kind}: as the target's")
    else:
        yield Finding(
            check,
            "warning",
            f"the head rotates with base {theta:g} ({kind}), its target with {wanted['rope_theta']:g} ({its_kind}); "
            "that is right only if it was trained so",
            _PROBE,
        )


def position_findings(model: DraftModel, target: TargetModel, files: HeadFiles) -> Iterator[Finding]:
    """The longest text that the head declares, and that it has seen."""
    check, limit = "positions", model.head.config.max_position_embeddings
    stated = [v for v in files.settings(_LIMIT).values() if isinstance(v, int)]
    limit = min([limit, *stated])
    if limit < target.context_length:
        yield Finding(
            check,
            "problem",
            f"the head declares {limit} positions, but its target takes {target.context_length}; "
            "engines crash or slow down beyond",
            f"serve with at most {limit} tokens (--max-model-len {limit}), or declare the target's limit",
        )
    else:
        yield Finding(check, "ok", f"{limit} positions, enough for the target's {target.context_length}")
    recipe = model.info.training.recipe
    if recipe is not None and recipe.max_length < limit:
        yield Finding(
            check,
            "note",
            f"the head was trained on at most {recipe.max_length} tokens",
            "measure acceptance on longer prompts if you serve such",
        )


def _contradiction(check: str, engines: str, own: str) -> Finding:
    return Finding(
        check,
        "problem",
        f"config.json, which engines read, says {engines}, but the head works with {own}",
        "export the head again with `tercel export`",
    )


def _listed(layers: tuple[int, ...]) -> str:
    return ", ".join(map(str, layers))
