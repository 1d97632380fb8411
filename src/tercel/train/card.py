"""The model card: what a head is for, what it learned from, how well it does, how to run it."""

from __future__ import annotations

from tercel.draft import DraftModel
from tercel.train.config import TrainConfig


def model_card(model: DraftModel, config: TrainConfig) -> str:
    """Markdown for the checkpoint's README.md."""
    c, info = model.head.config, model.info
    facts = info.training
    name = info.target.name if info.target else "unknown"
    held_out = info.measured.get("held_out")
    measured = (
        f"Held-out acceptance (joint-prefix simulation of a greedy {len(held_out['alpha'])}-step chain over "
        f"{held_out['rows']:,} rows): τ = {held_out['tau']:.3f}, "
        "n-α = " + " ".join(f"{value:.3f}" for value in held_out["alpha"]) + "."
        if held_out
        else "Not evaluated at this step."
    )
    data = ", ".join(facts["data"]) or "not recorded"
    return f"""---
library_name: tercel
tags: [eagle3, speculative-decoding, draft-head]
base_model: {name}
---
# EAGLE-3 draft head for {name}

One decoder layer ({model.head.num_parameters() / 1e6:.1f} M parameters) that drafts tokens for `{name}`; the
target verifies every one, so the text is the target's own. It is of no use with another model.

```
tercel generate {name} . --prompt "Why is the sky blue?"
tercel bench {name} .
```

## Measured
{measured}

## Data
{data}: {facts["conversations"]:,} conversations, {facts["tokens"]:,} tokens, of which
{facts["supervised_tokens"]:,} are the assistant's and were learned from. The licence of the data binds the
use of the head.

## Recipe
Training-time test with S = {config.ttt_steps}, loss `{config.loss}`, step decay {config.decay}, AdamW
(0.9, 0.95), learning rate {config.lr:g}, clip {config.clip:g}, {config.epochs} epochs, {facts["step"]} of
{facts["steps"]} steps, {facts["dtype"]} compute with float32 master weights. Features: inputs of layers
{", ".join(map(str, c.feature_layers))} of {c.target_num_layers}. Draft vocabulary: {c.draft_vocab_size:,} of
{c.vocab_size:,} tokens, {facts["draft_vocabulary_coverage"]:.1%} of the supervised text.
"""
