"""The paper's own scale, as commands for whoever has the accelerators: nothing of it is run here."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tercel.reproduce.experiments import EXPERIMENTS
from tercel.reproduce.scales import RECIPES, recipe_of

SHAREGPT, ULTRACHAT, THOUGHTS = "sharegpt", "ultrachat", "openthoughts"
# What the paper trained on: how each is fetched, at a revision, and where it then lies.
DATA = {
    SHAREGPT: (
        "hf download anon8231489123/ShareGPT_Vicuna_unfiltered ShareGPT_V3_unfiltered_cleaned_split.json --repo-type "
        "dataset --revision 192ab2185289094fc556ec8ce5ce1e8e587154ca --local-dir data",
        "data/ShareGPT_V3_unfiltered_cleaned_split.json",
    ),
    ULTRACHAT: (
        "python -c \"from datasets import load_dataset as load; load('HuggingFaceH4/ultrachat_200k', "
        "split='train_sft', revision='8049631c405ae6576f93f445c6b8166f76f5505a').to_json('data/ultrachat.jsonl')\"",
        "data/ultrachat.jsonl",
    ),
    THOUGHTS: (
        "python -c \"from datasets import load_dataset as load; load('open-r1/OpenThoughts-114k-math', split='train')"
        ".to_json('data/openthoughts.jsonl')\"  # of no revision that is known here: note the one that you get",
        "data/openthoughts.jsonl",
    ),
}


@dataclass(frozen=True)
class Model:
    """name: of the Hub, at a revision; ranks: accelerators of 80 GB for training; sharding: as of `tercel train`."""

    title: str
    name: str
    ranks: int
    sharding: str = "none"
    data: tuple[str, ...] = (SHAREGPT, ULTRACHAT)


MODELS = (
    Model("Vicuna 13B", "lmsys/vicuna-13b-v1.3@6566e9cb1787585d1147dcf4f9bc48f29e1328d2", 8),
    Model("Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct@0e9e39f249a16976918f6564b8830bc894c89659", 8),
    Model("Llama-3.3-70B", "meta-llama/Llama-3.3-70B-Instruct@6f6073b423013f6a7d4d9f39144961bfbfbc386b", 8, "tensor"),
    Model(
        "R1-Distill-Llama-8B",
        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B@6a6f4aa4197940add57724a7707d069478df56b1",
        8,
        data=(SHAREGPT, ULTRACHAT, THOUGHTS),
    ),
)
ONE_MODEL = ("Llama-3.1-8B",)  # of all experiments but Table 1


def commands(name: str) -> Iterator[str]:
    """Shell lines for an experiment, remarks among them. name: one of `EXPERIMENTS`."""
    experiment = EXPERIMENTS[name]
    recipes = list(dict.fromkeys(found for each in experiment.names if (found := recipe_of(each))))
    for model in MODELS:
        if name != "table1" and model.title not in ONE_MODEL:
            continue
        folder = f"runs/{model.title.replace(' ', '-')}"
        yield f"# {model.title}: {model.name.replace('@', ' at revision ')}"
        for source in model.data:
            fetching, file = DATA[source]
            yield fetching
            yield _line("data", "regenerate", file, "--target", model.name, "--out", f"{folder}/{source}.jsonl")
        for recipe in recipes:
            yield from _training(model, folder, recipe)
        yield (
            f"# {folder}/heads.yaml: a line for each of these heads, such as  {recipes[0]}: "
            f"{folder}/{recipes[0].replace('/', '-')}"
        )
        more = [] if "sps" not in experiment.names else ["--draft-model", "SMALL_MODEL_OF_THE_SAME_TOKENIZER"]
        yield _line(
            *("reproduce", name, "--target", model.name, "--heads", f"{folder}/heads.yaml", "--data-dir", "DATA"),
            *("--questions", "80", "--max-new-tokens", "1024", "--out", f"{folder}/reproduction", *more),
        )


def _training(model: Model, folder: str, recipe: str) -> Iterator[str]:
    """By the paper's rate; AdamW, clipping and length are those of `tercel train`."""
    wanted, out = RECIPES[recipe], f"{folder}/{recipe.replace('/', '-')}"
    if wanted.part > 1:
        yield f"# of the first 1/{wanted.part} of the data: add `limit: ROWS` to its settings"
    if wanted.top_layer:
        yield "# of the last hidden state alone: add `feature_layers: [L]` to its settings, L the model's layers"
    values = {"draft_vocab": 32000, "lr": "0.00005", **wanted.settings, "target_sharding": model.sharding}
    yield f"printf '%s\\n' {shlex.join(f'{key}: {value}' for key, value in values.items())} > {out}.yaml"
    data = [word for source in model.data for word in ("--data", f"{folder}/{source}.jsonl")]
    words = ("train", model.name, *data, "--out", out, "--config", f"{out}.yaml")
    yield f"torchrun --nproc-per-node {model.ranks} -m {_line(*words)}"


def _line(*words: str) -> str:
    return shlex.join(["tercel", *words])


def all_commands(names: Sequence[str]) -> Iterator[str]:
    """Of several experiments, each line once."""
    seen = set()
    for name in names:
        for line in commands(name):
            if line not in seen:
                seen.add(line)
                yield line
