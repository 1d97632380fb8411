"""Hydra (arXiv 2402.05109): Medusa's parts, each of which also reads the tokens drafted before its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tercel.decode.proposers import HYDRA, ProposerKind
from tercel.draft.head import HeadWork
from tercel.methods.last_hidden import LastHiddenHead, PartsConfig, ResBlock
from tercel.methods.parts_lesson import PartsLesson
from tercel.methods.parts_proposer import PartsProposer


@dataclass(frozen=True)
class HydraConfig(PartsConfig):
    """Sizes of a Hydra head; Hydra++ has four layers."""

    kind: ClassVar[str] = "hydra"


class HydraHead(LastHiddenHead):
    """Part `s` takes the hidden state and the embeddings of `s + 1` tokens: the root, and those drafted behind it."""

    title = "Hydra"
    reads = True
    config_class = HydraConfig
    config: HydraConfig

    def __init__(self, config: HydraConfig) -> None:
        super().__init__(config)
        c = config
        self.hydra_mlp = nn.ModuleList(
            nn.Sequential(
                ResBlock(c.hidden_size, reads=step + 1), *(ResBlock(c.hidden_size) for _ in range(c.num_layers - 1))
            )
            for step in range(c.num_parts)
        )
        if c.shared_output:
            self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False)
        else:
            self.hydra_lm_head = nn.ModuleList(
                nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False) for _ in range(c.num_parts)
            )
        self.initialise()

    def output(self, step: int, hidden: Tensor, read: Tensor | None) -> Tensor:
        """hidden `[.., H]`, read `[.., step + 1, H]`, the root's embedding first, to `[.., H]`."""
        assert read is not None
        joined = torch.cat([hidden[..., None, :], read], -2).flatten(-2)
        found: Tensor = self.hydra_mlp[step](joined)
        return found

    def output_layer(self, step: int) -> nn.Linear:
        layer = self.lm_head if self.config.shared_output else self.hydra_lm_head[step]
        assert isinstance(layer, nn.Linear)
        return layer

    def work(self) -> HeadWork:
        """Of a token in the middle of the parts."""
        c = self.config
        size = c.hidden_size * c.hidden_size
        first = 2 * (2 + (c.num_parts - 1) // 2) * size
        drafted = first + (c.num_layers - 1) * size + c.hidden_size * c.draft_vocab_size
        return HeadWork(drafted=drafted, context=0, fuse=0, kv=0)

    def public_config(self, dtype: torch.dtype) -> dict[str, Any]:
        c = self.config
        return {
            "architectures": ["HydraModel"],
            "model_type": "hydra",
            "hidden_size": c.hidden_size,
            "vocab_size": c.vocab_size,
            "draft_vocab_size": c.draft_vocab_size,
            "hydra_num_heads": c.num_parts,
            "hydra_num_layers": c.num_layers,
            "torch_dtype": str(dtype).removeprefix("torch."),
        }


class HydraLesson(PartsLesson):
    """Cross-entropy of the text's tokens, each part reading the text's tokens before; with the loss "soft" that of the
    target's own distribution, as in Hydra++ (its teacher loss)."""

    head_class = HydraHead


class Hydra(PartsProposer):
    """Drafts with a Hydra head, level by level."""

    name = HYDRA
    head_class = HydraHead


KIND = ProposerKind(Hydra, needs=("head",), about="heads that also read the drafts before theirs (arXiv 2402.05109)")
