"""Rules and their borders, what is counted for them, and the commands of the paper's own scale."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

import numpy as np
import pytest

from tercel.decode.proposers import KINDS
from tercel.draft.shape import PAPER, parse_shape
from tercel.errors import TercelError
from tercel.measure.intervals import Interval, ratio_of_totals
from tercel.measure.samples import (
    Samples,
    difference,
    difference_of_slopes,
    ratio,
    slope,
    smallest_ratio,
    value,
)
from tercel.methods.eagle import PUBLISHED
from tercel.reproduce.claims import CLAIMS
from tercel.reproduce.experiments import EXPERIMENTS
from tercel.reproduce.full import MODELS, all_commands
from tercel.reproduce.rules import NOT_REPRODUCED, REPRODUCED, STATISTICS, UNDECIDED, Rule, judge
from tercel.reproduce.scales import RECIPES, TREES, method_of, recipe_of
from tercel.train.config import EAGLE3, METHODS
from tests.test_readme import parse

ROOT = Path(__file__).parents[2]

EPS = 1e-9


def method_in(words: list[str]) -> str:
    """What a training line trains, by its file of settings; of other lines the usual one."""
    file = Path(words[words.index("--config") + 1]) if "--config" in words else None
    values = {} if file is None else dict(line.split(": ") for line in file.read_text("utf-8").splitlines())
    return values.get("method", EAGLE3)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (EPS, 1, REPRODUCED),
        (0, 1, UNDECIDED),  # the bound itself is not above it
        (-1, EPS, UNDECIDED),
        (-1, 0, NOT_REPRODUCED),
        (0, 0, NOT_REPRODUCED),
        (-2, -1, NOT_REPRODUCED),
        (math.nan, math.nan, UNDECIDED),
    ],
)
def test_borders_of_a_rule_that_asks_for_more(low: float, high: float, verdict: str) -> None:
    assert Rule(low=0.0).verdict(Interval((low + high) / 2, low, high)) == verdict


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-5, 0.1, REPRODUCED),  # at most: the bound itself is fine
        (0, 0.1 + EPS, UNDECIDED),
        (0.1, 0.2, UNDECIDED),
        (0.1 + EPS, 0.2, NOT_REPRODUCED),
    ],
)
def test_borders_of_a_rule_that_asks_for_no_more(low: float, high: float, verdict: str) -> None:
    assert Rule(high=0.1).verdict(Interval((low + high) / 2, low, high)) == verdict
    assert Rule(high=0.1).verdict(None) == UNDECIDED


def columns(means: dict[str, float], questions: int = 30, tasks: tuple[str, ...] = ("a", "b")) -> Samples:
    """Rates about these means, all hard where one is."""
    found: dict[str, dict[str, tuple[tuple[float, ...], tuple[float, ...]]]] = {}
    for task in tasks:
        rng = np.random.default_rng(len(task) + ord(task[0]))
        ease = rng.normal(0, 0.5, questions)
        for name, mean in means.items():
            rates = mean + ease + rng.normal(0, 0.01, questions)
            found.setdefault(name, {})[task] = (tuple((10 * rates).tolist()), (10.0,) * questions)
    return Samples(found)


def test_pairs_are_told_apart_that_are_not_one_by_one() -> None:
    samples = columns({"tau/x": 3.0, "tau/y": 2.9})
    one, other = (samples.interval(value, (name,)) for name in ("tau/x", "tau/y"))
    assert one is not None
    assert other is not None
    assert one.low < other.high  # what is hard for one is hard for both
    gap = samples.interval(difference, ("tau/x", "tau/y"))
    assert gap is not None
    assert 0.09 < gap.low < gap.value < gap.high < 0.11
    assert samples.interval(difference, ("tau/x", "tau/z")) is None
    above, below = samples.columns["tau/x"]["a"]
    alone = samples.interval(value, ("tau/x",), ["a"])
    assert alone is not None
    again = ratio_of_totals(above, below)  # the same interval by other resamples
    assert alone.value == pytest.approx(again.value)
    assert (alone.low, alone.high) == pytest.approx((again.low, again.high), abs=0.05)


def test_statistics_of_several_rates() -> None:
    names = [f"tau/x/{part}" for part in range(4)]
    beside = [f"tau/y/{part}" for part in range(4)]
    steep, gentle = ({name: 2 + by * i for i, name in enumerate(of)} for of, by in ((names, 0.3), (beside, 0.1)))
    rising = columns({**steep, **gentle})
    found = rising.interval(slope, names)
    assert found is not None
    assert found.value == pytest.approx(0.3, abs=0.02)
    both = rising.interval(difference_of_slopes, [*names, *beside])
    assert both is not None
    assert both.value == pytest.approx(0.2, abs=0.02)
    least = rising.interval(smallest_ratio, [*names, *beside])
    assert least is not None
    assert least.value == pytest.approx(1.0, abs=0.05)
    over = rising.interval(ratio, (names[3], beside[3]))
    assert over is not None
    assert over.value == pytest.approx(2.9 / 2.3, rel=0.05)


def test_too_few_questions_decide_nothing() -> None:
    samples = columns({"tau/x": 3.0, "tau/y": 2.0}, questions=1)
    gap = samples.interval(difference, ("tau/x", "tau/y"))
    assert gap is not None
    assert gap.ci95 is None
    assert Rule(low=0.0).verdict(gap) == UNDECIDED
    nothing = Samples({"alpha7/x": {"a": ((0.0, 0.0), (0.0, 0.0))}}).interval(value, ("alpha7/x",))
    assert nothing is not None
    assert not math.isfinite(nothing.value)
    uneven = Samples({"u": {"a": ((1.0,), (1.0,))}, "v": {"a": ((1.0, 1.0), (1.0, 1.0))}})
    with pytest.raises(TercelError, match="not measured on the same questions of a"):
        uneven.interval(difference, ("u", "v"))


def test_claims_are_many_and_can_be_judged() -> None:
    assert len(CLAIMS) >= 12
    assert len({claim.id for claim in CLAIMS}) == len({claim.text for claim in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        assert claim.experiment in EXPERIMENTS
        assert claim.statistic in STATISTICS
        means = {name: 2.0 + 0.1 * place for place, name in enumerate(reversed(claim.quantities))}
        judged = judge(claim, {claim.experiment: columns(means)}, "tercel …").to_json()
        assert set(judged) >= {"claim", "paper", "measured", "ci95", "verdict", "command"}
        assert judged["verdict"] in (REPRODUCED, NOT_REPRODUCED, UNDECIDED)
        assert judged["ci95"][0] <= judged["measured"] <= judged["ci95"][1]
        measured_names = {name.split("/")[1] for name in claim.quantities}
        known = {name.partition("/")[0] for name in EXPERIMENTS[claim.experiment].names}
        assert {name.removesuffix("-sized") for name in measured_names} <= {*known, "vanilla"}
    absent = judge(CLAIMS[0], {CLAIMS[0].experiment: Samples({})}, "", {"eagle2": "no head is given"}).to_json()
    assert absent["verdict"] == UNDECIDED
    assert "eagle2: no head is given" in absent["why"]
    assert judge(CLAIMS[0], {}, "").why == "table1 was not run"
    growing = next(claim for claim in CLAIMS if claim.id == "data-slope")
    part = judge(growing, {"fig1": Samples({})}, "", {"eagle3/1of8": "no answers"})
    assert part.why == "eagle3/1of8: no answers; eagle3: not measured"


def test_every_name_of_an_experiment_is_a_method_or_has_a_recipe() -> None:
    for experiment in EXPERIMENTS.values():
        for name in experiment.names:
            assert recipe_of(name) in RECIPES or method_of(name) in KINDS


def test_trees_of_the_papers_are_those_of_the_methods() -> None:
    assert parse_shape(TREES["eagle3"]) == PAPER
    assert parse_shape(TREES["eagle"]) == PUBLISHED
    assert set(TREES) <= set(KINDS)
    assert all(parse_shape(tree) is not None for tree in TREES.values())


def test_a_head_has_a_position_for_every_level_of_its_tree() -> None:
    shape = parse_shape(TREES["p-eagle"])
    assert shape is not None
    assert RECIPES["p-eagle"].settings["ttt_steps"] == shape.depth


def test_the_commands_of_the_papers_scale_are_what_the_command_line_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = list(all_commands(tuple(EXPERIMENTS)))
    assert len(lines) == len(set(lines))
    assert all("@" in model.name and len(model.name.split("@")[1]) == 40 for model in MODELS)
    parsed = 0
    for line in lines:
        words = shlex.split(line, comments=True)
        if words[:1] == ["printf"]:
            settings = Path(words[-1])
            settings.parent.mkdir(parents=True, exist_ok=True)
            settings.write_text("\n".join(words[2:-2]) + "\n", "utf-8")
        if "tercel" in words[:6]:
            wanted = words[words.index("tercel") + 1 :]
            if method_in(wanted) in METHODS:
                parse(wanted)
            parsed += 1
    assert parsed > 20


def test_the_page_has_the_claims_as_they_are() -> None:
    page = (ROOT / "docs" / "reproduction.md").read_text("utf-8")
    rows = [
        f"| `{claim.experiment}` | {claim.text} | {claim.published} | {STATISTICS[claim.statistic]} {claim.rule} |"
        for claim in CLAIMS
    ]
    assert page.endswith("\n".join(rows) + "\n")
    assert all(f"| `{name}` | " in page.split("```")[0] for name in EXPERIMENTS)
