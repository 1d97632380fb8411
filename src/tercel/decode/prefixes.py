"""What was computed for the beginnings of texts, for requests that begin alike: a chat's next turn, a system message
that many share. Bounded in bytes; what was not used for the longest time goes first.

The beginnings are a tree whose edges are tokens. A node holds up to `PIECE` of them, with what the target's cache and
the proposer keep of them, and ends where two texts part, so nothing is held twice.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tercel.decode.proposer import Proposer
from tercel.errors import TercelError
from tercel.target_model.kept import KeptTokens
from tercel.target_model.protocol import TargetModel

PIECE = 128  # tokens of a node at most: so many are forgotten at a time
WORTH_WAITING = 32  # tokens whose forward takes longer than reading the weights once more for it
MB = 1 << 20
PREFIX_MB = 512  # held by what answers people, if nothing else is said

Taken = Callable[[int], tuple[KeptTokens, KeptTokens | None]]


@dataclass(eq=False)
class _Node:
    """target, proposer: what they keep of its tokens."""

    tokens: tuple[int, ...]
    target: KeptTokens | None
    proposer: KeptTokens | None
    parent: _Node | None
    children: dict[int, _Node] = field(default_factory=dict)  # by their first token

    @property
    def nbytes(self) -> int:
        return sum(kept.nbytes for kept in (self.target, self.proposer) if kept is not None)

    def lineage(self) -> Iterator[_Node]:
        """Itself and those above it, but for the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


@dataclass(frozen=True)
class Known:
    """What is known of a prompt. tokens: so many the target need not run again; target, proposer: what was kept, piece
    by piece, of these and of as many as the proposer asks for beside them."""

    tokens: int = 0
    target: tuple[KeptTokens, ...] = ()
    proposer: tuple[KeptTokens | None, ...] = ()


class PrefixStore:
    """All that is held, of any number of targets and proposers, each pair for itself. limit: bytes.

    Raises `TercelError` for a limit below 0.
    """

    def __init__(self, limit: int) -> None:
        if limit < 0:
            raise TercelError(f"prefixes can be held in 0 bytes or more, not in {limit}")
        self.limit, self.held = limit, 0
        self.changing = False  # left on by whoever was interrupted
        self._roots: dict[tuple[TargetModel, Proposer], _Node] = {}
        self._order: OrderedDict[_Node, None] = OrderedDict()  # the longest unused first, a node behind all below it

    def of(self, target: TargetModel, proposer: Proposer) -> Prefixes | None:
        """Those of this pair; None where one of the two cannot go on from what was kept, or nothing may be."""
        if self.changing:
            self.clear()
        if not self.limit or not target.resumes or proposer.rerun is None:
            return None
        root = self._roots.setdefault((target, proposer), _Node((), None, None, None))
        return Prefixes(self, root, proposer.rerun)

    def clear(self) -> None:
        for root in self._roots.values():
            root.children.clear()
        self._order.clear()
        self.held, self.changing = 0, False

    def use(self, node: _Node) -> None:
        for used in node.lineage():
            self._order.move_to_end(used)

    def add(self, parent: _Node, tokens: tuple[int, ...], target: KeptTokens, own: KeptTokens | None) -> _Node | None:
        """A copy below `parent`, which is in use; None if there is no room for it, whatever else is forgotten."""
        node = _Node(tokens, target, own, parent)
        while self.held + node.nbytes > self.limit:
            oldest = next(iter(self._order), parent)
            if oldest is parent:
                return None
            self._forget(oldest)
        node.target, node.proposer = target.copied(), None if own is None else own.copied()
        parent.children[tokens[0]] = node
        self.held += node.nbytes
        self._order[node] = None
        self.use(node)
        return node

    def split(self, node: _Node, count: int) -> _Node:
        """Let a node of the first `count` tokens stand above the rest; returns it."""
        assert node.parent is not None
        assert node.target is not None
        target, own = node.target, node.proposer
        upper = _Node(
            node.tokens[:count],
            target.part(0, count).copied(),
            None if own is None else own.part(0, count).copied(),
            node.parent,
        )
        node.target = target.part(count, len(target)).copied()
        node.proposer = None if own is None else own.part(count, len(own)).copied()
        node.tokens, node.parent = node.tokens[count:], upper
        upper.children[node.tokens[0]] = node
        assert upper.parent is not None
        upper.parent.children[upper.tokens[0]] = upper
        self._order[upper] = None
        self.use(upper)
        return upper

    def _forget(self, leaf: _Node) -> None:
        assert leaf.parent is not None
        assert not leaf.children
        del leaf.parent.children[leaf.tokens[0]], self._order[leaf]
        self.held -= leaf.nbytes


class Prefixes:
    """The beginnings that one target and one proposer have had. rerun: as of the proposer. room: so many tokens of a
    text at most find room, as far as that has shown."""

    def __init__(self, store: PrefixStore, root: _Node, rerun: int) -> None:
        self._store, self._root, self._rerun = store, root, rerun
        self.room = sys.maxsize

    def known(self, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt need not be run: at most all but the last, whose output is wanted."""
        return max(0, self._usable(prompt, self._path(tuple(prompt))) - self._rerun)

    def take(self, prompt: Sequence[int]) -> Known:
        """What is known of a prompt, which is used now."""
        path = self._path(tuple(prompt))
        tokens = self._usable(prompt, path)
        if tokens <= self._rerun:
            return Known()
        self._store.changing = True
        self._store.use(path[-1][0])
        self._store.changing = False
        target, proposer, start = list[KeptTokens](), list[KeptTokens | None](), 0
        for node, _ in path:
            assert node.target is not None
            end = min(tokens, start + len(node.tokens))
            own = min(tokens - self._rerun, start + len(node.tokens))
            if own > start:
                target.append(node.target.part(0, own - start))
            proposer.append(None if node.proposer is None else node.proposer.part(0, end - start))
            start = end
            if start == tokens:
                break
        return Known(tokens - self._rerun, tuple(target), tuple(proposer))

    def keep(self, tokens: Sequence[int], taken: Taken) -> None:
        """Keep what is there of a text, as far as it is not known and there is room. taken: gives what the target and
        the proposer keep of its tokens from some place on, as far as they do; its end may be missing."""
        self._store.changing = True
        self._keep(tuple(tokens), taken)
        self._store.changing = False

    def _keep(self, tokens: tuple[int, ...], taken: Taken) -> None:
        path = self._path(tokens)
        known, node = sum(count for _, count in path), self._root
        if path:
            node, count = path[-1]
            self._store.use(node)
            if known < len(tokens) and count < len(node.tokens):
                node = self._store.split(node, count)
        if known == len(tokens):
            return
        target, proposer = taken(known)
        count = len(target) if proposer is None else min(len(target), len(proposer))
        for start in range(0, count, PIECE):
            end = min(start + PIECE, count)
            own = None if proposer is None else proposer.part(start, end)
            piece = tokens[known + start : known + end]
            added = self._store.add(node, piece, target.part(start, end), own)
            if added is None:
                self.room = known + start
                return
            node = added
        self.room = max(self.room, known + count)

    def _usable(self, prompt: Sequence[int], path: Sequence[tuple[_Node, int]]) -> int:
        return min(sum(count for _, count in path), len(prompt) - 1 + self._rerun)

    def _path(self, tokens: tuple[int, ...]) -> list[tuple[_Node, int]]:
        """Nodes from the top that hold the text's first tokens, and how many of each: all but of the last."""
        path: list[tuple[_Node, int]] = []
        node, start = self._root, 0
        while start < len(tokens) and (child := node.children.get(tokens[start])) is not None:
            count = shared(child.tokens, tokens[start : start + len(child.tokens)])
            path.append((child, count))
            node, start = child, start + count
            if count < len(child.tokens):
                break
        return path


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens two texts have in common."""
    alike, most = 0, min(len(one), len(other))
    while alike < most:
        middle = (alike + most + 1) // 2
        if one[alike:middle] == other[alike:middle]:
            alike = middle
        else:
            most = middle - 1
    return alike
