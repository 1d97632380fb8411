"""From hidden states to logits, and from tokens to embeddings, exactly as the model does it.

Models multiply, divide or cap around these two layers in ways no interface tells. So the ways known are tried
at load on a few tokens, and the one that reproduces the model's own logits is used; if none does, loading
fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from tercel.errors import TercelError
from tercel.target_model.padding import missing
from tercel.target_model.stock import layer_inputs
from tercel.target_model.structure import decoder_of

PROBE_TOKENS = 6


@dataclass(frozen=True)
class OutputLayer:
    """`soft_cap(linear(hidden) * scale)`; `scale` 1 and `soft_cap` None for most models.

    same_bits: whether a CPU computes the same logits for a token, to the bit, however many tokens come with it.
    """

    linear: nn.Module
    scale: float
    soft_cap: float | None
    same_bits: bool = False

    def __call__(self, hidden: Tensor) -> Tensor:
        rows = hidden.shape[:-1].numel()
        extra = missing(1, rows, hidden.dtype) if self.same_bits and hidden.device.type == "cpu" else 0
        if extra:
            return self._capped(F.pad(hidden.reshape(rows, -1), (0, 0, 0, extra)))[:rows].view(*hidden.shape[:-1], -1)
        return self._capped(hidden)

    def _capped(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.linear(hidden)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits

    def rows(self, ids: Tensor) -> Tensor:
        """`[W, K]`: the weights of these tokens, scaled as their logits are (a cap has no part in them)."""
        weight: Any = self.linear.weight
        return weight[ids.to(weight.device)] * self.scale

    @classmethod
    @torch.no_grad()
    def of(cls, model: PreTrainedModel, same_bits: bool = False) -> OutputLayer:
        """Find the form that reproduces `model`'s logits; raises `TercelError` if none known does."""
        linear = model.get_output_embeddings()
        tokens = probe_tokens(model)
        hidden = decoder_of(model)(input_ids=tokens, use_cache=False).last_hidden_state
        truth = model(input_ids=tokens, use_cache=False).logits.float()
        config = model.config.get_text_config()
        scales = [1.0]
        if getattr(config, "logit_scale", None):  # Cohere
            scales.append(float(config.logit_scale))
        if getattr(config, "logits_scaling", None):  # Granite
            scales.append(1.0 / float(config.logits_scaling))
        caps = {None, getattr(config, "final_logit_softcapping", None)}
        # the nearest, not the first near enough: a cap hardly changes the small logits of a few tokens
        forms = [cls(linear, scale, cap, same_bits) for scale in scales for cap in caps]
        nearest = min(forms, key=lambda form: float((form(hidden).float() - truth).abs().max()))
        if torch.allclose(nearest(hidden).float(), truth, rtol=1e-2, atol=1e-2 * float(truth.std())):
            return nearest
        raise TercelError(
            f"the logits of {type(model).__name__} are not its output layer's, nor a scaled or capped form "
            "of them; this architecture is not supported yet"
        )


def probe_tokens(model: PreTrainedModel) -> Tensor:
    """A few different tokens `[1, T]`, away from the special ids at the start of the vocabulary."""
    vocab = model.config.get_text_config().vocab_size
    return (torch.arange(PROBE_TOKENS, device=model.device)[None] * 7 + vocab // 2) % vocab


@torch.no_grad()
def embedding_scale(model: PreTrainedModel, first_layer: nn.Module) -> float:
    """The constant between the embedding module's output and what enters the first layer (Granite, Gemma 1).

    Models that add positions or normalise there have no such constant: 1, the head then sees plain
    embeddings.
    """
    tokens = probe_tokens(model)
    with layer_inputs([first_layer], [0]) as entered:
        decoder_of(model)(input_ids=tokens, use_cache=False)
    plain = model.get_input_embeddings()(tokens).float()
    scale = float((entered[0].float() * plain).sum() / (plain * plain).sum())
    scaled = torch.allclose(plain * scale, entered[0].float(), rtol=2e-2, atol=2e-2 * float(plain.std()) * abs(scale))
    return scale if scaled and abs(scale - 1.0) > 1e-3 else 1.0
