"""Where a model comes from: a Hub id, a local folder, a GGUF file, or the name of a built-in target."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from tercel.chat.panics import guarded
from tercel.chat.tokenizing import check_rules, tokenize
from tercel.errors import TercelError
from tercel.files import sha256_file
from tercel.hub import HubName, why_unreadable
from tercel.locks import made_once
from tercel.target_model.backend_names import NONE
from tercel.target_model.checkpoint import (
    CONFIGS,
    TEXTS,
    check_causal,
    check_complete,
    check_finite,
    check_folder,
    check_sizes,
    check_texts,
    one_line,
    stored_contents,
)
from tercel.target_model.gguf import conversion_folder, convert_gguf, quiet_transformers
from tercel.target_model.sharding import check_sharding, distributed, placed
from tercel.target_model.snapshot import fetch_files, fetch_weights
from tercel.target_model.wheels import BUILTIN
from tercel.wheels import OnBytes, fetch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Source:
    """What a model's name stands for; `path` is what `from_pretrained` takes: a local folder or a Hub id."""

    name: str
    path: str
    kind: Literal["folder", "hub", "gguf", "alias"]
    revision: str | None


def resolve(name: str, progress: OnBytes | None = None, accept_licence: bool = False) -> Source:
    """The source that `name` stands for; a GGUF file or built-in target is converted into the cache once.

    `name` is a folder, a `.gguf` file, a built-in target, or a Hub id (`owner/name`, `owner/name@revision`).
    Raises `TercelError` if it is none of them, or a folder that holds no model.
    """
    source = _locate(name, progress, accept_licence)
    if source.kind == "folder":
        check_folder(Path(source.path))
    return source


def load_tokenizer(
    name: str,
    trust_remote_code: bool = False,
    accept_licence: bool = False,
    progress: OnBytes | None = None,
) -> PreTrainedTokenizerBase:
    """The tokenizer of `name`, which may also be a folder that holds nothing but a tokenizer."""
    source = _locate(name, progress, accept_licence)
    if source.kind == "folder":
        check_texts(Path(source.path))
    if source.kind == "hub":
        with reading(source, "tokenizer"):
            source = _fetched(source, TEXTS)
    with reading(source, "tokenizer", hush=True):
        tokenizer = AutoTokenizer.from_pretrained(
            source.path, revision=source.revision, trust_remote_code=trust_remote_code
        )
        if not isinstance(tokenizer.chat_template, str | dict | None):
            raise TercelError(f"the chat template of {name} is not text; save its tokenizer again")
        check_rules(tokenizer)
        tokenize(tokenizer, "a text")  # shows what loading does not
    return tokenizer


def load_config(
    name: str,
    trust_remote_code: bool = False,
    accept_licence: bool = False,
    progress: OnBytes | None = None,
) -> PretrainedConfig:
    """The configuration of `name`; raises `TercelError` if it does not belong to a causal language model."""
    return config_of(resolve(name, progress, accept_licence), trust_remote_code)


def load_causal_lm(
    name: str,
    dtype: torch.dtype,
    device: str,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    accept_licence: bool = False,
    progress: OnBytes | None = None,
    sharding: str = NONE,
) -> PreTrainedModel:
    """The model of `name` on `device`, frozen and in eval mode, with every weight read and finite; split as `sharding`
    says, one of `SHARDINGS`.

    Only safetensors are read, never pickles. Raises `TercelError` if anything about the checkpoint is wrong:
    no causal LM, a damaged or missing file, missing weights, NaN or infinite values, code that needs trust.
    """
    where = check_device(device)
    source = resolve(name, progress, accept_licence)
    config = config_of(source, trust_remote_code)
    with reading(source, "weights"):
        folder = Path(source.path)
        if source.kind == "hub":
            folder = fetch_weights(source.path, source.revision, config)
            source = replace(source, revision=folder.name)
    with reading(source, "configuration"):
        check_sizes(name, config, *stored_contents(folder))
        check_sharding(name, config, sharding)
    with reading(source, "weights"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.path,
            config=config,
            revision=source.revision,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # reported below, by name
            output_loading_info=True,
            distributed_config=distributed(config, sharding),
        )
        model, loading = loaded
        check_complete(name, loading)
        check_finite(name, model, dtype)
        model = placed(model, where, sharding)
    return model.eval().requires_grad_(False)


def parse_dtype(name: str) -> torch.dtype:
    """`float32`, `bfloat16` or `float16` as PyTorch's type."""
    if name not in DTYPES:
        raise TercelError(f"{name!r} is not a data type for a model; use {', '.join(DTYPES)}")
    return DTYPES[name]


def check_device(name: str) -> torch.device:
    """`cpu`, `cuda`, `cuda:1` … or `mps` as PyTorch's device; raises `TercelError` if there is none."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise TercelError(f"{name!r} is not a device; use cpu, cuda, cuda:0 or mps") from error
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise TercelError(
                f"device {name} is asked for but PyTorch sees {count} CUDA devices; use cpu, or install a "
                "CUDA build of PyTorch and its driver"
            )
    elif device.type == "mps":
        if not torch.backends.mps.is_available():
            raise TercelError("device mps is asked for but PyTorch has no Metal here; use cpu")
    elif device.type != "cpu":
        raise TercelError(f"device {name} is not supported; use cpu, cuda, cuda:0 or mps")
    return device


def _locate(name: str, progress: OnBytes | None, accept_licence: bool) -> Source:
    """`resolve` without a look into a folder."""
    path = Path(os.path.expanduser(name))  # which leaves a name without a home alone
    if not name.strip():
        raise TercelError(f"the model's name is empty; {_hint(name)}")
    if name.lower() in BUILTIN:
        return Source(name, str(_fetch_alias(name, progress, accept_licence)), "alias", None)
    if os.path.isdir(path):
        return Source(name, str(path), "folder", None)
    if os.path.isfile(path):
        if path.suffix != ".gguf":
            raise TercelError(f"{name} is a file but not a .gguf; give a model's folder")
        return Source(name, str(_converted(path, sha256_file(path), progress)), "gguf", None)
    on_hub = HubName.parse(name)
    if on_hub is None or name.endswith(".gguf"):
        raise TercelError(f"there is no folder or file {name}, and it cannot be a Hub id; {_hint(name)}")
    if "/" not in name and difflib.get_close_matches(name.lower(), BUILTIN, cutoff=0.75):
        raise TercelError(f"there is no model {name}; {_hint(name)}")
    return Source(name, on_hub.id, "hub", on_hub.revision)


def _hint(name: str) -> str:
    """What to try instead: the nearest built-in target if one is near, else all of them."""
    near = difflib.get_close_matches(name.lower(), BUILTIN, n=1, cutoff=0.6)
    if near:
        return f"did you mean the built-in {near[0]}?"
    return f"give a model's folder, a .gguf file, a Hub id such as owner/name, or one of {', '.join(BUILTIN)}"


def _fetch_alias(name: str, progress: OnBytes | None, accept_licence: bool) -> Path:
    pinned = BUILTIN[name.lower()]
    folder = conversion_folder(pinned.sha256)
    if folder.is_dir():
        return folder
    if pinned.terms is not None and not accept_licence:
        raise TercelError(
            f"{name} is under the {pinned.licence} licence; read {pinned.terms} and, if you accept it, "
            "ask again with accept-licence"
        )
    return _converted(fetch(pinned, progress), pinned.sha256, progress)


def _converted(file: Path, sha256: str, progress: OnBytes | None) -> Path:
    folder = conversion_folder(sha256)
    if folder.is_dir():
        return folder
    if progress is not None:
        progress(f"unpacking {file.name}", 0, 0)
    with made_once(folder):
        if not folder.is_dir():
            convert_gguf(file, folder)
    return folder


def _fetched(source: Source, names: Sequence[str]) -> Source:
    """The source of the Hub at the commit whose small files `names` are in the cache by now, and fit to be read."""
    folder = fetch_files(source.path, source.revision, names)
    check_texts(folder)
    return replace(source, revision=folder.name)


def config_of(source: Source, trust_remote_code: bool = False) -> PretrainedConfig:
    """As `load_config`, of a source that is known."""
    with reading(source, "configuration"):
        if source.kind == "hub":
            source = _fetched(source, CONFIGS)
        config = AutoConfig.from_pretrained(source.path, revision=source.revision, trust_remote_code=trust_remote_code)
        check_causal(source.name, config)
    return config


@contextmanager
def reading(source: Source, part: str, *, hush: bool = False) -> Iterator[None]:
    """Turn whatever the files of a model lead to into one sentence; keep bars where something is downloaded.

    hush: as of `guarded`.
    """
    try:
        with nullcontext() if source.kind == "hub" else quiet_transformers(), guarded(hush=hush):
            yield
    except TercelError:
        raise
    except Exception as error:  # wrong files lead to whatever transformers does not check
        raise TercelError(_explain(source, part, error)) from error


def _explain(source: Source, part: str, error: Exception) -> str:
    text, name = str(error), source.name
    if "trust_remote_code" in text:
        return f"{name} brings its own Python code; read it and, if you trust it, ask for trust-remote-code"
    local = f"give a local folder, or use a built-in target ({', '.join(BUILTIN)})"
    if reason := why_unreadable(error, name, source.revision, part, otherwise=_hint(name), offline=local):
        return reason
    if "does not recognize this architecture" in text:
        return f"the installed transformers does not know the architecture of {name}; update transformers"
    if "instantiate the backend tokenizer" in text:
        return f"{name} holds no usable tokenizer; save the model's tokenizer into it"
    if "attn_implementation" in text or "FlashAttention" in text:
        return f"this attention implementation cannot be used ({one_line(error, 120)}); use sdpa or eager"
    if part == "weights" and isinstance(error, OSError) and ".safetensors" in text:
        return f"{name} has no model.safetensors (pickled weights are never read); save it as safetensors"
    plain = isinstance(error, OSError | ValueError | RuntimeError | ImportError | SafetensorError)
    return f"cannot read the {part} of {name}: {'' if plain else f'{type(error).__name__} '}{one_line(error)}"
