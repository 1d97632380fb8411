"""What an MTP head is made of: the target's own kind of layer, named so that it is built without the target."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import nn
from transformers import PreTrainedConfig

from tercel import limits
from tercel.draft.config import HeadConfig, LastHiddenConfig
from tercel.errors import TercelError
from tercel.methods.mtp.attention import NAME
from tercel.reading import short
from tercel.target_model.attention import NAME as TARGETS
from tercel.target_model.rope import depends_on_length
from tercel.target_model.stock import StockDecoder
from tercel.target_model.structure import rope_kinds

PARTS = ("layer", "norm", "rotary", "config")
# classes are taken from nowhere else, whatever a file says
_ROOMS = ("transformers.models.", "torch.nn.modules.normalization")
_FINAL_NORMS = ("norm", "final_layer_norm")
FULL = "full_attention"
# settings that say by a layer's number whether it is dense: an MTP module's has experts wherever the model has any
_EXPERTS = {"first_k_dense_replace": 0, "decoder_sparse_step": 1, "mlp_only_layers": []}
# settings that say nothing of layers
_OF_THE_MODEL = ("auto_map", "architectures", "quantization_config", "transformers_version", "dtype", "id2label",
                 "label2id")  # fmt: skip


@dataclass(frozen=True)
class MtpConfig(LastHiddenConfig):
    """Sizes as of other heads, and what the layers are.

    modules: how many there are, each for a draft one token further on; the last one drafts all further ones.
    hidden_first: whether the hidden state comes before the embedding where they are joined.
    classes: by `PARTS`, where the layer, the norm, the rotary embedding and their settings' class stand in
    transformers. settings: the layers'. attention: how they attend, `sdpa` or `eager`.
    """

    kind: ClassVar[str] = "mtp"

    own_output: bool = False
    modules: int = 1
    hidden_first: bool = False
    classes: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    attention: str = "sdpa"

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.modules) is not int or not 1 <= self.modules <= limits.DRAFT_DEPTH:
            raise TercelError(f"an MTP head has 1 to {limits.DRAFT_DEPTH} modules, not {short(self.modules)}")
        if not isinstance(self.hidden_first, bool) or self.attention not in ("sdpa", "eager"):
            raise TercelError("an MTP head says by hidden_first and attention (sdpa or eager) how its layers run")
        named = isinstance(self.classes, dict) and all(isinstance(self.classes.get(part), str) for part in PARTS)
        if not named or not isinstance(self.settings, dict):
            raise TercelError(f"an MTP head names the classes of its {', '.join(PARTS)} and their settings")

    @classmethod
    def beside(
        cls,
        stock: StockDecoder,
        *,
        vocab_size: int,
        draft_vocab_size: int,
        max_position_embeddings: int,
        modules: int = 1,
        hidden_first: bool = False,
        **own: bool,
    ) -> MtpConfig:
        """Modules with layers as `stock` has them. own: `own_embeddings` and `own_output`.

        Raises `TercelError` for a model whose layers cannot be had alone.
        """
        sizes = HeadConfig.for_target(
            stock.config,
            feature_layers=(len(stock.layers),),
            vocab_size=vocab_size,
            draft_vocab_size=draft_vocab_size,
            max_position_embeddings=max_position_embeddings,
        )
        last = stock.layers[last_attending(stock)]
        classes = {"layer": type(last), "config": _public(type(stock.config))}
        cache_name(type(last))
        classes |= {"norm": type(final_norm(stock)), "rotary": type(_beside_layers(stock, ("rotary_emb",)))}
        return cls(
            **{**vars(sizes), "own_output": False, **own},
            modules=modules,
            hidden_first=hidden_first,
            classes={part: f"{found.__module__}:{found.__name__}" for part, found in classes.items()},
            settings=_settings(stock, modules),
            attention="sdpa" if stock.config._attn_implementation in (TARGETS, "sdpa") else "eager",
        )

    def part(self, name: str) -> type[Any]:
        """One of the classes. Raises `TercelError` for one that is not transformers' own."""
        module, _, attribute = self.classes[name].partition(":")
        if not module.startswith(_ROOMS) or not attribute.isidentifier():
            raise TercelError(f"an MTP head is made of classes in {_ROOMS[0]}*, not of {short(self.classes[name])}")
        try:
            found: type[Any] = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise TercelError(f"the installed transformers has no {self.classes[name]}; update transformers") from error
        return found

    def layer_settings(self) -> PreTrainedConfig:
        """The layers' settings as transformers takes them."""
        made: PreTrainedConfig = self.part("config").from_dict(dict(self.settings))
        made._attn_implementation = NAME if self.attention == "sdpa" else self.attention
        return made


def last_attending(stock: StockDecoder) -> int:
    """The number of the model's last layer that attends to everything before a token.

    Raises `TercelError` if it has none.
    """
    kinds = getattr(stock.config, "layer_types", None) or [FULL] * len(stock.layers)
    found = [number for number, kind in enumerate(kinds) if kind == FULL]
    if not found:
        raise TercelError(
            f"{stock.name} has no layer of full attention, which an MTP module is one of; MTP heads for "
            f"{stock.config.model_type} models are not supported"
        )
    return found[-1]


def cache_name(layer: type[Any]) -> str:
    """What such a layer calls its cache. Raises `TercelError` for one that is not run with a cache and rotations from
    outside."""
    known = inspect.signature(layer.forward).parameters
    found = next((name for name in ("cache", "layer_past") if name in known), None)
    if found is None or "position_embeddings" not in known:
        raise TercelError(f"{layer.__name__} takes no cache or no rotations from outside, so that it is no MTP module")
    return found


def final_norm(stock: StockDecoder) -> nn.Module:
    """What comes behind the model's last layer. Raises `TercelError` if it goes by no name that is known."""
    return _beside_layers(stock, _FINAL_NORMS)


def _beside_layers(stock: StockDecoder, names: tuple[str, ...]) -> nn.Module:
    found = next((module for name, module in stock.decoder.named_children() if name in names), None)
    if found is None:
        raise TercelError(
            f"{stock.name} has no {names[0]} beside its layers, which an MTP module takes from it; MTP heads for "
            f"{stock.config.model_type} models are not supported"
        )
    return found


def _settings(stock: StockDecoder, modules: int) -> dict[str, Any]:
    """The model's, with as many layers as there are modules, each like its last attending one."""
    config, last = stock.config, last_attending(stock)
    settings = config.to_dict()
    for name, value in settings.items():
        if isinstance(value, list) and len(value) == config.num_hidden_layers and name not in _EXPERTS:
            settings[name] = [value[last]] * modules
    settings |= {name: value for name, value in _EXPERTS.items() if name in settings}
    settings["num_hidden_layers"] = modules
    settings |= {name: 0.0 for name, value in settings.items() if name.endswith("dropout") and isinstance(value, float)}
    kinds = rope_kinds(config)
    if any(depends_on_length(kind) for kind in kinds):  # entries made earlier are kept when a text grows
        settings["rope_parameters"] = {"rope_type": "default", "rope_theta": kinds[0]["rope_theta"]}
    for name in _OF_THE_MODEL:
        settings.pop(name, None)
    return settings


def _public(found: type[Any]) -> type[Any]:
    """The class itself or the nearest above it that transformers has: a model's own code derives its settings."""
    return next((c for c in found.__mro__ if c.__module__.startswith(_ROOMS)), found)
