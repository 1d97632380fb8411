"""A head on disk: the public SafeAILab/SGLang format, plus `tercel.json` for what that format cannot hold.

config.json        plain Llama keys, `LlamaForCausalLMEagle3`
model.safetensors  the head's tensors, `d2t` (offsets) and `t2d`
tercel.json        feature layers and their convention, the target it belongs to, how it was trained
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tercel.draft.config import HeadConfig, engine_default_layers
from tercel.draft.eagle1 import Eagle1Head
from tercel.draft.head import Eagle3Head
from tercel.draft.vocabulary import DraftVocabulary
from tercel.errors import TercelError
from tercel.file_set import CARD, CONFIG, RECORD, WEIGHTS, file_set, may_replace_card
from tercel.files import as_json

FORMAT = 1
_MAPS = ("d2t", "t2d")
EMBEDDINGS = "embeddings"  # key of a training record: whether a head's own embeddings learn with it
TRAINED, FROZEN = "trained", "frozen"


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
    training: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)


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
        try:
            save_file(tensors, staging / WEIGHTS, metadata={"format": "pt"})
        except (SafetensorError, OSError) as error:
            raise TercelError(
                f"writing the head to {out} failed: {error}; free space or choose another --out"
            ) from error
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
        "training": model.info.training,
        "measured": model.info.measured,
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


def load_head(path: Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> DraftModel:
    """Read a checkpoint folder.

    Raises `TercelError` for a missing, truncated, pickled, incomplete, misshapen or NaN checkpoint.
    """
    if not path.is_dir():
        raise TercelError(f"there is no head at {path}: give a folder with config.json and model.safetensors")
    weights = path / "model.safetensors"
    if not weights.is_file():
        pickled = next(iter(sorted([*path.glob("*.bin"), *path.glob("*.pt")])), None)
        if pickled is not None:
            raise TercelError(
                f"{pickled} is a pickle, which can run code when it is read; convert it to model.safetensors first"
            )
        raise TercelError(f"{path} has no model.safetensors; is it a head, and was it saved completely?")
    if not (path / "tercel.json").is_file():
        raise TercelError(
            f"{path} has no tercel.json, so its feature layers and target are unknown; it was not made by tercel"
        )
    config, info = _described(path / "tercel.json")
    tensors = read_tensors(weights)
    check_finite(tensors, weights)
    vocabulary = read_vocabulary(tensors, config, path)
    check_tensors(config, tensors, weights)
    return DraftModel(build_head(config, tensors, dtype, device), vocabulary, info, path)


def _described(path: Path) -> tuple[HeadConfig, HeadInfo]:
    """What `tercel.json` says."""
    extra = read_json(path)
    if extra.get("format") != FORMAT:
        raise TercelError(
            f"{path} has format {extra.get('format')!r}, but this version reads format {FORMAT}; update tercel"
        )
    for part in ("head", "training", "measured"):
        if not isinstance(extra.get(part), dict):
            raise TercelError(f"{path} has no object {part!r}; save or fetch the head again")
    try:
        config = HeadConfig.from_dict(extra["head"])
        identity = TargetIdentity(**extra["target"]) if extra["target"] else None
    except TercelError as error:
        raise TercelError(f"{path}: {error}") from error
    except (KeyError, TypeError) as error:
        raise TercelError(f"{path} is incomplete ({error}); save or fetch the head again") from error
    return config, HeadInfo(identity, extra["training"], extra["measured"])


def build_head(config: HeadConfig, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: str) -> Eagle3Head:
    """The frozen head of `config` with the weights of `tensors`, which `check_tensors` has passed."""
    head = Eagle3Head(config)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.copy_(tensors[name])
    return head.to(device=device, dtype=dtype).eval().requires_grad_(False)


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file; raises `TercelError` if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise TercelError(f"{path} cannot be read as JSON ({error}); save or fetch the head again") from error
    if not isinstance(value, dict):
        raise TercelError(f"{path} holds a {type(value).__name__}, not an object; save or fetch the head again")
    return value


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, as it stores them; raises `TercelError` if it is damaged."""
    try:
        with safe_open(path, framework="pt") as stored:
            return {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise TercelError(f"{path} is truncated or no safetensors file ({error}); save or fetch it again") from error


def check_finite(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raises `TercelError` for a tensor with NaN or infinite numbers; `path` is where they came from."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise TercelError(f"{name} in {path} holds NaN or infinite numbers; the head is damaged, train it again")


def read_vocabulary(tensors: Mapping[str, Tensor], config: HeadConfig, path: Path) -> DraftVocabulary:
    """The draft vocabulary of `d2t`, or the whole one where nothing is pruned.

    Raises `TercelError` if a pruned head has no map, or its maps are damaged or contradict each other.
    """
    if "d2t" in tensors:
        try:
            vocabulary = DraftVocabulary.from_d2t(tensors["d2t"], config.vocab_size, config.draft_vocab_size)
        except TercelError as error:
            raise TercelError(f"{path}: {error}") from error
    elif config.draft_vocab_size == config.vocab_size:
        vocabulary = DraftVocabulary.full(config.vocab_size)
    else:
        raise TercelError(
            f"{path} drafts {config.draft_vocab_size} of {config.vocab_size} tokens but has no map d2t; "
            "without it every draft would be another token"
        )
    if "t2d" in tensors and not torch.equal(tensors["t2d"].bool(), vocabulary.t2d):
        raise TercelError(f"{path} holds maps d2t and t2d that contradict each other; save the head again")
    return vocabulary


def check_tensors(config: HeadConfig, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Compare names and shapes with what a head of `config` has; raises `TercelError` for the first difference."""
    try:
        with torch.device("meta"):  # only the shapes: sizes may be damaged
            wanted = {name: parameter.shape for name, parameter in Eagle3Head(config).named_parameters()}
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise TercelError(f"{path.parent} describes a head that cannot be built ({error})") from error
    missing = sorted(set(wanted) - set(tensors))
    if missing:
        raise TercelError(f"{path} lacks {missing[0]} ({len(missing)} tensors missing in all); the head is incomplete")
    unknown = sorted(set(tensors) - set(wanted) - set(_MAPS))
    if unknown:
        raise TercelError(f"{path} holds {unknown[0]}, which no EAGLE-3 head has; is it another kind of head?")
    for name, shape in wanted.items():
        if shape != tensors[name].shape:
            raise TercelError(
                f"{name} in {path} is {list(tensors[name].shape)}, but the head's sizes ask for "
                f"{list(shape)}; config and weights are of different heads"
            )
