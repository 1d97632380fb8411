"""What a head is: sizes, feature layers, flags."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from transformers import PreTrainedConfig

from tercel.errors import TercelError


@dataclass(frozen=True)
class HeadConfig:
    """Sizes and conventions of an EAGLE-3 head (spec sections 1, 2 and 6).

    feature_layers: ids as *input of decoder layer i*, low to high.
    fc_norm: an RMSNorm for each captured layer before `fc` (EAGLE-3.1).
    norm_output: feed back the normed hidden instead of the residual stream (EAGLE-3.1).
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_num_layers: int
    feature_layers: tuple[int, ...]
    rms_norm_eps: float = 1e-5
    rope_parameters: dict[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0}
    )
    max_position_embeddings: int = 2048
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "head_dim",
            "draft_vocab_size",
            "num_attention_heads",
            "num_key_value_heads",
        ):
            if getattr(self, name) < 1:
                raise TercelError(f"{name} of a head must be at least 1, not {getattr(self, name)}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise TercelError(
                f"{self.num_attention_heads} attention heads cannot share {self.num_key_value_heads} key/value heads"
            )
        if self.draft_vocab_size > self.vocab_size:
            raise TercelError(
                f"draft_vocab_size {self.draft_vocab_size} exceeds the target's vocabulary of {self.vocab_size}"
            )
        if not self.feature_layers:
            raise TercelError("a head needs at least one feature layer")
        wrong = [layer for layer in self.feature_layers if not 0 <= layer < self.target_num_layers]
        if wrong:
            raise TercelError(
                f"feature layer {wrong[0]} is out of range for a target of {self.target_num_layers} layers "
                f"(0..{self.target_num_layers - 1}); ids mean the input of a layer"
            )

    @classmethod
    def for_target(
        cls,
        target: PreTrainedConfig,
        *,
        feature_layers: tuple[int, ...],
        vocab_size: int,
        draft_vocab_size: int,
        max_position_embeddings: int,
        fc_norm: bool = False,
        norm_output: bool = False,
    ) -> HeadConfig:
        """The head of the target's own shape: same width, heads, MLP, RoPE and norm epsilon."""
        config = target.get_text_config()
        heads = config.num_attention_heads
        hidden = config.hidden_size
        return cls(
            hidden_size=hidden,
            target_hidden_size=hidden,
            intermediate_size=_mlp_size(config),
            num_attention_heads=heads,
            num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or hidden // heads,
            vocab_size=vocab_size,
            draft_vocab_size=draft_vocab_size,
            target_num_layers=config.num_hidden_layers,
            feature_layers=feature_layers,
            rms_norm_eps=getattr(config, "rms_norm_eps", None) or 1e-5,
            rope_parameters=_rope_parameters(config),
            max_position_embeddings=max_position_embeddings,
            fc_norm=fc_norm,
            norm_output=norm_output,
        )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "feature_layers": list(self.feature_layers)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> HeadConfig:
        known = {f.name for f in fields(cls)}
        return cls(
            **{
                **{k: v for k, v in values.items() if k in known},
                "feature_layers": tuple(values["feature_layers"]),
            }
        )


def _mlp_size(config: PreTrainedConfig) -> int:
    size = config.intermediate_size
    return int(size[0] if isinstance(size, list | tuple) else size)


def _rope_parameters(config: PreTrainedConfig) -> dict[str, Any]:
    """The target's RoPE base and scaling; of its full-attention layers where they differ by kind (Gemma
    3)."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if "full_attention" in parameters:
        parameters = parameters["full_attention"]
    # a head always rotates its whole head size, whatever part of it the target rotates
    kept = {k: v for k, v in parameters.items() if k != "partial_rotary_factor"}
    return {"rope_type": "default", "rope_theta": 10000.0, **kept}
