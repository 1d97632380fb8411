"""An answer ends at the same token however its tokens arrive."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercel.decode.sampling import SamplingParams
from tercel.decode.stopping import Emission, StopChecker
from tercel.errors import TercelError
from tests.decode.test_streaming import BYTE_LEVEL
from tests.tiny import IM_END, IM_START, UNK, tiny_tokenizer

EOS = len(BYTE_LEVEL) - 1
A, B, SPACE, HASH = (BYTE_LEVEL(c)["input_ids"][0] for c in "ab #")


def test_end_token_is_in_the_tokens_but_not_in_the_text():
    checker = StopChecker(SamplingParams(), {EOS}, BYTE_LEVEL)
    assert checker.feed((A, B)) == Emission((A, B), "ab", None)
    assert checker.feed((A, EOS, B, B)) == Emission((A, EOS), "a", "stop")
    assert checker.text == "aba"
    assert checker.tokens == [A, B, A, EOS]
    with pytest.raises(ValueError, match="already ended"):
        checker.feed((A,))


def test_ignore_eos_still_heeds_stop_tokens():
    params = SamplingParams(ignore_eos=True, stop_token_ids=(B,))
    checker = StopChecker(params, {EOS}, BYTE_LEVEL)
    assert checker.feed((A, EOS, A, B, A)) == Emission((A, EOS, A, B), "aa", "stop")


def test_stop_string_over_token_borders_inside_and_between_blocks():
    checker = StopChecker(SamplingParams(stop=("##",)), {EOS}, BYTE_LEVEL)
    assert checker.feed((A, HASH)) == Emission((A, HASH), "a", None)
    assert checker.feed((B, HASH)) == Emission((B, HASH), "#b", None)
    assert checker.feed((HASH, A, A)) == Emission((HASH,), "", "stop")
    assert checker.text == "a#b"


@pytest.mark.parametrize(("room", "kept"), [(None, 3), (2, 2), (9, 3)])
def test_limits_cut_the_block_and_release_what_was_held_back(room, kept):
    checker = StopChecker(SamplingParams(max_new_tokens=3, stop=("####",)), {EOS}, BYTE_LEVEL, room)
    assert checker.feed((A, HASH, HASH, A)) == Emission((A, HASH, HASH)[:kept], "a##"[:kept], "length")


def test_an_end_at_the_limit_is_a_stop():
    params = SamplingParams(max_new_tokens=2, stop=("#",))
    assert StopChecker(params, {EOS}, BYTE_LEVEL).feed((A, EOS)).finish_reason == "stop"
    assert StopChecker(params, {EOS}, BYTE_LEVEL).feed((A, HASH)).finish_reason == "stop"
    assert StopChecker(params, {EOS}, BYTE_LEVEL).feed((A, A)).finish_reason == "length"


def test_without_a_tokenizer_there_is_no_text():
    checker = StopChecker(SamplingParams(max_new_tokens=2), {EOS}, None)
    assert checker.feed((A, B, B)) == Emission((A, B), "", "length")
    with pytest.raises(TercelError, match="without a tokenizer"):
        StopChecker(SamplingParams(stop=("#",)), {EOS}, None)


def test_a_full_context_is_an_error():
    with pytest.raises(TercelError, match="leaves no room"):
        StopChecker(SamplingParams(), {EOS}, None, 0)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_stop_string_may_spell_a_special_token(ignore_eos):
    tokenizer = tiny_tokenizer()
    params = SamplingParams(stop=("##", "<|im_start|>"), ignore_eos=ignore_eos)
    text = tokenizer("on <", add_special_tokens=False)["input_ids"]
    checker = StopChecker(params, {IM_END}, tokenizer)
    # what may begin the string is held back, and given out when the token itself comes
    assert "".join(checker.feed(ids).text for ids in ([*text, UNK], (IM_START, *text))) == "on <"
    assert (checker.finish_reason, checker.tokens, checker.text) == ("stop", [*text, UNK, IM_START], "on <")
    spelled = StopChecker(params, {IM_END}, tokenizer)  # the model may also write it out
    letters = tokenizer.convert_tokens_to_ids(list("<|im_start|>"))
    assert spelled.feed((*text, *letters)).finish_reason == "stop"
    assert spelled.text == "on <"
    with pytest.raises(TercelError, match=r"'x<\|im_end\|>' holds the special token '<\|im_end\|>'"):
        StopChecker(SamplingParams(stop=("x<|im_end|>",)), (), tokenizer)


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.lists(st.sampled_from([A, B, SPACE, HASH, EOS]), min_size=1, max_size=20),
    borders=st.sets(st.integers(1, 19)),
    stop=st.lists(st.text("ab #", min_size=1, max_size=4), max_size=2).map(tuple),
    limit=st.integers(1, 20),
    room=st.one_of(st.none(), st.integers(1, 20)),
    ignore_eos=st.booleans(),
)
def test_blocks_end_exactly_where_the_definition_says(tokens, borders, stop, limit, room, ignore_eos):
    params = SamplingParams(max_new_tokens=limit, stop=stop, ignore_eos=ignore_eos)

    def decode(ids):
        return BYTE_LEVEL.decode(ids, skip_special_tokens=True)

    expected: tuple[list[int], str, str | None] = (tokens, decode(tokens), None)
    for count in range(1, len(tokens) + 1):
        so_far, text = tokens[:count], decode(tokens[:count])
        found = [text.find(s) for s in stop if s in text]
        if found:
            expected = (so_far, text[: min(found)], "stop")
        elif so_far[-1] == EOS and not ignore_eos:
            expected = (so_far, text, "stop")
        elif count == min(limit, room or limit):
            expected = (so_far, text, "length")
        else:
            continue
        break

    checker = StopChecker(params, {EOS}, BYTE_LEVEL, room)
    emitted = []
    cuts = [0, *sorted(b for b in borders if b < len(tokens)), len(tokens)]
    for start, end in pairwise(cuts):
        emission = checker.feed(tokens[start:end])
        emitted.append(emission.text)
        assert emission.finish_reason == checker.finish_reason
        if checker.finish_reason:
            break
    assert (checker.tokens, checker.finish_reason) == (expected[0], expected[2])
    assert "".join(emitted) == checker.text
    if checker.finish_reason:
        assert checker.text == expected[1]
    else:
        assert expected[1].startswith(checker.text)  # the rest is held back: it may begin a stop string
