"""`config.json` for each engine: every default that engines disagree on is written out, ids in that engine's sense."""

from __future__ import annotations

from typing import Any

import torch

from tercel.draft import HeadConfig
from tercel.draft.eagle3 import public_config
from tercel.draft.shape import TreeShape
from tercel.interop.engines.limits import engine_ids


def engine_config(
    engine: str,
    c: HeadConfig,
    dtype: torch.dtype,
    target_name: str,
    target_architectures: list[str],
    shape: TreeShape,
    embeddings_learn: bool = False,
) -> dict[str, Any]:
    """For every engine that reads a `config.json`; `c` is placed. embeddings_learn: whether the head's own embeddings
    were trained with it, which speculators asks when it trains on."""
    if engine == "speculators":
        config = _speculators(c, dtype, target_name, target_architectures, shape)
        return {**config, "embed_requires_grad": embeddings_learn}
    config = {**public_config(c, dtype), "num_aux_hidden_states": c.num_features}
    config.pop("eagle_config", None)
    ids = list(engine_ids(engine, c.feature_layers))
    eagle: dict[str, Any] = {"use_aux_hidden_state": True, "norm_before_fc": c.norm_before_fc}
    if engine == "vllm":  # its two runners look in two places
        config["eagle_aux_hidden_state_layer_ids"] = ids
    if engine in ("vllm", "sglang"):
        eagle["eagle_aux_hidden_state_layer_ids"] = ids
    config["eagle_config"] = eagle
    return config


def _speculators(
    c: HeadConfig, dtype: torch.dtype, target_name: str, target_architectures: list[str], shape: TreeShape
) -> dict[str, Any]:
    """No `model_type` at the top: with one vLLM would not translate the rest."""
    public = public_config(c, dtype)
    of_the_speculator = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "draft_vocab_size")
    layer = {k: v for k, v in public.items() if k not in (*of_the_speculator, "target_hidden_size", "eagle_config")}
    del layer["architectures"]
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": shape.depth, "verifier_accept_k": 1}
            ],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target_name, "architectures": target_architectures},
        },
        # vLLM builds fc for three layers unless the layer's own part says otherwise
        "transformer_layer_config": {**layer, "num_aux_hidden_states": c.num_features},
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": c.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(c.feature_layers),
        "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": c.norm_before_fc,
        "fc_norm": c.fc_norm,
        "norm_output": c.norm_output,
        "tie_word_embeddings": False,
        "torch_dtype": public["torch_dtype"],
    }
