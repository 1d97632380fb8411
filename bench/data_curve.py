"""τ against the amount of training data: the same recipe on nested parts of a data set (paper, figure 1).

    python bench/data_curve.py TARGET DATA OUT [--parts 16 8 4 2 1] [--epochs 1] [--ttt-steps 3]

Part `k` is the first 1/k of the conversations. Every head is measured on the same held-out conversations, those that
`tercel train` would hold out of the whole set. Writes OUT/curve.json; heads and the target's features stay in OUT, so
that a second call only does what is missing.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from tercel import Target
from tercel.chat import load_chats
from tercel.draft import load_head
from tercel.files import write_json
from tercel.train.acceptance import simulate
from tercel.train.batches import plan_batches, split, usable
from tercel.train.config import TrainConfig
from tercel.train.features import FeatureSupply
from tercel.train.loop import EVAL_BATCH_TOKENS, train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("data")
    parser.add_argument("out", type=Path)
    parser.add_argument("--parts", type=int, nargs="+", default=[16, 8, 4, 2, 1])
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--ttt-steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--features", type=Path, help="folder of a feature cache, by default OUT/features")
    asked = parser.parse_args()

    target = Target.load(asked.target, dtype=torch.bfloat16)
    config = TrainConfig(epochs=asked.epochs, ttt_steps=asked.ttt_steps, lr=asked.lr, eval_every=10**6, save_every=200)
    chats, _ = load_chats([asked.data], target.tokenizer, max_length=config.max_length)
    held_out = split(usable(chats, config.max_length, target.vocab_size), config.eval_share).held_out
    plan = plan_batches([len(chat) for chat in held_out], EVAL_BATCH_TOKENS, 1, 0)
    features = asked.features or asked.out / "features"
    rows = []
    for part in sorted(asked.parts, reverse=True):
        out = asked.out / f"part-{part}"
        summary = train(target, chats[: len(chats) // part], config, out, feature_cache=features)
        model = load_head(out / "last", dtype=target.dtype)
        supply = FeatureSupply(target, model.eagle3, model.vocabulary, features)
        batches = (supply.batch([held_out[i] for i in indices]) for indices in plan)
        found = simulate(model.eagle3, batches, supply.to_draft, config.objective)
        rows.append(
            {"part": part, "supervised_tokens": summary.supervised_tokens, "tau": found.tau, "alpha": found.alpha}
        )
        alpha = " ".join(f"{value:.3f}" for value in found.alpha)
        print(
            f"1/{part:<3} {summary.supervised_tokens:>9,} supervised tokens  τ {found.tau:.3f}  α {alpha}", flush=True
        )
        write_json(asked.out / "curve.json", {"target": asked.target, "recipe": vars(config), "rows": rows})


if __name__ == "__main__":
    main()
