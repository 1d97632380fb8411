"""speculators' optimizer step: its model of the head, its training-time test, float32 weights under autocast.

Its trainer wants an accelerator, so its loop is repeated here. On a CPU its losses are the "eager" ones, and flex
attention cannot learn; "sdpa", its other dense one, takes less time and memory than "eager". The output layer does not
learn: it stays the target's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from given import Given, Packed
from torch import Tensor, nn

CLIP = 1.0  # of its trainer
# of its configuration, but for the optimizer: Muon is its default, and its own again where a recipe says so
DEFAULTS = {"lr": 1e-3, "optimizer": "muon", "scheduler": "linear", "warmup": 0.01, "decay": 1.0, "attention": "sdpa"}


class Speculators:
    settings: dict[str, Any]

    def __init__(self, given: Given) -> None:
        from speculators.config import SpeculatorsConfig, VerifierConfig
        from speculators.losses import resolve_loss_config
        from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
        from speculators.proposals.greedy import GreedyTokenProposalConfig
        from speculators.train.optimizers import build_optimizers
        from speculators.train.trainer import TrainerConfig

        recipe = {**DEFAULTS, **given.job["recipe"]}
        self.dtype, self.recipe, self.steps = given.dtype, recipe, given.job["steps"]
        layer = given.llama()
        layer._attn_implementation = recipe["attention"]
        config = Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=len(given.ids),
            norm_before_residual=True,
            norm_before_fc=True,
            norm_output=True,
            eagle_aux_hidden_state_layer_ids=list(given.layers),
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=self.steps)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
            ),
        )
        self.draft = Eagle3DraftModel(config)
        self.draft.load_vocab_mappings(given.t2d, given.d2t)
        rows = given.output[given.ids].float()
        self.draft.embed_tokens.load_state_dict({"weight": given.embeddings.float()})
        self.draft.lm_head.load_state_dict({"weight": rows})
        self.draft.verifier_lm_head.load_state_dict({"weight": rows.clone()})
        self.draft.verifier_norm = nn.Identity()  # what is given has been through it
        self.losses = resolve_loss_config("kl_div", "eager")
        settings = TrainerConfig(
            lr=recipe["lr"], num_epochs=1, save_path="", optimizer=recipe["optimizer"], muon_lr=recipe["lr"]
        )
        self.optimizers = build_optimizers(self.draft, settings)
        self.schedulers = [self._scheduler(optimizer) for optimizer in self.optimizers]
        self.settings = {"loss": "kl_div, eager", "output layer": "frozen", **recipe}

    def _scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        from transformers import get_constant_schedule, get_linear_schedule_with_warmup

        if self.recipe["scheduler"] == "constant":
            return get_constant_schedule(optimizer)
        total = self.recipe["total_steps"]
        return get_linear_schedule_with_warmup(optimizer, int(self.recipe["warmup"] * total), total)

    def step(self, batch: Packed) -> float:
        with torch.autocast("cpu", self.dtype, enabled=self.dtype != torch.float32):
            loss = self._loss(batch)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.draft.parameters(), CLIP)
        for optimizer in self.optimizers:
            optimizer.step()
        for scheduler in self.schedulers:
            scheduler.step()
        return float(loss.detach())

    def _loss(self, batch: Packed) -> Tensor:
        """As its loader packs sequences: each without its first token, whose row is that of the one before."""
        from speculators.models.eagle3.data import shift_batch

        shifted = [
            shift_batch(
                {
                    "input_ids": one.tokens,
                    "hidden_states": one.features,
                    "verifier_last_hidden_states": one.last,
                    "loss_mask": one.supervised & one.taught,
                    "lengths": torch.tensor(one.lengths),
                    "position_ids": torch.arange(len(one.tokens)),
                }
            )
            for one in batch.sequences()
        ]
        packed = {name: torch.cat([one[name] for one in shifted])[None] for name in shifted[0]}
        lengths = packed.pop("lengths")[0]
        _, loss, _ = self.draft(
            **packed,
            document_ids=torch.repeat_interleave(torch.arange(len(lengths)), lengths)[None],
            ttt_steps=self.steps,
            ttt_step_loss_decay=self.recipe["decay"],
            loss_config=self.losses,
        )
        return loss  # type: ignore[no-any-return]

    def state_dict(self) -> dict[str, Any]:
        parts = {"optimizers": self.optimizers, "schedulers": self.schedulers}
        return {
            "draft": self.draft.state_dict(),
            **{name: [one.state_dict() for one in ones] for name, ones in parts.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.draft.load_state_dict(state["draft"])
        for name, ones in (("optimizers", self.optimizers), ("schedulers", self.schedulers)):
            for one, stored in zip(ones, state[name], strict=True):
                one.load_state_dict(stored)

    def write_head(self, folder: Path) -> None:
        self.draft.save_pretrained(folder)
