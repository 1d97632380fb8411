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
    for n-α; rounds: of every batch size; batches: sizes; keeps_features: whether the target is asked once for all heads
    of the same layers, which takes disk and saves the time of its forwards."""

    name: str
    target: str | None
    questions: int
    tokens: int
    seeds: int
    recipe: Mapping[str, Any]
    chain: int
    rounds: int
    batches: tuple[int, ...] = BATCHES
    keeps_features: bool = False


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
            "ttt_steps": 5,  # as the shipped head; the paper's seven take longer
            "optimizer": "muon",
            "lr": 1e-3,
        },
        chain=15,
        rounds=6,
        keeps_features=True,
    ),
}

# The trees in which τ is measured, those of the papers' 7 B and 8 B models: drafts as large as pays would differ with
# the machine. What is not here has no draft, or draws no tree of a size. The EAGLE-3 paper does not say how large the
# drafts of its rivals were; each has what its own authors give, where they do.
TREES = {
    "eagle3": "10x8x60",  # the paper: EAGLE-2's, with depth 8 in place of 6
    "eagle2": "10x6x60",  # its paper (arXiv 2406.16858, section 5): 60 drafts for 7 B and 8 B, depth 6, 10 a level
    "hass": "10x6x60",  # its paper (arXiv 2408.15766): EAGLE-2's, 60 and depth 6 for all models
    # its code (SafeAILab/EAGLE, choices.py, mc_sim_7b_63): 25 drafts, at most 4 children, depth 5; by the same size
    # another choice of paths, by guessed chances (`static_tree.py`)
    "eagle": "4x5x26",
    # its code (FasterDecoding/Medusa, medusa_choices.py, mc_sim_7b_63): 63 drafts, at most 10 children, depth 4 of five
    # heads; again of that size, by guessed chances
    "medusa": "10x4x64",
    "hydra": "10x4x64",  # its code takes a list of the same name; not stated in the paper, so Medusa's size
    "sps": "chain:5",  # not stated in the paper; chosen
    "pld": "chain:10",  # not stated in the paper; its author's default (num_pred_tokens)
    "suffix": "chain:10",  # not in the paper; chosen as that of prompt lookup
    "lookahead": "7x4x29",  # not stated in the paper; Spec-Bench's (level 5, guess 7): 7 chains of 4 beside the root
    "mtp": "10x8x60",  # not in the paper; chosen as that of EAGLE-3
    # its paper (arXiv 2602.01469) drafts chains alone; chosen as that of EAGLE-3, so that the heads alone differ
    "p-eagle": "10x8x60",
}


@dataclass(frozen=True)
class Recipe:
    """How a head is trained: settings of `tercel train` beside those of the scale. top_layer: the feature is the
    target's last hidden state alone, as EAGLE's is. part: learn from the first 1/part of the data. begins_as_target: it
    takes the target's own layers to begin with, so features from files will not do."""

    settings: Mapping[str, Any]
    top_layer: bool = False
    part: int = 1
    begins_as_target: bool = False


def _recipes() -> dict[str, Recipe]:
    found = {
        "eagle3": Recipe({}),
        "eagle": Recipe({"method": "eagle"}),
        "hass": Recipe({"method": "hass"}),
        "medusa": Recipe({"method": "medusa", "ttt_steps": 5}),
        "hydra": Recipe({"method": "hydra", "ttt_steps": 5}),
        "mtp": Recipe({"method": "mtp"}, begins_as_target=True),
        # A position for every level of EAGLE-3's tree: EAGLE-3 goes on beyond the steps that it learned from by reading
        # its own output once more, positions that were not learned are not there. Steps and tokens are those of all
        # heads; one step takes the layer over eight positions instead of over the scale's steps.
        "p-eagle": Recipe({"method": "p-eagle", "ttt_steps": 8}),
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
