"""Any Hugging Face causal language model, loaded once: one forward gives hidden states and captured features.

Shape legend: B rows, T block length, K hidden size, V vocabulary, n captured layers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from tercel.chat.arguments import with_arguments
from tercel.errors import TercelError
from tercel.target_model.attention import use_grouped_attention
from tercel.target_model.cache import RowCache, TargetCache
from tercel.target_model.capabilities import TreeSupport, check_steps, probe_tree_support
from tercel.target_model.capture import layer_inputs
from tercel.target_model.ends import end_ids, turn_end, union
from tercel.target_model.identity import SCHEME, Samples, fingerprint, first_fingerprint, held_samples, stored_samples
from tercel.target_model.masks import additive, causal_block, slot_positions, visible_slots, within_window
from tercel.target_model.output import TargetOutput, joined
from tercel.target_model.output_layer import OutputLayer, embedding_scale
from tercel.target_model.rope import LengthRope, dynamic_ntk
from tercel.target_model.sources import Source, load_causal_lm, load_tokenizer, reading, resolve
from tercel.target_model.stepping import StepCache
from tercel.target_model.structure import (
    attention_windows,
    check_widths,
    context_length,
    decoder_layers,
    decoder_of,
    default_feature_layers,
)
from tercel.target_model.transfer import to_device

__all__ = ["Target", "TargetOutput", "default_feature_layers"]


class Target:
    """A frozen causal language model, and what a head needs to know of it.

    samples: of the weights as stored, if the model was loaded from files; else they are taken from memory.
    template_arguments: given to the tokenizer's chat template in all that this target renders.
    Raises `TercelError` for a model whose outputs cannot be followed, or that cannot be decoded even token by token.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        source: Source,
        samples: Samples | None = None,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        use_grouped_attention(model)
        self.model = model
        self._samples = samples
        self.template_arguments = dict(template_arguments or {})
        self._tokenizer = tokenizer
        if tokenizer is not None and self.template_arguments:
            self._tokenizer = with_arguments(tokenizer, self.template_arguments)
        self.source = source
        config = model.config.get_text_config()
        self.config = config
        self.num_layers: int = config.num_hidden_layers
        self.hidden_size: int = config.hidden_size
        check_widths(model, self.hidden_size)
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.decoder: nn.Module = decoder_of(model)
        self.decoder_layers = decoder_layers(self.decoder, self.num_layers)
        self._windows = attention_windows(config)
        self.output_layer = OutputLayer.of(model)
        self.embedding_scale = embedding_scale(model, self.decoder_layers[0])
        self.rope = LengthRope.of(self.decoder, config)
        self._steps = False  # whether it has to be decoded token by token, with its own cache
        self.tree_support: TreeSupport = probe_tree_support(self)
        if not self.tree_support.chain:
            self._steps = True
            check_steps(self)

    @classmethod
    def load(
        cls,
        name: str,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        attn_implementation: str | None = None,
        trust_remote_code: bool = False,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> Target:
        """Load `name`: a Hub id, a local folder, a GGUF file or a built-in alias.

        attn_implementation: None for `sdpa`, and `eager` where transformers says that the model's attention needs
        more than that (sinks, capped scores).
        template_arguments: what its chat template is given beside the messages, such as `{"enable_thinking": False}`.
        Raises `TercelError` if it cannot be found or loaded, is not a causal language model, or has no template that
        reads such arguments.
        """
        source = resolve(name)
        model = load_causal_lm(
            name,
            dtype=dtype,
            device=device,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
        )
        tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code)
        with reading(source, "model"):  # its first forwards show what loading does not
            return cls(model, tokenizer, source, stored_samples(source), template_arguments)

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
        limit = context_length(self.config)
        if self.rope is not None and (self._steps or not self.rope.modules):
            return min(limit, self.rope.border)  # its cache cannot be filled anew
        return limit

    @property
    def why_no_longer(self) -> str:
        """What to add where the context's limit is named, if it is not what the positions allow."""
        if self.context_length < context_length(self.config) or dynamic_ntk(self.config):
            return ", because beyond that its RoPE rotates all earlier tokens again"
        return ""

    def block_depth(self, length: int) -> int:
        """How deep a tree may be whose root has position `length`: no node may lie past the last position, nor in a
        sequence that is rotated otherwise than its root's."""
        last = self.context_length - 1
        if self.rope is not None and not self.rope.is_long(length + 1):
            last = min(last, self.rope.border - 1)
        return max(0, last - length)

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
        """Short digest of the settings and of a sample of every weight, whatever the dtype loaded."""
        samples = held_samples(self.model) if self._samples is None else self._samples
        return fingerprint(self.config, samples)

    @cached_property
    def _first_fingerprint(self) -> str:
        sizes = (self.num_layers, self.hidden_size, self.vocab_size)
        return first_fingerprint(self.model, sizes, self._samples or {})

    def is_recorded_as(self, weights: str) -> bool:
        """Whether a head's record, of whichever scheme, names this target."""
        return weights == (self.fingerprint if weights.startswith(SCHEME) else self._first_fingerprint)

    @property
    def tokenizer_digest(self) -> str:
        """Short digest of the tokenizer's vocabulary."""
        vocabulary = sorted(self.tokenizer.get_vocab().items(), key=lambda item: item[1])
        return hashlib.sha256(repr(vocabulary).encode()).hexdigest()[:16]

    def new_cache(self, rows: int, capacity: int) -> RowCache:
        return StepCache(rows, self.config) if self._steps else TargetCache(rows, capacity)

    @torch.no_grad()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: RowCache,
        block_mask: Tensor | None = None,
        capture: Sequence[int] = (),
    ) -> TargetOutput:
        """Run a block after what `cache` holds; the block's keys stay uncommitted until `cache.keep`.

        tokens, positions: `[B, T]`; block_mask: bool `[B, T, T]`, which block tokens each one sees (a tree's
        ancestor mask), causal if left out. With a `StepCache`, blocks are causal and positions follow the cache.
        capture: the decoder layers whose input is wanted (`0 .. L-1`); `L` is the input of the output layer, after the
        final norm.
        Raises `TercelError` for a block that reaches past a border where its row would be rotated otherwise, and for
        a layer out of range.
        """
        block = tokens.shape[1]
        if isinstance(cache, StepCache):
            cache.begin(block)
            rows = [self._run(tokens[i : i + 1], None, None, own, capture) for i, own in enumerate(cache.rows)]
            return joined(rows, 0)
        assert isinstance(cache, TargetCache)
        if block_mask is None:
            block_mask = causal_block(block, tokens.device).expand(tokens.shape[0], -1, -1)
        lengths = list(cache.lengths)
        cache.begin(block, tokens.device)
        seen = visible_slots(lengths, block_mask)
        with nullcontext() if self.rope is None else self.rope.block(cache, positions):
            return self._run(tokens, positions, self._masks(seen, positions, lengths), cache, capture)

    def renew(self, cache: RowCache, texts: Sequence[Sequence[int]]) -> None:
        """Make ready for the next block: run rows again whose next token lies past the border past which RoPE turns
        all their keys anew; `texts` are the tokens of each row."""
        if self.rope is None or not isinstance(cache, TargetCache):
            return
        for row in self.rope.stale_rows(cache):
            length, own = cache.lengths[row], TargetCache(1, cache.capacity)
            self.prefill(texts[row][:length], own, sequence=length + 1)
            cache.add_row(own)
            order = list(range(cache.rows - 1))
            order[row] = cache.rows - 1
            cache.select_rows(order)

    @contextmanager
    def sequences_of(self, length: int) -> Iterator[None]:
        """Within, the stock model rotates every forward as a part of one sequence of `length` tokens."""
        with nullcontext() if self.rope is None else self.rope.sequences([length]):
            yield

    def _masks(self, seen: Tensor, positions: Tensor, lengths: Sequence[int]) -> Tensor | dict[str, Tensor]:
        masks: dict[str, Tensor] = {}
        for kind, window in self._windows.items():
            allowed = seen
            if window is not None and max(lengths) + seen.shape[1] > window:
                allowed = seen & within_window(positions, slot_positions(lengths, positions), window)
            masks[kind] = additive(allowed, self.dtype)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    @torch.no_grad()
    def encode(self, tokens: Tensor, capture: Sequence[int] = ()) -> TargetOutput:
        """Run whole right-padded sequences `[B, T]` without a cache; causality hides the padding.

        Entry `i` is what one forward over the first `i + 1` tokens ends with, also where RoPE depends on the length.
        capture: as in `forward`.
        """
        if self.rope is None:
            return self._run(tokens, None, None, None, capture)
        border, length = self.rope.border, tokens.shape[1]
        parts = []
        with self.rope.sequences([1]):
            parts.append(self._run(tokens[:, :border], None, None, None, capture))
        if length > border:
            with self.rope.sequences([length]):
                parts.append(self._run(tokens, None, None, None, capture).part(border))
        return joined(parts, 1)

    def _run(
        self, tokens: Tensor, positions: Tensor | None, mask: Any, cache: Cache | None, capture: Sequence[int]
    ) -> TargetOutput:
        for layer in capture:
            if not 0 <= layer <= self.num_layers:
                raise TercelError(
                    f"feature layer {layer} is out of range: {self.source.name} has layers 0..{self.num_layers - 1}"
                )
        inner = [layer for layer in capture if layer < self.num_layers]
        with layer_inputs(self.decoder_layers, inner) as seen:
            hidden = self.decoder(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=mask,
                cache=cache,
                use_cache=cache is not None,
            ).last_hidden_state
        seen[self.num_layers] = hidden
        return TargetOutput(hidden=hidden, layers=tuple(seen[layer] for layer in capture))

    def prefill(
        self,
        tokens: Sequence[int],
        cache: RowCache,
        chunk: int = 512,
        sequence: int | None = None,
        capture: Sequence[int] = (),
    ) -> TargetOutput:
        """Run a prompt after what a one-row `cache` holds and commit it; returns `[1, T, ..]`.

        sequence: how long a sequence its keys are rotated for, if not for the tokens there are then.
        Raises `TercelError` for an empty prompt.
        """
        if not len(tokens):
            raise TercelError("an empty prompt gives the target nothing to go on; give at least one token")
        if isinstance(cache, StepCache):  # whole at first, as `generate()` does; some go on from one token only
            chunk = 1 if cache.lengths[0] else len(tokens)
        elif isinstance(cache, TargetCache) and not cache.lengths[0]:
            cache.turned_for[0] = sequence or len(tokens)
        outputs = []
        for start in range(0, len(tokens), chunk):
            piece = to_device([list(tokens[start : start + chunk])], self.device)
            positions = torch.arange(piece.shape[1], device=self.device)[None] + cache.lengths[0]
            outputs.append(self.forward(piece, positions, cache, capture=capture))
            cache.keep([range(piece.shape[1])])
        return joined(outputs, 1)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """`[.., K]` to `[.., V]`: the output layer with whatever cap or scale the model applies."""
        return self.output_layer(hidden)

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        """`[..]` to `[.., K]`: what enters the first layer for these tokens, embedding scale included."""
        embedded = self.model.get_input_embeddings()(tokens)
        return embedded if self.embedding_scale == 1.0 else embedded * self.embedding_scale
