"""From stored tensor names to this package's, and the tensors that mean another kind of head."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from tercel.errors import TercelError

_PREFIXES = ("draft_model.", "eagle_module.", "model.")
# SGLang's older names of the norms before fc, from low to high
_RENAMED = {f"aux_norm_{name}.weight": f"fc_norm.{i}.weight" for i, name in enumerate(("low", "mid", "high"))}
_HARMLESS = (
    r".*rotary_emb\.(inv_freq|cos_cached|sin_cached)",  # made again from the config
    r"verifier_(norm|lm_head)\.weight",  # the target's, which speculators trains against
)
_PACKED = (
    r".*(weight_packed|weight_scale(_inv|_2)?|weight_zero_point|weight_shape|qweight|qzeros|g_idx|input_scale)"
    r"|.*\.(scales|absmax|quant_map|quant_state\..*)"
)
_OTHER_KINDS = (
    (r"mask_hidden|parallel_draft_heads\..*", "a head that drafts in parallel, as P-EAGLE does"),
    (r"(medusa_heads?|heads)\..*|\d+\.\d+\.linear\.weight", "a set of Medusa heads"),
    (r".*\.self_attn\.(q_a_proj|q_b_proj|kv_a_.*|kv_b_proj)\..*", "a head with multi-head latent attention (MLA)"),
    (r".*\.self_attn\.(q_norm|k_norm)\.weight", "a head that norms its queries and keys (a Qwen3 layer)"),
    (r".*\.mlp\.(experts|gate|router|shared_experts?)\..*", "a head with a mixture of experts"),
    (r"fc\.bias", "a head whose fc has a bias"),
    (r"midlayer\.mlp\..*\.bias", "a head whose MLP has biases"),
)


def native(stored: Mapping[str, Tensor], file: Path) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The tensors by this package's names, and the stored names that were left out because nothing needs them.

    Raises `TercelError` for tensors of another kind of head, naming the kind, for quantised weights, and if two
    stored names mean the same tensor. What is left unknown is found by `check_tensors`.
    """
    _refuse_packed(stored, file)
    named: dict[str, Tensor] = {}
    origin: dict[str, str] = {}
    left_out = []
    for raw, tensor in stored.items():
        name = _native_name(raw)
        if any(re.fullmatch(pattern, name) for pattern in _HARMLESS):
            left_out.append(raw)
            continue
        if name in named:
            raise TercelError(f"{file} holds both {origin[name]} and {raw}, which mean the same tensor; remove one")
        named[name], origin[name] = tensor, raw
    _refuse_other_kinds(named, file)
    return named, tuple(left_out)


def _native_name(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    name = re.sub(r"^layers\.0\.", "midlayer.", name)
    return _RENAMED.get(name, name)


def _refuse_packed(stored: Mapping[str, Tensor], file: Path) -> None:
    for name, tensor in stored.items():
        if re.fullmatch(_PACKED, name):
            kind = str(tensor.dtype).removeprefix("torch.")
            raise TercelError(
                f"{file} holds quantised weights ({name}, {kind}), which tercel does not read; "
                "give the head in bfloat16, float16 or float32"
            )


def _refuse_other_kinds(named: Mapping[str, Tensor], file: Path) -> None:
    deeper = [name for name in named if re.match(r"(layers|midlayer)\.\d+\.", name)]
    if "fc.weight" not in named and any(name.endswith("embed_tokens.weight") for name in named) and deeper:
        raise TercelError(f"{file} holds a whole language model, not a draft head: it has layers but no fc.weight")
    for pattern, meaning in _OTHER_KINDS:
        found = next((name for name in sorted(named) if re.fullmatch(pattern, name)), None)
        if found is not None:
            raise TercelError(f"{file} holds {meaning} ({found}); tercel takes EAGLE-3 heads with one Llama layer")
