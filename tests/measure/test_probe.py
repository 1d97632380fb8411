"""Readings that cost acceptance without any error are found out on the target's own answers."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tercel.cli.consoles import result_console
from tercel.cli.probe_table import probe_table
from tercel.draft import DraftModel
from tercel.errors import TercelError
from tercel.measure.chains import greedy_chains, read_as, without_map
from tercel.measure.probe import ProbeReport, greedy_answers, probe
from tercel.measure.tasks import Prompt
from tercel.measure.variants import faults, readings
from tests.draft.heads_for_tests import tiny_head
from tests.overfit import ANSWER, STEPS, World, edit_json


def probed(world: World, model: DraftModel) -> ProbeReport:
    return probe(model, world.target, world.prompts, answer_tokens=ANSWER)


def test_a_right_reading_holds(world: World) -> None:
    report = probed(world, world.head)
    assert report.holds
    assert "the reading holds" in report.verdict
    assert [row.setting for row in report.rows] == [
        "as read",
        "layer ids +1 (3, 5, 6)",
        "layer ids -1 (1, 3, 4)",
        "norm_before_residual true",
    ]
    as_read, *others = report.rows
    assert as_read.alpha0 > 0.9
    assert as_read.gain.value == 1.0
    assert all(row.tau.value < 0.8 * as_read.tau.value and not row.clearly_better for row in others)
    assert report.prompts == len(world.prompts)


@pytest.mark.parametrize(
    ("written", "read", "remedy"),
    [
        ((1, 3, 4), (1, 3, 4), "set --layer-ids output"),
        ((2, 4, 5), (3, 5, 6), "set --layer-ids input"),
        ((), (1, 3, 4), "set eagle_aux_hidden_state_layer_ids [2, 4, 5] in config.json, and --layer-ids input"),
    ],
    ids=["outputs-as-inputs", "inputs-as-outputs", "unlisted"],
)
def test_layer_ids_off_by_one(
    world: World, tmp_path: Path, written: tuple[int, ...], read: tuple[int, ...], remedy: str
) -> None:
    folder = Path(shutil.copytree(world.head_folder, tmp_path / "head"))
    listed = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(written)}} if written else {}
    edit_json(folder / "config.json", lambda config: config.update(listed))
    foreign = replace(read_as(world.head, feature_layers=read), format="sglang", path=folder)
    report = probed(world, foreign)
    assert not report.holds
    assert "doubtful" in report.verdict
    assert report.verdict.endswith(remedy)


def test_layer_ids_off_by_one_in_a_head_of_this_package(world: World) -> None:
    report = probed(world, read_as(world.head, feature_layers=(1, 3, 4)))
    assert report.verdict.endswith("set feature_layers [2, 4, 5] in tercel.json")


def test_norm_before_residual_wrong(world: World) -> None:
    report = probed(world, replace(read_as(world.head, norm_before_residual=True), format="speculators"))
    assert not report.holds
    assert "norm_before_residual false in config.json" in report.verdict


def test_another_rope_base(world: World) -> None:
    rope = {"rope_type": "default", "rope_theta": 300.0}
    report = probed(world, replace(read_as(world.head, rope_parameters=rope), format="sglang"))
    assert not report.holds
    assert "rope_theta 10000 in config.json" in report.verdict


def test_layers_that_the_files_leave_to_the_engines(world: World) -> None:
    unplaced = read_as(world.head, feature_layers=(), target_num_layers=None)
    assert next(readings(unplaced, world.target)).model.head.config.feature_layers == (2, 4, 5)
    assert probed(world, unplaced).rows[0].tau == probed(world, world.head).rows[0].tau


def test_a_head_that_learned_nothing_of_this_target(world: World) -> None:
    # a head that proposes one token for ever
    head = tiny_head(world.head.head.config)
    head.lm_head.weight.data.zero_()
    report = probed(world, replace(world.head, head=head))
    assert not report.holds
    assert "not a head of this target" in report.verdict


def test_one_short_answer_is_too_little_to_tell(world: World) -> None:
    low = read_as(world.head, feature_layers=(1, 3, 4))
    report = probe(low, world.target, world.prompts[:1], answer_tokens=10)
    assert "too short to tell" in report.verdict
    assert report.to_json()["rows"][1]["gain_ci95"] is None


def test_answers_too_short_for_a_draft(world: World) -> None:
    with pytest.raises(TercelError, match="at most one token"):
        greedy_answers(world.target, world.prompts, 1)


def test_walked_rows_are_the_steps_of_a_decoder(world: World) -> None:
    answers = greedy_answers(world.target, world.prompts, ANSWER)
    for variant in faults(world.head, world.target):
        if variant.setting.startswith("draft vocabulary"):
            continue  # drafts are fed back by their true ids there
        decoded = world.decoded(variant.model)
        walked = [chain.walk().runs.tolist() for chain in greedy_chains(variant.model, world.target, answers, STEPS)]
        assert walked == [list(decoded[prompt.tokens].accepted) for prompt in world.prompts], variant.setting


def test_a_head_without_its_map(world: World) -> None:
    answers = greedy_answers(world.target, world.prompts, ANSWER)
    chains = greedy_chains(without_map(world.head), world.target, answers, STEPS)
    assert all(set(chain.walk().runs.tolist()) == {0} for chain in chains)


def test_chains_by_hand(world: World) -> None:
    answer = greedy_answers(world.target, [Prompt("a", world.prompts[0].tokens)], 6)
    (chain,) = greedy_chains(world.head, world.target, answer, STEPS)
    assert chain.room.tolist() == [3, 3, 3, 2, 1]  # five tokens behind the first
    assert all(chain.runs <= chain.room)
    assert chain.count(STEPS).seen[0] == 5
    assert chain.count(STEPS).seen[2] <= 3


def test_the_table_can_be_read(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    low = read_as(world.head, feature_layers=(1, 3, 4))
    result_console().print(probe_table(probed(world, low)))
    shown = capsys.readouterr().out
    assert "layer ids +1 (2, 4, 5)" in shown
    assert "0-α" in shown
    assert "× " in shown
