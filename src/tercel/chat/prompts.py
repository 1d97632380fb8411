"""Prompts that are to be answered: read from several sources, known by ids, in an order that batches well."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from tercel.chat.conversation import Conversation
from tercel.chat.readers import read_conversations, read_records

WINDOW = 8  # how many times what is in flight is put in order at once


def read_prompts(
    sources: Sequence[str | Path], limit: int | None = None, notes: list[str] | None = None
) -> list[Conversation]:
    """The conversations of all sources, one after the other; `limit` and `notes` as in `read_records`, the limit for
    each source."""
    return [conversation for source in sources for conversation in read_conversations(source, limit, notes)]


def answered_ids(files: Iterable[str | Path], notes: list[str] | None = None) -> set[str]:
    """The ids of all rows of files with answers, whatever their format."""
    return {record.id for file in files for record in read_records(file, notes=notes)}


def with_unique_ids(prompts: Iterable[Conversation]) -> list[Conversation]:
    """Ids are the keys of a resumed run; a repeated one gets `~2`, `~3`, … in the order of reading."""
    used: set[str] = set()
    result = []
    for conversation in prompts:
        id, count = conversation.id, 1
        while id in used:
            count += 1
            id = f"{conversation.id}~{count}"
        used.add(id)
        result.append(replace(conversation, id=id))
    return result


def without(prompts: Sequence[Conversation], ids: Collection[str]) -> list[Conversation]:
    """The prompts whose ids are not among these."""
    return [conversation for conversation in prompts if conversation.id not in ids]


def batched(prompts: Sequence[Conversation], in_flight: int) -> list[Conversation]:
    """The prompts, those of like length together: they are run in one block, and rows of a batch hold about as much.

    Within a window of a few batches only, so that what is answered at any time is a fair sample of all, and the longest
    first, so that the last ones to be answered are short.
    """
    size = WINDOW * in_flight
    windows = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    return [conversation for window in windows for conversation in sorted(window, key=_length, reverse=True)]


def _length(conversation: Conversation) -> int:
    """Characters up to the end of the first question."""
    total = 0
    for message in conversation.messages:
        total += len(message.content)
        if message.role == "user":
            break
    return total
