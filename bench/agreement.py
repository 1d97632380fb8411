"""Does decoding accept what training-time test says it should? Both on the target's own greedy text, in float32.

    python bench/agreement.py TARGET DATA [HEAD]

Prints the acceptance length of greedy chain decoding and the held-out τ of training on the same answers, a walk over
simulated chains (`tercel.train.acceptance`): they must be the same number.
"""

from __future__ import annotations

import sys

import torch

from tercel import Engine, Request, SamplingParams, Target, TreeShape, load_draft, make_proposer
from tercel.chat import TokenizedChat, load_chats
from tercel.draft.acceptance import acceptance_length, tokens_of_steps
from tercel.train.acceptance import simulate
from tercel.train.batches import split, usable
from tercel.train.config import TrainConfig
from tercel.train.features import FeatureSupply
from tercel.train.lesson import lesson_of

STEPS, ANSWER, CHATS = 5, 64, 8


def main() -> None:
    target = Target.load(sys.argv[1], dtype=torch.float32)
    draft = load_draft(sys.argv[3] if len(sys.argv) > 3 else None, target)
    chats, _ = load_chats([sys.argv[2]], target.tokenizer, max_length=2048)
    held_out = split(usable(chats, 2048, target.vocab_size), 0.02).held_out
    prompts = [tuple(c.tokens[~c.supervised].tolist()) for c in held_out if c.supervised.sum() > ANSWER][:CHATS]
    params = SamplingParams(max_new_tokens=ANSWER, ignore_eos=True)
    results = Engine(target, make_proposer("eagle3", target, head=draft, shape=TreeShape.chain(STEPS))).generate(
        [Request(p, params) for p in prompts]
    )
    supply = FeatureSupply(target, draft.eagle3, draft.vocabulary)
    batches = []
    for prompt, result in zip(prompts, results, strict=True):
        produced = [False] * len(prompt) + [True] * len(result.tokens)
        batches.append(supply.batch([TokenizedChat.of("answer", [*prompt, *result.tokens], produced)]))
    decoded = acceptance_length(sum(tokens_of_steps(r.tokens) for r in results), sum(r.steps for r in results))
    walked = simulate(lesson_of(TrainConfig(ttt_steps=STEPS)), draft.eagle3, batches, supply.to_draft).tau
    print(f"decoded {decoded:.4f}, walked {walked:.4f}")


if __name__ == "__main__":
    main()
