"""Whether a model sends each token to a few of many MLPs, by what its configuration says."""

from __future__ import annotations

from transformers import PretrainedConfig

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")


def has_experts(config: PretrainedConfig) -> bool:
    """Mixture-of-experts models name how many there are; 0 or 1 stands for a dense one of the same family."""
    return _named(config, _COUNTS) > 1


def expert_share(config: PretrainedConfig) -> float:
    """The part of all experts that a token is sent to: 1 for a dense model, and one expert where none says how many."""
    return min(1.0, _named(config, _CHOSEN) / _named(config, _COUNTS))


def _named(config: PretrainedConfig, names: tuple[str, ...]) -> int:
    """The largest count of these names, at least 1."""
    found = [getattr(config, name, None) for name in names]
    return max([1, *(count for count in found if isinstance(count, int))])
