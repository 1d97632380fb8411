"""How large a draft is: here, in the launch lines of engines, and as a server tells it."""

from __future__ import annotations

from dataclasses import dataclass

from tercel import limits
from tercel.errors import TercelError
from tercel.reading import short

CHAIN_DEPTH = 4  # drafted tokens of a chain, where nothing else is said


@dataclass(frozen=True)
class TreeShape:
    """top_k children a node and frontier width `K`; depth: deepest level; nodes: tree size `N`, root included, which is
    what is verified at once. With top_k 1 it is a chain.

    Raises `TercelError` for a shape without a draft.
    """

    top_k: int
    depth: int
    nodes: int

    def __post_init__(self) -> None:
        fine = 1 <= self.top_k <= limits.DRAFT_TOP_K and 1 <= self.depth <= limits.DRAFT_DEPTH
        if not fine or not 2 <= self.nodes <= limits.DRAFT_NODES:
            raise TercelError(
                f"a draft tree has top-k 1 to {limits.DRAFT_TOP_K}, depth 1 to {limits.DRAFT_DEPTH} and 2 to "
                f"{limits.DRAFT_NODES} nodes, not {short(self.top_k)}, {short(self.depth)} and {short(self.nodes)}"
            )

    @classmethod
    def chain(cls, depth: int = CHAIN_DEPTH) -> TreeShape:
        return cls(top_k=1, depth=depth, nodes=depth + 1)

    def beside(self, trees: bool) -> TreeShape:
        """Itself, or the chain as deep where a target verifies no `trees`."""
        return self if trees else TreeShape.chain(self.depth)

    def __str__(self) -> str:
        if self.top_k == 1:
            return f"a chain of {self.depth}"
        return f"a tree of {self.nodes} nodes, top-k {self.top_k}, depth {self.depth}"


PAPER = TreeShape(10, 8, 60)  # of the paper's 8 B model, on a GPU, where 60 nodes cost about what one does
SIZED = "trees as large as pays"  # what a draft without a shape is called
WIDEST = TreeShape(10, 12, 64)  # how far drafts may grow whose size is a matter of cost


def parse_shape(text: str) -> TreeShape | None:
    """`10x8x60` (top-k, depth, nodes) or `chain:4` to the shape; `auto` to None: as large as pays.

    Raises `TercelError` for anything else.
    """
    if text == "auto":
        return None
    kind, _, length = text.partition(":")
    numbers = [length] if kind == "chain" else text.split("x")
    if len(numbers) != (1 if kind == "chain" else 3) or not all(n.isascii() and n.isdecimal() for n in numbers):
        raise TercelError("a tree is auto, TOPKxDEPTHxNODES such as 10x8x60, or chain:LENGTH")
    sizes = [int(number) if len(number) < 20 else limits.COUNT for number in numbers]
    if kind == "chain":
        if not 1 <= sizes[0] <= limits.DRAFT_DEPTH:
            raise TercelError(f"a chain drafts 1 to {limits.DRAFT_DEPTH} tokens, not {short(sizes[0])}")
        return TreeShape.chain(sizes[0])
    return TreeShape(*sizes)
