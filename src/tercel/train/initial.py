"""Where a head starts. What is taken from the target need not be learned, and data is what costs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tercel.chat.conversation import TokenizedChat
from tercel.draft import DraftHead, DraftModel, DraftVocabulary
from tercel.draft.binding import bind
from tercel.draft.history import FROZEN
from tercel.draft.kinds import new_head
from tercel.errors import TercelError
from tercel.heads import resolve_head
from tercel.interop.formats.read import read_head
from tercel.target_model.protocol import TargetModel
from tercel.train.config import TrainConfig
from tercel.train.feature_store import FeatureStore
from tercel.train.lesson import lesson_of

# settings that a head has already, and what they are called there
_OF_HEADS = {
    **{name: name for name in ("feature_layers", "fc_norm", "norm_output", "shared_output", "tie_size")},
    **{"part_layers": "num_layers", "mlp_width": "intermediate_size", "head_layers": "num_decoder_layers"},
}


def first_head(
    config: TrainConfig,
    target: TargetModel,
    chats: Sequence[TokenizedChat],
    counts: Tensor,
    store: FeatureStore | None = None,
) -> tuple[DraftHead, DraftVocabulary, tuple[str, ...]]:
    """The head that a run begins with, on the target's device, its vocabulary, and what speaks against it: another
    run's (`start_from`), or a new one that can draft the tokens which are supervised most often (`counts` `[V]`).
    store: what the target gave for the chats, if it is not to be asked.

    Raises `TercelError` if there is no such head, or it does not fit.
    """
    warnings: tuple[str, ...] = ()
    lesson = lesson_of(config)
    if config.start_from:
        path = resolve_head(config.start_from, config.start_from)
        origin = bind(read_head(path, num_layers=target.num_layers), target)
        warnings = origin.warnings
        torch.manual_seed(config.seed)
        head, vocabulary = head_from(origin, config).to(target.device), origin.vocabulary
        if store is not None:
            store.require_of(target, head.config.feature_layers)
    else:
        size = config.draft_vocab or target.vocab_size
        vocabulary = DraftVocabulary.most_frequent(counts, size, always=target.eos_token_ids)
        torch.manual_seed(config.seed)
        head = new_head(lesson.new_config(target, len(vocabulary))).to(target.device)
        if store is not None:
            store.require_of(target, head.config.feature_layers)
        lesson.initialise(head, target, vocabulary, chats, store)
    lesson.freeze(head)
    return head, vocabulary, warnings


def head_from(origin: DraftModel, run: TrainConfig) -> DraftHead:
    """A copy of another run's head, bound to the target, to go on with.

    Embeddings of its own (those that repeat the target's are not) go on learning, unless its record says that they
    never did.
    Raises `TercelError` if it is not what the run's own settings ask for, or of another kind.
    """
    theirs = origin.head_as(lesson_of(run).head_class)
    config = theirs.config
    for name, own in _OF_HEADS.items():
        asked = vars(run)[name]
        if asked != vars(TrainConfig)[name] and (found := vars(config)[own]) != asked:
            raise TercelError(
                f"{origin.path} has {name} {found}, but this run asks for {asked}; "
                "give the same head settings, or leave out --start-from"
            )
    head = type(theirs)(config)
    head.load_state_dict(theirs.state_dict())
    if config.own_embeddings:
        head.embed_tokens.requires_grad_(origin.info.training.embeddings != FROZEN)
    return head
