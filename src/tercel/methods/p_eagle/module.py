"""The P-EAGLE head: EAGLE-3's layer, vectors for what is not known yet, and the part that ties drafts together.

Shape legend: `..` any leading shape, H head's hidden size, K positions drafted, A = K - 1 of them ahead of the newest
token, r width of the tie, W draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tercel import limits
from tercel.draft.config import HeadConfig
from tercel.draft.eagle3 import FusingHead, public_config
from tercel.draft.head import HeadWork
from tercel.errors import TercelError
from tercel.reading import short

POSITIONS, TIE = 7, 128


@dataclass(frozen=True)
class PEagleConfig(HeadConfig):
    """Sizes of such a head. num_parts: how many positions it drafts; tie_size: width of the state that ties the drafts
    of a path together, 0 for positions that know nothing of each other, as published."""

    kind: ClassVar[str] = "p-eagle"

    num_parts: int = POSITIONS
    tie_size: int = TIE

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least, most in (("num_parts", 2, limits.DRAFT_DEPTH), ("tie_size", 0, limits.HEAD_SIZE)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise TercelError(f"{name} of a head must be a whole number from {least} to {most}, not {short(value)}")
        if not self.own_output or self.norm_output:
            raise TercelError("a P-EAGLE head has an output layer of its own and feeds nothing back; its files differ")


class PEagleHead(FusingHead):
    """Row 0 of a draft reads what EAGLE-3's does. Row `s` stands `s` positions further on; in place of the feature and
    the token there, which nobody knows, it reads those of row 0, each with a learned vector added, and it sees what row
    0 sees and the rows before it.

    Beside the row's output, normed, an output layer of its own takes the tie of the path that is drafted.
    """

    title = "P-EAGLE"
    config_class = PEagleConfig
    config: PEagleConfig

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config)
        c = config
        self.mask_hidden = nn.Parameter(torch.empty(c.num_parts - 1, c.hidden_size))
        self.mask_embedding = nn.Parameter(torch.empty(c.hidden_size))
        if c.tie_size:
            self.tie_row = nn.Linear(c.hidden_size, c.tie_size)
            self.tie_token = nn.Linear(c.hidden_size, c.tie_size, bias=False)
            self.tie_path = nn.Linear(c.tie_size, c.tie_size, bias=False)
            self.lm_tie = nn.Linear(c.tie_size, c.draft_vocab_size, bias=False)
        self.initialise_own()

    @torch.no_grad()
    def initialise_own(self) -> None:
        """What EAGLE-3's layer has not: the tie moves no score at first."""
        c = self.config
        self.mask_hidden.normal_(std=0.2)  # of fused features, whose size is 1
        self.mask_embedding.zero_()
        if c.tie_size:
            for linear in (self.tie_row, self.tie_token):
                linear.weight.normal_(std=c.hidden_size**-0.5)
            self.tie_row.bias.zero_()
            self.tie_path.weight.normal_(std=0.5 * c.tie_size**-0.5)
            self.lm_tie.weight.zero_()

    def in_words(self) -> str:
        c = self.config
        tied = f"tied by a state of {c.tie_size}" if c.tie_size else "each by itself"
        return f"{self.title} ({c.num_parts} positions in one forward, {tied})"

    def work(self) -> HeadWork:
        """Of a drafted position; every node of a tree takes a step of the tie beside it, which is little."""
        c, plain = self.config, super().work()
        tie = c.tie_size * (2 * c.hidden_size + c.tie_size)
        return HeadWork(plain.drafted + tie, plain.context, plain.fuse, plain.kv)

    def public_config(self, dtype: torch.dtype) -> dict[str, Any]:
        """No engine reads the tie, so that the folder is told from one of theirs."""
        c = self.config
        own = {"architectures": ["TercelPEagleHead"], "model_type": "p-eagle"}
        return {**public_config(c, dtype), **own, "num_parts": c.num_parts, "tie_size": c.tie_size}

    def feedback(self, output: Tensor) -> Tensor:
        """What the nodes below a drafted one take: its path's tie, as it is."""
        return output

    def unknown(self, embedding: Tensor, hidden: Tensor, step: int | slice) -> tuple[Tensor, Tensor]:
        """What row `step` (from 1; or several) reads for row 0's embedding and hidden, `[.., H]` each."""
        before = slice(step.start - 1, step.stop - 1) if isinstance(step, slice) else step - 1
        further = hidden + self.mask_hidden[before]
        return (embedding + self.mask_embedding).expand_as(further), further

    def tie(self, said: Tensor, embedding: Tensor, path: Tensor | None) -> Tensor:
        """The tie of a path `[.., r]`, one token longer: said `[.., H]`, a row's normed output; embedding `[.., H]` of
        the token drafted before; path `[.., r]`, the tie up to there (None: there was none)."""
        return self.tied(self.tie_row(said), self.tie_token(self.midlayer.input_layernorm(embedding)), path)

    def tied(self, row: Tensor, token: Tensor, path: Tensor | None) -> Tensor:
        """`[.., r]` each: the same, of a row's and a token's share."""
        now = row + token
        return F.silu(now if path is None else now + self.tie_path(path))
