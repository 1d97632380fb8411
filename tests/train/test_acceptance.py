"""The simulated acceptance against chains really drafted, token by token, from the head's own choices."""

from __future__ import annotations

import pytest
import torch

from tercel.draft import DraftVocabulary
from tercel.train.acceptance import simulate
from tercel.train.features import FeatureSupply
from tercel.train.ttt import Objective, training_time_test
from tests.tiny import VOCAB
from tests.train.worlds import answered_chats, chat, decode_with_cache, head_for, target_of

STEPS = 3
EVERY_ID = DraftVocabulary(torch.arange(4, VOCAB), VOCAB)


def some_answers(target):
    """Answers of the target in two turns, with a token in each that it would not have said."""
    texts = []
    for one in answered_chats(target, 3, answer=13):
        tokens, flags = one.tokens.tolist(), one.supervised.tolist()
        flags[11] = False  # a second turn begins behind it
        tokens[8] = tokens[15] = 4 + tokens[8] % 100
        texts.append(chat(tokens, flags))
    return texts


def half_learned(head, supply, chats):
    """Enough steps on these very chats that some drafts are right and some are not."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=5e-3)
    batch, objective = supply.batch(chats), Objective(steps=STEPS, kind="hard")
    for _ in range(60):
        optimizer.zero_grad()
        training_time_test(head, batch, supply.to_draft, objective).loss.backward()
        optimizer.step()
    return head


@torch.no_grad()
def drafted_chain(target, head, features, tokens: list[int]) -> list[int]:
    """`STEPS` greedy drafts behind `tokens`, each made from the ones before."""
    drafts: list[int] = []
    for step in range(STEPS):
        outputs = decode_with_cache(head, target, features, tokens + drafts, STEPS)
        drafts.append(int(EVERY_ID.ids[head.logits(outputs[step]).argmax()]))
    return drafts


def test_simulation_equals_chains_really_drafted():
    target = target_of("llama")
    chats = some_answers(target)
    head = head_for(target, EVERY_ID)
    supply = FeatureSupply(target, head, EVERY_ID)
    half_learned(head, supply, chats)
    got, by_hard_labels = (
        simulate(
            head,
            (supply.batch(part) for part in (chats[:2], chats[2:])),
            supply.to_draft,
            Objective(steps=STEPS, kind=kind),
        )
        for kind in ("soft", "hard")
    )
    seen, right, rows = [0] * STEPS, [0] * STEPS, 0
    for one in chats:
        tokens, flags = one.tokens.tolist(), one.supervised.tolist()
        own = target.encode(torch.tensor([tokens]))
        best = target.logits(own.hidden[0]).argmax(-1).tolist()
        for known in range(2, len(tokens)):  # the head drafts what comes behind the first `known` tokens
            if not flags[known]:
                continue
            rows += 1
            drafts = drafted_chain(target, head, own.features[0, : known - 1], tokens[:known])
            for step, draft in enumerate(drafts):
                at = known + step
                if at >= len(tokens) or not flags[at]:
                    break
                seen[step] += 1
                if not draft == best[at - 1] == tokens[at]:
                    break
                right[step] += 1
    assert 0 < right[2] < right[1] < right[0] < rows  # or the test would say little
    assert got.rows == rows
    assert got.alpha == pytest.approx([r / s for r, s in zip(right, seen, strict=True)])
    a, b, c = got.alpha
    assert got.tau == pytest.approx(1 + a + a * b + a * b * c)
    assert by_hard_labels.alpha == got.alpha


def test_nothing_to_measure_is_vanilla_decoding():
    target = target_of("llama")
    head = head_for(target, EVERY_ID)
    supply = FeatureSupply(target, head, EVERY_ID)
    batch = supply.batch([chat([5, 17, 40], [False] * 3)])
    got = simulate(head, [batch], supply.to_draft, Objective(steps=2))
    assert (got.alpha, got.tau, got.rows) == ((0.0, 0.0), 1.0, 0)
