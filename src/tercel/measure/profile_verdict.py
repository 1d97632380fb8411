"""One sentence on a profile: where most time goes, what bounds it, and what a user can do about it."""

from __future__ import annotations

import math

from tercel.decode.proposers import VANILLA
from tercel.measure.profile_result import Profile, Steps, Timed, in_ms

NEAR = 0.6  # of the floor: whoever reaches that much is bound by the machine
CHEAP, DEAR = 1.1, 1.5  # times one token: what a block may cost as if it were one, and what it may not
MANY = 2  # times as many nodes: the larger tree that is looked at

_WHAT = {
    "target": "the target's forward",
    "head": "the draft head's forwards",
    "tree": "the building of the drafts",
    "verify": "the verification",
    "cache": "the work on the caches",
    "host": "the loop itself",
}


def verdict(profile: Profile) -> str:
    steps = profile.steps[profile.method]
    phase = max(steps.share, key=lambda name: steps.share[name].value)
    most = f"{steps.share[phase].value:.0%} of a step is {_WHAT[phase]}"
    if phase == "target":
        width = nearest(profile, steps.nodes)
        return f"{most}, {_bound(profile.usual[width], f'over {_tokens(width)}')}; {_tree(profile, steps)}"
    if phase == "head":
        deepest = profile.levels[list(profile.levels)[-1]] if profile.levels else None
        bound = f", {_bound(deepest, 'for a level')}" if deepest else ""
        return f"{most}{bound}; fewer levels (--tree auto) or a smaller draft vocabulary would cost less"
    if profile.method == VANILLA:
        return f"{most}, not the model; several requests at a time share it"
    return f"{most}, not a model; a smaller tree (--tree auto) or several requests at a time cost less of it"


def nearest(profile: Profile, nodes: float) -> int:
    """The measured width that is nearest to so many nodes, as ratios go."""
    return min(profile.usual, key=lambda width: abs(math.log(width / max(nodes, 1.0))))


def _bound(timed: Timed, of_what: str) -> str:
    took = f"{in_ms(timed.ms.value)} ms {of_what} where the machine needs {in_ms(timed.floor_ms)}"
    what = {"memory": "reading from memory", "compute": "multiplying"}[timed.bound]
    if timed.efficiency >= NEAR:
        return f"{took}: bound by {what}"
    return f"{took} for {what}: bound by neither memory nor compute but by kernels and what is between them"


def _tree(profile: Profile, steps: Steps) -> str:
    usual = profile.usual
    if 1 not in usual or len(usual) < 2:
        return "measure several widths, 1 among them, to see what a tree costs"
    one = usual[1].ms.value
    if profile.method == VANILLA:
        cheap = [width for width in usual if usual[width].ms.value <= DEAR * one]
        cost = usual[max(cheap)].ms.value / one
        return f"a block of {max(cheap)} costs {cost:.2f} × one token: that is room for drafts"
    nodes = nearest(profile, steps.nodes)
    cost, larger = usual[nodes].ms.value / one, nearest(profile, MANY * nodes)
    more = usual[larger].ms.value / usual[nodes].ms.value
    plain = profile.steps.get(VANILLA)
    if plain is not None and plain.token_ms < steps.token_ms:
        gain = "drafts cost more here than their τ of"
        return f"{gain} {steps.tau.value:.2f} brings in: take a smaller tree (--tree auto) or none (--draft none)"
    if larger > nodes and more <= CHEAP:
        return f"a block of {larger} costs only {more:.2f} × that: a larger tree (--tree auto finds it) may be faster"
    if cost > DEAR:
        return f"that is {cost:.2f} × one token: a smaller tree (--tree auto finds it) may be faster"
    return f"that is {cost:.2f} × one token for a τ of {steps.tau.value:.2f}: the tree fits the machine"


def _tokens(width: int) -> str:
    return "one token" if width == 1 else f"{width} tokens"
