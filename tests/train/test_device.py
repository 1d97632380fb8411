"""An optimizer step on a device that is not the CPU: nothing is put in the wrong place, and the host waits for nothing
that a micro-batch computes.

The device is `meta`: it knows shapes and no values, so it is as strict as an accelerator and needs none. Plans are made
of real tensors on the CPU, which is why this is no `FakeTensorMode`, where they would have no values either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tercel.draft import DraftVocabulary
from tercel.target_model.model import Target
from tercel.target_model.output import TargetOutput
from tercel.target_model.sources import Source
from tercel.train.batches import plan_steps
from tercel.train.config import TrainConfig
from tercel.train.learner import Learner
from tests.tiny import tiny_model, tiny_tokenizer
from tests.train.worlds import head_for, random_chat

CHATS = [random_chat(14 + seed % 5, seed) for seed in range(8)]
CONFIG = TrainConfig(epochs=1, batch_tokens=36, ttt_steps=3, feature_layers=(2, 4, 5))
SHAPES_OF_VALUES = ("nonzero", "masked_select", "_unique2", "unique_dim", "is_nonzero", "equal")


class Meta(TorchDispatchMode):
    """What crosses between the CPU and `meta`. reads: operations whose result the host has to wait for; what they give
    is zero. of_stock: those of the stock model's own forwards, apart. mixed: operations that take tensors of both,
    other than copies."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self.of_stock: list[str] = []
        self.mixed: list[str] = []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        named = named or {}
        name = function.overloadpacket.__name__
        given = [t for t in tree_leaves((arguments, named)) if isinstance(t, torch.Tensor)]
        if not any(t.is_meta for t in given):
            return function(*arguments, **named)
        if name == "_local_scalar_dense":
            self.reads.append(name)
            return given[0].new_zeros((), device="cpu").item()
        if name == "_to_copy" and torch.device(named.get("device") or "meta").type == "cpu":
            self.reads.append(name)
            return torch.zeros(given[0].shape, dtype=named.get("dtype") or given[0].dtype)
        if name in SHAPES_OF_VALUES:
            raise AssertionError(f"{name} waits for the device")
        if name not in ("_to_copy", "copy_") and any(t.ndim and not t.is_meta for t in given):
            self.mixed.append(name)
        return function(*arguments, **named)


@pytest.fixture(scope="module")
def target() -> Target:
    made = Target(tiny_model("llama"), tiny_tokenizer(), Source("llama", "llama", "folder", None))
    assert made.fingerprint  # taken of the weights, while they are there
    made.model.to("meta")
    return made


def crossed(monkeypatch: pytest.MonkeyPatch, target: Target, config: TrainConfig, dtype: torch.dtype) -> Meta:
    """What the first optimizer step does between the devices, the target's forwards included."""
    vocabulary = DraftVocabulary(torch.arange(64), target.vocab_size)
    head = head_for(target, vocabulary).to("meta")
    plan = plan_steps([len(chat) for chat in CHATS], config)
    assert len(plan[0]) == config.accumulate
    target.model.to(dtype)
    learner: Any = Learner(head, vocabulary, target, CHATS, config, plan)
    seen, encode = Meta(), target.encode

    def apart(tokens: torch.Tensor, capture: Sequence[int] = ()) -> TargetOutput:
        before = len(seen.reads)
        output = encode(tokens, capture)
        seen.of_stock.append(" ".join(seen.reads[before:]))
        del seen.reads[before:]
        return output

    with monkeypatch.context() as patched, seen:
        patched.setattr(target, "encode", apart)
        learner.gradients(0)
    assert all(p.grad is not None and p.grad.is_meta for p in learner.learning)
    return seen


@pytest.mark.parametrize("loss", ["soft", "hard", "lk"])
@pytest.mark.parametrize("average", ["sequence", "token"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_waits_for_the_device_equally_often_however_many_micro_batches_it_has(
    monkeypatch: pytest.MonkeyPatch, target: Target, loss: str, average: str, dtype: torch.dtype
) -> None:
    # the fused one does not know this device, and takes no part in what is looked at
    monkeypatch.setattr(torch.optim, "AdamW", lambda parameters, **how: torch.optim.SGD(parameters))
    configs = [replace(CONFIG, loss=loss, average=average, accumulate=count) for count in (2, 4)]
    seen = [crossed(monkeypatch, target, config, dtype) for config in configs]
    assert seen[0].reads == seen[1].reads
    assert 2 <= len(seen[0].reads) <= 3  # loss with right drafts, norm; the extent of a mean over tokens
    assert {*seen[0].of_stock, *seen[1].of_stock} <= {"", "_local_scalar_dense"}  # whether sequences are packed
    assert seen[0].mixed == seen[1].mixed == []
