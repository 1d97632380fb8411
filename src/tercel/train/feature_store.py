"""What a target gave for tokenised chats, kept in files: made once (`make_features`), read by any number of runs.

A folder holds `features.json`, which says of which target, layers and template they are, and shards: safetensors with
the rows of some chats one after another, and where each chat's begin. A shard is whole or not there.

Shape legend: N rows of a shard, one a token; U of them before a supervised token; n layers, K target's hidden size.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tercel.chat import dates
from tercel.chat.conversation import TokenizedChat
from tercel.chat.identity import template_digest
from tercel.errors import TercelError
from tercel.files import atomic_file, write_json
from tercel.locks import OURS
from tercel.reading import UnreadableError, check_utf8, parse_json, read_json, short
from tercel.target_model.protocol import TargetModel
from tercel.train.encoding import Encoded, before_supervised
from tercel.train.packing import PACKINGS, Packing

MANIFEST = "features.json"
FORMAT = 1
_SHARD = re.compile(r"shard-(\d{6,})\.safetensors")
_INDEX = "chats"
_KEY = "S12"  # of a chat
# of its place: the shard's number, the first and number of its rows in features and hidden states, their checksum
_COLUMNS = 6
_AGAIN = "remove it and run `tercel features` again, which makes what is missing"


@dataclass(frozen=True)
class FeaturesOf:
    """What features hang on besides the chats. layers: whose inputs they are. dtype: in which the target computed.
    rendered_at: what the chats' template took for now, if it writes the date."""

    target: str
    fingerprint: str
    dtype: str
    layers: tuple[int, ...]
    width: int
    store: str
    template: str | None
    rendered_at: str | None = None

    @classmethod
    def those(
        cls, target: TargetModel, layers: Sequence[int], store: str, rendered_at: str | None = None
    ) -> FeaturesOf:
        tokenizer = target.tokenizer_or_none
        return cls(
            target=target.source.name,
            fingerprint=target.fingerprint,
            dtype=str(target.dtype).removeprefix("torch."),
            layers=tuple(layers),
            width=target.hidden_size,
            store=store,
            template=None if tokenizer is None or not tokenizer.chat_template else template_digest(tokenizer),
            rendered_at=rendered_at,
        )

    def misfit(self, wanted: FeaturesOf) -> str:
        """How they differ from those that are wanted, and what to do, as a clause; "" if they do not. The target's name
        and the date are no matter: other weights have another fingerprint, other dates other chats."""
        mine, theirs = asdict(self), asdict(wanted)
        differ = (name for name in mine if name not in ("target", "rendered_at") and mine[name] != theirs[name])
        return next((_clause(name, mine[name], theirs[name]) for name in differ), "")

    def bytes_of(self, tokens: int, taught: int) -> int:
        """What features of so many tokens take on the disk, `taught` of them before a supervised one."""
        packing = PACKINGS[self.store]
        return tokens * packing.bytes_of(len(self.layers), self.width) + taught * packing.bytes_of(1, self.width)


class FeatureStore:
    """A folder of features, open to be read. Memory holds where each chat's are (60 bytes a chat); shards are opened as
    they are needed.

    damaged: shards that cannot be read, as if they were not there; next_shard: the number of the next one.
    Raises `TercelError` if the folder holds no features.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.of = _read_manifest(folder)
        self._packing: Packing = PACKINGS[self.of.store]
        self.damaged: list[Path] = []
        self.next_shard = 0
        self._open: tuple[int, Any] | None = None
        keys: list[np.ndarray] = []
        places: list[np.ndarray] = []
        for number, file in _shards(folder):
            self.next_shard = number + 1
            try:
                with safe_open(file, framework="pt") as stored:
                    index = parse_json((stored.metadata() or {})[_INDEX])
                here = np.array([(number, *rest) for _, *rest in index], np.int64).reshape(len(index), _COLUMNS)
                keys.append(np.array([bytes.fromhex(key) for key, *_ in index], _KEY))
                places.append(here)
            except (SafetensorError, OSError, UnreadableError, LookupError, TypeError, ValueError, OverflowError):
                self.damaged.append(file)
        together = np.concatenate([np.empty(0, _KEY), *keys])
        order = np.argsort(together, kind="stable")
        self._keys = together[order]
        self._places = np.concatenate([np.empty((0, _COLUMNS), np.int64), *places])[order]

    def __contains__(self, chat: TokenizedChat) -> bool:
        return self._find(chat) is not None

    def require_of(self, target: TargetModel, layers: Sequence[int]) -> None:
        """Raises `TercelError` if these are not the features of this target's `layers`."""
        if problem := self.of.misfit(FeaturesOf.those(target, layers, self.of.store)):
            raise TercelError(f"the features in {self.folder} are {problem}")

    def require(self, chats: Iterable[TokenizedChat], *, all_tokens: bool = False) -> None:
        """Raises `TercelError` if the features of any of these are not there. all_tokens: with last hidden states of
        prompts."""
        missing = [(chat.whole() if all_tokens else chat) in self for chat in chats].count(False)
        if missing:
            damaged = f" ({len(self.damaged)} of its shards are damaged)" if self.damaged else ""
            what, so = ("features of all tokens", "--all-tokens, ") if all_tokens else ("features", "")
            raise TercelError(
                f"{self.folder} lacks the {what} of {missing:,} of the conversations{damaged}; run `tercel features` "
                f"with {so}the same data, template arguments and --max-length, and it makes what is missing"
            )

    def read(self, chat: TokenizedChat, dtype: torch.dtype) -> Encoded:
        """What the target gave for a chat that is there, in `dtype`. Raises `TercelError` if it is damaged."""
        found = self._find(chat)
        if found is None:
            raise TercelError(f"{self.folder} lacks the features of conversation {short(chat.id)}; {_AGAIN}")
        number, row, tokens, taught_row, taught, checksum = found.tolist()
        kept = before_supervised(chat)[: tokens - 1]  # of all tokens
        file, names = shard_file(self.folder, number), self._packing.parts
        try:
            stored = self._shard(number)
            parts = [stored.get_slice(f"features{name}")[row : row + tokens] for name in names]
            parts += [stored.get_slice(f"hidden{name}")[taught_row : taught_row + taught] for name in names]
        except (SafetensorError, OSError) as error:
            raise TercelError(f"{file} cannot be read ({error}); {_AGAIN}") from error
        if _checksum(parts) != checksum:
            raise TercelError(f"{file} is damaged: conversation {short(chat.id)} is not what was written; {_AGAIN}")
        width, half = self.of.width, len(names)
        hidden = [part if taught == int(kept.sum()) else part[kept] for part in parts[half:]]
        return Encoded(self._packing.unpack(parts[:half], width, dtype), self._packing.unpack(hidden, width, dtype))

    def _find(self, chat: TokenizedChat) -> np.ndarray | None:
        """Its place, or that of the same tokens all supervised, which has what it needs."""
        for one in (chat, chat.whole()):
            key = np.array(key_of(one), _KEY)
            at = int(np.searchsorted(self._keys, key))
            if at < len(self._keys) and self._keys[at] == key:
                return self._places[at]
        return None

    def _shard(self, number: int) -> Any:
        """Of one shard the file stays open: chats of a batch may lie together."""
        if self._open is None or self._open[0] != number:
            self._open = number, safe_open(shard_file(self.folder, number), framework="pt")
        return self._open[1]


def open_or_new(folder: Path, of: FeaturesOf) -> FeatureStore | None:
    """The features in a folder that is to be filled; None if there are none yet.

    Raises `TercelError` if they are others than `of`, or the folder is somebody else's.
    """
    check_utf8(folder)
    if (folder / MANIFEST).exists():
        store = FeatureStore(folder)
        if problem := store.of.misfit(of):
            raise TercelError(f"the features in {folder} are {problem}, or choose another --out")
        return store
    if folder.exists() and (not folder.is_dir() or not all(f.name.startswith(OURS) for f in folder.iterdir())):
        raise TercelError(f"{folder} is not empty and holds no features; choose another --out")
    return None


def recorded_moment(folder: Path) -> datetime | None:
    """What the template took for now in the features of a folder, if it writes the date and there are any."""
    if not (folder / MANIFEST).exists():
        return None
    return dates.parse_moment({dates.RECORD: _read_manifest(folder).rendered_at})


def write_manifest(folder: Path, of: FeaturesOf) -> None:
    """To a folder that this process holds."""
    write_json(folder / MANIFEST, {"format": FORMAT, **asdict(of)}, held=True)


def write_shard(
    folder: Path, number: int, store: str, chats: Sequence[TokenizedChat], encoded: Sequence[Encoded], layers: int
) -> None:
    """Write what the target gave for some chats. Raises `TercelError` if the disk is full."""
    packing = PACKINGS[store]
    index: list[list[Any]] = []
    parts: list[tuple[list[Tensor], list[Tensor]]] = []
    row = taught_row = 0
    for chat, one in zip(chats, encoded, strict=True):
        packed = packing.pack(one.features.cpu(), layers), packing.pack(one.hidden.cpu(), 1)
        tokens, taught = len(one.features), len(one.hidden)
        index.append([key_of(chat).hex(), row, tokens, taught_row, taught, _checksum([*packed[0], *packed[1]])])
        parts.append(packed)
        row, taught_row = row + tokens, taught_row + taught
    tensors = {
        f"{name}{part}": torch.cat([packed[place][at] for packed in parts])
        for place, name in enumerate(("features", "hidden"))
        for at, part in enumerate(packing.parts)
    }
    with atomic_file(shard_file(folder, number), held=True) as partial:
        save_file(tensors, partial, metadata={_INDEX: json.dumps(index)})


def shard_file(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:06d}.safetensors"


def key_of(chat: TokenizedChat) -> bytes:
    """Of its tokens, and of which are supervised."""
    digest = hashlib.sha256(np.asarray(chat.tokens, dtype=np.int64).tobytes())
    digest.update(np.asarray(chat.supervised, dtype=bool).tobytes())
    return digest.digest()[:12]


def _shards(folder: Path) -> list[tuple[int, Path]]:
    found = ((_SHARD.fullmatch(file.name), file) for file in folder.iterdir())
    return sorted((int(match[1]), file) for match, file in found if match)


def _read_manifest(folder: Path) -> FeaturesOf:
    file = folder / MANIFEST
    if not file.is_file():
        raise TercelError(f"{folder} holds no features; make them with `tercel features`")
    told = read_json(file, "make the features again with `tercel features`")
    if told.get("format") != FORMAT:
        raise TercelError(f"{file} is of another version ({short(told.get('format'))}); make the features again")
    try:
        of = FeaturesOf(**{name: told[name] for name in FeaturesOf.__dataclass_fields__})
        layers = tuple(int(layer) for layer in of.layers)
        PACKINGS[of.store], int(of.width)
    except (KeyError, TypeError, ValueError) as error:
        raise TercelError(f"{file} is not what `tercel features` writes; make the features again") from error
    return replace(of, layers=layers)


def _clause(name: str, has: Any, wanted: Any) -> str:
    said = {
        "fingerprint": "of a target with other weights or settings; make them with this one",
        "template": "of another chat template, or other special tokens; make them with this target's",
        "layers": f"of layers {_list(has)}, not {_list(wanted)}; give the same feature-layers to both",
        "dtype": f"computed in {has}, not {wanted}; give the same --dtype to both",
        "store": f"kept as {has}, not {wanted}; give the same --store",
    }
    return said.get(name) or f"of {name} {short(has)}, not {short(wanted)}; make them with this target"


def _list(layers: Any) -> str:
    return ", ".join(map(str, layers)) if isinstance(layers, list | tuple) else short(layers)


def _checksum(parts: Sequence[Tensor]) -> int:
    """Of the stored bytes, their types and shapes."""
    digest = 0
    for tensor in parts:
        digest = zlib.crc32(f"{tensor.dtype} {list(tensor.shape)}".encode(), digest)
        digest = zlib.crc32(tensor.contiguous().flatten().view(torch.uint8).numpy().data, digest)
    return digest
