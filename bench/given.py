"""What every trainer is given: a target's output layer and embeddings, a draft vocabulary, and micro-batches.

Runs inside the trainers' environments too, so it needs PyTorch and safetensors alone.

Shape legend: N packed tokens, H hidden size of head and target, V target vocabulary, W draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

Job = dict[str, Any]
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")


@dataclass(frozen=True)
class Packed:
    """One micro-batch. tokens int64 `[N]`, `lengths` of its sequences; supervised bool `[N]`; taught bool `[N]`: where
    `last` `[N, H]`, after the target's final norm, is known; features `[N, 3*H]`."""

    tokens: Tensor
    lengths: list[int]
    supervised: Tensor
    taught: Tensor
    features: Tensor
    last: Tensor

    @classmethod
    def read(cls, file: str | Path) -> Packed:
        stored = load_file(file)
        return cls(**{**stored, "lengths": stored["lengths"].tolist()})  # type: ignore[arg-type]

    def sequences(self) -> list[Packed]:
        """Each of them alone."""
        names = ("tokens", "supervised", "taught", "features", "last")
        cut = zip(*(getattr(self, name).split(self.lengths) for name in names), strict=True)
        return [Packed(*one[:1], [len(one[0])], *one[1:]) for one in cut]


@dataclass(frozen=True)
class Given:
    """embeddings, output `[V, H]`, in `dtype`; ids int64 `[W]`, ascending; layers: whose inputs the features are. job:
    the sizes, `steps` of training-time test, what else a trainer is told. Whoever keeps it holds its memory."""

    job: Job
    embeddings: Tensor
    output: Tensor
    ids: Tensor

    @classmethod
    def of(cls, job: Job) -> Given:
        """From the file that the job names, or made up."""
        if job.get("target"):
            return cls(job, **load_file(job["target"]))
        vocabulary, drafted = job["vocab_size"], job["draft_vocab_size"]
        torch.manual_seed(0)
        output = (0.05 * torch.randn(vocabulary, job["hidden_size"])).to(getattr(torch, job["dtype"]))
        return cls(job, output, output, torch.arange(drafted) * (vocabulary // drafted))

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.job["dtype"])  # type: ignore[no-any-return]

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self.job["feature_layers"])

    @property
    def t2d(self) -> Tensor:
        """Bool `[V]`: which tokens the head can draft."""
        return torch.zeros(self.job["vocab_size"], dtype=torch.bool).index_fill_(0, self.ids, True)

    @property
    def d2t(self) -> Tensor:
        return self.ids - torch.arange(len(self.ids))

    def batch(self) -> Packed:
        """One sequence of random tokens, all of them supervised."""
        torch.manual_seed(1)
        length, hidden = self.job["length"], self.job["hidden_size"]
        every = torch.ones(length, dtype=torch.bool)
        features, last = torch.randn(length, 3 * hidden), torch.randn(length, hidden)
        tokens = torch.randint(self.job["vocab_size"], (length,))
        return Packed(tokens, [length], every, every, features.to(self.dtype), last.to(self.dtype))

    def llama(self, **more: Any) -> Any:
        """The decoder layer's settings, for trainers that take a configuration of transformers."""
        from transformers import LlamaConfig

        return LlamaConfig(
            **{name: self.job[name] for name in SIZES},
            vocab_size=self.job["vocab_size"],
            num_hidden_layers=1,
            max_position_embeddings=self.job["max_position_embeddings"],
            rms_norm_eps=self.job["rms_norm_eps"],
            rope_parameters=self.job["rope_parameters"],
            pad_token_id=None,
            tie_word_embeddings=False,
            **more,
        )
