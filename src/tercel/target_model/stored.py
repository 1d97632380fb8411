"""A target that is not loaded: as much of it as its files tell, for what is put beside it without running it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from tercel.errors import TercelError
from tercel.target_model.checkpoint import check_texts
from tercel.target_model.identity import SCHEME, fingerprint, stored_folder, stored_samples, tokenizer_digest
from tercel.target_model.sources import Source, config_of, load_tokenizer, resolve
from tercel.wheels import OnBytes

_EMBEDDINGS = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "gpt_neox.embed_in.weight",
)
_SCALED = ("embedding_multiplier", "scale_embedding", "hidden_size_per_layer_input")  # settings of models that scale


@dataclass(frozen=True)
class StoredTarget:
    """A target by its files; None is what they do not tell, or what is not known of one on the Hub.

    settings: its configuration; unread: why there is none.
    """

    source: Source
    settings: PretrainedConfig | None
    unread: TercelError | None = None

    @classmethod
    def find(cls, name: str, on_bytes: OnBytes | None = None, *, ask_hub: bool) -> StoredTarget:
        """The target `name`: a folder, a GGUF file, a built-in name, or one of the Hub. Of that only what was fetched
        before is known; `ask_hub` fetches the configuration, if the Hub can be reached.

        Raises `TercelError` if there is none, or its files cannot be read.
        """
        source = resolve(name, on_bytes)
        if source.kind != "hub":
            return cls(source, config_of(source))
        folder = stored_folder(source)
        try:
            if folder is not None and (folder / "config.json").is_file():
                check_texts(folder)
                return cls(source, config_of(Source(name, str(folder), "folder", None)))
            return cls(source, config_of(source) if ask_hub else None)
        except TercelError as error:
            return cls(source, None, error)

    @property
    def address(self) -> str:
        """What an engine loads it by: its name on the Hub, or where its folder is."""
        return self.source.name if self.source.kind == "hub" else str(Path(self.source.path).absolute())

    @property
    def config(self) -> PretrainedConfig | None:
        """The text model's part of `settings`."""
        return None if self.settings is None else self.settings.get_text_config()

    @property
    def num_layers(self) -> int | None:
        return None if self.config is None else self.config.num_hidden_layers

    @property
    def hidden_size(self) -> int | None:
        return None if self.config is None else self.config.hidden_size

    @property
    def vocab_size(self) -> int | None:
        return None if self.config is None else self.config.vocab_size

    @property
    def model_type(self) -> str | None:
        return None if self.config is None else self.config.model_type

    @cached_property
    def tokenizer_or_none(self) -> PreTrainedTokenizerBase | None:
        folder = stored_folder(self.source)
        if folder is None:
            return None
        try:
            return load_tokenizer(str(folder))
        except TercelError:  # a folder without one, or one with code of its own
            return None

    @property
    def tokenizer_digest(self) -> str:
        """Raises `TercelError` for a target without a tokenizer."""
        if self.tokenizer_or_none is None:
            raise TercelError(f"the target {self.source.name} has no tokenizer that can be read")
        return tokenizer_digest(self.tokenizer_or_none)

    def is_recorded_as(self, weights: str) -> bool | None:
        """Whether a head's record names this target. None where that takes the loaded model: for records of the first
        scheme, and for weights that are not in one folder."""
        if self.config is None or not weights.startswith(SCHEME):
            return None
        try:
            samples = stored_samples(self.source)
        except TercelError:  # of one on the Hub not all was fetched
            return None
        return None if samples is None else weights == fingerprint(self.config, samples)

    def is_rounded_from(self, weights: str) -> bool:
        """Nothing that only lies there is rounded."""
        return False

    def embeddings(self) -> Tensor | None:
        """`[V, K]`; None if they are not in a folder, or the model scales them."""
        folder = stored_folder(self.source)
        if folder is None or self.settings is None:
            return None
        return stored_embeddings(folder, self.settings.to_dict())


def stored_embeddings(folder: Path, config: Mapping[str, Any]) -> Tensor | None:
    """The embeddings `[V, K]` in a target's folder; None if it has none to be found, or its model scales them."""
    text = config.get("text_config") or config
    if str(text.get("model_type", "")).startswith("gemma") or any(text.get(name) for name in _SCALED):
        return None
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as stored:
                found = next((name for name in stored.keys() if name in _EMBEDDINGS), None)  # noqa: SIM118 (not a dict)
                if found is not None:
                    return stored.get_tensor(found)
        except (SafetensorError, OSError):
            return None
    return None
