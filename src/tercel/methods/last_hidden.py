"""What heads have in common that draft from one vector, the target's last hidden state (after the final norm): Medusa's
and Hydra's.

A head has `K` parts; part `s` (from 0) predicts the token `s + 2` places behind the one whose hidden state it takes, as
step `s` of a chain does (`draft/alignment.py`). The token in between is the target's own, the root of the draft tree.

Shape legend: `..` any leading shape, H hidden size (the target's), W draft vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tercel import limits
from tercel.draft.config import LAST_HIDDEN, LastHiddenConfig
from tercel.draft.head import DraftHead
from tercel.errors import TercelError
from tercel.reading import short

if TYPE_CHECKING:
    from tercel.target_model.protocol import TargetModel

PARTS = 5  # as published


@dataclass(frozen=True)
class PartsConfig(LastHiddenConfig):
    """Sizes of such a head; of those of attention and MLP it has no use.

    num_parts: how far ahead it drafts. num_layers: residual blocks of a part. shared_output: one output layer for all
    parts, where the vocabulary weighs more than the head; else each has its own, as published.
    """

    num_parts: int = PARTS
    num_layers: int = 1
    shared_output: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, most in (("num_parts", limits.DRAFT_DEPTH), ("num_layers", limits.PART_LAYERS)):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise TercelError(f"{name} of a head must be a whole number from 1 to {most}, not {short(value)}")
        if type(self.shared_output) is not bool:
            raise TercelError(f"shared_output of a head must be true or false, not {short(self.shared_output)}")
        if self.hidden_size != self.target_hidden_size or not self.own_output or self.own_embeddings:
            raise TercelError(
                "a head on the last hidden state has its target's width, output layers of its own and no embeddings; "
                "its files say otherwise"
            )

    @classmethod
    def beside(cls, target: TargetModel, draft_vocab_size: int, **settings: Any) -> Self:
        """The head for `target`. Raises `TercelError` as `HeadConfig.for_target`, and for wrong settings."""
        config = cls.for_target(
            target.config,
            feature_layers=(target.num_layers,),
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size,
            max_position_embeddings=target.context_length,
        )
        return replace(config, **settings)


class ResBlock(nn.Module):
    """`x + SiLU(linear(x))`, which is `x` at first. With `reads` vectors beside `x` all of them enter the linear layer,
    and `x` is replaced by a linear map of them all, which at first takes `x` alone."""

    def __init__(self, size: int, reads: int = 0) -> None:
        super().__init__()
        wide = size * (1 + reads)
        self.linear = nn.Linear(wide, size)
        self.res_connection = nn.Linear(wide, size, bias=False) if reads else nn.Identity()

    @torch.no_grad()
    def initialise(self) -> None:
        for parameter in self.parameters():
            parameter.zero_()
        if isinstance(self.res_connection, nn.Linear):
            self.res_connection.weight.fill_diagonal_(1.0)  # the first block of columns: `x`

    def forward(self, x: Tensor) -> Tensor:
        return self.res_connection(x) + F.silu(self.linear(x))


class LastHiddenHead(DraftHead):
    """`K` parts over the last hidden state.

    reads: whether a part takes the embeddings of the tokens before the one that it predicts, from the root on.
    """

    reads: bool
    config_class = PartsConfig
    config: PartsConfig
    lm_head: nn.Linear  # where the parts share it

    def reads_in_words(self) -> str:
        return LAST_HIDDEN

    def in_words(self) -> str:
        c = self.config
        layers = f"{c.num_layers} block{'s' if c.num_layers > 1 else ''} each"
        output = "one output layer for all" if c.shared_output else "an output layer each"
        return f"{self.title} ({c.num_parts} parts, {layers}, {output})"

    @abstractmethod
    def output(self, step: int, hidden: Tensor, read: Tensor | None) -> Tensor:
        """What the output layer takes at `step`, `[.., H]`, from the hidden state `[.., H]`, and if the head `reads`
        from the embeddings `[.., step + 1, H]` of the root and the tokens drafted behind it."""

    @abstractmethod
    def output_layer(self, step: int) -> nn.Linear:
        """`[.., H]` to `[.., W]`."""

    def logits(self, step: int, output: Tensor) -> Tensor:
        """`[.., H]` to `[.., W]`."""
        return self.output_layer(step)(output)

    @torch.no_grad()
    def initialise(self, output_rows: Tensor | None = None) -> None:
        """Every part says at first what the target said from its hidden state: `output_rows` `[W, H]` are its output
        layer's; left out, they are drawn."""
        for module in self.modules():
            if isinstance(module, ResBlock):
                module.initialise()
        for step in range(1 if self.config.shared_output else self.config.num_parts):
            weight = self.output_layer(step).weight
            if output_rows is None:
                nn.init.normal_(weight, std=0.02)
            else:
                weight.copy_(output_rows)
