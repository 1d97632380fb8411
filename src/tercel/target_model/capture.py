"""What enters the layers of a stock model, seen by hooks that live as long as one forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def layer_inputs(layers: Sequence[nn.Module], wanted: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Within, a forward fills the dictionary: the residual stream that entered each wanted one of `layers`."""
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
