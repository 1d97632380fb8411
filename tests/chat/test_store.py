"""Rows on disk: as they were, cut, from several threads; and memory that does not grow with the data."""

from __future__ import annotations

import json
import tempfile
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tercel.chat import TokenizedChat, lines, load_chats
from tercel.chat.store import ChatStore, SomeChats
from tercel.errors import TercelError
from tercel.train.batches import data_digest, plan_batches, split, supervised_counts, usable

from .tokenizers_for_tests import make_tokenizer


def same(one: TokenizedChat, other: TokenizedChat) -> bool:
    equal = np.array_equal(one.tokens, other.tokens) and np.array_equal(one.supervised, other.supervised)
    return equal and one.id == other.id and one.tokens.dtype == np.int32 and one.supervised.dtype == np.bool_


def rows(count: int) -> list[TokenizedChat]:
    random = np.random.default_rng(0)
    sizes = [int(n) for n in random.integers(0, 40, count)]
    return [
        TokenizedChat.of(f"é{i}\ud800", random.integers(0, 2**31 - 1, n), random.random(n) < 0.5)
        for i, n in enumerate(sizes)
    ]


def test_rows_come_back_as_they_were() -> None:
    chats, store = rows(50), ChatStore()
    for place, chat in enumerate(chats):
        store.add(chat)
        assert same(store[place // 2], chats[place // 2])  # read between writes
    assert len(store) == 50
    assert all(map(same, store, chats))
    assert same(store[-1], chats[-1])
    assert all(map(same, store[3:40:7], chats[3:40:7]))
    with pytest.raises(IndexError):
        store[50]
    some = SomeChats(store, [7, 3, 49], 5)
    assert [chat.id for chat in some] == [chats[i].id for i in (7, 3, 49)]
    assert all(same(one, chats[i].cut(5)) for one, i in zip(some[:2], (7, 3), strict=True))
    store[0].tokens[:] = 0  # a copy of one's own
    with ThreadPoolExecutor(8) as threads:
        assert all(same(one, chats[i % 50]) for i, one in enumerate(threads.map(lambda i: store[i % 50], range(400))))


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(TercelError, match=r"gone: No such file .* name another folder as TMPDIR"):
        ChatStore()


def peak(path: Path) -> int:
    """The most memory while a data set is read and a run over it planned, in bytes."""
    tokenizer = make_tokenizer("chatml")
    tracemalloc.start()
    chats, _ = load_chats([path], tokenizer, max_length=4096)
    parts = split(usable(chats, 4096, len(tokenizer)), 0.1)
    supervised_counts(parts.train, len(tokenizer))
    data_digest(parts.train)
    plan_batches([len(chat) for chat in parts.train], 4096, 1, 0)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most


def test_memory_does_not_grow_with_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "BLOCK", 1 << 14)  # of a file: less than the smaller one has
    peaks = []
    for count in (20, 200):
        path = tmp_path / f"{count}.jsonl"
        told = [{"prompt": f"{i} " + "why " * 300, "completion": "so " * 700} for i in range(count)]
        path.write_text("".join(json.dumps(row) + "\n" for row in told))
        peaks.append(peak(path))
    chats, _ = load_chats([path], make_tokenizer("chatml"), max_length=4096)
    more = sum(chat.tokens.nbytes + chat.supervised.nbytes for chat in chats[20:])
    assert more > 500_000  # what 180 more rows take in memory
    assert peaks[1] - peaks[0] < more / 10
