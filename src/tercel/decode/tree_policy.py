"""How large the drafts of a step should be: as large as pays.

A step of B rows yields a token each and, with N nodes a row, the chance of every drafted node besides; it takes the
time of a forward over B x N tokens and of drafting. Over many steps the most tokens a second come of letting each step
have what exceeds its price: a drafted node, a head's level, a draft at all are worth

    tokens expected - price * milliseconds,      price: tokens a millisecond, of the steps so far

and the price is never below that of decoding without drafts, so that nothing is drafted which that would outdo.

What is chosen depends on times, and is no part of the text: verification makes the same of every tree.

Shapes, as suffixes of names: B rows, P nodes of a level that were fed to the head, C children proposed for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tercel.decode.chances import Chances, Ints
from tercel.decode.costs import LiveCosts
from tercel.decode.rising import Floats
from tercel.decode.types import Committed, Proposal

LOOKED_AT = 4  # children of a node that a level is expected to bring
MEMORY = 1 / 64  # share of a step in the price
HOPE = 1.2  # the first price, over that of decoding without drafts
NEWS, DOUBT = 1 / 16, 1 / 4  # share of a step in what drafting brings: usually, and of a probe
PAUSE, LONGEST_PAUSE = 4, 64  # steps without drafts before one is tried again


class TreePolicy:
    """Sizes the drafts of one loop. most: nodes of a tree, root included, that are thought of."""

    def __init__(self, costs: LiveCosts, chances: Chances, most: int) -> None:
        self.costs, self.chances, self.most = costs, chances, most
        self._tokens, self._time = HOPE, 1.0  # of recent steps, in steps without drafts
        self._gain = 0.25  # tokens a row that drafting brings, beyond what it costs
        self._pause, self._left = PAUSE, 0
        self._children = np.tile(0.5 ** np.arange(1, LOOKED_AT + 1), (16, 1))  # by depth: chances of the likeliest
        self.step = Step(self, (False,), 1, False)

    def begin(self, sampled: Sequence[bool], context: int) -> bool:
        """A step of so many rows begins; returns whether anything is to be drafted."""
        idle = self._gain < 0
        self.step = Step(self, tuple(sampled), context, probe=idle)
        self._left -= idle
        return not idle or self._left < 0

    def price(self, plain_ms: float) -> float:
        """Tokens a row for a millisecond, where a step without drafts takes `plain_ms`."""
        return max(1.0, self._tokens / self._time) / plain_ms

    def drafted(self, gain: float) -> None:
        """A step with drafts gave so many tokens a row more than steps without would have given in its time."""
        idle = self._gain < 0
        self._gain += (DOUBT if idle else NEWS) * (float(np.clip(gain, -1, 2)) - self._gain)
        if self._gain >= 0:
            self._pause = PAUSE
        else:
            self._pause = min(2 * self._pause, LONGEST_PAUSE) if idle else PAUSE
            self._left = self._pause

    def ended(self, tokens: float, relative_ms: float) -> None:
        """A step gave so many tokens a row, in so much of the time of a step without drafts."""
        self._tokens += MEMORY * (tokens - self._tokens)
        self._time += MEMORY * (relative_ms - self._time)

    def children(self, depth: int) -> Floats:
        """Chances of the likeliest children of a node at `depth`, on average."""
        return self._children[min(depth, 15)]

    def met_children(self, depth: int, chances_NC: Floats) -> None:
        """Nodes at `depth` have children of such chances, the likeliest first."""
        found = chances_NC[:, :LOOKED_AT].mean(0)
        self._children[min(depth, 15), : len(found)] += MEMORY * (found - self._children[min(depth, 15), : len(found)])


@dataclass
class Step:
    """One step: who is in it, what it costs, and how its drafts grow.

    sampled: by row, whether its tokens are drawn. context: tokens of the longest. probe: whether drafting has not paid,
    so that a draft only looks how things are: it has a node at least, or nothing would ever be learned.
    """

    policy: TreePolicy
    sampled: tuple[bool, ...]
    context: int
    probe: bool

    def __post_init__(self) -> None:
        rows = len(self.sampled)
        self.curve = self.policy.costs.forward_ms(rows, self.policy.most, self.context)
        self.price = self.policy.price(float(self.curve[0])) * rows  # tokens of all rows for a millisecond
        self.levels = 0.0  # costs of the head's levels so far, by the table
        self.nodes, self.drafted = 1, False
        self._paths: list[Floats] = []  # [B, P*C] a level: chances of whole paths
        self._fed = np.ones((rows, 1))

    @property
    def rows(self) -> int:
        return len(self.sampled)

    # -- drafts that grow level by level

    def grow(self, log_q_BPC: Floats, depth: int, widest: int) -> Ints | None:
        """Children at `depth` of the P nodes that were fed, with the logarithms of the head's probabilities, ordered.

        Returns which of the P*C of each row are to be fed next `[B, K]`, at most `widest`; None where no level pays.
        """
        rows = zip(log_q_BPC, self.sampled, strict=True)
        chances = np.stack([self.policy.chances.of(log_q_PC, depth, sampled) for log_q_PC, sampled in rows])
        self.policy.met_children(depth - 1, chances.reshape(-1, chances.shape[-1]))
        paths = (self._fed[..., None] * chances).reshape(self.rows, -1)
        self._paths.append(paths)
        if not widest:
            return None
        order = np.argsort(-paths, axis=1, kind="stable")[:, : min(widest, self.policy.most - 1)]
        best = np.take_along_axis(paths, order, 1)
        width = self._next_width(best, depth)
        if not width:
            return None
        self.levels += self.policy.costs.table.level_ms(self.rows * width)
        self._fed = best[:, :width]
        return order[:, :width]

    def _next_width(self, best_BK: Floats, depth: int) -> int:
        """How many of the best nodes of this level are worth being fed; 0 if none.

        A level is worth what the tree is with the children that it should bring, beyond what it is without them."""
        known = np.concatenate(self._paths, 1)
        worth = self.worth(known)
        children = self.policy.children(depth)
        width, best_width = 1, 0
        while True:
            width = min(width, best_BK.shape[1])
            hoped = (best_BK[:, :width, None] * children).reshape(self.rows, -1)
            with_level = self.worth(np.concatenate([known, hoped], 1))
            with_level -= self.price * self.policy.costs.level_ms(self.rows * width)
            if with_level > worth:
                worth, best_width = with_level, width
            if width == best_BK.shape[1] or best_BK[:, width].max() * children[0] < self._node_price():
                return best_width
            width *= 2

    def _node_price(self) -> float:
        """Tokens a row that the cheapest further node costs."""
        steps = np.diff(self.curve)
        return float(steps.min(initial=np.inf)) * self.price / self.rows

    # -- what is verified

    def worth(self, paths_BM: Floats) -> float:
        """What the best choice among nodes of such chances is worth."""
        return float(self._values(paths_BM).max())

    def size(self, paths_BM: Floats) -> int:
        """How many nodes of every row are to be verified, roots included: the likeliest ones."""
        return 1 + max(int(self._values(paths_BM).argmax()), int(self.probe and paths_BM.shape[1] > 0))

    def _values(self, paths_BM: Floats) -> Floats:
        """By number of drafted nodes, from none on."""
        most = min(paths_BM.shape[1], len(self.curve) - 1)
        if not most:
            return np.zeros(1)
        likeliest = -np.sort(-paths_BM, axis=1)[:, :most].sum(0)
        gained = np.concatenate([[0.0], np.cumsum(likeliest)])
        return gained - self.price * (self.curve[: most + 1] - self.curve[0])

    def grown(self) -> tuple[Floats, int]:
        """Of what grew: chances `[B, M]`, level by level, and how many nodes are to be verified."""
        paths = np.concatenate(self._paths, 1)
        return paths, self.size(paths)

    def chain_depth(self, most: int) -> int:
        """How many tokens are to be drafted one after another where nothing may be told of them before."""
        each = np.array([[self.policy.chances.blind(d, 0, s) for d in range(1, most + 1)] for s in self.sampled])
        levels = self.policy.costs.level_ms(self.rows) * np.arange(most)
        paths = np.cumprod(each, 1)
        most = min(most, len(self.curve) - 1)
        values = np.cumsum(paths[:, :most].sum(0)) - self.price * (self.curve[1 : most + 1] - self.curve[0])
        values -= self.price * levels[:most]
        depth = int(values.argmax()) + 1 if most else 0
        depth = depth if depth and values[depth - 1] > 0 else int(self.probe)
        self.levels = self.policy.costs.table.level_ms(self.rows) * max(depth - 1, 0)
        return depth

    def choose(self, proposals: Sequence[Proposal]) -> list[Proposal]:
        """What of the proposals is to be verified. Drafts that were drawn stay as they are: how long they may be was
        said before, without a look at them."""
        judged = [p for p in proposals if p.distributions is None]
        if judged:
            paths = [self._path_chances(p, s) for p, s in zip(proposals, self.sampled, strict=True)]
            table = np.zeros((self.rows, max(map(len, paths)) - 1))
            for row, chances in enumerate(paths):
                table[row, : len(chances) - 1] = chances[1:]
            nodes = max([self.size(table), *(len(p.tree) for p in proposals if p.distributions is not None)])
            proposals = [
                p if p.distributions is not None else p.best(chances, nodes)
                for p, chances in zip(proposals, paths, strict=True)
            ]
        self.nodes, self.drafted = max(len(p.tree) for p in proposals), True
        return list(proposals)

    def _path_chances(self, proposal: Proposal, sampled: bool) -> Floats:
        """Of every node of a tree that all of its path is accepted; the root's is 1."""
        tree, chances = proposal.tree, self.policy.chances
        depths, parents = tree.depth_list, tree.parent_list
        paths = np.ones(len(tree))
        if proposal.log_q is None:
            for node in range(1, len(tree)):
                place = tree.children(parents[node]).index(node)
                paths[node] = paths[parents[node]] * chances.blind(depths[node], place, sampled)
            return paths
        own = np.ones(len(tree))
        log_q, levels = proposal.log_q, np.array(depths)
        for depth in range(1, max(depths) + 1):
            at = levels == depth
            own[at] = chances.of(log_q[at], depth, sampled)
        for node in range(1, len(tree)):
            paths[node] = paths[parents[node]] * own[node]
        return paths

    # -- what came of it

    def learn(self, rows: Sequence[int], proposals: Sequence[Proposal], committed: Sequence[Committed]) -> None:
        """The drafts of `rows` of this step, and what was committed."""
        if not rows:
            return
        for row, proposal, known in zip(rows, proposals, committed, strict=True):
            self._learn(proposal, known.tokens, self.sampled[row])
        tokens = sum(len(known.tokens) for known in committed) / len(rows)
        spent = self.curve[self.nodes - 1]
        if self.drafted:
            spent += self.policy.costs.draft_ms(self.rows, self.levels)
            self.policy.drafted(tokens - float(spent / self.curve[0]))
        self.policy.ended(tokens, float(spent / self.curve[0]))

    def _learn(self, proposal: Proposal, tokens: Sequence[int], sampled: bool) -> None:
        """Every child of every node on the accepted path was accepted or not."""
        tree, nodes, hits = proposal.tree, list[int](), list[bool]()
        node: int | None = 0
        for token in tokens:
            assert node is not None
            accepted = tree.child(node, token)
            for child in tree.children(node):
                nodes.append(child)
                hits.append(child == accepted)
            node = accepted
            if node is None:
                break
        chances, depths = self.policy.chances, tree.depth_list
        if proposal.log_q is not None:
            where: Ints = np.array([depths[n] for n in nodes], dtype=np.int64)
            chances.learn(proposal.log_q[nodes], where, np.array(hits, dtype=bool), sampled)
            return
        for node, hit in zip(nodes, hits, strict=True):
            place = tree.children(tree.parent_list[node]).index(node)
            chances.learn_blind(depths[node], place, hit, sampled)
