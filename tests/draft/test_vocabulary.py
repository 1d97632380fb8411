"""The map between draft and target ids."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tercel.draft import DraftVocabulary
from tercel.errors import TercelError


@settings(max_examples=60, deadline=None)
@given(counts=st.lists(st.integers(0, 4), min_size=2, max_size=30), data=st.data())
def test_the_most_frequent_and_those_always_in(counts, data):
    size = data.draw(st.integers(1, len(counts) + 2))
    always = data.draw(st.sets(st.integers(0, len(counts) - 1), max_size=size))
    vocabulary = DraftVocabulary.most_frequent(torch.tensor(counts), size, always)
    ids = vocabulary.ids.tolist()
    assert len(ids) == min(size, len(counts))
    assert ids == sorted(set(ids))
    assert always <= set(ids)
    left_out = [i for i in range(len(counts)) if i not in ids]
    free = [i for i in ids if i not in always]
    assert all((counts[a], -a) > (counts[b], -b) for a in free for b in left_out)


@settings(max_examples=60, deadline=None)
@given(ids=st.sets(st.integers(0, 49), min_size=1))
def test_maps_agree_with_each_other(ids):
    vocabulary = DraftVocabulary(torch.tensor(sorted(ids)), 50)
    d2t, t2d, to_draft = vocabulary.d2t, vocabulary.t2d, vocabulary.to_draft()
    assert d2t.dtype == torch.int64
    for draft, target in enumerate(sorted(ids)):
        assert draft + int(d2t[draft]) == target
        assert int(to_draft[target]) == draft
    assert t2d.nonzero()[:, 0].tolist() == sorted(ids)
    assert ((to_draft < 0) == ~t2d).all()
    back = DraftVocabulary.from_d2t(d2t, 50, len(ids))
    assert torch.equal(back.ids, vocabulary.ids)


def test_coverage_is_the_share_of_what_was_counted():
    vocabulary = DraftVocabulary(torch.tensor([0, 2]), 4)
    assert vocabulary.coverage(torch.tensor([3, 1, 5, 1])) == pytest.approx(0.8)
    assert vocabulary.pruned
    assert not DraftVocabulary.full(4).pruned


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([], "empty"),
        ([1, 50], "names token 50, but the target has 50 tokens; this map was built for another target"),
        ([-1, 2], "names token -1"),
        ([2, 2], "a token twice"),
    ],
)
def test_damaged_maps_are_refused(ids, words):
    with pytest.raises(TercelError, match=words):
        DraftVocabulary(torch.tensor(ids, dtype=torch.long), 50)


def test_a_map_of_another_head_is_refused():
    with pytest.raises(TercelError, match="d2t has 3 rows but the head's lm_head has 4; was this map built for"):
        DraftVocabulary.from_d2t(torch.zeros(3, dtype=torch.long), 50, 4)
    with pytest.raises(TercelError, match="d2t holds float32 numbers"):
        DraftVocabulary.from_d2t(torch.zeros(3), 50, 3)
