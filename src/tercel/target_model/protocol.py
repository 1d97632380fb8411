"""What a target model is to decoding, training and measuring, whatever computes it.

`Target` (`model.py`) is the one that Hugging Face `transformers` loads. What computes its blocks and logits can be
exchanged (`Blocks`, with a cache of their own: see `backends.py`); nothing that takes a `TargetModel` asks
what does.

Shape legend: B rows (requests), T block length, K hidden size, V vocabulary, W some of its tokens, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from tercel.target_model.kept import KeptTokens
from tercel.target_model.memory import CacheMemory
from tercel.target_model.output import TargetOutput
from tercel.target_model.sources import Source
from tercel.target_model.work import TargetWork

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

    from tercel.target_model.capabilities import TreeSupport


class RowCache(Protocol):
    """What the target remembers of every request, a row each; lengths: committed tokens of each row."""

    lengths: list[int]

    @property
    def memory(self) -> CacheMemory: ...

    def add_rows(self, count: int, capacity: int = 0) -> None:
        """Append empty rows for sequences of up to `capacity` tokens; no other row is copied for it, but where room
        has to be made."""
        ...

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Make a path of the last block permanent in each row it was for: block indices in order, `[]` for none.

        Raises `TercelError` if that cannot be kept.
        """
        ...

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        ...

    def taken(self, row: int, start: int, end: int) -> KeptTokens:
        """What a row holds of its committed tokens from `start` until `end`, as it lies there until the row changes:
        whoever keeps it copies it. Of a target that `resumes` alone."""
        ...

    def restore(self, kept: Mapping[int, Sequence[KeptTokens]]) -> None:
        """Commit tokens of which a cache like this one held that, by row and one piece after the other, behind what the
        rows hold."""
        ...


class Blocks(Protocol):
    """The part of a target that a backend brings: how blocks run and what they leave behind.

    The methods are those of `TargetModel`. backend: its name; renews: whether `renew` can fill a row anew; resumes:
    whether a row can begin with what another one held; torch_threads: how many threads torch should have beside it,
    None for as many as it has.
    """

    backend: str
    renews: bool
    resumes: bool

    @property
    def torch_threads(self) -> int | None: ...

    def new_cache(self, rows: int, capacity: int) -> RowCache: ...

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: RowCache,
        block_mask: Tensor | None,
        capture: Sequence[int],
        rows: Sequence[int] | None,
    ) -> TargetOutput: ...

    def prefill_chunk(
        self,
        remaining: Sequence[Sequence[int]],
        cache: RowCache,
        rows: Sequence[int],
        limit: int,
        capture: Sequence[int] = (),
    ) -> list[TargetOutput]: ...

    def renew(self, cache: RowCache, texts: Sequence[Sequence[int]]) -> None: ...

    @property
    def block_widths(self) -> Sequence[int]: ...

    def expect_many(self, many: bool = True) -> bool: ...

    def last_position(self, length: int) -> int | None:
        """How far a tree may reach that comes after `length` tokens; None where nothing but the context ends."""
        ...


class TargetModel(Protocol):
    """A frozen causal language model that verifies drafts, teaches heads and is measured."""

    @property
    def source(self) -> Source: ...
    @property
    def config(self) -> PretrainedConfig:
        """Of the text model, with the names that `transformers` has for its settings."""
        ...

    @property
    def generation_config(self) -> GenerationConfig | None: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device:
        """Where tensors that go in and come out lie."""
        ...

    @property
    def backend(self) -> str:
        """What computes its blocks."""
        ...

    def expect_many(self, many: bool = True) -> bool:
        """Many more blocks like those of now are to come, so what takes a while to prepare and makes them faster is
        worth it at once; or, if not `many`, when they have come. Around a warm-up: nothing is prepared while it counts.
        Returns what was said before, to be said again afterwards.
        """
        ...

    @property
    def sharding(self) -> str:
        """How it is split over the processes of a run: one of `SHARDINGS` (`backend_names.py`). Unless that is "none",
        `encode` takes all of them at once."""
        ...

    @property
    def weights(self) -> str | None:
        """"int8" where its matrices are rounded to that, so that it is another model than as it is stored."""
        ...

    def beside(self) -> AbstractContextManager[None]:
        """Within, torch has as many threads as go well with what computes the blocks: threads that wait for work keep
        the cores from those of another library."""
        ...

    @property
    def context_length(self) -> int:
        """The longest sequence, prompt and answer."""
        ...

    @property
    def why_no_longer(self) -> str:
        """What to add where that limit is named, if it is not what the positions allow."""
        ...

    @property
    def resumes(self) -> bool:
        """Whether a row can begin with what another one held of the same first tokens (`RowCache.restore`)."""
        ...

    @property
    def work(self) -> TargetWork:
        """What its forwards have to read and to multiply at least, its weights as they are held here."""
        ...

    @property
    def tree_support(self) -> TreeSupport: ...
    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Raises `TercelError` for a target without one."""
        ...

    @property
    def tokenizer_or_none(self) -> PreTrainedTokenizerBase | None: ...
    @property
    def tokenizer_digest(self) -> str: ...
    @property
    def template_arguments(self) -> Mapping[str, Any]:
        """What its chat template is given beside the messages."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end an answer: those of all `end_sources`."""
        ...

    @property
    def end_sources(self) -> Mapping[str, tuple[int, ...]]:
        """Who says at which ids an answer ends."""
        ...

    @property
    def fingerprint(self) -> str:
        """Of weights and settings: equal for the same target, however it is computed."""
        ...

    def is_recorded_as(self, weights: str) -> bool:
        """Whether a head's record names this target."""
        ...

    def is_rounded_from(self, weights: str) -> bool:
        """Whether a head's record names this target as it was before its weights were rounded."""
        ...

    def new_cache(self, rows: int, capacity: int) -> RowCache:
        """A cache for the calls below, with `rows` empty rows for sequences of up to `capacity` tokens."""
        ...

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: RowCache,
        block_mask: Tensor | None = None,
        capture: Sequence[int] = (),
        rows: Sequence[int] | None = None,
    ) -> TargetOutput:
        """Run a block after what `cache` holds; nothing of it is committed until `cache.keep`.

        tokens, positions: `[B, T]`. block_mask: bool `[B, T, T]`, which block tokens each one sees (a tree's ancestor
        mask); left out, the block is text that nobody drafted, a prompt's, and causal. capture: the layers whose input
        is wanted (`0 .. L-1`); `L` is the input of the output layer, after the final norm. rows: whose block it is; all
        rows of the cache if left out. No block may go deeper than `block_depth` allows; what one that does gives is not
        said.
        Raises `TercelError` for a layer out of range.
        """
        ...

    @property
    def block_widths(self) -> Sequence[int]:
        """To the next of which blocks of drafts are filled up, ascending; none where each is run as it is."""
        ...

    def block_depth(self, length: int) -> int:
        """How deep a tree may be whose root has position `length`."""
        ...

    def renew(self, cache: RowCache, texts: Sequence[Sequence[int]]) -> None:
        """Make ready for the next block of the first rows, whose tokens are `texts`, should the block not be able to
        go on from what they hold."""
        ...

    def prefill_chunk(
        self,
        remaining: Sequence[Sequence[int]],
        cache: RowCache,
        rows: Sequence[int],
        limit: int,
        capture: Sequence[int] = (),
    ) -> list[TargetOutput]:
        """Run the next tokens of the first prompts and commit them: at most `limit`, padding included, where the model
        can stop in between.

        remaining: what is left of each prompt, not empty; rows: of the cache, one a prompt. Returns `[1, t, ..]` for
        each prompt that had a part in it, over its next `t` tokens. Prompts end in their order (`prefill.py`).
        """
        ...

    def encode(self, tokens: Tensor, capture: Sequence[int] = ()) -> TargetOutput:
        """Run whole right-padded sequences `[B, T]` without a cache; causality hides the padding.

        Entry `i` is what one forward over the first `i + 1` tokens ends with, also where RoPE depends on the length.
        capture: as in `forward`.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """`[.., K]` to `[.., V]`: the output layer with whatever cap or scale the model applies."""
        ...

    def output_rows(self, ids: Tensor) -> Tensor:
        """`[W, K]`: the output layer's weights of these tokens, scaled as their logits are."""
        ...

    def embed(self, tokens: Tensor) -> Tensor:
        """`[..]` to `[.., K]`: what enters the first layer for these tokens, embedding scale included."""
        ...
