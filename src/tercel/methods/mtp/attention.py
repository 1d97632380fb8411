"""How MTP layers attend: as the target's blocks do, or as training-time test does.

Shape legend: N packed tokens, R rows of a later step, s later steps so far, q/kv heads, D size of queries and keys,
E of values.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tercel.errors import TercelError
from tercel.target_model.attention import grouped_sdpa
from tercel.train.attention import segments, ttt_attention

NAME = "tercel_mtp"


class TTTKeys:
    """What the rows of one module have left: keys and values of its first run over all tokens, and of every later step
    the rows' own. lengths: of the packed sequences."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self._first = self._later = (torch.empty(0),) * 2  # keys and values: [N, kv, D], [s, R, kv, D]
        self._rows = torch.empty(0, dtype=torch.long)
        self._kept: Tensor | None = None

    def step(self, rows: Tensor, kept: Tensor | None = None) -> TTTKeys:
        """Itself, for the step of `rows` `[R]`, ascending on the host; kept `[R]`: where they stand among those of the
        step before, None for the first run, whose rows are all tokens."""
        self._rows, self._kept = rows, kept
        return self

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """query `[1, q, R, D]`, key `[1, kv, R, D]`, value `[1, kv, R, E]` to `[1, R, q, E]`."""
        size, own = query.shape[-1], value.shape[-1]
        if own > size:
            raise TercelError("layers whose values are wider than their keys cannot be trained as MTP modules")
        value = F.pad(value, (0, size - own))
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        query = query if scaling is None else query * (scaling * size**0.5)  # it is divided by that again
        if self._kept is None:
            self._first = key, value
            self._later = key.new_empty(0, *key.shape), value.new_empty(0, *value.shape)
        else:
            kept, (keys, values) = self._kept.to(key.device), self._later
            self._later = torch.cat([keys[:, kept], key[None]]), torch.cat([values[:, kept], value[None]])
        rows = self._rows.to(key.device)
        out = ttt_attention(query, *self._first, *self._later, rows, segments(self._rows, self.lengths))
        return out.view(1, len(query), -1, size)[..., :own]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    ttt_keys: TTTKeys | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As `grouped_sdpa`; with `ttt_keys` as `TTTKeys.attend`."""
    if ttt_keys is None:
        return grouped_sdpa(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    return ttt_keys.attend(query, key, value, scaling), None
