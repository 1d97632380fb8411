"""Where a head starts. What is taken from the target need not be learned, and data is what costs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tercel.chat.conversation import TokenizedChat
from tercel.draft import DraftModel, DraftVocabulary, Eagle3Head, HeadConfig
from tercel.draft.binding import bind
from tercel.draft.history import FROZEN
from tercel.errors import TercelError
from tercel.heads import resolve_head
from tercel.interop.formats.read import read_head
from tercel.target_model.protocol import TargetModel
from tercel.target_model.structure import default_feature_layers
from tercel.train.config import TrainConfig
from tercel.train.encoding import encode_group
from tercel.train.feature_store import FeatureStore

SAMPLE_CHATS = 8


def first_head(
    config: TrainConfig,
    target: TargetModel,
    chats: Sequence[TokenizedChat],
    counts: Tensor,
    store: FeatureStore | None = None,
) -> tuple[Eagle3Head, DraftVocabulary, tuple[str, ...]]:
    """The head that a run begins with, on the target's device, its vocabulary, and what speaks against it: another
    run's (`start_from`), or a new one that can draft the tokens which are supervised most often (`counts` `[V]`).
    store: what the target gave for the chats, if it is not to be asked.

    Raises `TercelError` if there is no such head, or it does not fit.
    """
    warnings: tuple[str, ...] = ()
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
        head = Eagle3Head(
            HeadConfig.for_target(
                target.config,
                feature_layers=config.feature_layers or default_feature_layers(target.num_layers),
                vocab_size=target.vocab_size,
                draft_vocab_size=len(vocabulary),
                max_position_embeddings=target.context_length,
                fc_norm=config.fc_norm,
                norm_output=config.norm_output,
            )
        ).to(target.device)
        if store is not None:
            store.require_of(target, head.config.feature_layers)
        initialise_from_target(head, target, vocabulary, chats, store)
    head.lm_head.requires_grad_(not config.freeze_lm_head)
    return head, vocabulary, warnings


@torch.no_grad()
def initialise_from_target(
    head: Eagle3Head,
    target: TargetModel,
    vocabulary: DraftVocabulary,
    chats: Sequence[TokenizedChat],
    store: FeatureStore | None = None,
) -> None:
    """Give the head the target's output rows of its draft tokens (spec section 2), and scale `fc` to the
    features.

    Residual streams are not normalised: their size grows with depth and differs between models. With `fc`
    drawn at one fixed scale the fused hidden drowns what attention and MLP add to it, and most of a small
    training run goes into shrinking it. So each layer's block of `fc` is drawn such that the fused hidden has
    unit size and every layer the same share in it (median over tokens: the first token's size is far off in
    many models). Dividing every single channel by its size was tried too and learned more slowly.
    """
    head.lm_head.weight.copy_(target.output_rows(vocabulary.ids))
    layers = head.config.feature_layers
    if head.config.fc_norm:  # normed before they are fused
        head.fc.weight.normal_(std=head.fc.in_features**-0.5)
        return
    sizes = []  # root mean square of each captured layer, a line a chat
    for chat in chats[:SAMPLE_CHATS]:
        (encoded,) = encode_group(target, layers, [chat]) if store is None else [store.read(chat, target.dtype)]
        captured = encoded.features.to(target.device).chunk(len(layers), -1)
        sizes.append(torch.stack([layer.float().pow(2).mean(-1).sqrt().median() for layer in captured]))
    scale = torch.stack(sizes).median(0).values.clamp(min=1e-6)
    for block, size in zip(head.fc.weight.chunk(len(layers), dim=1), scale.tolist(), strict=True):
        block.normal_(std=1.0 / (size * head.fc.in_features**0.5))


def head_from(origin: DraftModel, run: TrainConfig) -> Eagle3Head:
    """A copy of another run's head, bound to the target, to go on with.

    Embeddings of its own (those that repeat the target's are not) go on learning, unless its record says that they
    never did.
    Raises `TercelError` if it is not what the run's own settings ask for, or of another kind.
    """
    config = origin.eagle3.config
    for name in ("feature_layers", "fc_norm", "norm_output"):
        theirs, asked = vars(config)[name], vars(run)[name]
        if asked and theirs != asked:
            raise TercelError(
                f"{origin.path} has {name} {theirs}, but this run asks for {asked}; "
                "give the same head settings, or leave out --start-from"
            )
    head = type(origin.eagle3)(config)
    head.load_state_dict(origin.eagle3.state_dict())
    if config.own_embeddings:
        head.embed_tokens.requires_grad_(origin.info.training.embeddings != FROZEN)
    return head
