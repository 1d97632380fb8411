"""Whether a model sends each token to a few of many MLPs, by what its configuration says."""

from __future__ import annotations

from transformers import PretrainedConfig

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def has_experts(config: PretrainedConfig) -> bool:
    """Mixture-of-experts models name how many there are; 0 or 1 stands for a dense one of the same family."""
    counts = [getattr(config, name, None) for name in _COUNTS]
    return any(isinstance(count, int) and count > 1 for count in counts)
