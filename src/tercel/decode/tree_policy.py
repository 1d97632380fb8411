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
from tercel.decode.draft_tree import DraftTree
from tercel.decode.gate import Gate
from tercel.decode.rising import Floats
from tercel.decode.types import Committed, Proposal

LOOKED_AT = 4  # children of a node that a level is expected to bring
MEMORY = 1 / 64  # share of a step in the price
HOPE = 1.2  # the first price, over that of decoding without drafts


class TreePolicy:
    """Sizes the drafts of one loop. most: nodes of a tree, root included, and what is computed beside it, that are
    thought of."""

    def __init__(self, costs: LiveCosts, chances: Chances, most: int) -> None:
        self.costs, self.chances, self.most = costs, chances, most
        self._tokens, self._time = HOPE, 1.0  # of recent steps, in steps without drafts
        self._gates: dict[int, Gate] = {}  # by the power of two of a step's rows
        self._children = np.tile(0.5 ** np.arange(1, LOOKED_AT + 1), (16, 1))  # by depth: chances of the likeliest
        self.step = Step(self, (False,), 1, False)

    def begin(self, sampled: Sequence[bool], context: int) -> bool:
        """A step of so many rows begins; returns whether anything is to be drafted."""
        gate = self._gate(len(sampled))
        self.step = Step(self, tuple(sampled), context, probe=gate.idle)
        return gate.opens()

    def idle(self, rows: int) -> bool:
        """Whether drafting does not pay for so many rows, so that hardly a step of them has drafts."""
        return self._gate(rows).idle

    def price(self, plain_ms: float) -> float:
        """Tokens a row for a millisecond, where a step without drafts takes `plain_ms`."""
        return max(1.0, self._tokens / self._time) / plain_ms

    def drafted(self, rows: int, gain: float, cost: float) -> None:
        """A step with drafts, of so many rows: as `Gate.learn`."""
        self._gate(rows).learn(gain, cost)

    def ended(self, tokens: float, relative_ms: float) -> None:
        """A step gave so many tokens a row, in so much of the time of a step without drafts."""
        self._tokens += MEMORY * (tokens - self._tokens)
        self._time += MEMORY * (relative_ms - self._time)

    def _gate(self, rows: int) -> Gate:
        return self._gates.setdefault(rows.bit_length(), Gate(rows=rows))

    def children(self, depth: int) -> Floats:
        """Chances of the likeliest children of a node at `depth`, on average."""
        return self._children[min(depth, 15)]

    def met_children(self, depth: int, chances_NC: Floats) -> None:
        """Nodes at `depth` have children of such chances, the likeliest first."""
        found = chances_NC[:, :LOOKED_AT].mean(0)
        known = self.children(depth)[: len(found)]
        known += MEMORY * (found - known)


@dataclass
class Step:
    """One step: who is in it, what it costs, and how its drafts grow.

    sampled: by row, whether its tokens are drawn. context: tokens of each, on average. probe: whether drafting has not
    paid, so that a draft only looks how things are: it has a node at least, or nothing would ever be learned.
    catching_up_ms: what drafting took for the tokens of earlier steps without drafts, which no other step will.
    """

    policy: TreePolicy
    sampled: tuple[bool, ...]
    context: int
    probe: bool
    catching_up_ms: float = 0.0

    def __post_init__(self) -> None:
        rows = len(self.sampled)
        self.curve = self.policy.costs.forward_ms(rows, self.policy.most, self.context)
        self.price = self.policy.price(float(self.curve[0])) * rows  # tokens of all rows for a millisecond
        self.levels = 0.0  # costs of the head's levels so far, by the table
        self.nodes, self.drafted = 1, False
        self._charged = self.price * (self.curve - self.curve[0])  # tokens, by drafted nodes
        self._dearer = float(np.diff(self._charged).min(initial=np.inf)) / rows  # that the cheapest further node costs
        regimes = {regime: [row for row, own in enumerate(self.sampled) if own == regime] for regime in (False, True)}
        self._regimes = {regime: members for regime, members in regimes.items() if members}
        self._fed = np.ones((rows, 1))
        self._paths: list[Floats] = []  # [B, P*C] a level: chances of whole paths
        self._best = np.zeros((rows, 0))  # of whole paths, negative: the likeliest so far, first
        self._sized = False  # whether the drafts grew as large as pays

    @property
    def rows(self) -> int:
        return len(self.sampled)

    # -- drafts that grow level by level

    def grow(self, log_q_BPC: Floats, depth: int, widest: int) -> Ints | None:
        """Children at `depth` of the P nodes that were fed, with the logarithms of the head's probabilities, ordered.

        Returns which of the P*C of each row are to be fed next `[B, K]`, at most `widest`; None where no level pays.
        """
        chances = self._chances(log_q_BPC, depth)
        self.policy.met_children(depth - 1, chances.reshape(-1, chances.shape[-1]))
        paths = (self._fed[..., None] * chances).reshape(self.rows, -1)
        self._paths.append(paths)
        if not widest:
            return None
        order = (-paths).argsort(1, kind="stable")
        ordered = paths[np.arange(self.rows)[:, None], order]
        self._best = np.sort(np.concatenate([self._best, -ordered[:, : self.policy.most]], 1), 1)[:, : self.policy.most]
        best = ordered[:, : min(widest, self.policy.most - 1)]
        width = self._next_width(best, depth)
        if not width:
            return None
        self.levels += self.policy.costs.table.level_ms(self.rows * width)
        self._fed = best[:, :width]
        return order[:, :width]

    def _chances(self, log_q_BPC: Floats, depth: int) -> Floats:
        """That children are accepted if their parents are."""
        of, regimes = self.policy.chances.of, self._regimes
        if len(regimes) == 1:
            return of(log_q_BPC, depth, *regimes)
        chances = np.empty_like(log_q_BPC)
        for sampled, rows in regimes.items():
            chances[rows] = of(log_q_BPC[rows], depth, sampled)
        return chances

    def _next_width(self, best_BK: Floats, depth: int) -> int:
        """How many of the best nodes of this level are worth being fed; 0 if none.

        A level is worth what the tree is with the children that it should bring, beyond what it is without them."""
        children, most = self.policy.children(depth), best_BK.shape[1]
        pays = best_BK.max(0) * children[0] >= self._dearer  # a node's likeliest child
        widths = [1]
        while widths[-1] < most and pays[widths[-1]]:
            widths.append(min(2 * widths[-1], most))
        hoped = -(best_BK[:, : widths[-1], None] * children).reshape(self.rows, -1)
        known, each = self._best.shape[1], len(children)
        with_level = np.zeros((len(widths), self.rows, known + hoped.shape[1]))
        with_level[..., :known] = self._best
        for own, width in zip(with_level, widths, strict=True):
            own[:, known : known + width * each] = hoped[:, : width * each]
        with_level.sort(-1)
        worth = self._values(with_level).max(-1)
        worth -= [self.price * self.policy.costs.level_ms(self.rows * width) for width in widths]
        place = int(worth.argmax())
        return widths[place] if worth[place] > self._values(self._best).max() else 0

    # -- what is verified

    def worth(self, paths_BM: Floats) -> float:
        """What the best choice among nodes of such chances is worth."""
        return float(self._values(np.sort(-paths_BM, 1)).max())

    def size(self, paths_BM: Floats) -> int:
        """How many nodes of every row are to be verified, roots included: the likeliest ones."""
        nodes = int(self._values(np.sort(-paths_BM, 1)).argmax())
        return 1 + max(nodes, int(self.probe and paths_BM.shape[1] > 0))

    def _values(self, sorted_BM: Floats) -> Floats:
        """By number of drafted nodes, from none on, of negative chances `[.., B, M]`, the likeliest first."""
        most = min(sorted_BM.shape[-1], len(self._charged) - 1)
        values = np.zeros((*sorted_BM.shape[:-2], most + 1))
        np.cumsum(-sorted_BM[..., :most].sum(-2), -1, out=values[..., 1:])
        values -= self._charged[: most + 1]
        return values

    def grown(self, within: Sequence[int] | None = None) -> tuple[Floats, int]:
        """Of what grew: chances `[B, M]`, level by level, and how many nodes are to be verified. within: how many of
        its first nodes each row may have, if not all."""
        self._sized = True
        paths = np.concatenate(self._paths, 1)
        for row, count in enumerate(within or ()):
            paths[row, count:] = 0.0
        return paths, self.size(paths)

    def chain_depth(self, most: int) -> int:
        """How many tokens are to be drafted one after another where nothing may be told of them before."""
        each = np.empty((self.rows, most))
        for sampled, rows in self._regimes.items():
            each[rows] = [self.policy.chances.blind(depth, 0, sampled) for depth in range(1, most + 1)]
        levels = self.policy.costs.level_ms(self.rows) * np.arange(most)
        paths = np.cumprod(each, 1)
        most = min(most, len(self.curve) - 1)
        values = np.cumsum(paths[:, :most].sum(0)) - self._charged[1 : most + 1]
        values -= self.price * levels[:most]
        depth = int(values.argmax()) + 1 if most else 0
        depth = depth if depth and values[depth - 1] > 0 else int(self.probe)
        self.levels = self.policy.costs.table.level_ms(self.rows) * max(depth - 1, 0)
        return depth

    def choose(self, proposals: Sequence[Proposal]) -> list[Proposal]:
        """What of the proposals is to be verified. What grew as large as pays stays as it is, as do drafts that were
        drawn: how long they may be was said before, without a look at them."""
        beside = max(p.width - len(p.tree) for p in proposals)  # is computed beside a tree of whatever size
        if beside:
            self._charged = self.price * (self.curve[beside:] - self.curve[beside])
        if not self._sized and any(p.distributions is None for p in proposals):
            paths = [self._path_chances(p, s) for p, s in zip(proposals, self.sampled, strict=True)]
            table = np.zeros((self.rows, max(map(len, paths)) - 1))
            for row, chances in enumerate(paths):
                table[row, : len(chances) - 1] = chances[1:]
            nodes = max([self.size(table), *(len(p.tree) for p in proposals if p.distributions is not None)])
            proposals = [
                p if p.distributions is not None else p.best(chances, nodes)
                for p, chances in zip(proposals, paths, strict=True)
            ]
        self.nodes, self.drafted = max(len(p.tree) for p in proposals) + beside, True
        return list(proposals)

    def _path_chances(self, proposal: Proposal, sampled: bool) -> Floats:
        """Of every node of a tree that all of its path is accepted; the root's is 1."""
        tree, chances = proposal.tree, self.policy.chances
        depths, paths = tree.depth_list, [1.0] * len(tree)
        if proposal.log_q is None:
            for node in range(len(tree)):
                for place, child in enumerate(tree.children(node)):
                    paths[child] = paths[node] * chances.blind(depths[child], place, sampled)
            return np.array(paths)
        log_q, levels, own = proposal.log_q, np.array(depths), np.ones(len(tree))
        for depth in range(1, max(depths) + 1):
            at = levels == depth
            own[at] = chances.of(log_q[at], depth, sampled)
        for node, (parent, chance) in enumerate(zip(tree.parent_list, own.tolist(), strict=True)):
            if node:
                paths[node] = paths[parent] * chance
        return np.array(paths)

    # -- what came of it

    def learn(self, rows: Sequence[int], proposals: Sequence[Proposal], committed: Sequence[Committed]) -> None:
        """The drafts of `rows` of this step, and what was committed."""
        if not rows:
            return
        for sampled in self._regimes:
            own = [place for place, row in enumerate(rows) if self.sampled[row] == sampled]
            self._learn([(proposals[place], committed[place].tokens) for place in own], sampled)
        tokens = sum(len(known.tokens) for known in committed) / len(rows)
        spent = self.curve[self.nodes - 1]
        if self.drafted:
            spent += self.policy.costs.draft_ms(self.rows, self.levels)
            relative = float(spent / self.curve[0])
            beside = self.catching_up_ms / float(self.curve[0])
            self.policy.drafted(self.rows, tokens - relative, relative - 1 + beside)
        self.policy.ended(tokens, float(spent / self.curve[0]))

    def _learn(self, outcomes: Sequence[tuple[Proposal, Sequence[int]]], sampled: bool) -> None:
        """Every child of every node on an accepted path was accepted or not."""
        log_q, depths, hits = list[Floats](), list[int](), list[bool]()
        for proposal, tokens in outcomes:
            nodes, right = _judged(proposal.tree, tokens)
            levels = [proposal.tree.depth_list[node] for node in nodes]
            if proposal.log_q is not None:
                log_q.append(proposal.log_q[nodes])
                depths += levels
                hits += right
                continue
            for node, depth, hit in zip(nodes, levels, right, strict=True):
                place = proposal.tree.children(proposal.tree.parent_list[node]).index(node)
                self.policy.chances.learn_blind(depth, place, hit, sampled)
        if hits:
            where: Ints = np.array(depths, dtype=np.int64)
            self.policy.chances.learn(np.concatenate(log_q), where, np.array(hits, dtype=bool), sampled)


def _judged(tree: DraftTree, tokens: Sequence[int]) -> tuple[list[int], list[bool]]:
    """The children of all nodes on the path that `tokens` took, and whether each was on it."""
    nodes, hits = list[int](), list[bool]()
    node: int | None = 0
    for token in tokens:
        assert node is not None
        accepted = tree.child(node, token)
        children = tree.children(node)
        nodes += children
        hits += [child == accepted for child in children]
        node = accepted
        if node is None:
            break
    return nodes, hits
