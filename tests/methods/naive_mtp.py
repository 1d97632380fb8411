"""MTP modules written out from the papers over a checkpoint's own tensors, slowly: no cache, no batch, whole texts.

DeepSeek-V3 (arXiv 2412.19437, section 2.2): module k gives for row i
h_i^k = layer(M [norm(Emb(t_{i+k})); norm(h_i^{k-1})]), where h^0 is the model's own output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from tests.methods.mtp_worlds import LAYERS, ORDER, public_tensors


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def turn(x: Tensor, theta: float, interleaved: bool) -> Tensor:
    """RoPE of `[T, heads, D]` at positions 0, 1, …, by complex numbers."""
    length, _, size = x.shape
    angles = torch.arange(length)[:, None] * theta ** (-torch.arange(0, size, 2) / size)
    by = torch.polar(torch.ones_like(angles), angles)[:, None]
    real, imaginary = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    turned = torch.complex(real, imaginary) * by
    return torch.cat([turned.real, turned.imag], -1)


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal, `[T, heads, D]` each, to `[T, heads * Dv]`."""
    heads = []
    for head in range(query.shape[1]):
        own = head * key.shape[1] // query.shape[1]
        scores = query[:, head] @ key[:, own].T * scale
        scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, float("-inf"))
        heads.append(scores.softmax(-1) @ value[:, own])
    return torch.cat(heads, -1)


@dataclass
class Layer:
    """One decoder layer over tensors that begin with `at`."""

    arch: str
    config: PretrainedConfig
    tensors: Mapping[str, Tensor]
    at: str

    def get(self, name: str) -> Tensor:
        return self.tensors[f"{self.at}{name}"]

    def apply(self, name: str, x: Tensor) -> Tensor:
        bias = self.tensors.get(f"{self.at}{name}.bias")
        out = x @ self.get(f"{name}.weight").T
        return out if bias is None else out + bias

    def norm(self, name: str, x: Tensor, eps: float | None = None) -> Tensor:
        return rms(x, self.get(f"{name}.weight"), eps or self.config.rms_norm_eps)

    def __call__(self, x: Tensor) -> Tensor:
        normed = self.norm("input_layernorm", x)
        x = x + (self.latent(normed) if self.arch == "deepseek_v3" else self.grouped(normed))
        normed = self.norm("post_attention_layernorm", x)
        routed = f"{self.at}mlp.gate.weight" in self.tensors
        return x + (self.experts(normed) if routed else self.swiglu("mlp", normed))

    def grouped(self, x: Tensor) -> Tensor:
        c, theta = self.config, self.config.rope_parameters["rope_theta"]
        size = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        query, key, value = (self.apply(f"self_attn.{n}_proj", x).unflatten(-1, (-1, size)) for n in "qkv")
        if f"{self.at}self_attn.q_norm.weight" in self.tensors:
            query, key = self.norm("self_attn.q_norm", query), self.norm("self_attn.k_norm", key)
        part = int(size * c.rope_parameters.get("partial_rotary_factor", 1.0))
        query, key = (torch.cat([turn(y[..., :part], theta, False), y[..., part:]], -1) for y in (query, key))
        return self.apply("self_attn.o_proj", attend(query, key, value, size**-0.5))

    def latent(self, x: Tensor) -> Tensor:
        c, theta = self.config, self.config.rope_parameters["rope_theta"]
        plain, turned = c.qk_nope_head_dim, c.qk_rope_head_dim
        low = self.norm("self_attn.q_a_layernorm", self.apply("self_attn.q_a_proj", x), 1e-6)
        query = self.apply("self_attn.q_b_proj", low).unflatten(-1, (-1, plain + turned))
        compressed = self.apply("self_attn.kv_a_proj_with_mqa", x)
        latent = self.norm("self_attn.kv_a_layernorm", compressed[:, : c.kv_lora_rank], 1e-6)
        both = self.apply("self_attn.kv_b_proj", latent).unflatten(-1, (-1, plain + c.v_head_dim))
        shared = turn(compressed[:, None, c.kv_lora_rank :], theta, True).expand(-1, both.shape[1], -1)
        key = torch.cat([both[..., :plain], shared], -1)
        query = torch.cat([query[..., :plain], turn(query[..., plain:], theta, True)], -1)
        return self.apply("self_attn.o_proj", attend(query, key, both[..., plain:], (plain + turned) ** -0.5))

    def swiglu(self, at: str, x: Tensor) -> Tensor:
        gate = self.apply(f"{at}.gate_proj", x)
        return self.apply(f"{at}.down_proj", gate * gate.sigmoid() * self.apply(f"{at}.up_proj", x))

    def experts(self, x: Tensor) -> Tensor:
        c = self.config
        rows = []
        for row in x:
            scores = (self.get("mlp.gate.weight") @ row).sigmoid()
            wanted = scores + self.get("mlp.gate.e_score_correction_bias")
            groups = wanted.view(c.n_group, -1)
            best = groups.topk(2).values.sum(-1).topk(c.topk_group).indices
            left = torch.full_like(groups, float("-inf"))
            left[best] = groups[best]
            chosen = left.flatten().topk(c.num_experts_per_tok).indices
            weights = scores[chosen] / (scores[chosen].sum() + 1e-20 if c.norm_topk_prob else 1)
            out = self.swiglu("mlp.shared_experts", row)
            for weight, expert in zip(weights * c.routed_scaling_factor, chosen.tolist(), strict=True):
                out = out + weight * self.swiglu(f"mlp.experts.{expert}", row)
            rows.append(out)
        return torch.stack(rows)


class NaiveMtp:
    """Drafts of a checkpoint's modules, for one text at a time."""

    def __init__(self, path: Path, arch: str, modules: int = 1) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.config, self.tensors = self.model.config, public_tensors(path)
        self.modules = [self._module(arch, number) for number in range(modules)]

    def _module(self, arch: str, number: int) -> Callable[[Tensor, Tensor], Tensor]:
        if arch == "qwen2":
            at = f"model.mtp_layers.{number}."
            names = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
        else:
            at, names = f"model.layers.{LAYERS + number}.", ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        embedding_norm, hidden_norm, joint, final = names
        layer = Layer(arch, self.config, self.tensors, at)

        def run(embedded: Tensor, hidden: Tensor) -> Tensor:
            parts = [layer.norm(embedding_norm, embedded), layer.norm(hidden_norm, hidden)]
            x = torch.cat(parts[::-1] if ORDER.get(arch) == "hidden" else parts, -1)
            return layer.norm(final, layer(layer.apply(joint, x)))

        return run

    @torch.no_grad()
    def scores(self, text: Sequence[int], path: Sequence[int]) -> Tensor:
        """Logits `[V]` of what comes after `text`, whose last token the target just chose, and the drafts `path`."""
        hidden = self.model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states[-1][0]
        tokens = torch.tensor([*text, *path])
        out = hidden
        for step in range(len(path) + 1):
            number = min(step, len(self.modules) - 1)
            if step == number:  # a module's first turn: row i reads token i + step + 1, as far as there are rows
                read, given = tokens[step + 1 : step + 1 + len(hidden)], out
            else:  # the last one again: a further row, which reads the output of the one before
                read, given = torch.cat([read, tokens[None, len(text) - 1 + step]]), torch.cat([given, out[-1:]])
            out = self.modules[number](self.tensors["model.embed_tokens.weight"][read], given)
        return out[-1] @ self.tensors["lm_head.weight"].T
