"""Features and teacher for a batch: from the frozen target as training goes, or from files filled earlier."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tercel.chat.conversation import TokenizedChat
from tercel.draft.alignment import deciding
from tercel.draft.head import DraftHead
from tercel.draft.vocabulary import DraftVocabulary
from tercel.files import atomic_file
from tercel.locks import FOLDER_LOCK, PATIENCE, one_at_a_time
from tercel.reading import check_utf8
from tercel.target_model.protocol import TargetModel
from tercel.train.losses import Teacher
from tercel.train.ranks import Alone, Ranks
from tercel.train.sharded import encode_all
from tercel.train.ttt import Batch

PADDING_WASTE = 1.15
CHECKSUM = "crc32"


@dataclass(frozen=True)
class Encoded:
    """One sequence of `T` tokens through the target: features `[T, n*K]`, and last hidden states `[U, K]` of
    the positions before a supervised token."""

    features: Tensor
    hidden: Tensor


class FeatureSupply:
    """Makes `Batch`es of chats. With `cache`, what the target gave is kept in files and read from there next
    time (`(n*K + K)` numbers a token: 4.6 KB for a target of width 576 in bfloat16). `ranks`: those of the run; where
    the target is split over them, all have to call `encode` equally often, if need be with no chats.

    made_again: how many files were there but damaged, or without a checksum.
    """

    def __init__(
        self,
        target: TargetModel,
        head: DraftHead,
        vocabulary: DraftVocabulary,
        cache: Path | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.target = target
        self.ranks = ranks or Alone()
        self.head = head
        self.vocabulary = vocabulary
        self.to_draft = vocabulary.to_draft().to(target.device)
        layers = head.config.feature_layers
        key = f"{target.fingerprint}-{'_'.join(map(str, layers))}-{str(target.dtype).removeprefix('torch.')}"
        if cache is not None:
            check_utf8(cache)
        self._folder = cache / key if cache is not None else None
        self.made_again = 0
        if self._folder is not None and (self._folder / FOLDER_LOCK).exists():
            with self._alone():  # a lock that a killed run left goes
                pass

    @torch.no_grad()
    def batch(self, chats: Sequence[TokenizedChat], encoded: Sequence[Encoded] | None = None) -> Batch:
        """The batch of `chats`; `encoded`: what `encode` gave for them, if it was called before."""
        encoded = self.encode(chats) if encoded is None else encoded
        device = self.target.device
        tokens = torch.from_numpy(np.concatenate([c.tokens for c in chats])).long()
        supervised = torch.from_numpy(np.concatenate([c.supervised for c in chats]))
        before = torch.cat([_before_supervised(chat) for chat in chats])
        taught = torch.full((len(tokens),), -1, dtype=torch.long)
        taught[before] = torch.arange(int(before.sum()))
        hidden = torch.cat([e.hidden for e in encoded])
        tokens = tokens.to(device)
        return Batch(
            tokens=tokens,
            lengths=[len(c.tokens) for c in chats],
            supervised=supervised,
            features=torch.cat([e.features for e in encoded]),
            embeddings=None if self.head.config.own_embeddings else self.target.embed(tokens),
            teacher=Teacher.of(self.target, hidden, self.vocabulary, self.to_draft),
            taught=taught.to(device),
        )

    @torch.no_grad()
    def encode(self, chats: Sequence[TokenizedChat]) -> list[Encoded]:
        """What the target, or the cache, gives for the chats."""
        found = [self._read(chat) for chat in chats]
        # whole groups, as they would be without files: their shapes show in the last bits of every member
        groups = _padding_groups([len(chat.tokens) for chat in chats])
        groups = [group for group in groups if any(found[i] is None for i in group)]
        for group, outcome in zip(groups, self._run([[chats[i] for i in group] for group in groups]), strict=True):
            for i, encoded in zip(group, outcome, strict=True):
                if found[i] is None:
                    found[i] = encoded
                    self._write(chats[i], encoded)
        return [encoded for encoded in found if encoded is not None]

    def _run(self, groups: Sequence[Sequence[TokenizedChat]]) -> Iterator[list[Encoded]]:
        """What the target gives for each group, padded on the right."""
        blocks = []
        for chats in groups:
            padded = torch.zeros(len(chats), max(len(c.tokens) for c in chats), dtype=torch.long)
            for number, chat in enumerate(chats):
                padded[number, : len(chat.tokens)] = torch.from_numpy(chat.tokens)
            blocks.append(padded)
        outputs = encode_all(self.target, self.ranks, blocks, self.head.config.feature_layers)
        for chats, out in zip(groups, outputs, strict=True):
            features, device = out.features, out.hidden.device
            yield [
                Encoded(
                    features[number, : len(chat.tokens)].contiguous(),
                    out.hidden[number, torch.nonzero(_before_supervised(chat))[:, 0].to(device)],
                )
                for number, chat in enumerate(chats)
            ]

    def _file(self, chat: TokenizedChat) -> Path | None:
        if self._folder is None:
            return None
        digest = hashlib.sha256(np.asarray(chat.tokens, dtype=np.int64).tobytes())
        digest.update(np.asarray(chat.supervised, dtype=bool).tobytes())
        name = digest.hexdigest()[:24]
        return self._folder / name[:2] / f"{name}.safetensors"

    def _read(self, chat: TokenizedChat) -> Encoded | None:
        file = self._file(chat)
        if file is None or not file.is_file():
            return None
        encoded = _stored(file)
        if encoded is None:
            self.made_again += 1
            return None
        return Encoded(encoded.features.to(self.target.device), encoded.hidden.to(self.target.device))

    def _alone(self) -> AbstractContextManager[None]:
        """Another run may fill the same files."""
        assert self._folder is not None
        return one_at_a_time(self._folder / FOLDER_LOCK, self._folder, wait=PATIENCE)

    def _write(self, chat: TokenizedChat, encoded: Encoded) -> None:
        file = self._file(chat)
        if file is None:
            return
        kept = Encoded(encoded.features.cpu().contiguous(), encoded.hidden.cpu().contiguous())
        # what a power cut spoils is noticed, and made again
        with self._alone():
            if file.is_file() and _stored(file) is not None:  # another rank, or another run, came first
                return
            with atomic_file(file, durable=False, held=True) as partial:
                save_file(
                    {"features": kept.features, "hidden": kept.hidden},
                    partial,
                    metadata={CHECKSUM: _checksum(file.name, kept)},
                )


def _stored(file: Path) -> Encoded | None:
    """What a file holds; None if it is damaged, or without a checksum."""
    try:
        with safe_open(file, framework="pt") as stored:
            encoded = Encoded(stored.get_tensor("features"), stored.get_tensor("hidden"))
            whole = (stored.metadata() or {}).get(CHECKSUM) == _checksum(file.name, encoded)
    except (SafetensorError, OSError):
        return None
    return encoded if whole else None


def _checksum(name: str, encoded: Encoded) -> str:
    """Of both tensors, their types and shapes, and the file's name, which says whose they are."""
    digest = zlib.crc32(name.encode())
    for tensor in (encoded.features, encoded.hidden):
        digest = zlib.crc32(f"{tensor.dtype} {list(tensor.shape)}".encode(), digest)
        digest = zlib.crc32(tensor.flatten().view(torch.uint8).numpy().data, digest)
    return f"{digest:08x}"


def _before_supervised(chat: TokenizedChat) -> Tensor:
    """Bool `[T]`: the positions whose logits predict a supervised token."""
    before = torch.zeros(len(chat.tokens), dtype=torch.bool)
    positions = deciding(torch.nonzero(torch.from_numpy(chat.supervised))[:, 0])
    before[positions[positions >= 0]] = True  # nothing decides the first token
    return before


def _padding_groups(lengths: list[int]) -> list[list[int]]:
    """Group indices of like lengths, so that right-padding wastes little."""
    groups: list[list[int]] = []
    total = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups:
            longest = lengths[groups[-1][0]]
            if longest * (len(groups[-1]) + 1) <= PADDING_WASTE * (total + lengths[index]):
                groups[-1].append(index)
                total += lengths[index]
                continue
        groups.append([index])
        total = lengths[index]
    return groups
