"""What every kind of draft head is to the rest of the package; a kind joins with a file and a line in `kinds.py`.

Shape legend: `..` any leading shape, H head's hidden size, Ht target's, n captured layers, q/kv heads, D head size, W
draft vocabulary, V target's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tercel.draft.config import HeadConfig
from tercel.draft.layers import Projected
from tercel.errors import TercelError

if TYPE_CHECKING:
    from tercel.target_model.protocol import TargetModel


@dataclass(frozen=True)
class HeadWork:
    """Multiply-accumulates (MACs). drafted: for one drafted token, attention's own products left out; context: those,
    for every token of the context; fuse: once for each token that the target commits. kv: keys and values of a token,
    in numbers."""

    drafted: int
    context: int
    fuse: int
    kv: int


class DraftHead(nn.Module, ABC):
    """A trained module that drafts: loaded and saved, put beside a target, inspected. How it drafts is its proposer's
    matter, how it learns its objective's.

    title: what messages call the kind. config_class: what its settings are.
    """

    title: ClassVar[str]
    config_class: ClassVar[type[HeadConfig]]
    embed_tokens: nn.Embedding  # `[V, H]`, of a head with embeddings of its own

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    @abstractmethod
    def in_words(self) -> str:
        """The kind and its settings, for a table."""

    @abstractmethod
    def reads_in_words(self) -> str:
        """What it reads of the target, for a table."""

    @abstractmethod
    def work(self) -> HeadWork:
        """What drafting costs."""

    def public_config(self, dtype: torch.dtype) -> dict[str, Any]:
        """`config.json` of a checkpoint in `dtype`, as the public loaders of this kind read it.

        Raises `TercelError` for a kind that is not written.
        """
        raise TercelError(f"a head of {self.title} can be run and inspected only, not written; give one of EAGLE-3")

    def placed(self, num_layers: int) -> Self:
        """The head, its weights shared, with the feature layers that it leaves to a target of `num_layers` layers.

        Raises `TercelError` as `HeadConfig.placed`.
        """
        config = self.config.placed(num_layers)
        if config == self.config:
            return self
        head = copy(self)  # the modules are the same: no size hangs on where features are taken
        head.config = config
        return head

    def beside(self, target: TargetModel, ids: Tensor) -> DraftHead:
        """The head with what it borrows of `target`; itself, if that is nothing. `ids` `[W]`: its draft vocabulary."""
        return self

    def without_embeddings(self) -> DraftHead:
        """The head with the target's embeddings in place of its own."""
        return self.rebuilt(replace(self.config, own_embeddings=False))

    def rebuilt(self, config: HeadConfig, more: Mapping[str, Tensor] | None = None) -> Self:
        """A frozen head of `config` with copies of this one's tensors and of `more`; what `config` has no place for
        is left out."""
        head = type(self)(config)
        tensors = {**self.state_dict(), **(more or {})}
        head.load_state_dict({name: tensors[name] for name in head.state_dict()})
        return head.to(self.device, self.dtype).eval().requires_grad_(False)


class StepHead(DraftHead):
    """A head that drafts step by step: `fuse` makes the hidden of the first step, `logits` tell what its output drafts,
    and `feedback` makes the next step's hidden of it. How a step is computed is a subclass's matter, and its state's.
    """

    title = "a kind that drafts step by step"

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """`[.., n*Ht]` (captured layers, low to high) to the hidden of step 0, `[.., H]`."""

    @abstractmethod
    def feedback(self, output: Tensor) -> Tensor:
        """What the next step takes as its hidden, `[.., H]`."""

    @abstractmethod
    def logits(self, output: Tensor) -> Tensor:
        """`[.., H]` to `[.., W]`. Raises `TercelError` for a head that borrows its output layer and has none yet."""


@dataclass(frozen=True)
class _Borrowed:
    """The target's output layer. A copy of a head borrows it too, and copies no target."""

    layer: Callable[[Tensor], Tensor]

    def __deepcopy__(self, memo: dict[int, Any]) -> _Borrowed:
        return self


class BorrowingHead(StepHead):
    """One that drafts with its target's output layer, or with the rows of it that a smaller draft vocabulary has."""

    output_rows: Tensor | None  # `[W, H]`, borrowed of the target

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        self.register_buffer("output_rows", None, persistent=False)
        self._output_layer: _Borrowed | None = None

    def beside(self, target: TargetModel, ids: Tensor) -> Self:
        head = copy(self)  # the modules are the same
        head._output_layer = _Borrowed(target.logits)
        if len(ids) < target.vocab_size:
            head._buffers = {**self._buffers, "output_rows": target.output_rows(ids)}
            head._output_layer = None
        return head

    def logits(self, output: Tensor) -> Tensor:
        if self.output_rows is not None:
            return F.linear(output, self.output_rows)
        if self._output_layer is None:
            raise TercelError(
                f"a head of {self.title} drafts with its target's output layer; load it together with the target"
            )
        return self._output_layer.layer(output)


class DeeperLayer(Protocol):
    """A layer behind a head's first: it reads that one's output alone."""

    def project(self, hidden: Tensor, positions: Tensor) -> Projected:
        """hidden: `[.., H]`; positions: `[..]`."""
        ...

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """As `LayerHead.finish`."""
        ...


# The attention of a head's layer, by its number: what it adds to `[.., H]`, and what it gives `[.., q*D]`.
Attend = Callable[[int, Projected], tuple[Tensor, Tensor]]


class LayerHead(StepHead):
    """One that computes `project` → (attention) → `finish`, a layer, and then the layers behind it, `deeper`.

    The module computes; who attends to what is the caller's: training-time test and the draft tree bring their own
    attention between the two.
    """

    @property
    def deeper(self) -> Sequence[DeeperLayer]:
        """The layers behind the first; most heads have none."""
        return ()

    def step(self, now: Projected, positions: Tensor, attend: Attend) -> Tensor:
        """The output of all layers behind `now`, of `project` at these positions. `attend` may answer for fewer rows at
        the last layer than it was given; those before make its keys, and need them all."""
        output = self.finish(*attend(0, now))
        for number, layer in enumerate(self.deeper, 1):
            output = layer.finish(*attend(number, layer.project(output, positions)))
        return output

    @abstractmethod
    def project(self, embedding: Tensor, hidden: Tensor, positions: Tensor) -> Projected:
        """embedding, hidden: `[.., H]`; positions: `[..]` (spec section 3)."""

    @abstractmethod
    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """residual `[.., H]` (of `project`), attended `[.., q*D]` to the step's output `[.., H]`."""


class AttendingHead(LayerHead):
    """One whose every step is that layer, fed with what the step before it gave."""

    title = "EAGLE"
