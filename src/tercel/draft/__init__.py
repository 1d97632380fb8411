"""Draft heads as plain modules, their vocabulary and their checkpoint; nothing here trains or decodes."""

from tercel.draft.checkpoint import Convention, DraftModel, HeadInfo, TargetIdentity, load_head, save_head
from tercel.draft.config import HeadConfig
from tercel.draft.head import Eagle3Head
from tercel.draft.vocabulary import DraftVocabulary

__all__ = [
    "Convention",
    "DraftModel",
    "DraftVocabulary",
    "Eagle3Head",
    "HeadConfig",
    "HeadInfo",
    "TargetIdentity",
    "load_head",
    "save_head",
]
