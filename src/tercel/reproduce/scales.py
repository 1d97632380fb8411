"""The three sizes of every experiment, and how heads for it are trained: all by the same budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tercel.measure.manifest import Entry
from tercel.reproduce.claims import BATCHES, PARTS

TINY, SMALL, FULL = "tiny", "small", "full"
PAPER_TASKS = ("mt_bench", "humaneval", "gsm8k", "alpaca", "cnn_dm")
ROBUST_TASKS = ("non_english", "tool_calls", "long_context")


@dataclass(frozen=True)
class Scale:
    """target: a name as TARGET, None for one that is built; questions: of each task; tokens: of an answer at most;
    seeds: how often a question is asked at T=1; recipe: settings of every head's training; chain: how long chains are
    for n-α; rounds: of every batch size; batches: sizes."""

    name: str
    target: str | None
    questions: int
    tokens: int
    seeds: int
    recipe: Mapping[str, Any]
    chain: int
    rounds: int
    batches: tuple[int, ...] = BATCHES


SCALES = {
    TINY: Scale(
        TINY,
        None,
        questions=3,
        tokens=20,
        seeds=1,
        recipe={
            "epochs": 200,  # as many as `max_steps` takes
            "max_steps": 60,
            "batch_tokens": 512,
            "draft_vocab": 0,
            "lr": 4e-3,
            "ttt_steps": 4,
            "eval_share": 0.1,
        },
        chain=8,
        rounds=3,
    ),
    SMALL: Scale(
        SMALL,
        "smollm2-135m",
        questions=16,
        tokens=96,
        seeds=1,
        recipe={
            "epochs": 64,  # as many as `max_steps` takes
            "max_steps": 1000,
            "batch_tokens": 2048,
            "draft_vocab": 8192,
            "optimizer": "muon",
            "lr": 1e-3,
        },
        chain=15,
        rounds=6,
    ),
}

# The trees of the papers' 7 B and 8 B models, in which τ is measured: drafts as large as pays would differ with the
# machine. What is not here has no draft, or no published tree.
TREES = {
    "eagle3": "10x8x60",
    "eagle2": "10x6x60",
    "hass": "10x6x60",
    "eagle": "4x5x26",
    "medusa": "10x5x64",
    "hydra": "10x5x64",
    "sps": "chain:5",
    "pld": "chain:10",
    "suffix": "chain:10",
    "lookahead": "7x4x29",
}


@dataclass(frozen=True)
class Recipe:
    """How a head is trained: settings of `tercel train` beside those of the scale. top_layer: the feature is the
    target's last hidden state alone, as EAGLE's is. part: learn from the first 1/part of the data."""

    settings: Mapping[str, Any]
    top_layer: bool = False
    part: int = 1


def _recipes() -> dict[str, Recipe]:
    found = {
        "eagle3": Recipe({}),
        "eagle": Recipe({"method": "eagle"}),
        "hass": Recipe({"method": "hass"}),
        "medusa": Recipe({"method": "medusa", "ttt_steps": 5}),
        "hydra": Recipe({"method": "hydra", "ttt_steps": 5}),
        "eagle3-top-layer": Recipe({}, top_layer=True),
        "no-feature-loss": Recipe({"ttt_steps": 1}, top_layer=True),
    }
    for part in PARTS[:-1]:
        found[f"eagle3/1of{part}"] = Recipe({}, part=part)
        found[f"eagle/1of{part}"] = Recipe({"method": "eagle"}, part=part)
    return found


RECIPES = _recipes()
# methods that draft with the head of another recipe, and heads that draft as another method
DRAFTS_WITH = {"eagle2": "eagle", **{f"eagle2/1of{part}": f"eagle/1of{part}" for part in PARTS[:-1]}}
DRAFTS_AS = {"eagle3-top-layer": "eagle3", "no-feature-loss": "eagle3"}


def recipe_of(name: str) -> str | None:
    """The recipe whose head `name` drafts with; None for a method without a trained head."""
    wanted = DRAFTS_WITH.get(name, name)
    return wanted if wanted in RECIPES else None


def method_of(name: str) -> str:
    """The proposer of a variant: `eagle3/1of8` drafts as eagle3 does."""
    base = name.partition("/")[0]
    return DRAFTS_AS.get(base, base)


def with_paper_tree(entry: Entry) -> Entry:
    """In the paper's tree, unless it has a tree of its own."""
    return Entry(entry.method, entry.head, entry.tree or TREES.get(entry.method))
