"""Medusa (arXiv 2401.10774): parts that know nothing of each other, each guessing one of the tokens ahead from the
target's last hidden state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tercel.decode.proposers import MEDUSA, MEDUSA_TYPICAL, ProposerKind
from tercel.decode.typical import Typical
from tercel.draft.head import HeadWork
from tercel.methods.last_hidden import LastHiddenHead, PartsConfig, ResBlock
from tercel.methods.parts_lesson import PartsLesson
from tercel.methods.parts_proposer import PartsProposer


@dataclass(frozen=True)
class MedusaConfig(PartsConfig):
    """Sizes of a Medusa head."""

    kind: ClassVar[str] = "medusa"


class MedusaHead(LastHiddenHead):
    """Part `s` is residual blocks, and an output layer unless all share one; its tensors go by the public names."""

    title = "Medusa"
    reads = False
    config_class = MedusaConfig
    config: MedusaConfig

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        c = config
        self.medusa_heads = nn.ModuleList(
            nn.Sequential(
                *(ResBlock(c.hidden_size) for _ in range(c.num_layers)),
                *([] if c.shared_output else [nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False)]),
            )
            for _ in range(c.num_parts)
        )
        if c.shared_output:
            self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False)
        self.initialise()

    def output(self, step: int, hidden: Tensor, read: Tensor | None = None) -> Tensor:
        """`[.., H]` to `[.., H]`."""
        part = self._part(step)
        for number in range(self.config.num_layers):
            hidden = part[number](hidden)
        return hidden

    def output_layer(self, step: int) -> nn.Linear:
        layer = self.lm_head if self.config.shared_output else self._part(step)[-1]
        assert isinstance(layer, nn.Linear)
        return layer

    def _part(self, step: int) -> nn.Sequential:
        part = self.medusa_heads[step]
        assert isinstance(part, nn.Sequential)
        return part

    def work(self) -> HeadWork:
        """A token's part is computed once, however many are drafted of it."""
        c = self.config
        drafted = c.num_layers * c.hidden_size * c.hidden_size + c.hidden_size * c.draft_vocab_size
        return HeadWork(drafted=drafted, context=0, fuse=0, kv=0)

    def public_config(self, dtype: torch.dtype) -> dict[str, Any]:
        """With the public names; no engine reads a shared output layer."""
        c = self.config
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": c.hidden_size,
            "vocab_size": c.vocab_size,
            "truncated_vocab_size": c.draft_vocab_size,
            "num_heads": c.num_parts,
            "num_hidden_layers": c.num_layers,
            "medusa_num_heads": c.num_parts,
            "medusa_num_layers": c.num_layers,
            "torch_dtype": str(dtype).removeprefix("torch."),
        }


class MedusaLesson(PartsLesson):
    """Medusa-1's: cross-entropy of the text's tokens; with the loss "soft" that of the target's own distribution."""

    head_class = MedusaHead


class Medusa(PartsProposer):
    """Drafts with a Medusa head: the likeliest tokens of all parts, combined freely."""

    name = MEDUSA
    head_class = MedusaHead


class TypicalMedusa(Medusa):
    """The same drafts, accepted where the target finds them likely enough: fewer are refused, and the text is no longer
    the target's own."""

    name = MEDUSA_TYPICAL
    lossy = Typical()


KIND = ProposerKind(Medusa, needs=("head",), about="heads that each guess one token ahead (arXiv 2401.10774)")
TYPICAL = ProposerKind(
    TypicalMedusa,
    needs=("head",),
    lossy=True,
    about="the same, accepting what is likely enough: LOSSY, the text is not the target's own",
)
