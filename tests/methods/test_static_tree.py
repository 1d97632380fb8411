"""Trees of one form: which paths of ranks they have, and the tokens that come to stand there."""

from __future__ import annotations

import itertools

import pytest
import torch

from tercel.draft.shape import TreeShape
from tercel.methods.static_tree import Static, levels_of, likeliest_paths, node_count

WHOLE = TreeShape(2, 3, 15)


def test_with_room_for_all_it_is_the_whole_cartesian_product() -> None:
    products = {path for depth in (1, 2, 3) for path in itertools.product(range(2), repeat=depth)}
    assert set(likeliest_paths(WHOLE)) == set(likeliest_paths(TreeShape(2, 3, 99))) == products
    assert node_count(TreeShape(2, 3, 99)) == 15


@pytest.mark.parametrize("shape", [TreeShape(10, 5, 64), TreeShape(3, 4, 9), TreeShape(4, 2, 6), TreeShape.chain(5)])
def test_without_it_the_likeliest_come_first(shape: TreeShape) -> None:
    paths = likeliest_paths(shape)
    assert len(paths) == len(set(paths)) == node_count(shape) - 1 == shape.nodes - 1
    assert max(map(len, paths)) <= shape.depth
    for place, path in enumerate(paths):
        assert max(path) < shape.top_k
        assert len(path) == 1 or path[:-1] in paths[:place]  # a tree
        assert path[-1] == 0 or (*path[:-1], path[-1] - 1) in paths[:place]  # no child before a likelier sibling
    if shape == TreeShape(10, 5, 64):  # wide where little is lost, deep only along the likeliest
        by_depth = [sum(len(path) == depth for path in paths) for depth in range(1, 6)]
        assert by_depth[0] == 10
        assert max(sum(path) for path in paths if len(path) == 5) <= 1


def test_tokens_stand_where_their_ranks_say() -> None:
    """A token here is told by its path: child `r` of the node with number `n` has number `10 n + r + 1`."""
    rows, shape = 2, TreeShape(3, 3, 12)
    growth = Static(shape, rows, torch.device("cpu"))
    frontier = torch.tensor([[0], [5]])  # the roots
    for depth in range(1, 4):
        children = 10 * frontier[..., None] + torch.arange(1, 4)
        found = growth.level(children, torch.zeros(children.shape), last=depth == 3)
        assert (found is None) == (depth == len(levels_of(shape)))
        if found is None:
            break
        frontier = found.tokens
        assert found.ancestors.sum(-1).eq(depth).all()  # the whole path, itself included
    proposals = growth.trees([0, 5], [3, 1])
    for root, proposal, depth in zip((0, 5), proposals, (3, 1), strict=True):
        tree = proposal.tree
        wanted = {path for path in likeliest_paths(shape) if len(path) <= depth}
        got = set()
        for token, parent in zip(tree.token_list[1:], tree.parent_list[1:], strict=True):
            assert token // 10 == tree.token_list[parent]
            digits = tuple(int(digit) - 1 for digit in str(token).removeprefix(str(root) if root else ""))
            got.add(digits)
        assert got == wanted
