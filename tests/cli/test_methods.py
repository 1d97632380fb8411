"""A method by its name, in every verb that drafts: one of the package, and one of the user's own."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tercel.cli.entrants import names_asked
from tercel.cli.options import DraftOptions
from tercel.decode.proposers import KINDS, proposer_kind
from tercel.draft import save_head
from tercel.measure.available import EVERY
from tercel.measure.methods import EngineMethod, Run
from tercel.target_model.model import Target
from tests.cli.conftest import World
from tests.cli.running import refused, run
from tests.methods.heads import random_eagle, random_parts
from tests.tiny import save_tiny, tiny_tokenizer

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
        ("eagel", "there is no method eagel; did you mean eagle?"),
        ("own_method:OTHER", "own_method:OTHER cannot be imported"),
        ("own_method:Again", "is no ProposerKind"),
    ):
        refused(run("generate", world.target, "--prompt", "x", "--draft", draft), words)
    refused(run("bench", world.target, world.head, "--draft", OWN), OWN, "does not draft with the head")
    refused(run("bench", world.target, world.head, "--methods", "vanilla,own_method:X"), "cannot be imported")
    refused(run("verify", world.target, world.head, "--draft", "vanilla"), "nothing to compare")


def test_the_methods_are_listed_with_what_they_need(tmp_path: Path) -> None:
    listed = run("methods", "--json", str(tmp_path / "methods.json"))
    assert listed.code == 0
    rows = {row["name"]: row for row in json.loads((tmp_path / "methods.json").read_text())["methods"]}
    assert set(rows) == {*KINDS, *EVERY}
    assert {name: row["needs"] for name, row in rows.items() if row["needs"]} == {
        name: ["--draft-model"] if name == "sps" else ["HEAD"] for name in KINDS if proposer_kind(name).needs
    }
    assert all(row["drafts"] and name in listed.out for name, row in rows.items())


def test_what_is_there_for_a_target_is_told(tmp_path: Path, world: World) -> None:
    file = tmp_path / "heads.yaml"
    listed = f"again: {{method: eagle3, head: {world.head}}}\ngone: {{method: eagle3, head: {tmp_path}/gone}}\n"
    file.write_text(listed, encoding="utf-8")
    out = tmp_path / "methods.json"
    assert run("methods", "smollm2-135m", "--heads", str(file), "--json", str(out)).code == 0
    ready = {row["name"]: row["ready"] for row in json.loads(out.read_text())["methods"]}
    assert (ready["vanilla"], ready["eagle3"], ready["again"]) == ("yes", "yes", world.head)
    assert ready["sps"] == "no: no --draft-model is given"
    assert ready["gone"] == f"no: there is no head {tmp_path}/gone"
    assert run("methods", world.target, "--json", str(out)).code == 0
    ready = {row["name"]: row["ready"] for row in json.loads(out.read_text())["methods"]}
    assert ready["eagle3"] == "no: no head is given"
    (tmp_path / "empty").mkdir()
    refused(run("methods", str(tmp_path / "empty")), str(tmp_path / "empty"))
    refused(run("methods", str(file)), "is a file but not a .gguf")


@pytest.mark.parametrize(
    ("kind", "served"),
    [("eagle1", {"eagle", "eagle2"}), ("medusa", {"medusa"}), ("hydra", {"hydra"}), ("eagle3", {"eagle3"})],
)
def test_all_methods_are_those_that_the_head_is_of(tmp_path: Path, world: World, kind: str, served: set[str]) -> None:
    target = Target.load(world.target)
    head = world.head
    if kind != "eagle3":
        save_head(random_eagle(target) if kind == "eagle1" else random_parts(kind, target), tmp_path / kind)
        head = str(tmp_path / kind)
    names, entries = names_asked("all", world.target, head, DraftOptions())
    assert served == {name for name in names if name != "transformers" and "head" in proposer_kind(name).needs}
    assert {entries[name].head for name in served} == {head}
    names, entries = names_asked("all", "smollm2-135m", head, DraftOptions())  # which has a head of its own
    assert {*served, "eagle3"} <= set(names)
    assert entries["eagle3"].head == (head if kind == "eagle3" else None)


def test_several_heads_temperatures_and_forms(tmp_path: Path, world: World) -> None:
    file = tmp_path / "heads.json"
    file.write_text(json.dumps({"small": {"method": "eagle3", "head": world.head, "tree": "chain:2"}}), "utf-8")
    asked = ["bench", world.target, world.head, "--tasks", f"{world.prompts}:2", "--max-new-tokens", "6", *EXACT]
    asked += ["--tree", "2x3x6", "--heads", str(file), "--temperature", "0,1", "--repeats", "2"]
    files = {name: tmp_path / f"bench.{name}" for name in ("json", "csv", "html")}
    outputs = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    done = run(*asked, "--methods", "vanilla,eagle3,small", *outputs)
    assert done.code == 0, done.err
    assert "T=1: speedup and τ" in done.out
    value = json.loads(files["json"].read_text("utf-8"))
    assert [report["settings"]["temperature"] for report in value["reports"]] == [0, 1]
    assert value["reports"][0]["heads"] == {"eagle3": world.head, "small": world.head}
    assert len(value["reports"][1]["questions"]["prompts"][0]["methods"]["small"]["tokens"]) == 2
    assert files["csv"].read_text("utf-8").count("\n") == 1 + 2 * 3
    assert "Temperature 1" in files["html"].read_text("utf-8")
    made = {path.name for path in files.values()}
    assert {path.name for path in tmp_path.iterdir()} == {"own_method.py", "heads.json", *made}
    refused(run(*asked, "--methods", "small"), "lacks vanilla")
    refused(run(*asked[:-4], "--temperature", "0,warm"), "no number")
    refused(run(*asked[:-4], "--temperature", "1,1"), "names one twice")
    file.write_text('{"small": {"method": "eagle4", "head": "x"}}', "utf-8")
    refused(run(*asked, "--methods", "vanilla,small"), "there is no method eagle4")


def test_a_benchmark_that_is_stopped_goes_on(tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["bench", world.target, "--tasks", f"{world.prompts}:3", "--max-new-tokens", "6", *EXACT]
    asked += ["--methods", "vanilla,pld", "--json", str(tmp_path / "bench.json")]
    answered = EngineMethod.run
    count = 0

    def stopping(self: EngineMethod, *given: Any) -> Run:
        nonlocal count
        count += 1
        if count == 7:  # two of the warm-up, two questions, and a half
            raise KeyboardInterrupt
        return answered(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(EngineMethod, "run", stopping)
        ended = run(*asked)
    assert ended.code == 130
    assert "bench.json.journal.jsonl keeps 4 answers; the same command goes on with them" in ended.err
    refused(run(*asked[:4], "--max-new-tokens", "7", *asked[6:]), "had sampling", "go on with that")
    again = run(*asked)
    assert again.code == 0, again.err
    assert "going on behind 4 answers" in again.err
    assert "The times are of 2 sittings" in again.out
    assert json.loads((tmp_path / "bench.json").read_text())["sittings"] == 2
    assert [path.name for path in tmp_path.iterdir() if "journal" in path.name] == []


def test_all_methods_are_measured_that_have_what_they_need(tmp_path: Path, world: World) -> None:
    asked = ["bench", world.target, "--tasks", f"{world.prompts}:2", "--max-new-tokens", "6", *EXACT]
    out = tmp_path / "bench.json"
    small = str(save_tiny(tmp_path, "llama", seed=3, num_hidden_layers=1))
    done = run(*asked, "--methods", "all", "--draft-model", small, "--tree", "2x3x6", "--json", str(out))
    assert done.code == 0, done.err
    assert "note: eagle3 is left out: no head is given" in done.err
    methods = json.loads(out.read_text())["tasks"]["prompts"]
    assert set(methods) == {"vanilla", "transformers", "sps", "pld", "suffix", "lookahead"}
    assert all(method["identical"] == 1 for name, method in methods.items() if name not in ("vanilla", "transformers"))
    both = run(*asked, "--methods", "vanilla,oracle", "--tree", "chain:3", "--json", str(out))
    assert both.code == 0, both.err
    assert json.loads(out.read_text())["tasks"]["prompts"]["oracle"]["tau"] > 2


def test_a_second_model_drafts(tmp_path: Path, world: World) -> None:
    small = str(save_tiny(tmp_path, "llama", seed=3, num_hidden_layers=1))
    few = ["--samples", "40", "--sampled-prompts", "1", "--sampled-tokens", "4", "--max-new-tokens", "6"]
    sps = ["--draft", "sps", "--draft-model", small]
    done = run("verify", world.target, *sps, "--tasks", f"{world.prompts}:1", *few)
    assert done.code == 0, done.out + done.err
    refused(run("generate", world.target, "--prompt", "x", "--draft", "sps"), "a second model, and none is given")
    refused(
        run("generate", world.target, "--prompt", "x", "--draft-model", small), "--draft-model is of no use to eagle3"
    )
    refused(run("bench", world.target, "--methods", "vanilla,pld", "--draft-model", small), "of no use to vanilla, pld")
    tiny_tokenizer(last_merge="2 0").save_pretrained(small)
    refused(run("generate", world.target, "--prompt", "x", *sps), "another tokenizer than")
    refused(run("generate", world.target, "--prompt", "x", *sps[:3], str(tmp_path / "gone")), "gone")
