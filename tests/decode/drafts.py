"""Tiny targets and heads for the decoding tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tercel.decode.draft_tree import DraftTree
from tercel.decode.proposer import PassingOn, Proposer
from tercel.decode.types import Proposal
from tercel.draft import DraftModel, DraftVocabulary, Eagle3Head, HeadConfig, HeadInfo
from tercel.target_model.model import Target
from tercel.target_model.sources import Source
from tercel.target_model.structure import default_feature_layers
from tests.tiny import tiny_model, tiny_tokenizer


def tiny_target(arch: str, seed: int = 0, **overrides: Any) -> Target:
    return Target(tiny_model(arch, seed, **overrides), tiny_tokenizer(), Source(arch, arch, "folder", None))


def random_draft(
    target: Target, *, pruned: bool = True, seed: int = 1, max_position_embeddings: int = 256, **flags: Any
) -> DraftModel:
    """An untrained head: its drafts are nearly always wrong, which is when losslessness is hardest."""
    torch.manual_seed(seed)
    size = target.vocab_size
    vocabulary = DraftVocabulary(torch.arange(0, size, 2), size) if pruned else DraftVocabulary.full(size)
    config = HeadConfig.for_target(
        target.config,
        feature_layers=default_feature_layers(target.num_layers),
        vocab_size=size,
        draft_vocab_size=len(vocabulary),
        max_position_embeddings=max_position_embeddings,
    )
    head = Eagle3Head(replace(config, **flags))
    head.initialise(std=0.3)
    return DraftModel(head.eval().requires_grad_(False), vocabulary, HeadInfo(None))


class Oracle(Proposer):
    """Drafts the target's own continuation with decoys around it, so that long paths are accepted: the part of
    the loop that a bad head never reaches."""

    name = "oracle"
    needs_tree = True

    def __init__(self, answers: dict[tuple[int, ...], tuple[int, ...]], depth: int = 3) -> None:
        self.answers, self.depth = answers, depth
        self.prompts = sorted(answers, key=len, reverse=True)  # one may begin as another
        self.max_nodes = 2 * depth + 1

    def propose(self, rows):
        proposals = []
        for row in rows:
            prompt = next(p for p in self.prompts if tuple(row.tokens[: len(p)]) == p)
            done = len(row.tokens) - len(prompt)
            ahead = self.answers[prompt][done : done + self.depth]
            tokens, parents, spine = [row.tokens[-1]], [-1], 0
            for token in ahead:
                decoy = (token + 1) % 100
                tokens += [decoy, token]  # the decoy comes first, so that the path is no prefix of the block
                parents += [spine, spine]
                spine = len(tokens) - 1
            proposals.append(Proposal(DraftTree(torch.tensor(tokens), torch.tensor(parents))))
        return proposals


class Watched(PassingOn):
    """A proposer whose proposals are kept, each with the tokens it came behind."""

    def __init__(self, inner: Proposer) -> None:
        super().__init__(inner)
        self.seen: list[tuple[tuple[int, ...], Proposal]] = []

    def propose(self, rows):
        proposals = super().propose(rows)
        self.seen += [(tuple(row.tokens), proposal) for row, proposal in zip(rows, proposals, strict=True)]
        return proposals
