"""An experiment on the tiny model from end to end, and what is kept of it."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tercel.cli.options import DecodingModelOptions, Dtype
from tercel.cli.reproduce_setting import Given, Setting, Sizes
from tercel.errors import TercelError
from tercel.measure.manifest import Entry
from tercel.measure.samples import Samples
from tercel.measure.summary import BenchReport
from tercel.measure.tasks import load_task
from tercel.reproduce.experiments import EXPERIMENTS
from tercel.reproduce.heads import Workshop, first_rows
from tercel.reproduce.results import Result, in_words, write_page
from tercel.reproduce.scales import SCALES, TINY
from tercel.reproduce.tiny import tiny_target, write_questions
from tercel.reproduce.world import World
from tests.cli.running import refused, run
from tests.measure.test_bench_report import checked, reports


def test_a_tiny_experiment_from_nothing(tmp_path: Path) -> None:
    runs, out = tmp_path / "runs", tmp_path / "out"
    asked = ["reproduce", "fig4", "--scale", "tiny", "--runs", str(runs), "--out", str(out)]
    asked += ["--questions", "3", "--max-new-tokens", "6", "--steps", "2"]
    done = run(*asked)
    assert done.code == 0, done.err
    assert "rules, fixed before the run" in done.out
    assert "heads are trained first" in done.err
    assert "$ tercel train" in done.err
    value = json.loads((out / "fig4.json").read_text("utf-8"))
    assert {"alpha0/eagle3/T0", "alpha1/eagle3/T0", "alpha0/no-feature-loss/T0"} <= set(value["numbers"])
    assert value["settings"]["scale"] == "tiny"
    assert value["extra"]["questions"] == 3  # all that there are of fifteen
    words = checked((out / "fig4.html").read_text("utf-8"))
    assert "Tiny scale" in words
    assert "1-α of eagle3 is above that of EAGLE" in words
    assert "0-α of no-feature-loss, T=0" in words
    assert "training of every head: epochs" in words
    kept = Result.read(out, "fig4")
    assert kept is not None
    assert kept.numbers() == value["numbers"]
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("*.safetensors")}
    again = run(*asked)
    assert again.code == 0, again.err
    assert "heads are trained first" not in again.err
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("*.safetensors")} == before
    other = run(*asked[:-1], "1")
    assert other.code == 0, other.err
    assert "heads are trained first" in other.err
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_heads_of_the_same_layers_share_features(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, rows = tiny_target(tmp_path / "target"), tmp_path / "answers.jsonl"
    words = ["to", "be", "or", "not", "to", "die", "to", "sleep", "no", "more"]
    asked = [{"role": "user", "content": word} for word in words]
    told = [{"messages": [ask, {"role": "assistant", "content": "that is it"}], "id": ask["content"]} for ask in asked]
    rows.write_text("".join(json.dumps(row) + "\n" for row in told), "utf-8")
    tiny, small = SCALES[TINY], SCALES["small"]
    scale = replace(small, recipe={**tiny.recipe, "max_steps": 1, "eval_share": 0.3})
    shop = Workshop(scale, target, 6, (str(rows),), tmp_path, {}, ("--dtype", "float32"))
    setting = Setting(shop, DecodingModelOptions(), None, {}, (), tmp_path / "journals")
    setting.train_heads(["eagle", "medusa", "mtp"])
    err = capsys.readouterr().err
    assert err.count("tercel features") == 2
    assert err.count("--features") == 2  # an MTP head begins with layers of the target
    assert [folder.name for folder in (tmp_path / "features").iterdir()] == ["last"]
    assert shop.to_train(["eagle2", "medusa", "mtp", "hydra"]) == ["hydra"]
    (tmp_path / "features" / "last" / "features.json").write_text("{}", "utf-8")
    with pytest.raises(TercelError, match=r"features\.json"):
        setting.train_heads(["hydra"])
    assert shop.to_train(["hydra"]) == ["hydra"]
    shutil.rmtree(tmp_path / "features")
    monkeypatch.setattr("tercel.train.make_features._SPARE", 1 << 60)
    setting.train_heads(["hydra"])
    assert "the disk has no room for features, so this head asks the target itself" in capsys.readouterr().err
    assert shop.to_train(["hydra"]) == []


def test_what_cannot_be_reproduced_is_told(tmp_path: Path) -> None:
    refused(run("reproduce", "table9"), "there is no experiment table9", "claims")
    (tmp_path / "fig1.json").write_text('{"samples": 3}', "utf-8")
    with pytest.raises(TercelError, match="no result of an experiment"):
        Result.read(tmp_path, "fig1")
    assert Result.read(tmp_path, "fig4") is None
    full = run("reproduce", "table1", "--scale", "full")
    assert full.code == 0
    assert "lmsys/vicuna-13b-v1.3@6566e9cb1787585d1147dcf4f9bc48f29e1328d2" in full.out


def test_rare_events_are_looked_for_in_more_questions(tmp_path: Path) -> None:
    task = load_task(str(write_questions(tmp_path / "gsm8k.jsonl", 7, seed=1)), ())
    shop = SimpleNamespace(scale=replace(SCALES["tiny"], questions=2))
    world = World(None, None, None, shop, {"gsm8k": task}, tmp_path)  # type: ignore[arg-type]
    assert [len(world.some(("gsm8k",), times)[0].questions) for times in (1, 3, 5)] == [2, 6, 7]


def test_more_questions_are_the_same_and_more(tmp_path: Path) -> None:
    few = write_questions(tmp_path / "gsm8k.jsonl", 2, seed=1).read_text("utf-8")
    many = write_questions(tmp_path / "gsm8k.jsonl", 5, seed=1).read_text("utf-8")
    assert many.startswith(few)
    assert many.count("\n") == 5


def test_the_command_of_a_claim_has_all_that_was_asked_for(tmp_path: Path) -> None:
    model = DecodingModelOptions(dtype=Dtype.float32, accept_licence=True, template_arg=["a=1", "b=2"])
    given = Given("small", Sizes(questions=3), model, None, None, ("a.jsonl",), (), None)
    asked = "tercel reproduce fig4 --scale small --data a.jsonl --questions 3 --dtype float32 --accept-licence"
    assert given.command("fig4") == f"{asked} --template-arg a=1 --template-arg b=2"


def test_results_are_kept_as_they_were_counted(tmp_path: Path) -> None:
    drafted, base = {"r": ((1.0, 2.0), (3.0, 4.0))}, {"r": ((1.0, 1.0), (1.0, 1.0))}
    samples = Samples({"speed/x/b1": drafted, "speed/vanilla/b1": base})
    result = Result("table3", {"scale": TINY}, samples, {"eagle": "no head is given"}, {"batches": [1]})
    result.write(tmp_path)
    again = Result.read(tmp_path, "table3")
    assert again is not None
    assert again.samples == samples
    assert set(again.numbers()) == {"speedup/x/b1", "speedup/vanilla/b1"}
    assert again.numbers() == result.numbers()


class Measures:
    """A world that notes whose throughput it is asked for."""

    def __init__(self) -> None:
        self.asked: dict[str, str | None] = {}
        self.batches: list[int] = []

    def there(self, names: Sequence[str]) -> dict[str, Entry]:
        return {name: Entry(name, f"{name}-head") for name in names}

    def some(self, names: Sequence[str]) -> list[Any]:
        return list(names)

    def bench(self, *_: Any, **__: Any) -> BenchReport:
        return replace(reports()[0])

    def throughputs(self, entries: dict[str, Entry], tasks: list[Any], batches: Sequence[int]) -> Samples:
        self.asked = {name: entry.tree for name, entry in entries.items()}
        self.batches = list(batches)
        column = {"rounds": ((4.0, 6.0), (1.0, 2.0))}
        return Samples({f"speed/{name}/b{batch}": column for name in ("vanilla", *entries) for batch in batches})


def test_two_drafters_side_by_side(tmp_path: Path) -> None:
    world, experiment = Measures(), EXPERIMENTS["parallel"]
    found = experiment.measure(experiment, cast(World, world))
    sized = {"eagle3-sized": None, "p-eagle-sized": None}
    assert world.asked == {"eagle3": "chain:3", "p-eagle": "chain:3", **sized}
    assert world.batches == [1, 16]
    result = Result("parallel", {"scale": TINY}, found.samples, {}, found.extra)
    words = checked(write_page(result, found, [], tmp_path).read_text("utf-8"))
    assert "beside EAGLE-3, their heads trained on the same data by the same budget" in words
    assert words.count("throughput over that without drafts") == 2
    assert "16 at a time" in words
    assert words.count("The same in the papers' trees") == 2
    assert set(found.extra["time_split_ms"]) == {"T0", "T1"}


@pytest.mark.parametrize(
    ("quantity", "words"),
    [
        ("alpha3/eagle/T1", "3-α of eagle, T=1"),
        ("tau/eagle2/1of4", "τ of eagle2, 1/4 of the data"),
        ("tau/eagle3/1of1", "τ of eagle3, all of the data"),
        ("speedup/eagle3-sized/b64", "speedup of eagle3-sized, 64 at a time"),
    ],
)
def test_pages_say_quantities_in_words(quantity: str, words: str) -> None:
    assert in_words(quantity) == words


def test_heads_without_anything_to_learn_from(tmp_path: Path) -> None:
    shop = Workshop(SCALES[TINY], "target", 6, (), tmp_path, {}, own_head=True)
    assert shop.lacks("eagle3") is None  # the shipped one
    for other in ("eagle3/1of8", "eagle3-top-layer"):  # whose head it is not
        assert shop.lacks(other) is not None
    shop = Workshop(SCALES[TINY], "target", 6, (), tmp_path, {"eagle": Entry("eagle", "e")})
    assert shop.entry("eagle2") == Entry("eagle2", "e")
    assert shop.lacks("eagle3") == "no head is given with --heads, nor answers with --data to train one on"
    assert shop.lacks("pld") is None
    assert shop.lacks("sps") == "no --draft-model is given"
    assert shop.to_train(["eagle3", "pld"]) == []
    with pytest.raises(TercelError, match="is no file"):
        first_rows(tmp_path / "gone", 2)
    rows = tmp_path / "answers.jsonl"
    rows.write_text("".join(f'{{"n": {number}}}\n' for number in range(16)), "utf-8")
    packed = tmp_path / "answers.jsonl.gz"
    packed.write_bytes(gzip.compress(rows.read_bytes()))
    assert first_rows(rows, 8) == first_rows(packed, 8) == '{"n": 0}\n{"n": 1}\n'
    shop = Workshop(SCALES[TINY], "target", 6, (str(rows),), tmp_path, {})
    assert shop.to_train(["eagle3", "eagle3/1of8", "pld"]) == ["eagle3", "eagle3/1of8"]
    assert shop.command("eagle3/1of8")[3] == str(tmp_path / "data" / "1of8.jsonl")
    assert shop.entry("eagle3/1of8").method == "eagle3"
    assert shop.features_folder("eagle/1of8") == shop.features_folder("hydra") == shop.features_folder("hass")
    assert shop.features_folder("eagle3") == shop.features_folder("p-eagle") != shop.features_folder("hydra")
    assert shop.features_folder("no-feature-loss") == shop.features_folder("hydra")
    assert shop.settings("no-feature-loss")["feature_layers"] == [6]  # what leaves the last layer
    assert shop.settings("no-feature-loss")["ttt_steps"] == 1
