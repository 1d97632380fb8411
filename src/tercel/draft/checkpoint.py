"""A head on disk: the public SafeAILab/SGLang format, plus `tercel.json` for what that format cannot hold.

config.json        plain Llama keys, `LlamaForCausalLMEagle3`
model.safetensors  the head's tensors, `d2t` (offsets) and `t2d`
tercel.json        feature layers and their convention, the target it belongs to, how it was trained
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tercel.draft.config import HeadConfig, engine_default_layers
from tercel.draft.eagle1 import Eagle1Head
from tercel.draft.eagle3 import Eagle3Head
from tercel.draft.history import MeasuredRecord, TrainingRecord
from tercel.draft.vocabulary import DraftVocabulary
from tercel.errors import TercelError
from tercel.file_set import CARD, CONFIG, RECORD, WEIGHTS, file_set, may_replace_card
from tercel.files import as_json

FORMAT = 1


@dataclass(frozen=True)
class TargetIdentity:
    """Which target a head was trained for: its name, a digest of its weights and one of its tokenizer."""

    name: str
    weights: str
    tokenizer: str


@dataclass(frozen=True)
class HeadInfo:
    """What `tercel.json` holds beside the sizes."""

    target: TargetIdentity | None
    training: TrainingRecord = field(default_factory=TrainingRecord)
    measured: MeasuredRecord = field(default_factory=MeasuredRecord)


@dataclass(frozen=True)
class Convention:
    """Something that formats disagree on: what holds for this head, and where that was read."""

    name: str
    value: str
    source: str


@dataclass(frozen=True)
class DraftModel:
    """A head with its vocabulary and its history: what everything that takes a HEAD works with.

    format: who wrote the files; conventions: how they were read (empty for a head of this package).
    """

    head: Eagle3Head | Eagle1Head
    vocabulary: DraftVocabulary
    info: HeadInfo
    path: Path | None = None
    warnings: tuple[str, ...] = ()
    format: str = "tercel"
    conventions: tuple[Convention, ...] = ()

    @property
    def eagle3(self) -> Eagle3Head:
        """The head, where only one of EAGLE-3 will do; raises `TercelError` for another."""
        if isinstance(self.head, Eagle1Head):
            raise TercelError(
                f"{self.path or 'this'} is an EAGLE-1 or EAGLE-2 head, which can be run and inspected only; "
                "give one of EAGLE-3"
            )
        return self.head


def save_head(
    model: DraftModel, out: Path, *, dtype: torch.dtype = torch.bfloat16, card: str | None = None
) -> None:
    """Write the checkpoint into the folder `out`, all of it or nothing; other files there stay.

    `card` becomes its README.md, unless there is one that somebody else wrote or edited.
    Raises `TercelError` if a file of another maker is in the way, or the folder cannot be written.
    """
    tensors = {name: p.detach().to("cpu", dtype).contiguous() for name, p in model.eagle3.named_parameters()}
    tensors["d2t"] = model.vocabulary.d2t
    tensors["t2d"] = model.vocabulary.t2d
    with file_set(out, "head") as staging:
        save_file(tensors, staging / WEIGHTS, metadata={"format": "pt"})
        (staging / CONFIG).write_text(as_json(public_config(model.head.config, dtype)), encoding="utf-8")
        (staging / RECORD).write_text(as_json(description(model)), encoding="utf-8")
        if card is not None and may_replace_card(out):
            (staging / CARD).write_text(card, encoding="utf-8")


def description(model: DraftModel) -> dict[str, Any]:
    """What `tercel.json` holds: sizes, target, history and results, from which the folder is read back exactly."""
    return {
        "format": FORMAT,
        "layer_ids_mean": "input of decoder layer i",
        "head": model.head.config.to_dict(),
        "target": asdict(model.info.target) if model.info.target else None,
        "training": model.info.training.to_json(),
        "measured": model.info.measured.to_json(),
    }


def public_config(c: HeadConfig, dtype: torch.dtype) -> dict[str, Any]:
    """`config.json` as the public loaders read it; every default that engines disagree on is written out."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": c.hidden_size,
        "target_hidden_size": c.target_hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "vocab_size": c.vocab_size,
        "draft_vocab_size": c.draft_vocab_size,
        "rms_norm_eps": c.rms_norm_eps,
        "max_position_embeddings": c.max_position_embeddings,
        "rope_parameters": c.rope_parameters,
        "rope_theta": c.rope_parameters["rope_theta"],
        "attention_bias": c.attention_bias,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": c.norm_before_fc,
        "fc_norm": c.fc_norm,
        "norm_output": c.norm_output,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if c.rope_parameters.get("rope_type", "default") != "default":
        config["rope_scaling"] = c.rope_parameters
    default = () if c.target_num_layers is None else engine_default_layers(c.target_num_layers)
    if c.feature_layers != default:  # engines assume the default; only then do they agree on what an id means
        config["eagle_aux_hidden_state_layer_ids"] = list(c.feature_layers)  # inputs: vLLM and llama.cpp read it here
        outputs = [i - 1 for i in c.feature_layers]  # SGLang and SpecForge read it there
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": outputs}
    return config
