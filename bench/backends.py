"""How long the target takes for a block in each backend: torch and OpenVINO in turns, in one process.

    python bench/backends.py [TARGET] [DTYPE]

Medians in milliseconds of a forward and its logits after 256 tokens, and how many times faster OpenVINO is: the median
of the ratios of forwards that ran one after the other, so that what else the machine does weighs on both. Run it with
nothing beside it all the same.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch

from tercel import Target
from tercel.target_model.backend_names import OPENVINO
from tercel.target_model.backends import with_backend
from tercel.target_model.prefill import prefill
from tercel.target_model.structure import default_feature_layers

CONTEXT, REPEATS, WARM = 256, 25, 3
WIDTHS = (1, 4, 8, 16, 32, 64)


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
    reference = Target.load(name, dtype=getattr(torch, sys.argv[2] if len(sys.argv) > 2 else "bfloat16"))
    target = with_backend(reference, OPENVINO, say=print)
    pair = [reference, target]
    layers = default_feature_layers(reference.num_layers)
    prompt = [(7 * i + 100) % reference.vocab_size for i in range(CONTEXT)]
    caches = [each.new_cache(1, CONTEXT + max(WIDTHS)) for each in pair]
    for each, cache in zip(pair, caches, strict=True):
        prefill(each, [prompt], cache)
    print(f"{reference.dtype}, {torch.get_num_threads()} threads\nwidth    torch  {target.backend}    ratio")
    for width in WIDTHS:
        tokens = torch.tensor([prompt[:width]])
        positions = torch.arange(width)[None] + CONTEXT
        seconds: list[tuple[float, ...]] = []
        for _ in range(WARM + REPEATS):
            marks = [time.perf_counter()]
            for each, cache in zip(pair, caches, strict=True):
                each.logits(each.forward(tokens, positions, cache, capture=layers).hidden)
                marks.append(time.perf_counter())
            seconds.append((marks[1] - marks[0], marks[2] - marks[1]))
        plain, fast = zip(*seconds[WARM:], strict=True)
        ratio = statistics.median(one / other for one, other in zip(plain, fast, strict=True))
        print(f"{width:5}  {statistics.median(plain) * 1e3:7.1f}  {statistics.median(fast) * 1e3:8.1f}  {ratio:7.2f}")


if __name__ == "__main__":
    main()
