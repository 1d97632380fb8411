"""What a step costs on this machine: target forwards by tree size, stock generation, whole steps by tree shape.

    python bench/step_cost.py [TARGET] [HEAD]

Medians in milliseconds, bfloat16, 200 tokens of context, everything in one process. Run it with nothing beside it.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch

from tercel import Engine, Request, SamplingParams, Target, TreeShape, load_draft, make_proposer
from tercel.target_model.prefill import prefill

CONTEXT, REPEATS, ANSWER = 200, 12, 64
SHAPES = [
    TreeShape.chain(2),
    TreeShape.chain(4),
    TreeShape(4, 3, 8),
    TreeShape(4, 4, 12),
    TreeShape(6, 4, 16),
    TreeShape(8, 5, 24),
    TreeShape(8, 6, 32),
    TreeShape(10, 8, 60),
]


def median_ms(work: Callable[[], object]) -> float:
    work()
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds) * 1e3


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
    target = Target.load(name, dtype=torch.bfloat16)
    draft = load_draft(sys.argv[2] if len(sys.argv) > 2 else None, target)
    layers = draft.head.config.feature_layers
    cache = target.new_cache(1, CONTEXT + 80)
    prompt = list(range(100, 100 + CONTEXT))
    prefill(target, [prompt], cache)
    print("nodes  target forward  output layer")
    for nodes in (1, 4, 8, 16, 24, 32, 48, 64):
        tokens = torch.arange(1000, 1000 + nodes)[None]
        positions = torch.arange(nodes)[None] + CONTEXT
        hidden = target.forward(tokens, positions, cache).hidden
        forward = median_ms(lambda t=tokens, p=positions: target.forward(t, p, cache, capture=layers))
        output = median_ms(lambda h=hidden: target.logits(h))
        print(f"{nodes:5}  {forward:14.1f}  {output:12.1f}")

    request = Request.chat(target, "Write a short story about a falcon.", SamplingParams(max_new_tokens=ANSWER))
    print("\nshape (top-k, depth, nodes)   ms/step    τ   ms/token  split")
    for shape in (None, *SHAPES):
        method = "vanilla" if shape is None else "eagle3"
        engine = Engine(target, make_proposer(method, target, head=draft, shape=shape))
        engine.generate([request])
        result = engine.generate([request])[0]
        step = result.decode_seconds / result.steps * 1e3
        split = "  ".join(f"{phase} {value / result.steps * 1e3:.1f}" for phase, value in result.split.items())
        label = "vanilla" if shape is None else f"{shape.top_k}, {shape.depth}, {shape.nodes}"
        print(f"{label:28}  {step:8.1f}  {result.tau:4.2f}  {step / result.tau:8.1f}  {split}")


if __name__ == "__main__":
    main()
