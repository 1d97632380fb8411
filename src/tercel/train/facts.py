"""What a run leaves in its head's record: the target's identity, the data, the recipe."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from tercel.chat.identity import ARGUMENTS, RECORD, TemplateIdentity
from tercel.chat.template import TemplateRefusalError
from tercel.draft import Eagle3Head, TargetIdentity
from tercel.draft.checkpoint import EMBEDDINGS, FROZEN, TRAINED
from tercel.target_model.model import Target
from tercel.train.batches import Split
from tercel.train.config import TrainConfig


def identity(target: Target) -> TargetIdentity:
    return TargetIdentity(target.source.name, target.fingerprint, target.tokenizer_digest)


def run_target(target: Target) -> str:
    """What of the target a resumed run must share: its weights, precision, and what its template was given."""
    given = f" told {json.dumps(target.template_arguments, sort_keys=True)}" if target.template_arguments else ""
    return f"{target.fingerprint} in {target.dtype}{given}"


def data_facts(data: Split, supervised_tokens: int, coverage: float) -> dict[str, Any]:
    """supervised_tokens: how many were learned from; coverage: the draft vocabulary's share of them."""
    return {
        "conversations": len(data.train),
        "held_out_conversations": len(data.held_out),
        "tokens": sum(len(chat) for chat in data.train),
        "supervised_tokens": supervised_tokens,
        "draft_vocabulary_coverage": coverage,
    }


def run_facts(target: Target, config: TrainConfig, steps: int) -> dict[str, Any]:
    return {
        "dtype": str(target.dtype).removeprefix("torch."),
        "steps": steps,
        **_template(target),
        "recipe": asdict(config),
    }


def embedding_facts(head: Eagle3Head) -> dict[str, Any]:
    """Of a head with embeddings of its own, whether they learn."""
    if not head.config.own_embeddings:
        return {}
    return {EMBEDDINGS: TRAINED if head.embed_tokens.weight.requires_grad else FROZEN}


def _template(target: Target) -> dict[str, Any]:
    """The chat template's identity and arguments: prompts rendered otherwise when serving cost acceptance."""
    tokenizer = target.tokenizer
    if not tokenizer.chat_template:
        return {}
    given = {ARGUMENTS: target.template_arguments} if target.template_arguments else {}
    try:
        return {RECORD: {**TemplateIdentity.of(tokenizer).to_json(), **given}}
    except TemplateRefusalError:  # one that takes no plain question and answer
        return {}
