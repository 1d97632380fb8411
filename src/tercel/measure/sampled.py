"""Is text drafted at a temperature distributed as the target's own? Three looks at the same samples:

- PIT: each token, mapped through the target's exact distribution after its own prefix, must be uniform; over all
  tokens at once, however large the vocabulary and long the prefixes.
- First tokens: chi-square of the counts after each prefix that many samples share.
- Same seed: the project's rule for deterministic drafts draws token `i` with uniform `i` of the request, drafted or
  not, so that the text must be equal; sharper than any statistic.

The exact distributions come from whole-sequence forwards of the stock model: no cache, no tree, no verification.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tercel.decode.sampling import RandomStream, SamplingParams, TokenHistory, target_distribution
from tercel.decode.types import Request
from tercel.errors import TercelError
from tercel.measure.goodness import (
    chi_square,
    chi_square_tail,
    chi_square_uniform,
    combine,
    ks_uniform,
    randomised_pit,
)
from tercel.measure.lossless import BATCH, Divergence, GreedyCheck, Progress, first_difference, require_prompts
from tercel.measure.methods import Generator
from tercel.measure.rounding import Shapes, run_shapes
from tercel.measure.tasks import Prompt
from tercel.target.model import Target

FIRST = 3  # generated tokens that the chi-square of first tokens looks at; the first of all is prefill's
ROWS = 16  # sequences a forward when the exact distributions are computed

Answer = tuple[int, ...]
