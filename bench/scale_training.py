"""What training a head for an 8 B, a 70 B and a 671 B model would take, from published figures. Nothing is run.

    python bench/scale_training.py

Prints the tables of docs/scale.md: what the answers, the features and the head take on a machine of eight GPUs, each
with the range that better and worse kernels span, what lies on disk, and what is in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

CONVERSATIONS, LENGTH, SUPERVISED, PASSES, STEPS = 532_000, 1000, 0.6, 2, 7
GPUS, BATCH, CONTEXT = 8, 256, 1024  # a machine; answers decoded at a time by a copy of the model, and their length
DRAFT_VOCABULARY = 32_000
# of a data sheet's bandwidth and dense peak: usual, worst, best; a head's kernels are smaller than a target's
REACHED, TARGET_PEAK, HEAD_PEAK = (0.7, 0.5, 0.85), (0.5, 0.3, 0.65), (0.35, 0.2, 0.5)
# of a weight of the head: in memory (float32 with two moments and a gradient, a bf16 copy), on disk while it is saved
STATE_BYTES, RUN_BYTES = 18, 36


@dataclass(frozen=True)
class Gpu:
    """GB, GB/s, dense TFLOP/s in bf16 of the data sheet."""

    memory: float
    bandwidth: float
    peak: float


@dataclass(frozen=True)
class Model:
    """Billions of weights, of those that a token meets; bytes of a weight; KB of cache a token; width, of the MLP that
    a head of its kind has, and of keys or values; GPUs that hold a copy. tau: of the paper's head, mean of five tasks
    at T=0, where it has one."""

    weights: float
    active: float
    bytes: int
    cache: float
    hidden: int
    mlp: int
    keys: int
    gpus: int
    tau: float | None

    @property
    def head(self) -> int:
        """Weights of an EAGLE-3 head without its output layer: fusion, a layer that reads twice the width."""
        attention = 2 * self.hidden * (self.hidden + 2 * self.keys) + self.hidden**2
        return 3 * self.hidden**2 + attention + 3 * self.hidden * self.mlp

    @property
    def output(self) -> int:
        return self.hidden * DRAFT_VOCABULARY


KINDS = {"H100 SXM": Gpu(80, 3350, 989), "H200 SXM": Gpu(141, 4800, 989)}
MODELS = {
    "8B": Model(8.03, 8.03, 2, 131, 4096, 14336, 1024, 1, 6.23),
    "70B": Model(70.6, 70.6, 2, 328, 8192, 28672, 1024, 4, 5.88),
    "671B": Model(671, 37, 1, 70, 7168, 18432, 1024, 8, None),
}


def answers(model: Model, gpu: Gpu, level: int) -> float:
    """Seconds: decoding every supervised token once, all weights read at every step of a batch (of a mixture of experts
    too: a batch of this size meets them all)."""
    read = model.weights * 1e9 * model.bytes + BATCH * CONTEXT * model.cache * 1e3
    bandwidth = model.gpus * gpu.bandwidth * 1e9 * REACHED[level]
    step = max(read / bandwidth, 2e9 * model.active * BATCH / (model.gpus * gpu.peak * 1e12 * TARGET_PEAK[level]))
    copies = GPUS // model.gpus
    return CONVERSATIONS * LENGTH * SUPERVISED / (BATCH * copies) * step


def features(model: Model, gpu: Gpu, level: int) -> float:
    """Seconds: one forward over all tokens; kept on disk for the other passes."""
    return 2e9 * model.active * CONVERSATIONS * LENGTH / (GPUS * gpu.peak * 1e12 * TARGET_PEAK[level])


def head(model: Model, gpu: Gpu, level: int) -> float:
    """Seconds: forward and twice that backward, step 0 over all tokens, later ones and the output layer over those that
    are supervised."""
    tokens = CONVERSATIONS * LENGTH * PASSES
    rows = tokens * SUPERVISED
    work = 6 * (model.head * (tokens + (STEPS - 1) * rows) + model.output * STEPS * rows)
    return work / (GPUS * gpu.peak * 1e12 * HEAD_PEAK[level])


def memory(model: Model) -> float:
    """GB a GPU: the target's weights shared by its GPUs, the head's state whole on each; activations come on top."""
    return model.weights * model.bytes / model.gpus + (model.head + model.output) * STATE_BYTES / 1e9


def disk(model: Model) -> tuple[float, float]:
    """TB of features (three layers of every token, the last hidden state of supervised ones, bf16), GB of a run."""
    kept = CONVERSATIONS * LENGTH * (3 + SUPERVISED) * model.hidden * 2
    return kept / 1e12, (model.head + model.output) * RUN_BYTES / 1e9


def rows() -> list[str]:
    """The table, a line a model and machine; a model that does not fit is left out."""
    lines = [
        "| model | 8 × | head, weights | answers | features | head, 2 passes | disk: features | run | memory a GPU "
        "| paper's τ |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, model in MODELS.items():
        for kind, gpu in KINDS.items():
            if memory(model) > 0.9 * gpu.memory:
                continue
            times = [_range([work(model, gpu, level) for level in range(3)]) for work in (answers, features, head)]
            kept, run = disk(model)
            sizes = [f"{kept:.1f} TB", f"{run:.0f} GB", f"{memory(model):.0f} of {gpu.memory:.0f} GB"]
            weights = f"{(model.head + model.output) / 1e9:.2f} billion"
            cells = [name, kind, weights, *times, *sizes, "none" if model.tau is None else f"{model.tau:.2f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _range(seconds: list[float]) -> str:
    """Usual, best and worst."""
    usual, worst, best = map(_hours, seconds)
    return f"{usual} ({best} to {worst})"


def _hours(seconds: float) -> str:
    hours = timedelta(seconds=seconds) / timedelta(hours=1)
    return f"{hours:.1f} h" if hours < 10 else f"{hours:.0f} h"


if __name__ == "__main__":
    print("\n".join(rows()))
