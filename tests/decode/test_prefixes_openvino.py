"""On OpenVINO a row that goes on from what is known holds, bit for bit, what one holds whose whole text was a
prompt."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("openvino", reason="openvino is not installed: pip install 'tercel[openvino]'")

from tercel.decode.eagle3 import Eagle3
from tercel.decode.engine import Engine
from tercel.decode.loop import DecodingLoop
from tercel.decode.prefixes import PrefixStore
from tercel.decode.proposer import Proposer
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import Request
from tercel.decode.vanilla import Vanilla
from tercel.draft.shape import TreeShape
from tercel.target_model.openvino.places import SECOND_CHUNK
from tercel.target_model.prefill import prefill
from tests.decode.drafts import Oracle, random_draft
from tests.target_model.test_openvino import on_openvino, reference_of

pytestmark = pytest.mark.usefixtures("every_core")
AMPLE = 1 << 26


@pytest.mark.parametrize(
    ("arch", "dtype", "weights"),
    [
        ("llama", torch.bfloat16, None),
        ("llama", torch.float32, None),
        ("gemma3", torch.bfloat16, None),
        ("llama", torch.bfloat16, "int8"),
    ],
    ids=["llama bfloat16", "llama float32", "gemma3 bfloat16", "llama int8"],
)
def test_a_turn_after_known_ones_has_the_bits_of_a_whole_prefill(
    arch: str, dtype: torch.dtype, weights: str | None
) -> None:
    """What is known crosses the border of a chunk of slots, in an answer out of trees."""
    target = on_openvino(reference_of(arch, dtype, weights, max_position_embeddings=1024))
    params, text = SamplingParams(max_new_tokens=24, ignore_eos=True), tuple(5 + i % 90 for i in range(375))
    asked = [text, (7, *text[:40])]  # one that leaves while the other goes on
    told = [result.tokens for result in Engine(target, Vanilla()).generate([Request(one, params) for one in asked])]
    answer = told[0]
    oracle = Oracle(dict(zip(asked, told, strict=True)))
    draft = random_draft(target)
    draft.head.to(dtype)
    proposers: list[Proposer] = [oracle, Eagle3(draft, target, TreeShape(3, 3, 8))]
    for proposer in proposers:
        store = PrefixStore(AMPLE)
        loop = DecodingLoop(target, proposer, slots=2, prefill_chunk=100, prefixes=store)
        for one in asked:
            loop.submit(Request(one, params))
        while loop.pending:
            loop.step()
        second = (*text, *answer, *range(20, 40))
        prefixes = store.of(target, proposer)
        assert prefixes is not None
        known = prefixes.take(second)
        assert known.tokens >= len(text) + len(answer) - 2 > SECOND_CHUNK
        warm, cold = target.new_cache(2, 0), target.new_cache(1, 0)
        warm.restore({1: known.target})
        rest = prefill(target, [second[known.tokens :]], warm, [1])[0]
        whole = prefill(target, [second], cold)[0]
        assert torch.equal(rest.hidden, whole.hidden[:, known.tokens :])
        pairs = zip(warm.taken(1, 0, len(second)).tensors, cold.taken(0, 0, len(second)).tensors, strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_texts_are_the_same_cold_and_warm_with_a_head() -> None:
    """The head is a graph too, with a cache of slots."""
    target = on_openvino(reference_of("llama", torch.bfloat16, max_position_embeddings=1024))
    params, beginning = SamplingParams(max_new_tokens=16, ignore_eos=True), tuple(range(10, 60))
    draft = random_draft(target)
    draft.head.to(target.dtype)
    head = Eagle3(draft, target, TreeShape(3, 3, 8))
    requests = [Request((*beginning, 70 + number, 5), params) for number in range(5)]
    truth = [result.tokens for result in Engine(target, Vanilla(), slots=3).generate(requests)]
    engine = Engine(target, head, slots=3, prefix_cache=AMPLE)
    for _ in range(2):
        results = engine.generate(requests)
        assert [result.tokens for result in results] == truth
    assert all(result.cached_tokens == len(beginning) + 1 for result in results)
