"""Explanations for the tests: of a tiny target with drafts that are often right, and one with evil texts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from tercel.cli.explain import explained
from tercel.decode.engine import Engine
from tercel.decode.sampled_chain import SampledChain
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import Request
from tercel.decode.vanilla import Vanilla
from tercel.explain.steps import Explanation
from tests.decode.drafts import Oracle, random_draft, tiny_target

PROMPT = (9, 10, 9, 9, 10, 9)
GREEDY = SamplingParams(ignore_eos=True, max_new_tokens=12)
SAMPLED = replace(GREEDY, temperature=0.9, seed=3)
EVIL = "</script></style><img src=x onerror=owned=1><script>owned=2</script>'\"&\x1b[2J\u202e\ud800\x00\uffff"


@cache
def explanation(drawn: bool = False) -> Explanation:
    """drawn: sampled, with drafts that were drawn too."""
    target = tiny_target("llama", num_hidden_layers=3)
    if drawn:
        proposer, params = SampledChain(random_draft(target), target, 3), SAMPLED
    else:
        answer = Engine(target, Vanilla()).generate([Request(PROMPT, GREEDY)])[0].tokens
        proposer, params = Oracle({PROMPT: answer}), GREEDY
    return explained(Engine(target, proposer), Request(PROMPT, params, traced=True), {"target": "tiny", "seed": 3})


def evil() -> Explanation:
    """The same with an evil text in every place that has one."""
    good = explanation()
    steps = [
        replace(
            step,
            before=EVIL,
            pieces=tuple(replace(piece, text=EVIL) for piece in step.pieces),
            names=(EVIL,) * len(step.names),
            taken=(EVIL,) * len(step.taken),
            likeliest=tuple((EVIL,) * len(names) for names in step.likeliest),
        )
        for step in good.steps
    ]
    return replace(good, prompt=EVIL, steps=tuple(steps), facts={"target": EVIL, EVIL: {EVIL: [EVIL]}})
