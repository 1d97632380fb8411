"""Which chats make which batch: known in advance for the whole run, so that a resumed one sees the same."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tercel import limits
from tercel.chat.conversation import TokenizedChat
from tercel.chat.store import SomeChats
from tercel.draft.alignment import FIRST_PREDICTED
from tercel.errors import TercelError
from tercel.train.config import TrainConfig
from tercel.train.ranks import Step


@dataclass(frozen=True)
class Split:
    """Training chats and held-out ones."""

    train: Sequence[TokenizedChat]
    held_out: Sequence[TokenizedChat]


def usable(chats: Sequence[TokenizedChat], max_length: int, vocab_size: int) -> SomeChats:
    """The chats cut to `max_length`, without those of which no row could learn.

    Raises `TercelError` for ids outside the vocabulary, and if nothing is left.
    """
    kept = array("q")
    for place, chat in enumerate(chats):
        if len(chat) and not 0 <= int(chat.tokens.min()) <= int(chat.tokens.max()) < vocab_size:
            wrong = int(chat.tokens.min() if chat.tokens.min() < 0 else chat.tokens.max())
            raise TercelError(
                f"conversation {chat.id} holds token {wrong}, but the target has {vocab_size} tokens; "
                "the data was tokenised for another target"
            )
        if chat.supervised[FIRST_PREDICTED:max_length].any():
            kept.append(place)
    if not kept:
        raise TercelError(
            f"none of {len(chats)} conversations has a token of the assistant within {max_length} tokens; "
            "give other data or a larger max-length"
        )
    return SomeChats(chats, kept, max_length)


def split(chats: Sequence[TokenizedChat], share: float) -> Split:
    """Hold out about `share` of the chats, by a hash of their tokens (so equal chats fall on one side).

    Raises `TercelError` if either side would be empty.
    """
    train, held_out = array("q"), array("q")
    longest = 0
    for place, chat in enumerate(chats):
        digest = hashlib.sha256(np.asarray(chat.tokens, dtype=np.int64).tobytes()).digest()
        (held_out if int.from_bytes(digest[:4], "big") < share * 2**32 else train).append(place)
        longest = max(longest, len(chat))
    if not train or not held_out:
        raise TercelError(
            f"{len(chats)} conversations are too few to hold out a share of {share}; "
            "give more data or a larger eval-share"
        )
    return Split(SomeChats(chats, train, longest), SomeChats(chats, held_out, longest))


def plan_batches(lengths: Sequence[int], batch_tokens: int, epochs: int, seed: int) -> list[list[int]]:
    """Indices of the chats of every micro-batch of the run, epoch after epoch, each shuffled by `seed` and
    packed up to `batch_tokens` (a longer chat is a batch of its own).

    Raises `TercelError` for more epochs than can be planned.
    """
    if epochs * len(lengths) > limits.PLANNED:
        raise TercelError(
            f"{epochs:,} epochs of {len(lengths):,} conversations are more than the {limits.PLANNED:,} that can be "
            "planned in advance; give fewer epochs"
        )
    plan: list[list[int]] = []
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = torch.randperm(len(lengths), generator=generator).tolist()
        batch: list[int] = []
        tokens = 0
        for index in order:
            if batch and tokens + lengths[index] > batch_tokens:
                plan.append(batch)
                batch, tokens = [], 0
            batch.append(index)
            tokens += lengths[index]
        plan.append(batch)
    return plan


def plan_steps(lengths: Sequence[int], config: TrainConfig) -> list[Step]:
    """The optimizer steps of a run over chats of these lengths."""
    micro = plan_batches(lengths, config.batch_tokens, config.epochs, config.seed)
    steps = [micro[i : i + config.accumulate] for i in range(0, len(micro), config.accumulate)]
    return steps[: config.max_steps] if config.max_steps else steps


def seed_of(seed: int, step: int, names: Sequence[str]) -> int:
    """A seed for what chance does to the chats of these names in optimizer step `step` of a run of `seed`: the same
    however the run got there, and whoever of several ranks has them."""
    told = json.dumps([seed, step, *names])
    return int.from_bytes(hashlib.sha256(told.encode()).digest()[:8], "big") >> 1


def data_digest(chats: Sequence[TokenizedChat]) -> str:
    """Hash of all tokens and masks, in order."""
    digest = hashlib.sha256()
    for chat in chats:
        digest.update(np.asarray(chat.tokens, dtype=np.int64).tobytes())
        digest.update(np.asarray(chat.supervised, dtype=bool).tobytes())
    return digest.hexdigest()[:16]


def supervised_counts(chats: Sequence[TokenizedChat], vocab_size: int) -> torch.Tensor:
    """int64 `[V]`: how often each token is supervised."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for chat in chats:
        np.add.at(counts, chat.tokens[chat.supervised], 1)
    return torch.from_numpy(counts)
