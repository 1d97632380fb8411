"""The MTP modules themselves: norms of embedding and hidden state, their projection, and a layer as the target's are.

Shape legend: B rows, T entries, `..` any leading shape, M modules, H hidden size, W draft vocabulary, V target's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, PreTrainedConfig

from tercel.draft.config import LAST_HIDDEN
from tercel.draft.head import BorrowingHead, HeadWork
from tercel.errors import TercelError
from tercel.methods.mtp.attention import NAME, TTTKeys, attend
from tercel.methods.mtp.config import FULL, MtpConfig, cache_name

if TYPE_CHECKING:
    from tercel.target_model.protocol import TargetModel


class MtpModule(nn.Module):
    """One of them; parameters go by DeepSeek's names, those of the layer by transformers' under `block`."""

    def __init__(self, c: MtpConfig, settings: PreTrainedConfig, number: int) -> None:
        super().__init__()
        norm = c.part("norm")
        self.hidden_first = c.hidden_first
        self.enorm = norm(c.hidden_size, eps=c.rms_norm_eps)
        self.hnorm = norm(c.hidden_size, eps=c.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=False)
        self.block = c.part("layer")(settings, number)
        self.cache_name = cache_name(type(self.block))
        self.norm = norm(c.hidden_size, eps=c.rms_norm_eps)
        _keep_buffers(self.block)

    def join(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """`[.., H]` each, to what enters the layer `[.., H]`."""
        parts = [self.enorm(embedding), self.hnorm(hidden)]
        return self.eh_proj(torch.cat(parts[::-1] if self.hidden_first else parts, -1))


class MtpHead(BorrowingHead):
    """Modules in a row, the last of which is used again and again. An output is `[.., H]`, after the module's norm: the
    target's output layer and the next module read it alike."""

    title: ClassVar[str] = "MTP"
    config_class = MtpConfig
    config: MtpConfig

    def __init__(self, config: MtpConfig) -> None:
        super().__init__(config)
        AttentionInterface.register(NAME, attend)
        settings = config.layer_settings()
        self.layers = nn.ModuleList([MtpModule(config, settings, number) for number in range(config.modules)])
        if config.own_output:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        # no part of the module: its frequencies stay in float32 when the head is cast
        self._rotary: tuple[nn.Module, dict[str, str]] = _rotary(config, settings)

    @property
    def mtp_modules(self) -> list[MtpModule]:
        return [module for module in self.layers if isinstance(module, MtpModule)]

    def in_words(self) -> str:
        many = "1 module" if self.config.modules == 1 else f"{self.config.modules} modules"
        layer = self.config.classes["layer"].partition(":")[2]
        return f"{self.title} ({many}, {layer})"

    def reads_in_words(self) -> str:
        return LAST_HIDDEN

    def work(self) -> HeadWork:
        """Of one module: a draft takes one. Of its experts, those that a token goes to."""
        c, settings = self.config, self.config.layer_settings()
        experts = sum(p.numel() for name, p in self.layers[0].named_parameters() if ".experts." in name)
        dense = sum(p.numel() for name, p in self.layers[0].named_parameters() if ".experts." not in name)
        count, used = (_first(settings, names) for names in (_EXPERTS, _CHOSEN))
        drafted = dense + (experts * used // count if experts and count else 0)
        latent = _first(settings, ("kv_lora_rank",))
        kv = latent + c.head_dim if latent else 2 * c.num_key_value_heads * c.head_dim
        context = 2 * c.num_attention_heads * c.head_dim
        return HeadWork(drafted=drafted + c.hidden_size * c.draft_vocab_size, context=context, fuse=0, kv=kv)

    def public_config(self, dtype: torch.dtype) -> dict[str, Any]:
        """No engine reads such a folder: all that it is stands in tercel.json."""
        return {"architectures": ["TercelMtpHead"], "torch_dtype": str(dtype).removeprefix("torch.")}

    def beside(self, target: TargetModel, ids: Tensor) -> MtpHead:
        return self if self.config.own_output else super().beside(target, ids)

    def fuse(self, features: Tensor) -> Tensor:
        """`[.., H]`, as it is."""
        return features

    def feedback(self, output: Tensor) -> Tensor:
        """The output itself."""
        return output

    def logits(self, output: Tensor) -> Tensor:
        return self.lm_head(output) if self.config.own_output else super().logits(output)

    def step(
        self,
        number: int,
        embedding: Tensor,
        hidden: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        cache: Cache | None = None,
        ttt_keys: TTTKeys | None = None,
    ) -> Tensor:
        """Module `number` over entries: embedding, hidden `[B, T, H]`, positions `[B, T]`, mask `[B, 1, T, S]` that is
        added to scores over what is in `cache` and the entries themselves; or, of one row, with the keys of
        training-time test. Returns its outputs `[B, T, H]`."""
        module: Any = self.layers[number]
        x = module.join(embedding, hidden)
        rotary, of_kind = self._rotary
        turned = rotary(x, positions, **of_kind)
        how = {module.cache_name: cache} if ttt_keys is None else {"ttt_keys": ttt_keys}
        out = module.block(x, attention_mask=mask, position_embeddings=turned, position_ids=positions, **how)
        return module.norm(out[0] if isinstance(out, tuple) else out)


_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
_CHOSEN = ("num_experts_per_tok",)


def _first(settings: PreTrainedConfig, names: tuple[str, ...]) -> int:
    """The first of these settings that is there; 0 where none is."""
    found = (getattr(settings, name, None) for name in names)
    return next((value for value in found if isinstance(value, int)), 0)


def _rotary(c: MtpConfig, settings: PreTrainedConfig) -> tuple[nn.Module, dict[str, str]]:
    """What rotates, and which of its frequencies it is told to take, where kinds of layers differ."""
    module = c.part("rotary")(config=settings)
    for buffer in module.buffers():
        if not buffer.is_meta and not bool(torch.isfinite(buffer).all()):
            raise TercelError("a RoPE whose frequencies are not numbers")
    nested = FULL in (getattr(settings, "rope_parameters", None) or {})
    return module, {"layer_type": FULL} if nested else {}


def _keep_buffers(block: nn.Module) -> None:
    """Stored numbers that do not learn, such as a router's corrections, as parameters: a head is saved by these."""
    for module in block.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if name not in module._non_persistent_buffers_set:
                delattr(module, name)
                module.register_parameter(name, nn.Parameter(buffer, requires_grad=False))
