"""What a run leaves in its head's record: the target's identity, the data, the recipe."""

from __future__ import annotations

import json
from dataclasses import replace

from tercel.chat.identity import TemplateIdentity
from tercel.chat.template import TemplateRefusalError
from tercel.draft import DraftHead, TargetIdentity, TrainingRecord
from tercel.draft.history import FROZEN, TRAINED, Recipe, TemplateRecord
from tercel.target_model.protocol import TargetModel
from tercel.train.batches import Split
from tercel.train.config import TrainConfig
from tercel.train.feature_store import FeatureStore


def identity(target: TargetModel) -> TargetIdentity:
    return TargetIdentity(target.source.name, target.fingerprint, target.tokenizer_digest)


def run_target(target: TargetModel, features: FeatureStore | None = None) -> str:
    """What of the target a resumed run must share: its weights, precision, what its template was given, and how its
    features are kept where they come from files."""
    given = f" told {json.dumps(target.template_arguments, sort_keys=True)}" if target.template_arguments else ""
    kept = "" if features is None else f" kept as {features.of.store}"
    return f"{target.fingerprint} in {target.dtype}{given}{kept}"


def begun_record(
    origins: TrainingRecord,
    target: TargetModel,
    config: TrainConfig,
    data: Split,
    head: DraftHead,
    *,
    supervised_tokens: int,
    coverage: float,
    steps: int,
) -> TrainingRecord:
    """All that is known of a run when it begins, added to where its data come from (`origins`).

    supervised_tokens: how many are learned from; coverage: the draft vocabulary's share of them.
    """
    return replace(
        origins,
        conversations=len(data.train),
        held_out_conversations=len(data.held_out),
        tokens=sum(len(chat) for chat in data.train),
        supervised_tokens=supervised_tokens,
        draft_vocabulary_coverage=coverage,
        dtype=str(target.dtype).removeprefix("torch."),
        steps=steps,
        chat_template=_template(target),
        recipe=Recipe.of(config.values()),
        embeddings=_embeddings(head),
    )


def _embeddings(head: DraftHead) -> str | None:
    """Of a head with embeddings of its own, whether they learn."""
    if not head.config.own_embeddings:
        return None
    return TRAINED if head.embed_tokens.weight.requires_grad else FROZEN


def _template(target: TargetModel) -> TemplateRecord | None:
    """The chat template's identity and arguments: prompts rendered otherwise when serving cost acceptance."""
    tokenizer = target.tokenizer
    if not tokenizer.chat_template:
        return None
    try:
        found = TemplateIdentity.of(tokenizer)
    except TemplateRefusalError:  # one that takes no plain question and answer
        return None
    given = dict(target.template_arguments) or None
    return TemplateRecord(source=found.source, rendered=found.rendered, arguments=given)
