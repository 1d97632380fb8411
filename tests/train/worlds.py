"""Small targets, chats and heads for the tests of training."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tercel.chat.conversation import TokenizedChat
from tercel.draft import DraftVocabulary, Eagle3Head, HeadConfig
from tercel.draft.layers import Projected
from tercel.target_model.model import Target
from tercel.target_model.sources import Source
from tests.draft.heads_for_tests import tiny_head
from tests.tiny import VOCAB, tiny_model, tiny_tokenizer

LAYERS = (2, 4, 5)


@cache
def target_of(arch: str = "llama", dtype: torch.dtype = torch.float32) -> Target:
    model = tiny_model(arch).to(dtype)
    return Target(model, tiny_tokenizer(), Source(arch, arch, "folder", None))


def head_for(target: Target, vocabulary: DraftVocabulary, seed: int = 0, **flags: Any) -> Eagle3Head:
    """A head of the target's shape; `flags` are any settings of `HeadConfig`."""
    config = HeadConfig.for_target(
        target.config,
        feature_layers=LAYERS,
        vocab_size=target.vocab_size,
        draft_vocab_size=len(vocabulary),
        max_position_embeddings=256,
    )
    return tiny_head(replace(config, **flags), seed)


def chat(tokens: list[int], supervised: list[bool], name: str = "c") -> TokenizedChat:
    return TokenizedChat.of(name, tokens, supervised)


def random_chat(length: int, seed: int, ids: list[int] | None = None) -> TokenizedChat:
    """A prompt, an answer, a second question, a second answer, of random tokens (of `ids`)."""
    generator = torch.Generator().manual_seed(seed)
    allowed = torch.tensor(ids if ids is not None else list(range(4, VOCAB)))
    tokens = allowed[torch.randint(len(allowed), (length,), generator=generator)].tolist()
    third = length // 3
    supervised = [False] * (third // 2) + [True] * third + [False] * 2
    supervised += [True] * (length - len(supervised))
    return chat(tokens, supervised, f"random-{seed}")


@torch.no_grad()
def answered_chats(target: Target, count: int, prompt: int = 5, answer: int = 20) -> list[TokenizedChat]:
    """Random prompts with the target's own greedy answers."""
    generator = torch.Generator().manual_seed(11)
    prompts = torch.randint(4, VOCAB, (count, prompt), generator=generator)
    texts = prompts
    for _ in range(answer):
        texts = torch.cat([texts, target.logits(target.encode(texts).hidden[:, -1]).argmax(-1, True)], 1)
    flags = [False] * prompt + [True] * answer
    return [chat(row.tolist(), flags, f"answer-{i}") for i, row in enumerate(texts)]


@torch.no_grad()
def decode_with_cache(
    head: Eagle3Head, target: Target, features: Tensor, tokens: list[int], drafts: int
) -> list[Tensor]:
    """The head's output behind the last of the target's `features` `[T, n*K]` and behind each token after it.

    Plain decoding: one key a token in each layer; committed tokens enter with the target's features, those after token
    `T` are drafts and enter with the head's own output.
    """
    entries: list[list[Projected]] = [[] for _ in (head, *head.deeper)]
    outputs: list[Tensor] = []

    def attended(layer: int, now: Projected) -> tuple[Tensor, Tensor]:
        entries[layer].append(now)
        group = now.query.shape[0] // now.key.shape[0]
        k = torch.stack([entry.key for entry in entries[layer]]).repeat_interleave(group, 1)  # [S, q, D]
        v = torch.stack([entry.value for entry in entries[layer]]).repeat_interleave(group, 1)
        weights = torch.softmax(torch.einsum("qd,sqd->qs", now.query, k) / now.query.shape[1] ** 0.5, -1)
        return now.residual, torch.einsum("qs,sqd->qd", weights, v).flatten()

    for position, token in enumerate(tokens[1 : len(features) + drafts]):
        true = position < len(features)
        hidden = head.fuse(features[position]) if true else head.feedback(outputs[-1])
        now = head.project(target.embed(torch.tensor(token)), hidden, torch.tensor(position))
        outputs.append(head.step(now, torch.tensor(position), attended))
    return outputs[len(features) - 1 :]  # nothing is drafted behind those before
