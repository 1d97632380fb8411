"""What a target's generation config asks of every answer, taken over where the loop can do it exactly.

Penalties, suppressions and rules on length are taken over always: stock `generate()` obeys them at any temperature.
`do_sample` is not, so that nothing is random unless somebody asks for it; its temperature, top-k, top-p and min-p
count once somebody does. What is given explicitly wins over all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from tercel.decode.rules import TokenRules
from tercel.decode.sampling import SamplingParams
from tercel.errors import TercelError
from tercel.target_model.ends import disagreement
from tercel.target_model.protocol import TargetModel

SAMPLING = ("temperature", "top_k", "top_p", "min_p")
SHOWN = 4  # entries of a list in a note

# What cannot be taken over, and whether a value asks for something.
_ALWAYS: dict[str, Callable[[Any], bool]] = {
    "num_beams": lambda value: value > 1,
    "guidance_scale": lambda value: value != 1,
    "watermarking_config": bool,
    "encoder_repetition_penalty": lambda value: value != 1,
    "encoder_no_repeat_ngram_size": lambda value: value > 0,
    "penalty_alpha": lambda value: value > 0,
    "dola_layers": bool,
    "constraints": bool,
    "force_words_ids": bool,
    "token_healing": bool,
    "max_time": bool,
}
_DRAWN: dict[str, Callable[[Any], bool]] = {
    "top_h": lambda value: value < 1,
    "typical_p": lambda value: value < 1,
    "epsilon_cutoff": lambda value: value > 0,
    "eta_cutoff": lambda value: value > 0,
}


@dataclass(frozen=True)
class Adopted:
    """Parameters with what the target asks for in them; notes: lines a user should see."""

    params: SamplingParams
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Asked:
    """What somebody asks for, judged before a target is loaded.

    given: fields of `SamplingParams`; None counts as not given. sample: draw tokens, with the generation config's
    values where none are given. generation_config: False leaves the config out.

    Raises `TercelError` for a value outside its range.
    """

    given: Mapping[str, Any]
    sample: bool = False
    generation_config: bool = True

    def __post_init__(self) -> None:
        params = self.params  # made here, so that a wrong value is told before anything is loaded
        if self.sample and "temperature" in self.values and params.greedy:
            raise TercelError("temperature 0 is greedy, but sampling is asked for; give one of the two")

    @property
    def values(self) -> dict[str, Any]:
        return {name: value for name, value in self.given.items() if value is not None}

    @cached_property
    def params(self) -> SamplingParams:
        """What is given alone."""
        return SamplingParams(**self.values)

    def of(self, target: TargetModel) -> Adopted:
        """With what the target asks for. Raises `TercelError` for a config that means nothing."""
        params, wishes = self.params, _Wishes.of(target) if self.generation_config else _Wishes()
        drawn = {"temperature": 1.0, **wishes.sampling} if self.sample or not params.greedy else {}
        asked = {**wishes.values, **drawn}
        taken = {name: value for name, value in asked.items() if name not in self.values}
        free = (pair for pair in wishes.rules.sequence_bias if len(pair[0]) > 1 or pair[0][0] not in params.logit_bias)
        rules = replace(wishes.rules, sequence_bias=tuple(free), eos_token_ids=target.eos_token_ids)
        params = replace(params, rules=rules, **taken)
        return Adopted(params, _notes(target, wishes, params, taken, chosen="temperature" in self.values))


def sampling_for(
    target: TargetModel, *, sample: bool = False, generation_config: bool = True, **given: Any
) -> SamplingParams:
    """The parameters that `given` (fields of `SamplingParams`) and the target's generation config make together; see
    `Asked`."""
    return Asked(given, sample, generation_config).of(target).params


def described(params: SamplingParams) -> str:
    """All that the text depends on beyond temperature, seed and length."""
    apart = ("temperature", "seed", "max_new_tokens", "rules")
    usual = {name: value for name, value in vars(SamplingParams()).items() if name not in apart}
    changes = {**_changed(vars(params), usual), **_changed(vars(params.rules), vars(TokenRules()))}
    return ", ".join(f"{name}={value!r}" for name, value in changes.items())


def _changed(values: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name, value in usual.items() if name in values and values[name] != value}


@dataclass(frozen=True)
class _Wishes:
    """A generation config, read. values: parameters that hold at any temperature; sampling: those of a draw, as far
    as it names them; draws: whether it would draw; rules; beyond: `name=value` of what cannot be done, and whether
    that matters only where tokens are drawn."""

    values: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    draws: bool = False
    rules: TokenRules = field(default_factory=TokenRules)
    beyond: tuple[tuple[str, bool], ...] = ()

    @classmethod
    def of(cls, target: TargetModel) -> _Wishes:
        """Raises `TercelError` for a value that means nothing."""
        config = target.generation_config
        if config is None:
            return cls()
        said = {name: _frozen(value) for name, value in config.to_dict().items() if value is not None}
        values = {name: said[name] for name in ("repetition_penalty",) if name in said}
        if "stop_strings" in said:
            values["stop"] = (said["stop_strings"],) if isinstance(said["stop_strings"], str) else said["stop_strings"]
        sampling = {name: said[name] for name in SAMPLING if name in said}
        if not sampling.get("temperature", 1):
            del sampling["temperature"]  # 0, as some write for greedy
        try:
            SamplingParams(**values, **sampling)
            beyond = tuple(
                (f"{name}={said[name]!r}", only_drawn)
                for only_drawn, known in ((False, _ALWAYS), (True, _DRAWN))
                for name, asks in known.items()
                if name in said and asks(said[name])
            )
            return cls(values, sampling, bool(config.do_sample), _rules(said, target.vocab_size), beyond)
        except (TercelError, TypeError, ValueError) as error:
            raise TercelError(
                f"the generation config of {target.source.name} cannot be followed: {error}; repair it, or leave it "
                "out with --no-generation-config"
            ) from error


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


def _rules(said: Mapping[str, Any], vocab_size: int) -> TokenRules:
    """The rules among `said`, without ids and sequences that no answer can contain.

    Raises `TercelError` for a value that is no rule.
    """
    values = {f.name: said[f.name] for f in fields(TokenRules) if f.name in said and f.name != "eos_token_ids"}
    if "min_new_tokens" in values:
        values["min_length"] = 0  # as in stock generation, which then goes by the new ones
    if isinstance(values.get("forced_eos_token_id"), int):
        values["forced_eos_token_id"] = (values["forced_eos_token_id"],)
    if isinstance(values.get("sequence_bias"), Mapping):
        values["sequence_bias"] = tuple(values["sequence_bias"].items())
    for name in ("suppress_tokens", "begin_suppress_tokens"):
        if isinstance(values.get(name), tuple):
            values[name] = tuple(token for token in values[name] if token not in (-1,))  # "none", as some write
    rules = TokenRules(**values)
    forced = () if rules.forced_bos_token_id is None else (rules.forced_bos_token_id,)
    for token in (*forced, *rules.forced_eos_token_id):
        if token >= vocab_size:
            raise TercelError(f"it forces token id {token}, but the vocabulary has {vocab_size} entries")
    return replace(
        rules,
        suppress_tokens=tuple(token for token in rules.suppress_tokens if token < vocab_size),
        begin_suppress_tokens=tuple(token for token in rules.begin_suppress_tokens if token < vocab_size),
        bad_words_ids=tuple(ids for ids in rules.bad_words_ids if max(ids) < vocab_size),
        sequence_bias=tuple(pair for pair in rules.sequence_bias if max(pair[0]) < vocab_size),
    )


def _notes(
    target: TargetModel, wishes: _Wishes, params: SamplingParams, taken: Mapping[str, Any], *, chosen: bool
) -> tuple[str, ...]:
    """chosen: whether it was said that this is to be greedy, or not."""
    config = f"the generation config of {target.source.name}"
    notes = []
    rules = vars(replace(params.rules, eos_token_ids=()))
    changes = {**_changed(taken, vars(SamplingParams(temperature=1.0))), **_changed(rules, vars(TokenRules()))}
    if changes:
        listed = ", ".join(f"{name}={_short(value)}" for name, value in changes.items())
        notes.append(f"as {config} asks: {listed}; --no-generation-config leaves that out")
    if wishes.draws and params.greedy and not chosen:
        how = ", ".join(f"{name}={value}" for name, value in wishes.sampling.items()) or "temperature=1.0"
        notes.append(f"{config} would draw tokens ({how}); this is greedy, and --sample draws as it says")
    beyond = [what for what, only_drawn in wishes.beyond if not (only_drawn and params.greedy)]
    if beyond:
        notes.append(f"{config} also asks for {', '.join(beyond)}, which is not supported and left out")
    ends = disagreement(target.end_sources, target.tokenizer_or_none)
    return (*notes, ends) if ends and not params.ignore_eos else tuple(notes)


def _short(value: Any) -> str:
    return f"({len(value)} of them)" if isinstance(value, tuple) and len(value) > SHOWN else f"{value!r}"
