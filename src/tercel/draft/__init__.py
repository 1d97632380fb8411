"""Draft heads as plain modules, their vocabulary and their checkpoint; nothing here trains or decodes."""

from tercel.draft.checkpoint import Convention, DraftModel, HeadInfo, TargetIdentity, save_head
from tercel.draft.config import HeadConfig
from tercel.draft.eagle1 import Eagle1Config, Eagle1Head
from tercel.draft.eagle3 import Eagle3Head
from tercel.draft.head import AttendingHead, DraftHead, LayerHead, StepHead
from tercel.draft.history import MeasuredRecord, TrainingRecord
from tercel.draft.load import load_head
from tercel.draft.vocabulary import DraftVocabulary

__all__ = [
    "AttendingHead",
    "Convention",
    "DraftHead",
    "DraftModel",
    "DraftVocabulary",
    "Eagle1Config",
    "Eagle1Head",
    "Eagle3Head",
    "HeadConfig",
    "HeadInfo",
    "LayerHead",
    "MeasuredRecord",
    "StepHead",
    "TargetIdentity",
    "TrainingRecord",
    "load_head",
    "save_head",
]
