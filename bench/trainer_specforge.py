"""SpecForge's optimizer step: its model of the head, its training-time test, its optimizer with float32 weights.

On a CPU its attention "sdpa" is the only one that can learn, and of its two losses the reference, compiled as it is
there, stands for the one in Triton. Teacher: its "compact" one, which makes no logits of the whole vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from given import Given, Packed
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

STEP_DECAY = 0.8  # the weight of a step's loss by that of the one before
DEFAULTS = {"lr": 1e-4, "warmup": 0.015, "scheduler": "cosine"}  # of its configuration


@contextmanager
def _named_triton() -> Iterator[None]:
    """Lets a module be imported whose kernels want Triton; they cannot be called. The compiler looks for Triton itself,
    so it must have looked before."""
    import torch._inductor.compile_fx
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1  # no processes for it, whose memory would be counted
    language: Any = ModuleType("triton.language")
    language.constexpr = int
    triton: Any = ModuleType("triton")
    triton.language, triton.jit = language, lambda kernel: kernel
    modules = {"triton": triton, "triton.language": language}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


class SpecForge:
    settings: dict[str, Any]

    def __init__(self, given: Given) -> None:
        with _named_triton():
            from specforge.core import loss as losses
        losses.LogSoftmaxLoss = SimpleNamespace(apply=losses._compute_loss)
        from specforge import optimizer as optimizers
        from specforge.algorithms.eagle3.model import OnlineEagle3Model
        from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3

        optimizers.print_on_rank0 = print  # it asks a group of processes which of them this is

        job, recipe = given.job, {**DEFAULTS, **given.job["recipe"]}
        outputs = [layer - 1 for layer in given.layers]
        config = given.llama(
            draft_vocab_size=len(given.ids),
            architectures=["LlamaForCausalLMEagle3"],
            eagle_config={"eagle_aux_hidden_state_layer_ids": outputs, "use_aux_hidden_state": True},
        )
        self.dtype = given.dtype
        self.draft = LlamaForCausalLMEagle3(config, attention_backend="sdpa").to(given.dtype)
        self.draft.embed_tokens.weight = nn.Parameter(given.embeddings, requires_grad=False)
        self.draft.t2d.copy_(given.t2d)
        self.draft.d2t.copy_(given.d2t)
        self.output = given.output
        self.model = OnlineEagle3Model(self.draft, length=job["steps"], attention_backend="sdpa")
        self.optimizer = optimizers.BF16Optimizer(
            self.draft,
            recipe["lr"],
            total_steps=recipe["total_steps"],
            warmup_ratio=recipe["warmup"],
            lr_scheduler=recipe["scheduler"],
        )
        self.settings = {"attention": "sdpa", "loss": "reference, compiled", "teacher": "compact", **recipe}

    def step(self, batch: Packed) -> float:
        loss = self._loss(batch)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def _loss(self, batch: Packed) -> Tensor:
        """As its strategy for EAGLE-3 prepares a batch of sequences: row `i` reads token `i + 1` and learns what the
        target says there, if token `i` is supervised."""
        from specforge.utils import padding

        parts = [
            (one.tokens, one.last, one.features, torch.ones_like(one.tokens), one.supervised.long(), one.taught.long())
            for one in batch.sequences()
        ]
        padded = (pad_sequence(part, batch_first=True) for part in zip(*parts, strict=True))
        tokens, last, features, attended, supervised, taught = padded
        losses = self.model(
            input_ids=padding(tokens, left=False),
            attention_mask=attended,
            target=None,
            loss_mask=(supervised * padding(taught, left=False))[..., None],
            hidden_states=features.to(self.dtype),
            target_hidden_for_compact=padding(last.to(self.dtype), left=False),
            target_head_weight=self.output,
        )[0]
        return sum(STEP_DECAY**number * one for number, one in enumerate(losses))  # type: ignore[return-value]

    def state_dict(self) -> dict[str, Any]:
        return {"draft": self.draft.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.draft.load_state_dict(state["draft"])
        self.optimizer.load_state_dict(state["optimizer"])

    def write_head(self, folder: Path) -> None:
        """Without the embeddings, which are the target's."""
        kept = {name: value for name, value in self.draft.state_dict().items() if "embed" not in name}
        self.draft.save_pretrained(folder, state_dict=kept)
