"""The stack of layers of a stock `transformers` model, run without its output layer.

Shape legend: B rows, T block length, K hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from tercel.errors import TercelError
from tercel.target_model.output import TargetOutput, joined
from tercel.target_model.rope import LengthRope
from tercel.target_model.structure import decoder_layers, decoder_of


class StockDecoder:
    """Stock layers and what they see: captured features on request, RoPE that follows the length of a sequence."""

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        self.model = model
        self.config = model.config.get_text_config()
        self.name = name
        self.decoder: nn.Module = decoder_of(model)
        self.layers = decoder_layers(self.decoder, self.config.num_hidden_layers)
        self.rope = LengthRope.of(self.decoder, self.config)

    def check_layers(self, capture: Sequence[int]) -> None:
        """Raises `TercelError` for a layer that the model has not."""
        last = len(self.layers)
        for layer in capture:
            if not 0 <= layer <= last:
                raise TercelError(f"feature layer {layer} is out of range: {self.name} has layers 0..{last - 1}")

    def run(
        self,
        tokens: Tensor,
        capture: Sequence[int],
        positions: Tensor | None = None,
        mask: Tensor | dict[str, Tensor] | None = None,
        cache: Cache | None = None,
    ) -> TargetOutput:
        """One forward over `[B, T]`; capture: as in `TargetModel.forward`."""
        self.check_layers(capture)
        last = len(self.layers)
        with layer_inputs(self.layers, [layer for layer in capture if layer < last]) as seen:
            hidden = self.decoder(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=mask,
                cache=cache,
                use_cache=cache is not None,
            ).last_hidden_state
        seen[last] = hidden
        return TargetOutput(hidden=hidden, layers=tuple(seen[layer] for layer in capture))

    def encode(self, tokens: Tensor, capture: Sequence[int]) -> TargetOutput:
        """Whole sequences; where RoPE depends on the length, entry `i` is as for a sequence of `i + 1` tokens."""
        if self.rope is None:
            return self.run(tokens, capture)
        border, length = self.rope.border, tokens.shape[1]
        with self.rope.sequences([1]):
            parts = [self.run(tokens[:, :border], capture)]
        if length > border:
            with self.rope.sequences([length]):
                parts.append(self.run(tokens, capture).part(border))
        return joined(parts, 1)

    @contextmanager
    def sequences_of(self, length: int) -> Iterator[None]:
        """Within, the stock model rotates every forward as a part of one sequence of `length` tokens."""
        with nullcontext() if self.rope is None else self.rope.sequences([length]):
            yield


@contextmanager
def layer_inputs(layers: nn.ModuleList | list[nn.Module], wanted: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Within, a forward fills the dictionary: the residual stream that entered each wanted one of `layers`.

    The hooks live no longer than that, so what one caller captures costs no other anything.
    """
    seen: dict[int, Tensor] = {}
    hooks = [
        layers[number].register_forward_pre_hook(_keep(seen, number), with_kwargs=True)
        for number in dict.fromkeys(wanted)
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _keep(seen: dict[int, Tensor], number: int) -> Callable[..., None]:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen[number] = args[0] if args else kwargs["hidden_states"]

    return hook
