"""How checkpoints name and join the parts of their MTP modules: a family is a line of `FAMILIES`.

All of them give the first module the target's last hidden state after the final norm, and each next one the output of
the one before it after its norm; the token read is the one after the hidden state's, whose position counts. (Engines
differ from one another: of DeepSeek's and GLM's modules vLLM hands the output on before its norm, SGLang 0.5.23 and
transformers 5.24 after it, as here; vLLM also reads zeros in place of a text's second token.)

| family | where | before the layer | after it | joined |
|---|---|---|---|---|
| DeepSeek-V3, GLM-4.5 | model.layers.{L + k} | enorm, hnorm, eh_proj | shared_head.norm | embedding, hidden |
| Qwen3-Next, Qwen3.5 | mtp.layers.{k} | pre_fc_norm_embedding, pre_fc_norm_hidden, fc | norm | embedding, hidden |
| MiMo | model.mtp_layers.{k} | token_layernorm, hidden_layernorm, input_proj | final_layernorm | hidden, embedding |

Qwen's stand beside its layers, once for all of them. What else a module holds is its decoder layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

# how config.json announces modules
ANNOUNCED = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "num_mtp_modules")
REPEATED = "repeated."  # before what later modules say once more


@dataclass(frozen=True)
class Family:
    """layer: a module's tensors, by number and name; parts: those that are not of its layer, by what they are here;
    counted_on: whether modules are counted on from the model's own layers; shared: whether the parts stand once for all
    modules, under `mtp.`; own: what repeats the target's embeddings and output layer."""

    name: str
    layer: re.Pattern[str]
    parts: Mapping[str, str]
    hidden_first: bool = False
    counted_on: bool = False
    shared: bool = False
    own: Mapping[str, str] = field(default_factory=dict)


FAMILIES = (
    Family(
        "DeepSeek",
        re.compile(r"^(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.(.+)$"),
        {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head.norm": "norm"},
        counted_on=True,
        own={"embed_tokens.weight": "embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"},
    ),
    Family(
        "Qwen",
        re.compile(r"^mtp\.layers\.(\d+)\.(.+)$"),
        {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj", "norm": "norm"},
        shared=True,
    ),
    Family(
        "MiMo",
        re.compile(r"^model\.mtp_layers\.(\d+)\.(.+)$"),
        {
            "token_layernorm": "enorm",
            "hidden_layernorm": "hnorm",
            "input_proj": "eh_proj",
            "final_layernorm": "norm",
        },
        hidden_first=True,
    ),
)


@dataclass(frozen=True)
class Found:
    """Modules among a checkpoint's tensors. names: by what each is here, `layers.{k}.…`, what it is there; a shared one
    stands for every module."""

    family: Family
    modules: int
    names: Mapping[str, str]


def find_modules(names: Iterable[str], num_layers: int) -> Found | None:
    """The MTP modules of a model of `num_layers` layers among its tensors' names; None if there is none."""
    every = list(names)
    for family in FAMILIES:
        first = num_layers if family.counted_on else 0
        placed = {name: match.groups() for name in every if (match := family.layer.match(name))}
        numbers = sorted({int(number) - first for number, _ in placed.values() if int(number) >= first})
        if not numbers:
            continue
        found = {}
        for name, (number, rest) in placed.items():
            if int(number) >= first and not rest.endswith("rotary_emb.inv_freq"):
                found[_here(family, int(number) - first, rest)] = name
        if family.shared:
            for name in every:
                part, _, kind = name.removeprefix("mtp.").rpartition(".")
                if name.startswith("mtp.") and part in family.parts:
                    found |= {f"layers.{number}.{family.parts[part]}.{kind}": name for number in numbers}
        if any(name.endswith(".eh_proj.weight") for name in found):
            return Found(family, len(numbers), found)
    return None


def _here(family: Family, number: int, rest: str) -> str:
    """What tensor `rest` of module `number` is called here."""
    if rest in family.own:
        return family.own[rest] if number == 0 else f"{REPEATED}{number}.{rest}"
    part, _, kind = rest.rpartition(".")
    if not family.shared and part in family.parts:
        return f"layers.{number}.{family.parts[part]}.{kind}"
    return f"layers.{number}.block.{rest}"


def announced(config: Mapping[str, Any]) -> tuple[str, int] | None:
    """By which setting of config.json, and how many modules it says there are; None if it says nothing of any."""
    text = config.get("text_config")
    for settings in (config, text if isinstance(text, dict) else {}):
        for name in ANNOUNCED:
            value = settings.get(name)
            if type(value) is int and value > 0:
                return name, value
    return None
