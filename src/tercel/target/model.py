"""Any Hugging Face causal language model, loaded once: one forward gives hidden states and captured features.

Shape legend: B rows, T block length, K hidden size, V vocabulary, n captured layers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tercel.errors import TercelError
from tercel.target.attention import use_grouped_attention
from tercel.target.cache import TargetCache
from tercel.target.capabilities import TreeSupport, probe_tree_support
from tercel.target.ends import end_ids, turn_end, union
from tercel.target.masks import additive, causal_block, slot_positions, visible_slots, within_window
from tercel.target.output_layer import OutputLayer, embedding_scale
from tercel.target.sources import Source, load_causal_lm, load_tokenizer, resolve
from tercel.target.transfer import to_device


@dataclass(frozen=True)
class TargetOutput:
    """What one forward over a block gives.

    hidden: `[B, T, K]`, after the final norm (what the output layer takes).
    layers: for each captured layer `[B, T, K]`, the residual stream entering it.
    """

    hidden: Tensor
    layers: tuple[Tensor, ...]

    @property
    def features(self) -> Tensor:
        """`[B, T, n*K]`, low to high, not normalised (paper section 3.1)."""
        return torch.cat(self.layers, dim=-1)


def default_feature_layers(num_layers: int) -> tuple[int, ...]:
    """Low, middle and high: the inputs of layers `2`, `L//2`, `L-3` (spec section 1); of the first, a middle
    and the last layer where the model has fewer than seven.

    Raises `TercelError` for a model of fewer than three layers, for which layers have to be chosen by hand.
    """
    if num_layers < 3:
        raise TercelError(
            f"a model of {num_layers} layers has no low, middle and high layer; name the feature layers yourself"
        )
    return (2, num_layers // 2, num_layers - 3) if num_layers >= 7 else (0, num_layers // 2, num_layers - 1)


class Target:
    """A frozen causal language model with hooks for its features, and what a head needs to know of it."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, source: Source) -> None:
        use_grouped_attention(model)
        self.model = model
        self._tokenizer = tokenizer
        self.source = source
        config = model.config.get_text_config()
        self.config = config
        self.num_layers: int = config.num_hidden_layers
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.decoder: nn.Module = model.get_decoder()
        self.decoder_layers = _decoder_layers(self.decoder, self.num_layers)
        self.feature_layers: tuple[int, ...] = ()
        self._captured: dict[int, Tensor] = {}
        self._hooks: list[Any] = []
        self._windows = _attention_windows(config)
        self.output_layer = OutputLayer.of(model)
        self.embedding_scale = embedding_scale(model, self.decoder_layers[0])
        self.tree_support: TreeSupport = probe_tree_support(self)

    @classmethod
    def load(
        cls,
        name: str,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        attn_implementation: str | None = "sdpa",
        trust_remote_code: bool = False,
    ) -> Target:
        """Load `name`: a Hub id, a local folder, a GGUF file or a built-in alias.

        Raises `TercelError` if it cannot be found or loaded, or is not a causal language model.
        """
        source = resolve(name)
        model = load_causal_lm(
            name,
            dtype=dtype,
            device=device,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
        )
        return cls(model, load_tokenizer(name, trust_remote_code=trust_remote_code), source)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            raise TercelError(f"the target {self.source.name} was built without a tokenizer")
        return self._tokenizer

    @property
    def tokenizer_or_none(self) -> PreTrainedTokenizerBase | None:
        return self._tokenizer

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def context_length(self) -> int:
        """The longest sequence the model's positions allow."""
        return int(getattr(self.config, "max_position_embeddings", None) or 1 << 30)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end an answer: those of all `end_sources`."""
        return union(self.end_sources)

    @property
    def end_sources(self) -> dict[str, tuple[int, ...]]:
        """Who says at which ids an answer ends.

        Raises `TercelError` for an `eos_token_id` that is none.
        """
        generation, tokenizer = self.model.generation_config, self._tokenizer
        said = {
            "the generation config": generation.eos_token_id if generation else None,
            "the model's config": self.config.eos_token_id,
            "the tokenizer": tokenizer.eos_token_id if tokenizer is not None else None,
            "the chat template": self._turn_end,
        }
        return {name: end_ids(f"{name} of {self.source.name}", value, self.vocab_size) for name, value in said.items()}

    @cached_property
    def _turn_end(self) -> tuple[int, ...]:
        return turn_end(self._tokenizer)

    @cached_property
    def fingerprint(self) -> str:
        """Short digest of the sizes and of a sample of every weight.

        Taken at bfloat16 precision, so that the dtype loaded does not matter.
        """
        digest = hashlib.sha256(f"{self.num_layers} {self.hidden_size} {self.vocab_size}".encode())
        for name, parameter in self.model.named_parameters():
            flat = parameter.detach().flatten()
            digest.update(name.encode())
            digest.update(flat[:: max(1, flat.numel() // 64)][:64].to("cpu", torch.bfloat16).float().numpy().tobytes())
        return digest.hexdigest()[:16]

    @property
    def tokenizer_digest(self) -> str:
        """Short digest of the tokenizer's vocabulary."""
        vocabulary = sorted(self.tokenizer.get_vocab().items(), key=lambda item: item[1])
        return hashlib.sha256(repr(vocabulary).encode()).hexdigest()[:16]

    def tap(self, layers: Sequence[int]) -> None:
        """Capture the input of these decoder layers (`0 .. L-1`) in every forward from now on; `L` is the input of
        the output layer, after the final norm.

        Raises `TercelError` for an id out of range.
        """
        for layer in layers:
            if not 0 <= layer <= self.num_layers:
                raise TercelError(
                    f"feature layer {layer} is out of range: {self.source.name} has layers 0..{self.num_layers - 1}"
                )
        if tuple(layers) == self.feature_layers:
            return
        for hook in self._hooks:
            hook.remove()
        self.feature_layers = tuple(layers)
        self._hooks = [
            self.decoder_layers[layer].register_forward_pre_hook(self._capture(layer), with_kwargs=True)
            for layer in dict.fromkeys(layers)
            if layer < self.num_layers
        ]

    def _capture(self, layer: int) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._captured[layer] = args[0] if args else kwargs["hidden_states"]

        return hook

    def new_cache(self, rows: int, capacity: int) -> TargetCache:
        return TargetCache(rows, capacity)

    @torch.no_grad()
    def forward(
        self, tokens: Tensor, positions: Tensor, cache: TargetCache, within: Tensor | None = None
    ) -> TargetOutput:
        """Run a block behind what `cache` holds; the block's keys stay uncommitted until `cache.keep`.

        tokens, positions: `[B, T]`; within: bool `[B, T, T]`, which block tokens each one sees (a tree's
        ancestor mask), causal if left out.
        """
        block = tokens.shape[1]
        if within is None:
            within = causal_block(block, tokens.device).expand(tokens.shape[0], -1, -1)
        lengths = list(cache.lengths)
        cache.begin(block, tokens.device)
        seen = visible_slots(lengths, within)
        return self._run(tokens, positions, self._masks(seen, positions, lengths), cache)

    def _masks(self, seen: Tensor, positions: Tensor, lengths: Sequence[int]) -> Tensor | dict[str, Tensor]:
        masks: dict[str, Tensor] = {}
        for kind, window in self._windows.items():
            allowed = seen
            if window is not None and max(lengths) + seen.shape[1] > window:
                allowed = seen & within_window(positions, slot_positions(lengths, positions), window)
            masks[kind] = additive(allowed, self.dtype)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    @torch.no_grad()
    def encode(self, tokens: Tensor) -> TargetOutput:
        """Run whole right-padded sequences `[B, T]` without a cache; causality hides the padding."""
        return self._run(tokens, None, None, None)

    def _run(self, tokens: Tensor, positions: Tensor | None, mask: Any, cache: TargetCache | None) -> TargetOutput:
        self._captured.clear()
        hidden = self.decoder(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            cache=cache,
            use_cache=cache is not None,
        ).last_hidden_state
        self._captured[self.num_layers] = hidden
        layers = tuple(self._captured[layer] for layer in self.feature_layers)
        self._captured.clear()
        return TargetOutput(hidden=hidden, layers=layers)

    def prefill(self, tokens: Sequence[int], cache: TargetCache, chunk: int = 512) -> TargetOutput:
        """Run a prompt behind what a one-row `cache` holds and commit it; returns `[1, T, ..]`.

        Raises `TercelError` for an empty prompt.
        """
        if not len(tokens):
            raise TercelError("an empty prompt gives the target nothing to go on; give at least one token")
        outputs = []
        for start in range(0, len(tokens), chunk):
            piece = to_device([list(tokens[start : start + chunk])], self.device)
            positions = torch.arange(piece.shape[1], device=self.device)[None] + cache.lengths[0]
            outputs.append(self.forward(piece, positions, cache))
            cache.keep([range(piece.shape[1])])
        if len(outputs) == 1:
            return outputs[0]
        return TargetOutput(
            hidden=torch.cat([o.hidden for o in outputs], dim=1),
            layers=tuple(torch.cat(parts, dim=1) for parts in zip(*(o.layers for o in outputs), strict=True)),
        )

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """`[.., K]` to `[.., V]`: the output layer with whatever cap or scale the model applies."""
        return self.output_layer(hidden)

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        """`[..]` to `[.., K]`: what enters the first layer for these tokens, embedding scale included."""
        embedded = self.model.get_input_embeddings()(tokens)
        return embedded if self.embedding_scale == 1.0 else embedded * self.embedding_scale


def _decoder_layers(decoder: nn.Module, count: int) -> nn.ModuleList:
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise TercelError(
        f"found no list of {count} decoder layers in {type(decoder).__name__}; its features cannot be captured"
    )


def _attention_windows(config: Any) -> dict[str, int | None]:
    """Kinds of attention layers and their windows (None: unlimited), as the model's masks are keyed."""
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds:  # older configurations: one window for all layers
        return {"full_attention": window}
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}
