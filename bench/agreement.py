"""Does decoding accept what training-time test says it should? Both on the target's own greedy text, in float32.

    python bench/agreement.py TARGET DATA [HEAD]

Prints the acceptance length of greedy chain decoding, of a walk over the simulated hits (start, jump over what was
accepted, start again: it must be the same number), and of the joint-prefix simulation, which weighs every row alike
and is higher because decoding starts anew, by construction, right after a draft that failed.
"""

from __future__ import annotations

import sys

import torch

from tercel import Eagle3, Engine, Request, SamplingParams, Target, TreeShape, load_draft
from tercel.chat import TokenizedChat, load_chats
from tercel.draft.alignment import head_position
from tercel.train.acceptance import simulate
from tercel.train.batches import split, usable
from tercel.train.features import FeatureSupply
from tercel.train.ttt import Batch, Objective, training_time_test

STEPS, ANSWER, CHATS = 5, 64, 8


def walk(draft, batch: Batch, to_draft: torch.Tensor, prompt: int) -> tuple[int, int]:
    """Tokens after the first and target forwards of a greedy chain over one answer."""
    result = training_time_test(draft.eagle3, batch, to_draft, Objective(steps=STEPS))
    length = len(batch.tokens)
    run = torch.zeros(length, dtype=torch.long)  # accepted drafts if a chain starts at this row
    alive = torch.ones(length, dtype=torch.bool)
    for rows, step in zip(result.plan.rows, result.steps, strict=False):
        hit = torch.zeros(length, dtype=torch.bool)
        hit[rows] = step.correct
        alive &= hit
        run[alive] += 1
    tokens = forwards = 0
    root = torch.tensor(prompt)  # position of the last committed token, at first the one prefill gave
    while root < length - 1:
        step = min(int(run[head_position(root)]) + 1, length - 1 - int(root))
        tokens, forwards, root = tokens + step, forwards + 1, root + step
    return tokens, forwards


def main() -> None:
    target = Target.load(sys.argv[1], dtype=torch.float32)
    draft = load_draft(sys.argv[3] if len(sys.argv) > 3 else None, target)
    chats, _ = load_chats([sys.argv[2]], target.tokenizer, max_length=2048)
    held_out = split(usable(chats, 2048, target.vocab_size), 0.02).held_out
    prompts = [tuple(c.tokens[~c.supervised].tolist()) for c in held_out if c.supervised.sum() > ANSWER][:CHATS]
    params = SamplingParams(max_new_tokens=ANSWER, ignore_eos=True)
    results = Engine(target, Eagle3(draft, target, TreeShape.chain(STEPS))).generate(
        [Request(p, params) for p in prompts]
    )
    supply = FeatureSupply(target, draft.eagle3, draft.vocabulary)
    batches, walked = [], [0, 0]
    for prompt, result in zip(prompts, results, strict=True):
        produced = [False] * len(prompt) + [True] * len(result.tokens)
        batch = supply.batch([TokenizedChat.of("answer", [*prompt, *result.tokens], produced)])
        batches.append(batch)
        for place, count in enumerate(walk(draft, batch, supply.to_draft, len(prompt))):
            walked[place] += count
    decoded = sum(len(r.tokens) - 1 for r in results) / sum(r.steps for r in results)
    simulated = simulate(draft.eagle3, batches, supply.to_draft, Objective(steps=STEPS)).tau
    print(f"decoded {decoded:.4f}, walked {walked[0] / walked[1]:.4f}, joint prefix {simulated:.4f}")


if __name__ == "__main__":
    main()
