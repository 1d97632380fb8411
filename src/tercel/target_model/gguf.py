"""A GGUF file becomes a plain Hugging Face folder, once: dequantised float32 safetensors and a tokenizer.

transformers reads GGUF, but keeps weights packed unless asked not to, and rebuilds the tokenizer from the
file's metadata with a few details missing; what is missing is put back here.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers import normalizers, pre_tokenizers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from tercel.chat.panics import guarded
from tercel.errors import TercelError
from tercel.files import atomic_dir, cache_dir
from tercel.target_model.checkpoint import check_sizes, one_line
from tercel.target_model.gguf_header import check_header

# `tokenizer.ggml.pre` names of vocabularies learned with every digit on its own, then GPT-2's split.
DIGIT_SPLITTING = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
# Byte-level families whose split the conversion knows, or needs no more than GPT-2's own.
PLAIN_BYTE_LEVEL = frozenset({"default", "gpt-2", "mpt", "olmo", "jais", "trillion", "granite-docling"})
# Families whose original tokenizer brings text to NFC first.
NFC_NORMALISING = frozenset({"qwen2"})


# Shows whether two tokenizers treat numbers, blanks, contractions, accents and line ends alike.
PROBE = "In 2024, the café's 1234 naïve  customers didn't re-order:\n\n\tA\u030a = x**2  # 日本語 🙂\r\n"

# Part of the cache key: raise it when a conversion of the same file comes out differently.
CONVERSION = 1


def conversion_folder(sha256: str) -> Path:
    """Where in the cache the conversion of the GGUF file with this checksum is, or will be."""
    return cache_dir() / "models" / f"{sha256[:16]}-{CONVERSION}"


def convert_gguf(file: Path, out_dir: Path) -> None:
    """Write the model of `file` to `out_dir` as float32 safetensors, with its tokenizer and end tokens.

    `out_dir` is whole or absent. Raises `TercelError` if the file is no GGUF, is cut off, or holds an
    architecture or tokenizer that cannot be converted faithfully.
    """
    metadata = read_metadata(file)
    with quiet_transformers():
        tokenizer = _tokenizer(file, metadata)
        model = _model(file)
        model.generation_config = GenerationConfig(
            bos_token_id=model.config.bos_token_id,
            eos_token_id=_end_tokens(metadata, tokenizer),
            pad_token_id=tokenizer.pad_token_id,
        )
        with atomic_dir(out_dir) as partial:
            _save(model, tokenizer, partial)
            if not _reads_back(tokenizer, partial):
                raise TercelError(
                    f"the tokenizer of {file} reads back differently once saved, because transformers "
                    "imposes its family's own; use the model's safetensors folder"
                )


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Raises `OSError` if it cannot be written: the libraries raise types of their own where the disk is full."""
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except Exception as error:
        raise OSError(one_line(error)) from error


def _reads_back(tokenizer: PreTrainedTokenizerBase, folder: Path) -> bool:
    """Whether the tokenizer saved in the folder tokenises as `tokenizer` does."""
    try:
        with guarded(hush=True):
            return bool(AutoTokenizer.from_pretrained(folder).encode(PROBE) == tokenizer.encode(PROBE))
    except Exception as error:  # what wrong settings of a GGUF file lead to
        raise TercelError(
            f"the converted tokenizer cannot be used ({one_line(error)}); use the model's safetensors folder"
        ) from error


def read_metadata(file: Path) -> dict[str, str | int]:
    """The strings and whole numbers among the file's metadata, by their GGUF keys."""
    check_header(file)
    try:
        fields = GGUFReader(file).fields.values()
        values = {field.name: field.contents() for field in fields if len(field.types) == 1}
    except Exception as error:  # the reader checks little of what it finds
        raise TercelError(f"{file} is not a whole GGUF file ({error}); download or convert it again") from error
    return {name: value for name, value in values.items() if isinstance(value, str | int)}


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without transformers' own bars and warnings while the block runs; errors are still raised."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def restore_tokenizer(tokenizer: PreTrainedTokenizerBase, pre: str) -> None:
    """Give a converted byte-level tokenizer the splitting and normalising that `tokenizer.ggml.pre` names.

    The conversion knows the patterns of Llama 3, Qwen2 and others, and falls back to GPT-2's where it does
    not: then "2024" becomes one token although the model was trained on four.
    """
    backend = tokenizer.backend_tokenizer
    if pre in DIGIT_SPLITTING:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if pre in NFC_NORMALISING:
        backend.normalizer = normalizers.NFC()


def _tokenizer(file: Path, metadata: dict[str, str | int]) -> PreTrainedTokenizerBase:
    kind, pre = str(metadata.get("tokenizer.ggml.model")), str(metadata.get("tokenizer.ggml.pre", "default"))
    try:
        with guarded(hush=True):
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except Exception as error:  # what wrong settings of a file lead to
        raise TercelError(
            f"the tokenizer in {file} ({kind}) cannot be converted ({one_line(error)}); use the model's safetensors "
            "folder"
        ) from error
    if kind != "gpt2":  # SentencePiece vocabularies need no pattern
        return tokenizer
    restore_tokenizer(tokenizer, pre)
    split_by_conversion = not isinstance(tokenizer.backend_tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel)
    if not split_by_conversion and pre not in PLAIN_BYTE_LEVEL:
        raise TercelError(
            f"{file} splits text in a way named {pre!r}, which this version cannot reproduce, so that tokens "
            "would differ from training; use the model's safetensors folder"
        )
    return tokenizer


def _model(file: Path) -> PreTrainedModel:
    try:
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        check_sizes(str(file), config, *check_header(file))
        # the bar over the file's tensors heeds no setting
        with redirect_stderr(io.StringIO()):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                file.parent,
                gguf_file=file.name,
                dtype=torch.float32,
                quantization_config=GgufConfig(dequantize=True),
                output_loading_info=True,
            )
    except TercelError:
        raise
    except Exception as error:
        raise TercelError(
            f"the model in {file} cannot be converted ({one_line(error)}); use its safetensors folder"
        ) from error
    model, loading = loaded
    if missing := sorted(loading["missing_keys"]):
        raise TercelError(
            f"{file} lacks {len(missing)} of the model's weights, such as {missing[0]}; "
            "give the whole file (parts of a split one must be merged first)"
        )
    packed = [name for name, module in model.named_modules() if _is_packed(module)]
    if packed:
        raise TercelError(f"{file}: {packed[0]} stayed quantised after loading; update transformers")
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model


def _is_packed(module: nn.Module) -> bool:
    """A linear layer of another class than PyTorch's, or with weights that are not float32."""
    linear = isinstance(module, nn.Linear) or type(module).__name__.endswith("Linear")
    return linear and (type(module) is not nn.Linear or module.weight.dtype != torch.float32)


def _end_tokens(metadata: dict[str, str | int], tokenizer: PreTrainedTokenizerBase) -> list[int] | int | None:
    """Every token that ends an answer: end of text, of turn, of message, and a padding `<|endoftext|>`.

    A GGUF file names one end token; instruct models of Qwen's kind also stop at the text's own end, which the
    file names only as padding.
    """
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [metadata[f"tokenizer.ggml.{name}"] for name in names if f"tokenizer.ggml.{name}" in metadata]
    padding = metadata.get("tokenizer.ggml.padding_token_id")
    if padding is not None and tokenizer.convert_ids_to_tokens(int(padding)) == "<|endoftext|>":
        ids.append(padding)
    distinct = list(dict.fromkeys(int(token) for token in ids))
    return distinct if len(distinct) > 1 else next(iter(distinct), None)
