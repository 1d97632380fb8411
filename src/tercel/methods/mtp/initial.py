"""An MTP head for a target that has none: what it can take from the target need not be learned."""

from __future__ import annotations

import torch
from torch import Tensor

from tercel.errors import TercelError
from tercel.methods.mtp.config import MtpConfig, final_norm, last_attending
from tercel.methods.mtp.module import MtpHead
from tercel.target_model.model import Target
from tercel.target_model.output_layer import probe_tokens
from tercel.target_model.protocol import TargetModel
from tercel.target_model.stock import StockDecoder


def stock_of(target: TargetModel) -> StockDecoder:
    """The target's own layers. Raises `TercelError` for a target that is none of transformers'."""
    if not isinstance(target, Target):
        raise TercelError(f"{target.source.name} has no layers of transformers, which an MTP module is made of")
    return target.stock


def new_config(
    target: TargetModel, draft_vocab_size: int, modules: int = 1, hidden_first: bool = False, **own: bool
) -> MtpConfig:
    """Modules of the target's own kind of layer. own: `own_embeddings` and `own_output`.

    Raises `TercelError` for a target whose layers cannot be had alone.
    """
    return MtpConfig.beside(
        stock_of(target),
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        max_position_embeddings=target.context_length,
        modules=modules,
        hidden_first=hidden_first,
        **own,
    )


@torch.no_grad()
def take_from_target(head: MtpHead, target: TargetModel) -> None:
    """Give every module the target's last layer and final norm, and a projection that hands on what this layer is used
    to: the hidden state of the token before as it is without the final norm's weights, as large as what enters the
    layer, and a like share of the embedding.

    Raises `TercelError` for a layer that is not like the modules', and if the target was loaded without its layers.
    """
    stock = stock_of(target)
    last = last_attending(stock)
    if not all(parameter.numel() for parameter in stock.layers[last].parameters()):
        raise TercelError(
            f"an MTP head begins with the last layer of {stock.name}, which is not loaded where features come from "
            "files; leave --features out, or begin with another head (--start-from)"
        )
    stored = {name: tensor.float() for name, tensor in stock.layers[last].state_dict().items()}
    tokens = probe_tokens(stock.model)
    entering = target.encode(tokens, capture=(last,)).layers[0].float()
    size = float(entering.pow(2).mean(-1).sqrt().median())
    for module in head.mtp_modules:
        own = module.block.state_dict()
        if {name: tensor.shape for name, tensor in stored.items()} != {n: t.shape for n, t in own.items()}:
            raise TercelError(
                f"the last layer of {stock.name} is of another kind than an MTP module's, which cannot start from it"
            )
        module.block.load_state_dict(stored)
        module.norm.load_state_dict(final_norm(stock).state_dict())
        module.eh_proj.weight.copy_(_projection(module.norm, head, size))


def _projection(final: torch.nn.Module, head: MtpHead, size: float) -> Tensor:
    """`[H, 2H]`: of embedding and hidden state, each with half of the square of `size`."""
    width, share = head.config.hidden_size, size * 0.5**0.5
    weights = final(torch.ones(width, device=head.device))
    undone = weights.pow(2).mean().sqrt() / weights.abs().clamp(min=1e-2) * weights.sign()
    parts = [torch.eye(width, device=head.device) * share, torch.diag(undone * share)]
    return torch.cat(parts[::-1] if head.config.hidden_first else parts, -1)
