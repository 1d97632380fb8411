from __future__ import annotations

import pytest
import torch

from tercel.decode.draft_tree import DraftTree
from tercel.decode.engine import Engine
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import GenerationResult, Proposal
from tercel.errors import TercelError
from tercel.measure.acceptance import count_alpha, n_alpha
from tests.measure.worlds import PROMPTS, OfTarget, V, small_target


def result(tokens: int, accepted: tuple[int, ...]) -> GenerationResult:
    return GenerationResult((7,) * tokens, "", "length", 4, len(accepted), accepted, 0, 0.1, 0.1, {})


def test_counts_by_hand() -> None:
    # prefill 1; steps of 3+1, 0+1, 2+1 tokens, the last one whole
    counted = count_alpha([result(9, (3, 0, 2))], depth=3)
    assert counted.seen == (3, 2, 2)
    assert counted.alpha == (2 / 3, 1.0, 1 / 2)


def test_a_cut_step_says_nothing_of_the_next_draft() -> None:
    # the last step gave two accepted drafts and no token of the target's: the answer ended there
    counted = count_alpha([result(4, (0, 2))], depth=3)
    assert counted.seen == (2, 1, 0)
    assert counted.alpha == (1 / 2, 1.0, None)


def test_a_step_that_accepts_everything_tries_no_more() -> None:
    assert count_alpha([result(7, (2, 2))], depth=2).seen == (2, 2)


def test_an_answer_of_one_token_counts_nothing() -> None:
    assert count_alpha([result(1, ())], depth=2).alpha == (None, None)


def test_a_wrong_depth_is_refused() -> None:
    with pytest.raises(TercelError, match="2 deep"):
        count_alpha([result(5, (3,))], depth=2)


class HalfRight(OfTarget):
    """A chain of the target's own choices whose third token is never right."""

    name, max_nodes, needs_tree = "half-right", 5, False

    def propose(self, rows) -> list[Proposal]:
        proposals = []
        for row in rows:
            tokens = list(row.tokens)
            for depth in range(4):
                best = int(self.next_logits([tokens])[0].argmax())
                tokens.append((best + 1) % V if depth == 2 else best)
            proposals.append(Proposal(DraftTree.chain(row.tokens[-1], tokens[-4:])))
        return proposals


@torch.no_grad()
def test_decoding_with_a_chain_of_known_rights() -> None:
    seen: list[tuple[int, int]] = []
    engine = Engine(small_target(), HalfRight(small_target()))
    params = SamplingParams(max_new_tokens=13, ignore_eos=True)
    counted = n_alpha(engine, PROMPTS, params, 4, lambda *at: seen.append(at))
    # 12 tokens after the first: four steps of 2 + 1 for each prompt
    assert counted.alpha == (1.0, 1.0, 0.0, None)
    assert counted.seen == (8, 8, 8, 0)
    assert seen == [(1, 2), (2, 2)]
