"""What a head is: sizes, feature layers, flags."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, Self

from transformers import PreTrainedConfig

from tercel import limits
from tercel.errors import TercelError
from tercel.reading import short
from tercel.target_model.experts import has_experts
from tercel.target_model.rope import depends_on_length

# every size with what it may be at most
_SIZES = {
    "hidden_size": limits.HEAD_SIZE,
    "target_hidden_size": limits.HEAD_SIZE,
    "intermediate_size": limits.HEAD_SIZE,
    "num_attention_heads": limits.HEAD_SIZE,
    "num_key_value_heads": limits.HEAD_SIZE,
    "head_dim": limits.HEAD_SIZE,
    "vocab_size": limits.VOCABULARY,
    "draft_vocab_size": limits.VOCABULARY,
    "max_position_embeddings": limits.POSITIONS,
    "num_decoder_layers": limits.HEAD_LAYERS,
}
_DENSE_WIDTHS = ("intermediate_size_mlp", "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
LAST_HIDDEN = "the last hidden state, after the final norm"
# off, unless a head says otherwise
FLAGS = ("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc", "attention_bias", "own_embeddings")


@dataclass(frozen=True)
class HeadConfig:
    """Sizes and conventions of an EAGLE-3 head (spec sections 1, 2 and 6).

    target_num_layers: None if the files of a head made elsewhere do not say it.
    feature_layers: ids as *input of decoder layer i*, low to high; empty for what engines take by default, which
    depends on the target's depth (`placed` fills it in). The depth itself, alone, is the last hidden state, after the
    final norm: the top layer only, which no public format can say.
    fc_norm: an RMSNorm for each captured layer before `fc` (EAGLE-3.1).
    norm_output: feed back the normed hidden instead of the residual stream (EAGLE-3.1).
    norm_before_residual: the layer's residual is the normed hidden (a flag of speculators and vLLM).
    norm_before_fc: one RMSNorm over all captured layers together before `fc` (speculators).
    attention_bias: the attention's projections have biases.
    own_embeddings: the head has token embeddings of its own; so has every head of another width than its target.
    own_output: the head has an output layer of its own; without one it is the target's, in the rows of the draft
    vocabulary.
    num_decoder_layers: the first reads embedding and hidden, those behind it are ordinary ones; the paper has one.
    """

    kind: ClassVar[str] = "eagle3"  # the name in `kinds.py`

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_num_layers: int | None
    feature_layers: tuple[int, ...]
    rms_norm_eps: float = 1e-5
    rope_parameters: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_position_embeddings: int = 2048
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    attention_bias: bool = False
    own_embeddings: bool = False
    own_output: bool = True
    num_decoder_layers: int = 1

    def __post_init__(self) -> None:
        for name, most in _SIZES.items():
            _check_size(name, getattr(self, name), most)
        if self.target_num_layers is not None:
            _check_size("target_num_layers", self.target_num_layers, limits.HEAD_SIZE)
        _check_rope(self.rope_parameters)
        if not isinstance(self.rms_norm_eps, float) or not 0 < self.rms_norm_eps < 1:
            raise TercelError(f"rms_norm_eps of a head must be a small positive number, not {short(self.rms_norm_eps)}")
        for name in (*FLAGS, "own_output"):
            if not isinstance(getattr(self, name), bool):
                raise TercelError(f"{name} of a head must be true or false, not {short(getattr(self, name))}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise TercelError(
                f"{self.num_attention_heads} attention heads cannot share {self.num_key_value_heads} key/value heads"
            )
        if self.head_dim % 2:
            raise TercelError(f"head_dim {self.head_dim} is odd, but RoPE rotates pairs")
        if self.draft_vocab_size > self.vocab_size:
            raise TercelError(
                f"draft_vocab_size {self.draft_vocab_size} exceeds the target's vocabulary of {self.vocab_size}"
            )
        if self.fc_norm and self.norm_before_fc:
            raise TercelError("a head norms its features one by one (fc_norm) or together (norm_before_fc), not both")
        if self.hidden_size != self.target_hidden_size and not self.own_embeddings:
            object.__setattr__(self, "own_embeddings", True)  # the target's do not fit
        if self.hidden_size != self.target_hidden_size and not self.own_output:
            raise TercelError(
                f"a head of width {self.hidden_size} cannot share the output layer of a target of width "
                f"{self.target_hidden_size}; it needs an lm_head of its own"
            )
        if self.num_decoder_layers > 1 and self.kind != HeadConfig.kind:
            raise TercelError(f"a head of the kind {self.kind} has one decoder layer, not {self.num_decoder_layers}")
        self._check_feature_layers()

    def captured(self, num_layers: int) -> tuple[int, ...]:
        """The feature layers beside a target of `num_layers` layers, whether or not it has them."""
        return self.feature_layers or engine_default_layers(num_layers)

    def beyond(self, num_layers: int) -> tuple[int, ...]:
        """The feature layers that a target of `num_layers` layers does not have."""
        if self.target_num_layers == num_layers and self.reads_last_hidden:
            return ()
        return tuple(layer for layer in self.captured(num_layers) if not 0 <= layer < num_layers)

    @property
    def reads_last_hidden(self) -> bool:
        """Whether its one feature is the target's last hidden state."""
        return self.target_num_layers is not None and self.feature_layers == (self.target_num_layers,)

    def fits_depth(self, num_layers: int) -> bool:
        """Whether it can be `placed` beside a target of `num_layers` layers."""
        return self.target_num_layers in (None, num_layers) and not self.beyond(num_layers)

    def _check_feature_layers(self) -> None:
        depth = self.target_num_layers
        if len(self.feature_layers) > limits.FEATURE_LAYERS:
            raise TercelError(f"a head of {len(self.feature_layers)} feature layers cannot be built; fetch it again")
        if depth is not None and not self.feature_layers:
            raise TercelError("a head needs at least one feature layer")
        if self.reads_last_hidden:
            return
        wrong = [i for i in self.feature_layers if type(i) is not int or i < 0 or (depth is not None and i >= depth)]
        if wrong:
            known = "" if depth is None else f" for a target of {depth} layers (0..{depth - 1})"
            raise TercelError(
                f"feature layer {short(wrong[0])} is out of range{known}; ids mean the input of a layer"
            )

    @property
    def num_features(self) -> int:
        """How many layers are captured."""
        return len(self.feature_layers) or 3

    def placed(self, num_layers: int) -> Self:
        """This head beside a target of `num_layers` layers: with its feature layers, where the files left them to
        the engines' default.

        Raises `TercelError` if a layer is out of range, or the head is for a target of another depth.
        """
        if self.target_num_layers not in (None, num_layers):
            raise TercelError(f"the head is for a target of {self.target_num_layers} layers, not of {num_layers}")
        return replace(self, target_num_layers=num_layers, feature_layers=self.captured(num_layers))

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
    ) -> Self:
        """The head of the target's own shape: same width, heads, MLP, RoPE and norm epsilon.

        Raises `TercelError` for a target without attention, whose shape gives a head none.
        """
        config = target.get_text_config()
        heads = getattr(config, "num_attention_heads", None)
        hidden = config.hidden_size
        if not heads:
            raise TercelError(
                f"a {config.model_type} model has no attention heads, so that a draft head has no shape to take; "
                "heads for such targets are not supported"
            )
        return cls(
            hidden_size=hidden,
            target_hidden_size=hidden,
            intermediate_size=_mlp_size(config),
            num_attention_heads=heads,
            num_key_value_heads=_first(config, ("num_key_value_heads", "num_kv_heads")) or heads,
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
        """For JSON; the kind is told where it is not the usual one."""
        kind = {} if self.kind == HeadConfig.kind else {"kind": self.kind}
        return {**kind, **asdict(self), "feature_layers": list(self.feature_layers)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        known = {f.name for f in fields(cls)}
        return cls(
            **{
                **{k: v for k, v in values.items() if k in known},
                "feature_layers": tuple(values["feature_layers"]),
            }
        )


class LastHiddenConfig(HeadConfig):
    """Of a head of a kind whose one feature is the last hidden state: `feature_layers` is `(target_num_layers,)`, or
    empty while the target's depth is unknown."""

    def captured(self, num_layers: int) -> tuple[int, ...]:
        return (num_layers,)

    def beyond(self, num_layers: int) -> tuple[int, ...]:
        return ()  # every target has a last hidden state

    def _check_feature_layers(self) -> None:
        if self.feature_layers != (() if self.target_num_layers is None else (self.target_num_layers,)):
            raise TercelError(
                f"a head of the kind {self.kind} reads the target's last hidden state, not layers {self.feature_layers}"
            )

    @property
    def num_features(self) -> int:
        return 1


def engine_default_layers(num_layers: int) -> tuple[int, ...]:
    """What vLLM and SGLang capture if a head names no layers: the inputs of layers `2`, `L//2`, `L-3`."""
    return (2, num_layers // 2, num_layers - 3)


def _check_size(name: str, value: object, most: int) -> None:
    if type(value) is not int or value < 1:  # bool is an int too
        raise TercelError(f"{name} of a head must be a whole number of at least 1, not {short(value)}")
    if value > most:
        raise TercelError(f"{name} of a head is {value}, which no model has; is the config damaged?")


def _check_rope(parameters: Any) -> None:
    theta = parameters.get("rope_theta") if isinstance(parameters, dict) else None
    if not isinstance(theta, int | float) or isinstance(theta, bool):
        raise TercelError(f"rope_parameters of a head must name a rope_theta, not be {short(parameters)}")
    if not isinstance(parameters.get("rope_type", "default"), str):
        raise TercelError(f"rope_type of a head must be a name, not {short(parameters['rope_type'])}")
    if not 0 < theta < math.inf:
        raise TercelError(f"rope_theta of a head must be a number above 0, not {short(theta)}")


def _mlp_size(config: PreTrainedConfig) -> int:
    """The width of the target's dense MLP, by whichever name it goes; four times the hidden size where it names none.

    An expert is narrower or wider than any dense MLP would be. Models with experts of a width of its own name
    (`moe_intermediate_size`, or `intermediate_size_mlp` beside it) keep `intermediate_size` for dense layers; in all
    others it is an expert's, and passed over.
    """
    names: tuple[str, ...] = _DENSE_WIDTHS
    if has_experts(config) and getattr(config, "moe_intermediate_size", None) is None:
        names = ("intermediate_size_mlp",)
    size = _first(config, names)
    return size or 4 * config.hidden_size


def _first(config: PreTrainedConfig, names: tuple[str, ...]) -> int | None:
    """The first of these settings that the configuration has; of a list, with one for each layer, its first."""
    for name in names:
        value = getattr(config, name, None)
        value = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(value, int) and value > 0:
            return value
    return None


def _rope_parameters(config: PreTrainedConfig) -> dict[str, Any]:
    """The target's RoPE base and scaling; where kinds of layers differ (Gemma 3), full attention's.

    Of kinds that depend on the length of the sequence (`longrope`, dynamic NTK) the base alone: the head keeps its
    entries when a sequence grows, so it needs one set of frequencies, the same in training, here and in every engine.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    if "full_attention" in parameters:
        parameters = parameters["full_attention"]
    # a head always rotates its whole head size, whatever part of it the target rotates
    kept = {k: v for k, v in parameters.items() if k != "partial_rotary_factor"}
    if depends_on_length(kept):
        kept = {"rope_theta": kept["rope_theta"]}
    return {"rope_type": "default", "rope_theta": 10000.0, **kept}
