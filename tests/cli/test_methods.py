"""A method by its name, in every verb that drafts: one of the package, and one of the user's own."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import World
from tests.cli.running import refused, run

EXACT = ["--dtype", "float32"]
OWN = "own_method:KIND"
MODULE = '''
from tercel import DraftTree, Proposal, Proposer, ProposerKind


class Again(Proposer):
    """Drafts the last token once more."""

    name, max_nodes = "again", 2

    def propose(self, rows):
        return [Proposal(DraftTree.chain(row.tokens[-1], [row.tokens[-1]])) for row in rows]

    def notes(self):
        return ["nothing was tried but the last token"]


KIND = ProposerKind(lambda parts: Again())
'''


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_method.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("own_method", None)


def test_a_method_of_ones_own_answers_without_a_head(tmp_path: Path, world: World) -> None:
    asked = ["generate", world.target, "--prompt", "the cat sat", "--max-new-tokens", "12", *EXACT]
    out = tmp_path / "out.json"
    drafted = run(*asked, "--draft", OWN, "--json", str(out))
    assert (drafted.code, drafted.out) == (0, run(*asked, "--draft", "none").out)
    assert drafted.err == "note: nothing was tried but the last token\n"
    assert json.loads(out.read_text())["steps"] > 0


def test_it_is_measured_beside_the_others(tmp_path: Path, world: World) -> None:
    asked = ["bench", world.target, "--tasks", f"{world.prompts}:2", "--max-new-tokens", "6", *EXACT]
    out = tmp_path / "bench.json"
    done = run(*asked, "--methods", f"vanilla,{OWN}", "--json", str(out))
    assert done.code == 0, done.err
    methods = json.loads(out.read_text())["tasks"]["prompts"]
    assert set(methods) == {"vanilla", OWN}
    assert methods[OWN]["identical"] == 1


@pytest.mark.parametrize(("method", "draws"), [(OWN, False), ("eagle3-sampled-chain", True)])
def test_it_is_verified(tmp_path: Path, world: World, method: str, draws: bool) -> None:
    few = ["--samples", "40", "--sampled-prompts", "1", "--sampled-tokens", "4", "--max-new-tokens", "6"]
    out = tmp_path / "verify.json"
    done = run("verify", world.target, world.head, "--draft", method, "--tasks", f"{world.prompts}:1", *few,
               "--json", str(out))  # fmt: skip
    assert done.code == 0, done.out + done.err
    sampled = json.loads(out.read_text())["sampled"]
    assert (sampled["same_seed"] is None) == draws  # drawn drafts promise the distribution, not the text


def test_what_no_method_is_called(world: World) -> None:
    for draft, words in (
        ("eagle", "there is no method eagle; did you mean eagle3?"),
        ("own_method:OTHER", "own_method:OTHER cannot be imported"),
        ("own_method:Again", "is no ProposerKind"),
    ):
        refused(run("generate", world.target, "--prompt", "x", "--draft", draft), words)
    refused(run("bench", world.target, world.head, "--draft", OWN), OWN, "does not draft with the head")
    refused(run("bench", world.target, world.head, "--methods", "vanilla,own_method:X"), "cannot be imported")
    refused(run("verify", world.target, world.head, "--draft", "vanilla"), "nothing to compare")
