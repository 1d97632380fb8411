"""Where time goes: what is measured, what the floors are, and what the sentence says of them. No time is asserted."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tercel.decode import stopwatch
from tercel.decode.clock import PHASES
from tercel.decode.eagle3 import Eagle3
from tercel.decode.pieces import Context
from tercel.decode.sampling import SamplingParams
from tercel.decode.stopwatch import Patience, time_in_turn
from tercel.decode.vanilla import Vanilla
from tercel.draft.shape import TreeShape
from tercel.errors import TercelError
from tercel.heads import known_as, shipped
from tercel.measure import machine
from tercel.measure import profile as profile_module
from tercel.measure.intervals import Interval
from tercel.measure.machine import Ceilings, Probe, Rate, Work, reading
from tercel.measure.profile import ProfileSettings, run_profile
from tercel.measure.profile_cases import forward_case, head_cases
from tercel.measure.profile_report import ceilings_line, plot_profile, profile_tables
from tercel.measure.profile_result import Profile, Steps, Timed, in_ms
from tercel.measure.profile_verdict import verdict
from tercel.measure.tasks import Prompt
from tercel.target_model.model import Target
from tercel.target_model.sources import Source
from tests.decode.drafts import random_draft, tiny_target
from tests.tiny import tiny_model

CPU = torch.device("cpu")
PROMPTS = (Prompt("a", (5, 9, 11, 7)), Prompt("b", (8, 8, 20)))
FEW = ProfileSettings(
    widths=(4, 1), contexts=(40, 8), patience=Patience(0.0), params=SamplingParams(max_new_tokens=6, ignore_eos=True)
)


@pytest.fixture(scope="module")
def measured() -> Profile:
    target = tiny_target("llama")
    proposers = {"vanilla": Vanilla(), "eagle3": Eagle3(random_draft(target), target, TreeShape(3, 3, 8))}
    return run_profile(target, proposers, PROMPTS, FEW)


def test_everything_stands_beside_its_floor(measured: Profile) -> None:
    value = json.loads(json.dumps(measured.to_json(), allow_nan=False))
    assert (value["context"], list(value["by_context"])) == (40, ["8", "40"])
    assert list(value["head_levels"]["ms"]) == ["commit", "1", "2", "3"]
    for widths in (value["by_context"]["8"], value["by_context"]["40"], value["output_layer"]):
        assert list(widths["ms"]) == ["1", "4"]
    for timed in (*value["by_context"].values(), value["output_layer"], value["head_levels"]):
        for name, floor in timed["floor_ms"].items():
            assert floor > 0
            assert timed["efficiency"][name] == pytest.approx(floor / timed["ms"][name])
            assert timed["ms_ci95"][name][0] <= timed["ms"][name] <= timed["ms_ci95"][name][1]
    assert value["forward_ms"] == value["by_context"]["40"]["ms"]
    assert value["floor_ms"] == value["by_context"]["40"]["floor_ms"]
    assert value["ceilings"]["bandwidth_gb_s"] >= value["ceilings"]["bandwidth_gb_s_median"] > 0
    assert (value["rounds"], value["device"], value["dtype"]) == (6, "cpu", "float32")


def test_the_shares_of_a_step_are_a_whole(measured: Profile) -> None:
    value = measured.to_json()
    assert value["method"] == "eagle3"
    assert value["step_share"] == value["steps"]["eagle3"]["share"]
    for name, steps in value["steps"].items():
        assert set(steps["share"]) == set(PHASES)
        assert sum(steps["share"].values()) == pytest.approx(1)
        assert sum(steps["split_ms"].values()) == pytest.approx(steps["step_ms"])
        assert (steps["share"]["head"] > 0) == (name == "eagle3")
    assert value["steps"]["vanilla"]["nodes"] == value["steps"]["vanilla"]["tau"] == 1
    assert value["steps"]["eagle3"]["nodes"] > 1


def test_what_is_run_leaves_no_trace() -> None:
    target = tiny_target("llama")
    proposer = Eagle3(random_draft(target), target, TreeShape(3, 3, 8))
    context = Context(target, 12, 4, lambda tokens: None, proposer.feature_layers)
    cases = {"forward": forward_case(context, 4, proposer.feature_layers), **dict(head_cases(proposer, context))}
    first = {name: case.run() for name, case in cases.items()}
    again = {name: case.run() for name, case in reversed(cases.items())}
    assert context.cache.lengths == [12]
    assert torch.equal(first["forward"].hidden, again["forward"].hidden)  # type: ignore[attr-defined]
    for name in ("1", "2", "3"):
        for one, other in zip(first[name], again[name], strict=True):  # type: ignore[call-overload]
            assert torch.equal(one, other)


def test_a_head_level_is_the_proposers_own() -> None:
    """The first level's numbers are those of which the proposer makes its first level."""
    target = tiny_target("llama")
    proposer = Eagle3(random_draft(target), target, TreeShape(3, 2, 4))
    context = Context(target, 12, 4, lambda tokens: None, proposer.feature_layers)
    _, drafts = dict(head_cases(proposer, context))["1"].run()  # type: ignore[misc]

    class Row:
        tokens, params, stream = context.tokens[:13], None, None

    proposer.reset(20)
    proposer.admit([Row], [context.output])  # type: ignore[list-item]
    drafted = proposer.propose([Row])[0].tree  # type: ignore[list-item]
    best = proposer.ids[drafts.flatten()[0]]
    assert drafted.token_list[1] == int(best)


def test_token_by_token_targets_have_one_width() -> None:
    target = Target(tiny_model("mamba"), None, Source("mamba", "mamba", "folder", None))
    settings = replace(FEW, widths=None, contexts=None, usual_contexts=(8,))
    profile = run_profile(target, {"vanilla": Vanilla()}, PROMPTS, settings)
    assert list(profile.usual) == [1]
    assert any("token by token" in note for note in profile.notes)
    with pytest.raises(TercelError, match="mamba"):
        run_profile(target, {"vanilla": Vanilla()}, PROMPTS, FEW)


def test_contexts_are_those_that_fit() -> None:
    target = tiny_target("llama")  # of 256 tokens
    settings = replace(FEW, contexts=None, usual_contexts=(8, 253, 400))
    profile = run_profile(target, {"vanilla": Vanilla()}, PROMPTS, settings)
    assert list(profile.forward) == [8]
    assert any("contexts of 253, 400 tokens are left out" in note for note in profile.notes)
    none = run_profile(target, {"vanilla": Vanilla()}, PROMPTS, replace(settings, usual_contexts=(400,)))
    assert list(none.forward) == [252]
    for wrong, words in (
        (replace(FEW, contexts=(253,)), "253 tokens and a block of 4 do not fit .* takes 256"),
        (replace(FEW, contexts=(1 << 39,)), "do not fit"),
    ):
        with pytest.raises(TercelError, match=words):
            run_profile(target, {"vanilla": Vanilla()}, PROMPTS, wrong)
    with pytest.raises(TercelError, match="every prompt fills the context"):
        run_profile(target, {"vanilla": Vanilla()}, [Prompt("long", (5,) * 256)], FEW)


def test_the_only_context_is_no_longer_than_memory_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama")
    monkeypatch.setattr(profile_module, "available_memory", lambda device: 4 * target.work.cache_bytes(1) * 20)
    settings = replace(FEW, contexts=None, usual_contexts=(64,))
    found = run_profile(target, {"vanilla": Vanilla()}, PROMPTS, settings)
    assert list(found.forward) == [20]
    assert any("contexts of 64 tokens are left out: memory is short" in note for note in found.notes)


def test_settings_refuse_what_is_no_size() -> None:
    sizes = ({"widths": (0,)}, "a block has 1 to"), ({"contexts": (-1,)}, "a context"), ({"widths": ()}, "no block")
    for wrong, words in sizes:
        with pytest.raises(TercelError, match=words):
            ProfileSettings(**wrong)


# ------------------------------------------------------------------------------------------------ the stopwatch


def test_works_run_in_turn_and_the_first_moves_on() -> None:
    log: list[str] = []
    works = {name: lambda name=name: log.append(name) for name in "abc"}
    seen: list[tuple[int, int]] = []
    taken = time_in_turn(works, CPU, Patience(0.0, least=2, most=9), lambda *done: seen.append(done))
    assert "".join(log) == "abc" + "aabbcc" + "bbccaa"  # each right after a run that is not counted
    assert {name: len(values) for name, values in taken.items()} == dict.fromkeys("abc", 2)
    assert seen[-1] == (9, 30)


def test_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = iter(range(100))
    monkeypatch.setattr(stopwatch.time, "monotonic", lambda: float(next(passed)))
    for seconds, rounds in ((2.0, 4), (50.0, 5)):
        taken = time_in_turn({"a": lambda: None}, CPU, Patience(seconds, least=2, most=5), lambda *done: None)
        assert len(taken["a"]) == rounds


# ------------------------------------------------------------------------------- floors and sentences, by hand


def steady(value: float) -> Interval:
    return Interval(value, value, value)


CEILINGS = Ceilings(Rate(10e9, steady(8e9)), Rate(100e9, steady(90e9)))


def test_a_floor_is_what_takes_longer() -> None:
    assert CEILINGS.floor_ms(Work(50e6, 100e6)) == pytest.approx(5)
    assert CEILINGS.bound(Work(50e6, 100e6)) == "memory"
    assert CEILINGS.floor_ms(Work(50e6, 1e9)) == pytest.approx(10)
    assert CEILINGS.bound(Work(50e6, 1e9)) == "compute"
    assert CEILINGS.steadiness == pytest.approx(0.8)


@pytest.mark.parametrize(("steady", "told"), [(0.0, False), (1.1, True)])
def test_a_busy_machine_is_told(monkeypatch: pytest.MonkeyPatch, steady: float, told: bool) -> None:
    monkeypatch.setattr(profile_module, "STEADY", steady)
    found = run_profile(tiny_target("llama"), {"vanilla": Vanilla()}, PROMPTS[:1], FEW)
    assert any("nothing beside it" in note for note in found.notes) == told


def test_more_than_the_whole_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_module, "reading", lambda like, device: Probe(lambda: None, 1e-6))
    found = run_profile(tiny_target("llama"), {"vanilla": Vanilla()}, PROMPTS[:1], FEW)
    assert found.output[1].efficiency > 1
    assert any("more than 100%" in note for note in found.notes)


@pytest.mark.parametrize(
    ("like", "free", "read"), [(0, None, 32 << 20), (40 << 20, None, 40 << 20), (1 << 40, 160 << 20, 40 << 20)]
)
def test_the_ceiling_is_read_from_as_much_as_weights_are(
    monkeypatch: pytest.MonkeyPatch, like: int, free: int | None, read: int
) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda device: free)
    probe = reading(like, CPU)
    assert probe.amount == read
    assert probe.run() == read // 8  # ones


def steps_of(token_ms: float, tau: float, nodes: float, **shares: float) -> Steps:
    share = {phase: steady(shares.get(phase, 0.0)) for phase in PHASES}
    ms = {phase: steady(token_ms * tau * value.value) for phase, value in share.items()}
    return Steps(ms, share, steady(tau), nodes, 100.0, 10)


def profile_of(forward: Mapping[int, tuple[float, float]], drafted: Steps | None, plain_ms: float = 40.0) -> Profile:
    usual = {width: Timed(steady(ms), floor, "memory") for width, (ms, floor) in forward.items()}
    steps = {"vanilla": steps_of(plain_ms, 1.0, 1.0, target=0.9, host=0.1)}
    levels = {"commit": Timed(steady(2.0), 1.9, "memory"), "1": Timed(steady(3.0), 1.0, "memory")}
    return Profile(
        target="t",
        head=None if drafted is None else "h",
        dtype="bfloat16",
        device=CPU,
        threads=2,
        context=256,
        forward={256: usual},
        output=usual,
        levels={} if drafted is None else levels,
        ceilings=CEILINGS,
        steps=steps if drafted is None else {**steps, "eagle3": drafted},
        rounds=6,
    )


FLAT = {1: (40.0, 30.0), 8: (42.0, 30.0), 16: (44.0, 30.0)}
STEEP = {1: (40.0, 10.0), 8: (80.0, 10.0), 16: (160.0, 10.0)}
MAINLY = {"target": 0.8, "head": 0.2}


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        (profile_of(FLAT, None), ("90% of a step is the target's forward", "block of 16 costs 1.10 × one token")),
        (
            profile_of(FLAT, steps_of(30, 2.0, 8, **MAINLY)),
            ("80% of", "42.0 ms over 8 tokens", "bound by reading from memory", "a larger tree (--tree auto"),
        ),
        (
            profile_of(STEEP, steps_of(30, 2.5, 8, **MAINLY)),
            ("bound by neither memory nor compute", "2.00 × one token: a smaller tree"),
        ),
        (profile_of(STEEP, steps_of(50, 1.2, 8, **MAINLY)), ("their τ of 1.20", "or none (--draft none)")),
        (
            profile_of({1: (40.0, 30.0), 8: (50.0, 30.0), 16: (80.0, 30.0)}, steps_of(30, 2.0, 8, **MAINLY)),
            ("the tree fits the machine",),
        ),
        (profile_of({8: (40.0, 30.0)}, steps_of(30, 2.0, 8, **MAINLY)), ("measure several widths",)),
        (
            profile_of(FLAT, steps_of(30, 2.0, 8, target=0.3, head=0.7)),
            ("70% of a step is the draft head's forwards", "3.00 ms for a level", "--tree auto"),
        ),
        (profile_of(FLAT, steps_of(30, 2.0, 8, target=0.3, tree=0.7)), ("the building of the drafts", "--tree auto")),
    ],
)
def test_the_sentence_says_what_bounds_and_what_to_do(profile: Profile, words: tuple[str, ...]) -> None:
    sentence = verdict(profile)
    assert "\n" not in sentence
    for word in words:
        assert word in sentence, sentence


def test_a_head_is_called_as_users_know_it(measured: Profile, tmp_path: Path) -> None:
    assert known_as(shipped("smollm2-135m")) == "smollm2-135m"
    assert known_as(tmp_path / "mine") == str(tmp_path / "mine")
    assert measured.title().startswith("head on llama, float32")  # made in memory


def test_numbers_as_people_read_them() -> None:
    assert [in_ms(value) for value in (2503.4, 34.12, 3.456, 0.0123)] == ["2,503", "34.1", "3.46", "0.012"]


def test_tables_and_pictures(tmp_path: Path, measured: Profile) -> None:
    one = replace(measured, forward={40: measured.usual}, levels={})
    unsure = {40: {1: Timed(Interval(2.0, math.nan, math.nan), 1.0, "memory")}}
    assert [len(profile_tables(profile)) for profile in (measured, one)] == [3, 2]
    assert "GB/s" in ceilings_line(measured)
    for profile in (measured, one, replace(one, forward=unsure)):
        plot_profile(profile, tmp_path / "a.png")
        plot_profile(profile, tmp_path / "a.svg")
        assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
        assert b"<svg" in (tmp_path / "a.svg").read_bytes()
    with pytest.raises(TercelError, match=r"end in \.png or \.svg"):
        plot_profile(measured, tmp_path / "a.jpeg")
