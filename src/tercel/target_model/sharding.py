"""A target over several processes of a torch process group, when one device cannot hold it.

What is split are the layers of the decoder. Embeddings, last norm and output layer stay whole in every process, so that
`embed`, `logits` and `output_rows` are each process's own; only `encode` takes all of them at once (who calls it, and
how often: `train/sharded.py`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

from tercel.errors import TercelError
from tercel.target_model.backend_names import FSDP, NONE, TENSOR
from tercel.target_model.structure import decoder_layers, decoder_of, rope_kinds


def check_sharding(name: str, config: PretrainedConfig, sharding: str) -> None:
    """Raises `TercelError` if the target `name` cannot be split in this way, or there is nobody to share it with."""
    if sharding == NONE:
        return
    if not dist.is_initialized() or dist.get_world_size() < 2:
        raise TercelError(f"target-sharding {sharding} needs several processes; start them with torchrun")
    if sharding == FSDP and any(kind.get("rope_type") == "longrope" for kind in rope_kinds(config.get_text_config())):
        raise TercelError(
            f"{name} has a RoPE that depends on the length of a sequence, so that processes would need different "
            "numbers of forwards; use target-sharding tensor or none"
        )
    if sharding == TENSOR:
        if _whole_in_plan(config) is None:
            raise TercelError(
                f"transformers has no tensor-parallel plan for {name} ({config.model_type}); use target-sharding fsdp"
            )
        text, count = config.get_text_config(), dist.get_world_size()
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        if heads % count:
            raise TercelError(
                f"{name} has {heads} key heads, which cannot be divided among {count} processes; use target-sharding "
                "fsdp, or another number of processes"
            )


def distributed(config: PretrainedConfig, sharding: str) -> DistributedConfig | None:
    """What `from_pretrained` is told; None unless it is to cut the matrices itself."""
    if sharding != TENSOR:
        return None
    changes = dict.fromkeys(_whole_in_plan(config) or (), "replicate")
    return DistributedConfig(tp_size=dist.get_world_size(), tp_plan=changes or "auto")


def placed(model: PreTrainedModel, device: torch.device, sharding: str) -> PreTrainedModel:
    """The loaded model on `device`, if need be this process's part of it."""
    if sharding == FSDP:
        _shard_layers(model, device)
    moved: Any = model
    return moved.to(device)


def _whole_in_plan(config: PretrainedConfig) -> list[str] | None:
    """Which modules the tensor-parallel plan of `transformers` cuts that are to stay whole here; None if it has no plan
    for the layers."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    plan = model.tp_plan
    whole = (model.get_input_embeddings(), model.get_output_embeddings())
    names = [name for name, module in model.named_modules() if any(module is one for one in whole) and name in plan]
    return names if set(plan) - set(names) else None


def _shard_layers(model: PreTrainedModel, device: torch.device) -> None:
    """Keep of each layer only this process's part (FSDP2): it is put together for its forward and dropped behind it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    decoder = decoder_of(model)
    layers = decoder_layers(decoder, model.config.get_text_config().num_hidden_layers)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    split = set(layers.parameters())
    fully_shard(decoder, mesh=mesh, ignored_params={p for p in decoder.parameters() if p not in split})
