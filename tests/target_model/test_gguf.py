"""A converted GGUF file is the same model and the same tokenizer as the original."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from tercel.errors import TercelError
from tercel.target_model.gguf import convert_gguf, quiet_transformers, read_metadata, restore_tokenizer
from tests.tiny import CHATML, DIGIT_MERGE, IM_END, IM_START, PAD, VOCAB, save_tiny_gguf, tiny_tokenizer

TOKENS = torch.randint(4, VOCAB, (2, 30), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory):
    """The model that was written to a GGUF file, and the folder that came of it."""
    folder = tmp_path_factory.mktemp("gguf")
    model = save_tiny_gguf(folder / "tiny.gguf")
    convert_gguf(folder / "tiny.gguf", folder / "out")
    return model, folder / "out"


def test_float_weights_come_back_bit_for_bit(converted) -> None:
    model, folder = converted
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)
    assert not hasattr(again.config, "quantization_config")


def test_quantised_weights_are_unpacked_to_plain_float32(tmp_path: Path) -> None:
    model = save_tiny_gguf(tmp_path / "tiny.gguf", quantised=True)
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    original = model.state_dict()
    for name, weight in weights.items():
        assert weight.dtype == torch.float32
        # Q8_0 rounds to 1/127 of the largest of 32 values, twice rounded for the float16 scale
        limit = 0.51 * original[name].abs().max() / 127 + 1e-3 if weight.ndim == 2 else 0.0
        assert (weight - original[name]).abs().max() <= limit, name


def test_settings_survive(converted) -> None:
    _, folder = converted
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.max_position_embeddings == 256
    assert model.config.num_key_value_heads == 2
    assert model.config.rope_parameters["rope_theta"] == 10_000.0
    assert model.generation_config.eos_token_id == IM_END
    assert model.generation_config.bos_token_id == IM_START
    assert model.generation_config.pad_token_id == PAD


def test_tokenizer_equals_the_original_on_text_without_digits(converted) -> None:
    again, original = AutoTokenizer.from_pretrained(converted[1]), tiny_tokenizer(last_merge=DIGIT_MERGE)
    text = "<|im_start|>user\nthe cat is\n\there, <b>~ok</b>  and then<|im_end|>\n"
    assert again.encode(text) == original.encode(text)
    assert again.decode(again.encode(text)) == text
    assert again.chat_template == CHATML
    assert (again.eos_token_id, again.pad_token_id) == (IM_END, PAD)


def test_digits_are_split_as_in_training(converted) -> None:
    again, plain = AutoTokenizer.from_pretrained(converted[1]), tiny_tokenizer(last_merge=DIGIT_MERGE)
    assert again.convert_ids_to_tokens(again.encode("2024 is")) == ["2", "0", "2", "4", "Ġ", "is"]
    # the tiny vocabulary has a token "20", which GPT-2's own split would use
    assert plain.convert_ids_to_tokens(plain.encode("2024 is")) == ["20", "2", "4", "Ġ", "is"]


@pytest.mark.parametrize("pre", ["default", "gpt-2"])
def test_other_byte_level_files_keep_numbers_together(tmp_path: Path, pre: str) -> None:
    save_tiny_gguf(tmp_path / "tiny.gguf", pre=pre)
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again.encode("2024 is") == tiny_tokenizer(last_merge=DIGIT_MERGE).encode("2024 is")


@given(st.text(alphabet=[chr(code) for code in range(32, 127)], max_size=40))
@settings(max_examples=100, deadline=None)
def test_restored_tokenizer_loses_nothing_and_joins_no_digits(text: str) -> None:
    tokenizer = tiny_tokenizer(last_merge=DIGIT_MERGE)
    restore_tokenizer(tokenizer, "smollm")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(sum(c.isdigit() for c in token) <= 1 for token in tokenizer.convert_ids_to_tokens(ids))


def test_restore_normalises_only_where_the_family_does() -> None:
    qwen, other = tiny_tokenizer(last_merge=DIGIT_MERGE), tiny_tokenizer(last_merge=DIGIT_MERGE)
    restore_tokenizer(qwen, "qwen2")
    restore_tokenizer(other, "default")
    assert qwen.backend_tokenizer.normalizer.normalize_str("A\u030a") == "\u00c5"
    assert other.backend_tokenizer.normalizer is None
    assert isinstance(other.backend_tokenizer.pre_tokenizer, ByteLevel)


def test_padding_called_endoftext_ends_a_text_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renamed = ("<unk>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
    monkeypatch.setattr("tests.tiny.SPECIALS", renamed)
    save_tiny_gguf(tmp_path / "tiny.gguf")
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.generation_config.eos_token_id == [IM_END, PAD]


def test_unknown_split_is_refused(tmp_path: Path) -> None:
    save_tiny_gguf(tmp_path / "tiny.gguf", pre="viking")
    with pytest.raises(TercelError, match=r"'viking'.*differ from training"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_tokenizer_that_reads_back_differently_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_gguf(tmp_path / "tiny.gguf")
    # transformers imposes a splitting of its own on some families' folders
    load = AutoTokenizer.from_pretrained

    def plain_when_read_back(path: Path, **kwargs: str) -> PreTrainedTokenizerBase:
        tokenizer = load(path, **kwargs)
        if not kwargs:
            tokenizer.backend_tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
        return tokenizer

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", plain_when_read_back)
    with pytest.raises(TercelError, match="reads back differently"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_missing_tensor_is_refused(tmp_path: Path) -> None:
    save_tiny_gguf(tmp_path / "tiny.gguf", without="blk.3.ffn_up")
    with pytest.raises(TercelError, match=r"lacks 1 of the model's weights, such as model\.layers\.3\.mlp\.up"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("keep", [0.02, 0.3, 0.99])
def test_cut_off_file_is_refused(tmp_path: Path, keep: float) -> None:
    file = tmp_path / "tiny.gguf"
    save_tiny_gguf(file)
    file.write_bytes(file.read_bytes()[: int(keep * file.stat().st_size)])
    with pytest.raises(TercelError, match="not a whole GGUF file"):
        convert_gguf(file, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_other_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"hello, this is text and long enough")
    with pytest.raises(TercelError, match="not a whole GGUF file"):
        read_metadata(tmp_path / "x.gguf")


def test_quiet_is_scoped_and_conversion_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    with quiet_transformers():
        assert not transformers_logging.is_progress_bar_enabled()
    save_tiny_gguf(tmp_path / "tiny.gguf")
    err = io.StringIO()
    with redirect_stderr(err):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    assert err.getvalue() == ""
    assert capfd.readouterr() == ("", "")
    assert before == (transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled())
