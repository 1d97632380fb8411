"""`tercel features`: run a target over conversations once, and keep what training needs of it.

The last hidden states are kept, not the logits that follow from them: K numbers instead of V.
"""

from __future__ import annotations

import shutil
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tercel.chat.conversation import TokenizedChat
from tercel.chat.store import SomeChats
from tercel.errors import NoRoomError
from tercel.locks import folder_lock
from tercel.target_model.protocol import TargetModel
from tercel.train.batches import usable
from tercel.train.encoding import Encoded, encode_group, padding_groups
from tercel.train.feature_store import FeaturesOf, key_of, open_or_new, write_manifest, write_shard
from tercel.train.packing import PACKINGS

SHARD_BYTES = 128 << 20  # what a kill loses at most
FORWARD_TOKENS = 4096  # of a block of chats, padding included
_SPARE = 64 << 20  # bytes that are left free for whoever else writes


@dataclass(frozen=True)
class FeaturePlan:
    """What is to be made. conversations, tokens, taught (tokens before a supervised one) and bytes: of those that lack
    features; there: how many conversations have them already; free: bytes on the disk."""

    conversations: int
    tokens: int
    taught: int
    bytes: int
    there: int
    free: int


def make_features(
    target: TargetModel,
    chats: Sequence[TokenizedChat],
    layers: Sequence[int],
    out: Path,
    *,
    max_length: int,
    store: str = "bf16",
    all_tokens: bool = False,
    rendered_at: str | None = None,
    planned: Callable[[FeaturePlan], None] | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> FeaturePlan:
    """Keep in `out` what `target` gives for the chats that `train` would use, cut to `max_length`: the inputs of
    `layers`, and last hidden states. What is there already stays; a run that was stopped goes on.

    store: how numbers are kept (`PACKINGS`). all_tokens: last hidden states of prompts too, for runs that learn from
    them; runs that do not can read these as well. planned: told what is to be made before it is. on_progress: told how
    many tokens are done, shard by shard.
    Raises before anything is written: `NoRoomError` if the disk has none, `TercelError` if `out` holds other features,
    or something else.
    """
    of = FeaturesOf.those(target, layers, store, rendered_at)
    chats = usable(chats, min(max_length, target.context_length), target.vocab_size)
    if all_tokens:
        chats = SomeChats(chats, range(len(chats)), max_length, whole=True)
    encode_group(target, layers, [chats[0].cut(1)])  # layers that the target has not are told before all else
    with folder_lock(out):
        found = open_or_new(out, of)
        lacking, plan = _plan(chats, of, out, lambda chat: found is not None and chat in found)
        if planned is not None:
            planned(plan)
        if plan.bytes + _SPARE > plan.free and plan.conversations:
            raise NoRoomError(_no_room(out, of, plan))
        if found is None:
            write_manifest(out, of)
        for file in found.damaged if found is not None else ():
            file.unlink()
        number, done = found.next_shard if found is not None else 0, 0
        for shard in _shards(chats, lacking, of):
            encoded = _encode(target, of.layers, shard)
            write_shard(out, number, store, shard, encoded, len(of.layers))
            number, done = number + 1, done + sum(map(len, shard))
            if on_progress is not None:
                on_progress(done)
    return plan


def _plan(
    chats: Sequence[TokenizedChat], of: FeaturesOf, out: Path, has: Callable[[TokenizedChat], bool]
) -> tuple[array[int], FeaturePlan]:
    """The places of chats without features, equal ones once, and what they come to."""
    keys = np.array([key_of(chat) for chat in chats], "S12")
    _, first = np.unique(keys, return_index=True)
    lacking, tokens, taught = array("q"), 0, 0
    for place in sorted(first.tolist()):
        chat = chats[place]
        if not has(chat):
            lacking.append(place)
            tokens += len(chat)
            taught += _taught(chat)
    free = shutil.disk_usage(next(folder for folder in (out, *out.absolute().parents) if folder.exists())).free
    there = len(first) - len(lacking)
    return lacking, FeaturePlan(len(lacking), tokens, taught, of.bytes_of(tokens, taught), there, free)


def _no_room(out: Path, of: FeaturesOf, plan: FeaturePlan) -> str:
    def size(store: str) -> int:
        return replace(of, store=store).bytes_of(plan.tokens, plan.taught)

    least = min(PACKINGS, key=size)
    advice = f"; --store {least} takes {_gigabytes(size(least))}" if size(least) < plan.bytes else ""
    return (
        f"features of {plan.tokens:,} tokens take {_gigabytes(plan.bytes)}, but {out} has {_gigabytes(plan.free)} free"
        f"{advice}; free space, choose another --out, or give less data with --limit"
    )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.2f} GB"


def _shards(chats: Sequence[TokenizedChat], places: Sequence[int], of: FeaturesOf) -> Iterator[list[TokenizedChat]]:
    shard: list[TokenizedChat] = []
    size = 0
    for place in places:
        chat = chats[place]
        own = of.bytes_of(len(chat), _taught(chat))
        if shard and size + own > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(chat)
        size += own
    if shard:
        yield shard


def _encode(target: TargetModel, layers: Sequence[int], chats: Sequence[TokenizedChat]) -> list[Encoded]:
    found: dict[int, Encoded] = {}
    for group in padding_groups([len(chat) for chat in chats], FORWARD_TOKENS):
        encoded = encode_group(target, layers, [chats[i] for i in group])
        found.update(zip(group, (Encoded(one.features.cpu(), one.hidden.cpu()) for one in encoded), strict=True))
    return [found[place] for place in range(len(chats))]


def _taught(chat: TokenizedChat) -> int:
    """How many tokens stand before a supervised one."""
    return int(chat.supervised[1:].sum())
