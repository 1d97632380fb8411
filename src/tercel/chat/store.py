"""Token rows on disk, read one at a time: a data set may be larger than memory."""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np

from tercel.chat.conversation import TokenizedChat
from tercel.errors import TercelError

_TOKEN = np.dtype(np.int32).itemsize


class ChatStore(Sequence[TokenizedChat]):
    """The rows that were added, in order. They lie in a file without a name, in the system's folder for temporary files
    (`TMPDIR`), which goes with the process; memory holds 16 bytes a row.

    May be read in several threads at once.
    """

    def __init__(self) -> None:
        try:
            self._file = tempfile.TemporaryFile(prefix="tercel-", buffering=1 << 20)  # noqa: SIM115 (lives as long)
        except OSError as error:
            raise _no_room(error) from error
        self._ends = array("q", [0])  # where each row's bytes end: its id, tokens and mask
        self._lengths = array("q")  # in tokens
        self._written = True  # whether the file has all of them

    def add(self, chat: TokenizedChat) -> None:
        """Raises `TercelError` if the disk is full."""
        id = chat.id.encode("utf-8", "surrogatepass")
        try:
            for part in (id, np.asarray(chat.tokens, np.int32), np.asarray(chat.supervised, np.bool_)):
                self._file.write(part)
        except OSError as error:
            raise _no_room(error) from error
        self._ends.append(self._ends[-1] + len(id) + (_TOKEN + 1) * len(chat))
        self._lengths.append(len(chat))
        self._written = False

    def __len__(self) -> int:
        return len(self._lengths)

    @overload
    def __getitem__(self, place: int) -> TokenizedChat: ...
    @overload
    def __getitem__(self, place: slice) -> list[TokenizedChat]: ...
    def __getitem__(self, place: int | slice) -> TokenizedChat | list[TokenizedChat]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        if not -len(self) <= place < len(self):
            raise IndexError(place)
        return self._read(place % len(self))

    def __iter__(self) -> Iterator[TokenizedChat]:
        return (self._read(place) for place in range(len(self)))

    def _read(self, place: int) -> TokenizedChat:
        start, end, length = self._ends[place], self._ends[place + 1], self._lengths[place]
        try:
            if not self._written:
                self._file.flush()
                self._written = True
            stored = os.pread(self._file.fileno(), end - start, start)
        except OSError as error:
            raise _no_room(error) from error
        at = len(stored) - (_TOKEN + 1) * length
        tokens = np.frombuffer(stored, np.int32, length, at)
        return TokenizedChat(
            stored[:at].decode("utf-8", "surrogatepass"),
            tokens.copy(),  # as aligned and writable as others
            np.frombuffer(stored, np.bool_, length, at + _TOKEN * length).copy(),
        )


class SomeChats(Sequence[TokenizedChat]):
    """Those of `chats` that `places` names, in its order, each cut to `length` tokens; read when they are asked for.
    whole: with every token supervised that can be."""

    def __init__(
        self, chats: Sequence[TokenizedChat], places: Sequence[int], length: int, *, whole: bool = False
    ) -> None:
        self._chats, self._length, self._whole = chats, length, whole
        self._places = array("q", places)

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, place: int) -> TokenizedChat: ...
    @overload
    def __getitem__(self, place: slice) -> list[TokenizedChat]: ...
    def __getitem__(self, place: int | slice) -> TokenizedChat | list[TokenizedChat]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        chat = self._chats[self._places[place]].cut(self._length)
        return chat.whole() if self._whole else chat


def _no_room(error: OSError) -> TercelError:
    return TercelError(
        f"the tokenised conversations cannot be kept in {tempfile.gettempdir()}: {error.strerror or error}; "
        "free space, or name another folder as TMPDIR"
    )
