"""Tiny checkpoints with MTP modules, under the names that the families publish them by."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config, Glm4MoeConfig, PretrainedConfig, PreTrainedModel

from tercel.draft import DraftModel, DraftVocabulary, HeadInfo
from tercel.draft.binding import bind
from tercel.draft.kinds import new_head
from tercel.methods.mtp.initial import new_config, take_from_target
from tercel.methods.mtp.module import MtpHead
from tercel.target_model.protocol import TargetModel
from tests.tiny import VOCAB, tiny_config, tiny_tokenizer

Checkpoints = Callable[..., Path]
H, LAYERS = 32, 2
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": H,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
}
ORDER = {"qwen2": "hidden"}  # what is joined first, where that is not the embedding; it has MiMo's names


def random_mtp(target: TargetModel, modules: int = 2) -> DraftModel:
    """An untrained head of the target's own kind of layer, none of whose weights are as they begin."""
    vocabulary = DraftVocabulary(torch.arange(0, target.vocab_size, 2), target.vocab_size)
    head = new_head(new_config(target, len(vocabulary), modules))
    assert isinstance(head, MtpHead)
    take_from_target(head, target)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return bind(DraftModel(head.eval().requires_grad_(False), vocabulary, HeadInfo(None)), target)


def config_of(arch: str, layers: int) -> PretrainedConfig:
    if arch == "deepseek_v3":
        latent = {"kv_lora_rank": 16, "q_lora_rank": 12, "qk_rope_head_dim": 8, "v_head_dim": 12, "qk_nope_head_dim": 8}
        return DeepseekV3Config(**COMMON, **latent, num_hidden_layers=layers, num_key_value_heads=4)
    if arch == "glm4_moe":
        grouped = {"num_key_value_heads": 2, "head_dim": 16, "attention_bias": True, "use_qk_norm": True}
        return Glm4MoeConfig(**COMMON, **grouped, num_hidden_layers=layers)
    return tiny_config(arch, num_hidden_layers=layers)


def random_model(config: PretrainedConfig, seed: int) -> PreTrainedModel:
    """As `tiny_model`, with a router's corrections off zero too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for tensor in (*model.parameters(), *(b for n, b in model.named_buffers() if "correction" in n)):
                if tensor.ndim == 1:
                    tensor.add_(0.1 * torch.randn_like(tensor))
    return model.eval()


def public_layer(arch: str, seed: int, scratch: Path) -> dict[str, Tensor]:
    """A random decoder layer of the kind that modules have, by its public names."""
    config = config_of(arch, 1)
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0
    if arch == "qwen3_next":
        config = tiny_config(arch, num_hidden_layers=1, layer_types=["full_attention"])
    random_model(config, seed).save_pretrained(scratch)
    stored = load_file(scratch / "model.safetensors")
    return {name.removeprefix("model.layers.0."): t for name, t in stored.items() if name.startswith("model.layers.0.")}


def save_with_modules(folder: Path, arch: str, modules: int = 1, **announced: int) -> Path:
    """A tiny target of `arch` whose files hold `modules` MTP modules."""
    path = folder / f"{arch}-{modules}"
    random_model(config_of(arch, 4 if arch == "qwen3_next" else LAYERS), 0).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    stored = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * (0.25 if len(shape) > 1 else 0.1) + float(len(shape) == 1)

    for number in range(modules):
        layer = public_layer(arch, 10 + number, folder / "scratch")
        if arch in ("deepseek_v3", "glm4_moe"):
            at = f"model.layers.{LAYERS + number}."
            names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
            stored[f"{at}embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
            stored[f"{at}shared_head.head.weight"] = stored["lm_head.weight"].clone()
        elif arch == "qwen2":
            at = f"model.mtp_layers.{number}."
            names = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
        else:
            at, names = f"mtp.layers.{number}.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        before = "mtp." if arch == "qwen3_next" else at
        stored |= {f"{at}{name}": tensor for name, tensor in layer.items()}
        for name in names:
            joint = name in ("eh_proj", "input_proj", "fc")
            stored[f"{before}{name}.weight"] = random(H, 2 * H) if joint else random(H)
    save_file({n: t.contiguous() for n, t in stored.items()}, path / "model.safetensors", metadata={"format": "pt"})
    announce(path, announced)
    return path


def public_tensors(path: Path) -> Mapping[str, Tensor]:
    return load_file(path / "model.safetensors")


def changed(path: Path, out: Path, change: Callable[[dict[str, Tensor]], object], **announced: int) -> Path:
    """A copy of a checkpoint, its tensors and its config.json changed."""
    shutil.copytree(path, out)
    tensors = dict(public_tensors(out))
    change(tensors)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    announce(out, announced)
    return out


def announce(path: Path, modules: Mapping[str, int]) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **modules}), encoding="utf-8")


def leave_out_modules(tensors: dict[str, Tensor]) -> None:
    """As saving a fine-tuned model of DeepSeek's names does."""
    for name in list(tensors):
        match = re.match(r"model\.layers\.(\d+)\.", name)
        if match and int(match.group(1)) >= LAYERS:
            del tensors[name]
