"""Typical acceptance: what it accepts, that it is lossy, and that every output says so."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from tercel.decode.draft_tree import DraftTree
from tercel.decode.engine import Engine
from tercel.decode.history import TokenHistory
from tercel.decode.sampling import RandomStream, SamplingParams, choose_token, target_distribution
from tercel.decode.typical import Typical
from tercel.decode.vanilla import Vanilla
from tercel.decode.verify import verify
from tercel.draft import save_head
from tercel.measure.lossless import check_greedy, check_sampled
from tercel.measure.sampled import SampledCheck
from tercel.target_model.model import Target
from tests.cli.running import refused, run
from tests.measure.worlds import PROMPTS, OwnTree, small_target
from tests.methods.heads import random_parts
from tests.tiny import save_tiny

V = 12
TREE = DraftTree([0, 1, 2, 3, 4, 5, 1, 2, 6], [-1, 0, 0, 1, 1, 2, 3, 3, 5])
PENALISED = SamplingParams(temperature=0.9, repetition_penalty=1.3, seed=3)


@pytest.mark.parametrize("seed", range(8))
def test_it_takes_the_longest_path_of_which_every_draft_is_likely_enough(seed: int) -> None:
    logits = 2.0 * torch.randn(len(TREE), V, generator=torch.Generator().manual_seed(seed))
    rule = Typical()
    paths = {0: (0,)}
    for node, parent in enumerate(TREE.parent_list[1:], start=1):
        paths[node] = (*paths[parent], node)

    def judged(path: tuple[int, ...]) -> tuple[bool, float]:
        history, likelihood = TokenHistory([0], V), 0.0
        for parent, node in itertools.pairwise(path):
            p = target_distribution(logits[parent], PENALISED, history)
            chance, entropy = float(p[TREE.token_list[node]]), float(-(p * p.log()).nan_to_num().sum())
            if chance <= min(rule.epsilon, rule.delta * math.exp(-entropy)):
                return False, 0.0
            likelihood += math.log(chance)
            history.push(TREE.token_list[node])
        return True, likelihood

    accepted = [(len(path), judged(path)[1], path) for path in paths.values() if judged(path)[0]]
    wanted = max(accepted)[2]
    history, stream = TokenHistory([0], V), RandomStream(3)
    verdict = rule.verify(TREE, logits, PENALISED, history, stream)
    assert verdict.path == wanted[1:]
    assert history.generated == []  # left as it was
    for token in verdict.accepted:
        history.push(token)
    assert verdict.own == choose_token(logits[wanted[-1]], PENALISED, history, stream)


def test_at_temperature_0_it_is_verification() -> None:
    for seed in range(8):
        logits = torch.randn(len(TREE), V, generator=torch.Generator().manual_seed(seed))
        how = (SamplingParams(), TokenHistory([0], V), RandomStream(0))
        assert Typical().verify(TREE, logits, *how).tokens == verify(TREE, logits, *how).tokens


class LossyTree(OwnTree):
    """Good drafts, accepted where they are likely enough."""

    lossy = Typical()


def check_of(target: Target, proposer: OwnTree) -> SampledCheck:
    params = SamplingParams(temperature=1.0, max_new_tokens=8, seed=5)
    return check_sampled(target, Engine(target, proposer, slots=8), PROMPTS, 60, params)


def test_the_check_of_the_distribution_finds_it_out() -> None:
    """Statistics alone, without the comparison by seed: the same drafts pass where they are verified as everywhere."""
    target = small_target()
    assert check_of(target, OwnTree(target)).ok
    lossy = check_of(target, LossyTree(target))
    assert not lossy.ok
    assert lossy.impossible == 0


def test_greedy_text_is_not_touched() -> None:
    target = small_target()
    engines = Engine(target, LossyTree(target)), Engine(target, Vanilla())
    check = check_greedy(target, *engines, PROMPTS, SamplingParams(max_new_tokens=12))
    assert check.ok
    assert check.accepted > 0


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("lossy")
    target = str(save_tiny(folder, "llama"))
    save_head(random_parts("medusa", Target.load(target, dtype=torch.float32)), folder / "head", dtype=torch.float32)
    return target, str(folder / "head")


def test_every_output_says_that_it_is_lossy(world: tuple[str, str], tmp_path: Path) -> None:
    target, head = world
    out, prompts = tmp_path / "out.json", tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "q", "turns": ["the cat sat"]}\n', encoding="utf-8")
    exact = ["--dtype", "float32", "--tree", "3x3x9", "--json", str(out)]
    note = "note: medusa-typical is LOSSY: typical acceptance changes the text, which is not the model's own\n"

    done = run("generate", target, head, "--draft", "medusa-typical", "--prompt", "the cat", "--max-new-tokens", "6",
               "--show", *exact)  # fmt: skip
    assert (done.code, done.err) == (0, note)
    assert "lossy: typical acceptance" in done.out
    assert json.loads(out.read_text())["lossy"] == "typical acceptance"

    done = run("bench", target, head, "--methods", "vanilla,medusa,medusa-typical", "--tasks", str(prompts),
               "--max-new-tokens", "4", *exact)  # fmt: skip
    assert (done.code, done.err) == (0, note)
    assert "medusa-typical (LOSSY)" in done.out
    methods = json.loads(out.read_text())["tasks"]["prompts"]
    assert [summary["lossy"] for summary in methods.values()] == [None, None, "typical acceptance"]

    few = ["--tasks", str(prompts), "--samples", "4", "--sampled-tokens", "3", "--max-new-tokens", "4"]
    done = run("verify", target, head, "--draft", "medusa", *few, *exact)
    assert (done.code, json.loads(out.read_text())["lossy"]) == (0, None)
    for check in ("both", "greedy"):  # whatever is found: it is no rule that promises the text
        done = run("verify", target, head, "--draft", "medusa-typical", "--check", check, *few, *exact)
        assert (done.code, done.err) == (1, note)
        assert "NOT lossless: typical acceptance is no lossless rule" in done.out
        told = json.loads(out.read_text())
        assert (told["ok"], told["lossy"]) == (False, "typical acceptance")

    listed = run("methods", "--json", str(out))
    assert listed.code == 0
    assert [one["name"] for one in json.loads(out.read_text())["methods"] if one["lossy"]] == ["medusa-typical"]


def test_it_neither_makes_training_data_nor_serves(world: tuple[str, str], tmp_path: Path) -> None:
    target, head = world
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "q", "turns": ["the cat sat"]}\n', encoding="utf-8")
    done = run("data", "regenerate", str(prompts), "--target", target, "--head", head, "--draft", "medusa-typical",
               "--out", str(tmp_path / "answers.jsonl"))  # fmt: skip
    refused(done, "--draft medusa-typical is lossy", "the answers would not be the model's own")
    refused(run("serve", target, head, "--draft", "medusa-typical"), "lossy", "what is served would not be")
