"""The target that Hugging Face `transformers` loads: any causal language model, once.

Shape legend: K hidden size, V vocabulary, W some of its tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from tercel.chat.arguments import with_arguments
from tercel.errors import TercelError
from tercel.target_model.attention import use_grouped_attention
from tercel.target_model.backend_names import INT8, NONE, OPENVINO, WEIGHTS
from tercel.target_model.blocks import MaskedBlocks
from tercel.target_model.capabilities import TreeSupport, check_steps, probe_tree_support
from tercel.target_model.ends import end_ids, turn_end, union
from tercel.target_model.identity import (
    SCHEME,
    Samples,
    fingerprint,
    first_fingerprint,
    held_samples,
    stored_samples,
    tokenizer_digest,
)
from tercel.target_model.int8 import Int8Weights
from tercel.target_model.output import TargetOutput
from tercel.target_model.output_layer import OutputLayer, embedding_scale
from tercel.target_model.protocol import Blocks, RowCache
from tercel.target_model.rope import dynamic_ntk
from tercel.target_model.sources import Source, load_causal_lm, load_tokenizer, reading, resolve
from tercel.target_model.stepping import TokenSteps
from tercel.target_model.stock import StockDecoder
from tercel.target_model.structure import (
    check_widths,
    context_length,
)
from tercel.target_model.work import TargetWork, stock_work


class Target:
    """A frozen causal language model, and what a head needs to know of it (a `TargetModel`).

    samples: of the weights as stored, if the model was loaded from files; else they are taken from memory.
    template_arguments: given to the tokenizer's chat template in all that this target renders.
    same_bits: whether drafted text is computed as token-by-token text is, to the bit, where that is known how
    (`docs/exactness.md`); without it near ties may fall the other way. Left out, it is in types of 16 bits; in float32
    it makes single tokens slow.
    sharding: how the model is split already, one of `SHARDINGS`.
    weights: "int8" rounds the model's matrices in place (`int8.py`), so that this is the quantised model in all that it
    computes, and in its fingerprint; None leaves them as they are.
    Raises `TercelError` for a model whose outputs cannot be followed, that cannot be decoded even token by token, or
    that cannot have such weights.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        source: Source,
        samples: Samples | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        same_bits: bool | None = None,
        sharding: str = NONE,
        weights: str | None = None,
    ) -> None:
        if weights not in (None, *WEIGHTS):
            raise TercelError(f"there are no weights {weights}; known are {', '.join(WEIGHTS)}")
        known = use_grouped_attention(model)
        same_bits = known and (model.dtype.itemsize == 2 if same_bits is None else same_bits)
        self.model = model
        self.sharding = sharding
        self.int8: Int8Weights | None = None
        self.rounds_activations = False  # whether what computes the blocks does so before products with int8 weights
        if weights == INT8:
            samples = held_samples(model) if samples is None else samples  # before they are rounded
            self.int8 = Int8Weights(model, source.name)
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
        self.stock = StockDecoder(model, source.name)
        self.output_layer = OutputLayer.of(model, same_bits)
        self._logits: Callable[[Tensor], Tensor] = self.output_layer
        self.embedding_scale = embedding_scale(model, self.stock.layers[0])
        self._blocks: Blocks = MaskedBlocks(self.stock, same_bits)
        self.tree_support: TreeSupport = probe_tree_support(self)
        if not self.tree_support.chain:
            self._blocks = TokenSteps(self.stock)
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
        same_bits: bool | None = None,
        sharding: str = NONE,
        weights: str | None = None,
    ) -> Target:
        """Load `name`: a Hub id, a local folder, a GGUF file or a built-in alias.

        attn_implementation: None for `sdpa`, and `eager` where transformers says that the model's attention needs
        more than that (sinks, capped scores).
        template_arguments: what its chat template is given beside the messages, such as `{"enable_thinking": False}`.
        same_bits, weights: as in the constructor. sharding: split it over the processes of torch's process group, one
        of `SHARDINGS`; all call this together.
        Raises `TercelError` if it cannot be found or loaded, is not a causal language model, cannot have such weights,
        or has no template that reads such arguments.
        """
        source = resolve(name)
        model = load_causal_lm(
            name,
            dtype=dtype,
            device=device,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            sharding=sharding,
        )
        tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code)
        with reading(source, "model"):  # its first forwards show what loading does not
            return cls(
                model, tokenizer, source, stored_samples(source), template_arguments, same_bits, sharding, weights
            )

    def computed_by(self, blocks: Blocks, logits: Callable[[Tensor], Tensor]) -> Target:
        """The same target with blocks and logits computed otherwise; everything else is shared."""
        other = copy.copy(self)
        other.__dict__.pop("work", None)  # what is read depends on who computes
        other._blocks, other._logits = blocks, logits
        return other

    def drop_blocks(self) -> None:
        """Free the memory of the layers, for who needs embeddings and output layer alone; nothing can be run after."""
        _ = self.fingerprint, self._first_fingerprint  # what is known of all weights is known before they go
        for parameter in self.stock.layers.parameters():
            parameter.data = parameter.data.new_empty(0)

    @property
    def backend(self) -> str:
        return self._blocks.backend

    @property
    def weights(self) -> str | None:
        return None if self.int8 is None else INT8

    @contextmanager
    def beside(self) -> Iterator[None]:
        before, count = torch.get_num_threads(), self._blocks.torch_threads
        if count in (None, before):
            yield
            return
        torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(before)

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
        limit, rope = context_length(self.config), self.stock.rope
        return limit if rope is None or self._blocks.renews else min(limit, rope.border)

    @property
    def why_no_longer(self) -> str:
        """What to add where the context's limit is named, if it is not what the positions allow."""
        if self.context_length < context_length(self.config) or dynamic_ntk(self.config):
            return ", because beyond that its RoPE rotates all earlier tokens again"
        return ""

    @property
    def resumes(self) -> bool:
        return self._blocks.resumes

    @cached_property
    def work(self) -> TargetWork:
        whole = self.int8 if self.backend == OPENVINO else None  # torch computes with what they stand for
        return stock_work(self.stock, self.output_layer, whole)

    @property
    def block_widths(self) -> Sequence[int]:
        return self._blocks.block_widths

    def expect_many(self, many: bool = True) -> bool:
        return self._blocks.expect_many(many)

    def block_depth(self, length: int) -> int:
        """How deep a tree may be whose root has position `length`: no node may lie past the last position, nor in a
        sequence that is rotated otherwise than its root's, nor where its backend would sum otherwise."""
        last, rope = self.context_length - 1, self.stock.rope
        backends = self._blocks.last_position(length)
        if backends is not None:
            last = min(last, backends)
        if rope is not None and not rope.is_long(length + 1):
            last = min(last, rope.border - 1)
        return max(0, last - length)

    @property
    def generation_config(self) -> GenerationConfig | None:
        return self.model.generation_config

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end an answer: those of all `end_sources`."""
        return union(self.end_sources)

    @property
    def end_sources(self) -> dict[str, tuple[int, ...]]:
        """Who says at which ids an answer ends.

        Raises `TercelError` for an `eos_token_id` that is none.
        """
        generation, tokenizer = self.generation_config, self._tokenizer
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
        """Short digest of the settings and of a sample of every weight, whatever the dtype loaded; with the name of the
        weights where they are rounded."""
        return self._stored_fingerprint if self.weights is None else f"{self._stored_fingerprint}-{self.weights}"

    @cached_property
    def _stored_fingerprint(self) -> str:
        samples = held_samples(self.model) if self._samples is None else self._samples
        return fingerprint(self.config, samples)

    @cached_property
    def _first_fingerprint(self) -> str:
        sizes = (self.num_layers, self.hidden_size, self.vocab_size)
        return first_fingerprint(self.model, sizes, self._samples or {})

    def is_recorded_as(self, weights: str) -> bool:
        """Whether a head's record, of whichever scheme, names this target."""
        if self.weights is not None:
            return weights == self.fingerprint
        return self._is_stored_as(weights)

    def is_rounded_from(self, weights: str) -> bool:
        return self.weights is not None and self._is_stored_as(weights)

    def _is_stored_as(self, weights: str) -> bool:
        return weights == (self._stored_fingerprint if weights.startswith(SCHEME) else self._first_fingerprint)

    @property
    def tokenizer_digest(self) -> str:
        """Short digest of the tokenizer's vocabulary."""
        return tokenizer_digest(self.tokenizer)

    def new_cache(self, rows: int, capacity: int) -> RowCache:
        return self._blocks.new_cache(rows, capacity)

    @torch.no_grad()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: RowCache,
        block_mask: Tensor | None = None,
        capture: Sequence[int] = (),
        rows: Sequence[int] | None = None,
    ) -> TargetOutput:
        """See `TargetModel.forward`; where drafts cannot be verified, blocks are causal and follow the cache."""
        return self._blocks.forward(tokens, positions, cache, block_mask, capture, rows)

    @torch.no_grad()
    def prefill_chunk(
        self,
        remaining: Sequence[Sequence[int]],
        cache: RowCache,
        rows: Sequence[int],
        limit: int,
        capture: Sequence[int] = (),
    ) -> list[TargetOutput]:
        return self._blocks.prefill_chunk(remaining, cache, rows, limit, capture)

    @torch.no_grad()
    def renew(self, cache: RowCache, texts: Sequence[Sequence[int]]) -> None:
        """Run rows again whose next token lies past the border past which RoPE turns all their keys anew."""
        self._blocks.renew(cache, texts)

    @torch.no_grad()
    def encode(self, tokens: Tensor, capture: Sequence[int] = ()) -> TargetOutput:
        with self.activations():
            return self.stock.encode(tokens, capture)

    @contextmanager
    def activations(self) -> Iterator[None]:
        """Within, the stock model's activations are what they are in its blocks, wherever those are computed."""
        with self.int8.activations_rounded() if self.int8 and self.rounds_activations else nullcontext():
            yield

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """`[.., K]` to `[.., V]`: the output layer with whatever cap or scale the model applies."""
        return self._logits(hidden)

    @torch.no_grad()
    def output_rows(self, ids: Tensor) -> Tensor:
        """`[W, K]`: the output layer's weights of these tokens, scaled as their logits are."""
        return self.output_layer.rows(ids)

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        """`[..]` to `[.., K]`: what enters the first layer for these tokens, embedding scale included."""
        embedded = self.model.get_input_embeddings()(tokens)
        return embedded if self.embedding_scale == 1.0 else embedded * self.embedding_scale
