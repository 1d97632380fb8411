"""Training-time test once more, as spec sections 2-5 say it: row by row, no batching, no fused anything.

Nothing here is shared with the package but the names of the parameters: alignment, rotation, attention, masks
and losses are written out again, in float64.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

LAYER = ("midlayer", *(f"layers.{number}" for number in range(1, 16)))  # what the tensors of each are called


class NaiveHead:
    """The head's formulas for one token, and the list of keys it sees."""

    def __init__(self, head) -> None:
        self.c = head.config
        self.w = {n: p.detach().double().requires_grad_() for n, p in head.named_parameters()}

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean() + self.c.rms_norm_eps).sqrt() * self.w[name + ".weight"]

    def fuse(self, features: list[Tensor]) -> Tensor:
        if self.c.fc_norm:
            features = [self.norm(f, f"fc_norm.{i}") for i, f in enumerate(features)]
        together = torch.cat(features)
        if self.c.norm_before_fc:
            together = self.norm(together, "input_norm")
        return self.w["fc.weight"] @ together

    def embedding(self, token: int, of_target: Tensor) -> Tensor:
        return self.w["embed_tokens.weight"][token] if self.c.own_embeddings else of_target

    def attention(self, layer: int, name: str, x: Tensor) -> Tensor:
        place = f"{LAYER[layer]}.self_attn.{name}_proj"
        product = self.w[f"{place}.weight"] @ x
        return product + self.w[f"{place}.bias"] if self.c.attention_bias else product

    def rotated(self, x: Tensor, position: int) -> Tensor:
        half = self.c.head_dim // 2
        angle = position * torch.tensor([self.frequency(i) for i in range(half)]).double()
        a, b = x[:, :half], x[:, half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def frequency(self, i: int) -> float:
        """Of pair `i`; with Llama 3's scaling, waves that are long beside the first training's context turn slower."""
        rope = self.c.rope_parameters
        plain = rope["rope_theta"] ** (-2 * i / self.c.head_dim)
        if rope.get("rope_type", "default") == "default":
            return plain
        assert rope["rope_type"] == "llama3"
        turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        return kept * plain + (1 - kept) * plain / rope["factor"]

    def entry(self, embedding: Tensor, hidden: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor]:
        """Query `[q, D]`, key and value `[kv, D]`."""
        x = torch.cat(
            [
                self.norm(embedding, "midlayer.input_layernorm"),
                self.norm(hidden, "midlayer.hidden_norm"),
            ]
        )
        return self.projected(0, x, position)

    def further_entry(self, layer: int, hidden: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor]:
        """The same, of a layer behind the first."""
        return self.projected(layer, self.norm(hidden, f"{LAYER[layer]}.input_layernorm"), position)

    def projected(self, layer: int, x: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self.attention(layer, name, x).view(-1, self.c.head_dim) for name in "qkv")
        return self.rotated(q, position), self.rotated(k, position), v

    def outputs(self, hidden: Tensor, own: tuple[Tensor, Tensor, Tensor], seen: list[list], position: int) -> Tensor:
        """Of all layers, from the first one's entry; `seen`, which each layer's entry joins, are those before it."""
        for layer, entries in enumerate(seen):
            entries.append(own if layer == 0 else self.further_entry(layer, hidden, position))
            query = entries[-1][0]
            hidden = self.output(layer, hidden, query, [e[1] for e in entries], [e[2] for e in entries])
        return hidden

    def output(
        self, layer: int, hidden: Tensor, query: Tensor, keys: list[Tensor], values: list[Tensor]
    ) -> Tensor:
        group = self.c.num_attention_heads // self.c.num_key_value_heads
        mixed = []
        for head in range(self.c.num_attention_heads):
            k = torch.stack([key[head // group] for key in keys])
            v = torch.stack([value[head // group] for value in values])
            mixed.append(torch.softmax(k @ query[head] / self.c.head_dim**0.5, 0) @ v)
        normed = self.c.norm_before_residual and layer == 0
        residual = self.norm(hidden, "midlayer.hidden_norm") if normed else hidden
        h1 = residual + self.attention(layer, "o", torch.cat(mixed))
        y = self.norm(h1, f"{LAYER[layer]}.post_attention_layernorm")
        gate, up, down = (self.w[f"{LAYER[layer]}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return h1 + down @ (F.silu(gate @ y) * (up @ y))

    def log_q(self, output: Tensor) -> Tensor:
        return torch.log_softmax(self.w["lm_head.weight"] @ self.norm(output, "norm"), 0)

    def next_hidden(self, output: Tensor) -> Tensor:
        return self.norm(output, "norm") if self.c.norm_output else output


def naive_ttt(naive: NaiveHead, model, chats, ids: Tensor, steps: int, decay, kind, oov, average) -> Tensor:
    """The loss of spec section 5 over whole conversations."""
    draft_id = {int(t): i for i, t in enumerate(ids)}
    per_step: list[list[list[Tensor]]] = [[[] for _ in chats] for _ in range(steps)]
    for number, chat in enumerate(chats):
        tokens, flags, end = chat.tokens.tolist(), chat.supervised.tolist(), len(chat.tokens)
        with torch.no_grad():
            own = model(input_ids=torch.tensor([tokens]), output_hidden_states=True)
        p = torch.softmax(own.logits[0].double(), -1)
        states = [h[0].double() for h in own.hidden_states]
        fused = [naive.fuse([states[layer][t] for layer in naive.c.feature_layers]) for t in range(end)]
        embedded = [naive.embedding(token, of_target) for token, of_target in zip(tokens, states[0], strict=True)]
        first: list[list] = [[] for _ in range(naive.c.num_decoder_layers)]  # entries of step 0 in each layer
        of_first = []
        for t in range(end - 1):
            of_first.append(naive.outputs(fused[t], naive.entry(embedded[t + 1], fused[t], t), first, t))
        for t, hidden in enumerate(fused[: end - 1]):
            seen = [entries[: t + 1] for entries in first]
            for s in range(steps):
                if t + 2 + s >= end or not all(flags[t + 2 : t + 3 + s]):
                    break
                if s == 0:
                    out = of_first[t]
                else:
                    out = naive.outputs(hidden, naive.entry(embedded[t + 1 + s], hidden, t + s), seen, t + s)
                hidden = naive.next_hidden(out)
                loss = row_loss(kind, oov, naive.log_q(out), p[t + 1 + s], tokens[t + 2 + s], ids, draft_id)
                if loss is not None:
                    per_step[s][number].append(loss)
    total = torch.zeros((), dtype=torch.float64)
    for s, sequences in enumerate(per_step):
        if average == "sequence":
            mean = sum(torch.stack(rows).mean() for rows in sequences if rows) / len(chats)
        else:
            every = [row for rows in sequences for row in rows]
            mean = torch.stack(every).mean() if every else 0
        total = total + mean * (1 / steps if decay is None else decay**s)
    return total


def row_loss(kind, oov, log_q: Tensor, p: Tensor, token: int, ids: Tensor, draft_id: dict) -> Tensor | None:
    if kind == "hard":
        return -log_q[draft_id[token]] if token in draft_id else None
    if oov == "drop" and int(p.argmax()) not in draft_id:
        return None
    kept = p[ids] / p[ids].sum()
    if kind == "soft":
        return -(kept * log_q).sum()
    return -torch.minimum(kept, log_q.exp()).sum().log()
