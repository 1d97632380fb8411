"""Blocks that an OpenVINO graph computes, and logits that another one does.

Shape legend: B rows, T block length, K hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import openvino as ov
import torch
from torch import Tensor

from tercel.errors import TercelError
from tercel.memory import available_memory
from tercel.target_model.backend_names import OPENVINO
from tercel.target_model.masks import causal_block
from tercel.target_model.openvino.artefacts import graph_folder, kept_graph
from tercel.target_model.openvino.cache import Run, SlotCache
from tercel.target_model.openvino.graph import Layout, convert_decoder, convert_output, slot_axes
from tercel.target_model.openvino.places import last_position, positions_of
from tercel.target_model.openvino.runtime import CompiledGraph, bucket
from tercel.target_model.output import TargetOutput
from tercel.target_model.padding import padded_block
from tercel.target_model.prefill import run_pieces
from tercel.target_model.protocol import RowCache

if TYPE_CHECKING:
    from tercel.target_model.model import Target

Say = Callable[[str], None]
ATTENDING = 5.0  # how many times as long a byte of the cache takes as one of the weights
COPIES = 3  # of the weights in an instance: 600 MB for the 212 MB of the default target
MOST = 6  # instances of a graph for sizes of their own
OFTEN, SOON = 256, 8  # 1 to 2 s over 3 to 4 ms, or a dozen after another size; of one row where many are to come


class OpenVinoBlocks:
    """Trees, chains and padded prompts of many rows in few runs of a graph.

    One graph is held, which captures every layer that was ever asked for; so that the same graph, and with it the same
    bits, serves with and without drafts. capture: layers to begin with. keep: whether graphs are kept in the
    package's cache. say: told what takes long.
    """

    backend = OPENVINO
    torch_threads = 1  # of torch's own there is little to compute
    block_widths = (1, 4, 8, 16, 32, 64, 128)
    renews = False  # what it would be needed for is refused
    resumes = True

    def __init__(self, target: Target, capture: Sequence[int], keep: bool, say: Say) -> None:
        self._target, self._keep, self._say = target, keep, say
        self._embeddings = target.model.get_input_embeddings()
        self._captured: tuple[int, ...] = ()
        self._soon = False
        self._build(capture)

    def expect_many(self, many: bool = True) -> bool:
        before, self._soon = self._soon, many  # but not for many rows, whose number changes
        return before

    def new_cache(self, rows: int, capacity: int) -> SlotCache:
        return SlotCache(self._layout, self._target.dtype, rows, self._run_in_slots)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: RowCache,
        block_mask: Tensor | None,
        capture: Sequence[int],
        rows: Sequence[int] | None,
    ) -> TargetOutput:
        own, target = cast(SlotCache, cache), self._target
        target.stock.check_layers(capture)
        if not set(capture) <= {*self._captured, target.num_layers}:
            self._build(capture)
        rows = range(len(own.lengths)) if rows is None else rows
        width, again = tokens.shape[1], block_mask is not None  # a step like many others
        if block_mask is None:
            block_mask = causal_block(width, tokens.device)
        else:
            more = bucket(width, self.block_widths) - width
            tokens, positions, block_mask = padded_block(tokens, positions, block_mask, more)
        seen = block_mask.expand(len(rows), -1, -1)
        states, runs = list[list[Tensor]](), own.runs(rows, tokens.shape[1])
        held: list[Run] = []
        for places in runs:
            part = [self._embeddings(tokens[places]), positions[places], seen[places]]
            state, block = self._run(part, own, [rows[place] for place in places], again)
            states.append(state)
            held.append((places, [group[..., :width, :] for group in block]))
        own.hold(rows, held)
        every = [self._in_order(runs, parts)[:, :width] for parts in zip(*states, strict=True)]
        captured = dict(zip((target.num_layers, *self._captured), every, strict=True))
        return TargetOutput(captured[target.num_layers], tuple(captured[layer] for layer in capture))

    def _run(
        self, block: Sequence[Tensor], cache: SlotCache, rows: Sequence[int], again: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Embedded tokens, positions and mask of rows that run together; again: whether their sizes are expected once
        more. Returns the last and the captured states, and keys and values a group."""
        count, width = block[1].shape
        past = cache.past(rows, width)
        lengths, slots = torch.tensor([cache.lengths[row] for row in rows]), positions_of(past[0].shape[2])
        embedded, positions, seen = (part.contiguous() for part in block)
        dtype = self._target.dtype
        states = [torch.empty(count, width, self._target.hidden_size, dtype=dtype) for _ in (0, *self._captured)]
        own = [
            torch.empty(len(group), count, heads, width, size, dtype=dtype)
            for (heads, size), group in self._layout.groups.items()
        ]
        sizes, often = (count, width) if again else None, SOON if self._soon and count == 1 else OFTEN
        self._graph.run([embedded, positions, lengths, seen, slots, *past], [*states, *own], sizes, often)
        return states, own

    @staticmethod
    def _in_order(runs: Sequence[Sequence[int]], parts: Sequence[Tensor]) -> Tensor:
        """Rows of all runs `[B, ..]`, each at its place."""
        order = [place for run in runs for place in run]
        together = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        if order == list(range(len(order))):
            return together
        return together[torch.tensor(order).argsort()]

    def prefill_chunk(
        self,
        remaining: Sequence[Sequence[int]],
        cache: RowCache,
        rows: Sequence[int],
        limit: int,
        capture: Sequence[int] = (),
    ) -> list[TargetOutput]:
        """Pieces end where a chunk of slots does, so that a prompt's tokens have the bits that they have one by one,
        whatever comes beside them and wherever it is cut."""
        room = [last_position(cache.lengths[row]) + 1 - cache.lengths[row] for row in rows]
        within = [len(tokens) <= most for tokens, most in zip(remaining, room, strict=True)]
        count = (within.index(False) if False in within else len(within)) or 1
        pieces = [tokens[:most] for tokens, most in zip(remaining[:count], room, strict=False)]
        return run_pieces(self, pieces, cache, rows[:count], limit, capture, self._target.device)

    def renew(self, cache: RowCache, texts: Sequence[Sequence[int]]) -> None:
        pass

    def last_position(self, length: int) -> int:
        return last_position(length)

    def _build(self, capture: Sequence[int]) -> None:
        layers = sorted({*self._captured, *capture} - {self._target.num_layers})
        part, target = f"layers, giving inputs of {layers}", self._target
        model = _graph(target, part, self._keep, self._say, lambda: convert_decoder(target.stock, layers, target.int8))
        self._layout = Layout.of(model)
        self._graph = CompiledGraph(model, self._target.dtype, self._spare, OFTEN, slot_axes(model))
        self._captured = tuple(layers)

    @property
    def _run_in_slots(self) -> float:
        """How many slots' attention takes as long as another run, which reads all weights."""
        slot = sum(heads * size for heads, size in self._layout.shapes) * self._target.dtype.itemsize
        return self._weights / (ATTENDING * slot)

    @property
    def _weights(self) -> int:
        """Bytes."""
        return sum(p.numel() * p.element_size() for p in self._target.stock.decoder.parameters())

    @property
    def _spare(self) -> int:
        """How many instances may be held, with the weights as they are stored and as kernels want them: in a fifth of
        the memory that is left."""
        left = available_memory(self._target.device)
        return 0 if left is None else min(MOST, left // 5 // max(1, COPIES * self._weights))


class OpenVinoOutput:
    """The output layer, with its scale and cap, as a graph."""

    def __init__(self, target: Target, keep: bool, say: Say) -> None:
        self._vocabulary = target.vocab_size
        layer, dtype = target.output_layer, target.dtype
        model = _graph(target, "output layer", keep, say, lambda: convert_output(layer, dtype, target.int8))
        self._graph = CompiledGraph(model, target.dtype)

    def __call__(self, hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1]).contiguous()
        logits = flat.new_empty(len(flat), self._vocabulary)
        self._graph.run([flat], [logits])
        return logits.reshape(*hidden.shape[:-1], self._vocabulary)


def _graph(target: Target, part: str, keep: bool, say: Say, convert: Callable[[], ov.Model]) -> ov.Model:
    """Raises `TercelError` for a part that cannot be converted."""

    def converted() -> ov.Model:
        say(f"building the OpenVINO graph of {target.source.name}'s {part}" + (", once" if keep else ""))
        return convert()

    try:
        if not keep:
            return converted()
        return kept_graph(graph_folder(target.fingerprint, target.dtype, part), converted)
    except TercelError:
        raise
    except Exception as error:  # of transformers, torch or OpenVINO, over a model that they cannot follow
        reason = " ".join(str(error).split()) or type(error).__name__
        raise TercelError(f"OpenVINO cannot compute the {part} of {target.source.name}: {reason[:200]}") from error
