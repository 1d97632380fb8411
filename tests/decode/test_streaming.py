"""Streamed text equals the decoded whole, holds no half characters, and is never taken back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from tercel.decode.streaming import WINDOW, TextStream


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """All 256 bytes, a few merged pieces (among them a cut through an emoji), and one special token."""
    alphabet = sorted(ByteLevel.alphabet())
    vocab = {piece: index for index, piece in enumerate(alphabet)}
    merges = []
    for left, right in [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("Ċ", "Ċ"), ("ð", "Ł"), ("Ġ", "ð"), ("s", "t")]:
        merges.append((left, right))
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Llama-2-like: `▁` for spaces, the first of which is stripped, and `<0x..>` for bytes."""
    pieces = ["<unk>", "▁", "▁a", "b", "▁b", "a", ".", "é", "▁▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


BYTE_LEVEL = byte_level_tokenizer()
BYTE_FALLBACK = byte_fallback_tokenizer()
TOKENIZERS = {"byte level": BYTE_LEVEL, "byte fallback": BYTE_FALLBACK}
TEXT = "the 🦅 flies\n\nüber 東京 — é👩‍👩‍👧 the end"


def whole(tokenizer: PreTrainedTokenizerFast, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def ids_of(tokenizer: PreTrainedTokenizerFast, pieces: list[str]) -> list[int]:
    vocab = tokenizer.get_vocab()
    return [vocab[piece] for piece in pieces]


def stream(tokenizer: PreTrainedTokenizerFast, tokens: list[int], stop: tuple[str, ...] = ()) -> list[str]:
    text = TextStream(tokenizer, stop)
    pieces = []
    for token in tokens:
        pieces.append(text.push(token))
        if text.stopped:
            break
    pieces.append(text.finish())
    assert text.text == "".join(pieces)
    return pieces


def test_text_with_characters_of_many_bytes():
    tokens = BYTE_LEVEL(TEXT)["input_ids"]
    assert len(tokens) > len(TEXT)
    pieces = stream(BYTE_LEVEL, tokens)
    assert "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)
    assert BYTE_LEVEL.tokenize(TEXT)[:2] == ["t", "he"]
    assert pieces[:2] == ["t", "he"]  # shown at once


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=30))
def test_any_text_comes_out_as_it_went_in(text):
    tokens = BYTE_LEVEL(text)["input_ids"]
    pieces = stream(BYTE_LEVEL, tokens)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_tokens_stream_to_the_decoded_whole(name, data):
    """Also invalid UTF-8, special tokens anywhere, leading spaces."""
    tokenizer = TOKENIZERS[name]
    last = len(tokenizer) - 1
    fallback = [f"<0x{byte:02X}>" for byte in "🦅é\n".encode()]
    of_bytes = ids_of(tokenizer, BYTE_LEVEL.tokenize("🦅é\n") if name == "byte level" else fallback)
    token = st.one_of(st.integers(0, last), st.sampled_from([*of_bytes, last, 1, 2, 8]))
    tokens = data.draw(st.lists(token, max_size=40))
    assert "".join(stream(tokenizer, tokens)) == whole(tokenizer, tokens)
    in_blocks, left = TextStream(tokenizer), list(tokens)
    while left:
        block = [left.pop(0) for _ in range(min(len(left), data.draw(st.integers(1, 5))))]
        in_blocks.push(*block)
    in_blocks.finish()
    assert in_blocks.text == whole(tokenizer, tokens)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_text_ends_before_the_first_stop_string(name, data):
    """By definition: it ends at the first token after which the decoded whole holds a stop string."""
    tokenizer = TOKENIZERS[name]
    fallback = ["▁", "▁a", "a", "b", "<0x0A>", "<0x61>", "<end>", "▁b"]
    ids = ids_of(tokenizer, ["a", "b", "Ġ", "Ċ", "ĊĊ", "<end>"] if name == "byte level" else fallback)
    tokens = data.draw(st.lists(st.sampled_from(ids), max_size=15))
    stop = tuple(data.draw(st.lists(st.text("ab \n", min_size=1, max_size=4), min_size=1, max_size=3)))
    expected, used = whole(tokenizer, tokens), len(tokens)
    for count in range(1, len(tokens) + 1):
        text = whole(tokenizer, tokens[:count])
        if any(s in text for s in stop):
            expected, used = text[: min(text.find(s) for s in stop if s in text)], count
            break
    pieces = stream(tokenizer, tokens, stop)
    assert "".join(pieces) == expected
    assert len(pieces) == used + 1


def test_the_start_of_a_stop_string_is_held_back_and_released():
    ids = [BYTE_LEVEL(c)["input_ids"][0] for c in "a##b###"]
    text = TextStream(BYTE_LEVEL, ("###",))
    assert [text.push(token) for token in ids] == ["a", "", "", "##b", "", "", ""]
    assert text.stopped
    assert text.finish() == ""
    assert text.text == "a##b"
    with pytest.raises(ValueError, match="has ended at a stop string"):
        text.push(ids[0])


def test_what_is_held_back_at_the_end_comes_with_finish():
    ids = [BYTE_LEVEL(c)["input_ids"][0] for c in "a##"]
    text = TextStream(BYTE_LEVEL, ("###",))
    for token in ids:
        text.push(token)
    assert (text.text, text.finish(), text.finish(), text.text) == ("a", "##", "", "a##")


def test_a_run_of_fallback_bytes_waits_for_its_end():
    """A wrong byte at its end turns the characters before it into replacement characters."""
    ids = ids_of(BYTE_FALLBACK, ["b", "<0xC3>", "<0xA9>", "<0xC3>"])
    assert stream(BYTE_FALLBACK, ids) == ["b", "", "", "", "\ufffd\ufffd\ufffd"]
    assert stream(BYTE_FALLBACK, [*ids[:3], ids[0]]) == ["b", "", "", "éb", ""]


def test_windows_stay_short():
    """Over a long answer with special tokens in it, no call decodes more than a handful of tokens."""
    sizes = []

    class Watched(PreTrainedTokenizerFast):
        def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> Any:
            sizes.append(len(token_ids))
            return super().decode(token_ids, skip_special_tokens, **options)

    tokenizer = Watched(tokenizer_object=BYTE_LEVEL.backend_tokenizer)
    tokens = (BYTE_LEVEL(TEXT)["input_ids"] + [len(BYTE_LEVEL) - 1] * 10) * 20
    stream(tokenizer, tokens, ("never there",))
    assert len(sizes) >= len(tokens)
    assert max(sizes) <= WINDOW + 8
