"""What a tokenizer can do to a run: texts that it cannot take, panics, rules that blow texts up."""

from __future__ import annotations

import json
import os
import threading

import pytest
from tokenizers import Regex, Tokenizer, decoders, normalizers
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from tercel import limits
from tercel.chat.panics import guarded
from tercel.chat.tokenizing import UnfitTextError, check_rules, detokenize, tokenize
from tercel.errors import TercelError
from tests.tiny import tiny_tokenizer


def test_texts_that_cannot_be_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TEXT_CHARACTERS", 100)
    for text, words in (("a\udcff", "character 2 is '\\udcff'"), ("x" * 101, "a text of 101 characters")):
        with pytest.raises(UnfitTextError) as caught:
            tokenize(tiny_tokenizer(), text)
        assert words in str(caught.value)


def test_a_panic_of_the_tokenizer() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = Split(Regex("(a+)+$"), "isolated")
    assert tokenize(tokenizer, "fine")["input_ids"]
    with pytest.raises(UnfitTextError, match=r"on a text of 61 characters .Onig: .*is its tokenizer.json"):
        tokenize(tokenizer, "a" * 60 + "!")


def test_a_panic_is_told_by_nobody_else(capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = Split(Regex("(a+)+$"), "isolated")
    with pytest.raises(UnfitTextError):
        tokenize(tokenizer, "a" * 60 + "!")
    assert capfd.readouterr().err == ""


def test_what_others_write_meanwhile_is_not_lost(capfd: pytest.CaptureFixture[str]) -> None:
    def write() -> None:
        with guarded(hush=True):
            os.write(2, b"written ")
            with guarded(hush=True):
                os.write(2, b"meanwhile")
            assert capfd.readouterr().err == ""
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert capfd.readouterr().err == "written meanwhile"


def test_other_threads_leave_standard_error_alone(capfd: pytest.CaptureFixture[str]) -> None:
    def write() -> None:
        with guarded(hush=True):
            os.write(2, b"at once")
            seen.append(capfd.readouterr().err)

    seen: list[str] = []
    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert seen == ["at once"]


def test_a_panic_on_the_way_back_to_text(capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenize(tokenizer, "a!")["input_ids"]
    assert detokenize(tokenizer, ids) == "a!"
    tokenizer.backend_tokenizer.decoder = decoders.Strip("a", 5, 5)
    with pytest.raises(UnfitTextError, match=r"on 2 of its tokens .index out of bounds.*is its tokenizer.json"):
        detokenize(tokenizer, ids)
    assert capfd.readouterr().err == ""


def test_an_interruption_passes() -> None:
    for error in (KeyboardInterrupt, SystemExit):
        with pytest.raises(error), guarded():
            raise error


def test_a_tokenizer_that_doubles_letters_forty_times_is_refused() -> None:
    twice = normalizers.Replace("a", "aa")
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), *[twice] * 9])
    check_rules(tokenizer)  # 2 ** 9
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.Sequence([twice] * 5), *[twice] * 35])
    with pytest.raises(TercelError, match=r"up to 1e\+12 times as many characters"):
        check_rules(tokenizer)
    tokenizer.backend_tokenizer.normalizer = None
    tokenizer.backend_tokenizer.decoder = decoders.Replace(Regex("."), "a" * 2000)
    with pytest.raises(TercelError, match=r"up to 2e\+03 times"):
        check_rules(tokenizer)


@pytest.mark.parametrize(
    ("single", "defined", "words"),
    [
        ("<s> $A", ["<s>"], None),
        ("<s> $A </s>", ["<s>"], "adds the special token '</s>', which it does not define"),
        ("<s>", ["<s>"], "leaves out the text itself"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_post_processor_that_cannot_work(single: str, defined: list[str], words: str | None, nested: bool) -> None:
    whole = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}, "single": []}
    for piece in single.split():
        kind = "Sequence" if piece == "$A" else "SpecialToken"
        whole["single"].append({kind: {"id": piece.strip("$"), "type_id": 0}})
    whole["special_tokens"] = {name: {"id": name, "ids": [0], "tokens": [name]} for name in defined}
    backend = tiny_tokenizer().backend_tokenizer
    rules = json.loads(backend.to_str())
    rules["post_processor"] = {"type": "Sequence", "processors": [whole]} if nested else whole
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(rules)))
    if words is None:
        check_rules(tokenizer)
        assert tokenize(tokenizer, "a", special_tokens=True)["input_ids"][0] == 0
        return
    with pytest.raises(TercelError, match=words):
        check_rules(tokenizer)
