"""The block that one forward runs: every row's tree, and behind the widest what is computed beside the trees.

Shape legend: B rows, T width of the block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tercel.decode.types import AsideOutput, Committed, Proposal
from tercel.target_model.output import TargetOutput
from tercel.target_model.transfer import to_device


class Block:
    """nodes: of the widest tree; the block has room for more only where `of` left drafts out."""

    def __init__(self, proposals: Sequence[Proposal]) -> None:
        self.proposals = list(proposals)
        self.nodes = max(len(proposal.tree) for proposal in proposals)
        self._beside = max(proposal.width - len(proposal.tree) for proposal in proposals)

    def of(self, proposals: Sequence[Proposal]) -> Block:
        """As wide, of less: so that what it leaves in a cache covers all that the first one left."""
        other = Block(proposals)
        other.nodes, other._beside = self.nodes, self._beside
        return other

    def on(self, device: torch.device, starts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens and positions `[B, T]` and who sees whom, bool `[B, T, T]`, behind `starts` tokens of each row. What a
        row lacks are tokens that see only themselves."""
        # tokens, positions and masks travel together: one copy to the device a step
        width = self.nodes + self._beside
        packed = np.zeros((len(self.proposals), width, 2 + width), np.int64)
        packed[:, :, 2:] = np.eye(width, dtype=np.int64)
        for own, proposal, start in zip(packed, self.proposals, starts, strict=False):
            tree, aside, n = proposal.tree, proposal.aside, len(proposal.tree)
            seen = tree.ancestor_mask().numpy()
            own[:n, 0], own[:n, 1], own[:n, 2 : 2 + n] = tree.token_list, tree.depth_list, seen
            if aside is not None:
                beside = slice(self.nodes, self.nodes + len(aside))
                own[beside, 0], own[beside, 1] = aside.tokens, aside.depths
                own[beside, 2 : 2 + n] = seen[list(aside.at)]
                own[beside, 2 + self.nodes : 2 + self.nodes + len(aside)] = aside.seen
            own[:, 1] += start  # the root's position is the cache's length
        there = to_device(torch.from_numpy(packed), device)
        return there[:, :, 0].contiguous(), there[:, :, 1].contiguous(), there[:, :, 2:] > 0

    def beside(self, output: TargetOutput, row: int) -> AsideOutput | None:
        """What came of the tokens beside a row's tree."""
        aside = self.proposals[row].aside
        if aside is None:
            return None
        return AsideOutput(aside.numbers, output.of_row(row, self.nodes + len(aside)).part(self.nodes))

    def committed(
        self,
        output: TargetOutput,
        paths: Sequence[list[int]],
        tokens: Sequence[tuple[int, ...]],
        rows: Sequence[int],
    ) -> list[Committed]:
        """What became permanent for `rows`: by row its path, root included, and its tokens. Features are gathered with
        one index for all rows and layers."""
        features: list[tuple[Tensor, ...]] = [()] * len(rows)
        if output.layers:
            width = max(len(paths[row]) for row in rows)
            places = [[row, *paths[row], *[0] * (width - len(paths[row]))] for row in rows]
            index = to_device(places, output.layers[0].device)
            together = torch.cat(output.layers, -1)[index[:, :1], index[:, 1:]].unbind()
            sizes = [layer.shape[-1] for layer in output.layers]
            features = [own[: len(paths[row])].split(sizes, -1) for row, own in zip(rows, together, strict=True)]
        pairs = zip(rows, features, strict=True)
        return [Committed(tokens[row], layers, self.beside(output, row)) for row, layers in pairs]
