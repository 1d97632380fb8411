"""The script that tries variants of a recipe, on tiny runs, and what its pages say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from ablations import EQUAL, KEPT, TABLE, Trials, Variant, read_table, run_all
from ablations_page import Measured, Row, Setting, verdict
from recipe import settings_of

from tercel.draft import load_head
from tercel.errors import TercelError
from tercel.train.acceptance import simulate
from tercel.train.batches import plan_steps
from tercel.train.config import TrainConfig
from tercel.train.feature_store import FeatureStore
from tercel.train.features import FeatureSupply
from tercel.train.lesson import lesson_of
from tests.train.test_loop import CHATS, SMALL
from tests.train.worlds import target_of

TOLD = Setting.of(
    **{"command": "python bench/ablations.py …", "target": "tiny", "data": "d.jsonl", "base": {"lr": 2e-3}, "steps": 2},
    **{"chain": 2, "learned": 11, "supervised": 90, "held_out": 3},
)


def test_features_in_8_bits_are_learned_from_and_those_as_they_are_measured_on(tmp_path: Path) -> None:
    base = replace(SMALL, accumulate=1, max_steps=2, eval_every=10**6)
    trials = Trials(target_of(), CHATS, base, tmp_path / "out", keep=True)
    variants = [Variant(f"kept-{store}", KEPT, {}, store) for store in ("int8",)]
    (page,) = run_all(trials, variants, [0], TOLD, tmp_path / "pages")
    text = page.read_text("utf-8")
    assert "| kept-int8 | `store: int8` | 1." in text
    assert FeatureStore(tmp_path / "out" / "features-int8").of.store == "int8"
    heads = {name: next((tmp_path / "out").glob(f"{name}-seed-0-*/last")) for name in ("base", "kept-int8")}
    weights = {name: load_head(folder).head.fc.weight for name, folder in heads.items()}
    assert not weights["kept-int8"].equal(weights["base"])
    model = load_head(heads["kept-int8"])
    supply = FeatureSupply(target_of(), model.head, model.vocabulary)
    held_out = simulate(lesson_of(base), model.head, [supply.batch(trials.data.held_out)], supply.to_draft)
    (kept,) = (tmp_path / "out").glob("kept-int8-seed-0-*.json")
    assert Measured.from_json(json.loads(kept.read_text("utf-8"))).tau == pytest.approx(held_out.tau)


def test_variants_are_trained_measured_and_written_down_once(tmp_path: Path) -> None:
    table = tmp_path / "t.txt"
    table.write_text(
        "# name | question | settings\n\n"
        "hard | Which loss? | loss: hard\n"
        "muon | Which optimizer? | optimizer: muon, lr: 5e-4\n"
        "same | Which optimizer? | accumulate: 1\n"
        "far | Which loss? | feature-layers: [1, 99]\n",
        encoding="utf-8",
    )
    variants = read_table(table)
    base = replace(SMALL, accumulate=1, max_steps=2, eval_every=10**6)
    trials = Trials(target_of(), CHATS, base, tmp_path / "out", keep=True)
    pages = list(run_all(trials, variants, [0, 1], TOLD, tmp_path / "pages"))
    assert [page.name.partition("which-")[2] for page in pages] == ["loss-2-steps.md", "optimizer-2-steps.md"]
    loss, optimizer = (page.read_text("utf-8") for page in pages)
    assert loss.startswith("# Which loss? After 2 steps ")
    assert "| hard | `loss: hard` | 1." in loss
    runs = [Measured.from_json(json.loads(file.read_text("utf-8"))) for file in (tmp_path / "out").glob("base-*.json")]
    assert f"(of the base over {sum(run.train_tokens for run in runs) / 2:,.0f} tokens" in loss
    assert "`optimizer: muon`, `lr: 0.0005`" in optimizer
    assert "| same |" not in optimizer  # nothing but the base again
    assert "\nfar could not be tried: feature layer 99 is out of range" in loss
    index = (tmp_path / "pages" / "README.md").read_text("utf-8")
    assert all(page.name in index for page in pages)

    # what is measured is what training itself would say of these heads
    (kept,) = (tmp_path / "out").glob("hard-seed-1-*.json")
    found = Measured.from_json(json.loads(kept.read_text("utf-8")))
    model = load_head(kept.with_suffix("") / "last")
    supply = FeatureSupply(target_of(), model.head, model.vocabulary)
    held_out = simulate(lesson_of(base), model.head, [supply.batch(trials.data.held_out)], supply.to_draft)
    assert (found.tau, sum(found.steps)) == (pytest.approx(held_out.tau), held_out.steps)
    first = sum(right[0] for right in found.right) / sum(tried[0] for tried in found.tried)
    assert first == pytest.approx(held_out.alpha[0])
    assert all(0 <= overlap <= rows for overlap, rows in zip(found.overlap, found.rows, strict=True))
    assert load_head(kept.with_suffix("") / "last").info.training.step == 2

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ablations.train", None)  # nothing is trained twice
        wanted = [variant for variant in variants if variant.name != "far"]
        again = list(run_all(trials, wanted, [0, 1], TOLD, tmp_path / "again"))
    assert again[1].read_text("utf-8") == optimizer
    short = Variant("short", "How many steps?", {"ttt_steps": 1})
    tried = [replace(trials, base=replace(base, ttt_steps=steps)).measure(short, 0).tried[0] for steps in (2, 3)]
    assert [len(depths) for depths in tried] == [2, 3]  # in chains of each base


def test_learned_text_is_of_what_the_run_came_to(tmp_path: Path) -> None:
    trials = Trials(target_of(), CHATS, replace(SMALL, accumulate=1, max_steps=1), tmp_path)
    config = trials.config(None, 0)
    held_out, known = trials.sides(config)
    (step,) = plan_steps([len(chat) for chat in trials.data.train], config)
    seen = [trials.data.train[place].id for batch in step for place in batch]
    assert len(seen) < len(trials.data.train)
    assert {chat.id for chat in known} <= set(seen)
    assert len(known) == min(len(held_out), len(seen))


@pytest.mark.parametrize("settings", [{"max_length": 8}, {"eval_share": 0.5}, {"epochs": 9}, {"max_steps": 3}])
def test_variants_have_the_base_s_budget_and_held_out_conversations(tmp_path: Path, settings: dict[str, float]) -> None:
    trials = Trials(target_of(), CHATS, SMALL, tmp_path)
    with pytest.raises(TercelError, match=f"{next(iter(settings))} cannot differ"):
        trials.config(Variant("v", "Which?", settings), 0)


def test_the_table_is_of_settings_that_exist() -> None:
    variants = read_table(TABLE)
    assert len(variants) > 30
    for variant in variants:
        replace(TrainConfig(), **variant.settings)
        assert not set(variant.settings) & set(EQUAL)
    questions = " ".join(variant.question for variant in variants)
    for asked in ("later steps weigh", "prompts", "dropout", "noise", "draft vocabulary", "AdamW or Muon"):
        assert asked in questions


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("a | b", "give name | question | settings"),
        ("a | b | nonsense: 1", "there is no setting 'nonsense'"),
        ("base | b | lr: 1", "the name base is taken"),
        ("a | b | lr: [", "is not YAML"),
        ("a | b | lr: fast", "lr must be a number, not 'fast'"),
    ],
)
def test_lines_that_are_none(tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / "t.txt"
    file.write_text(line, encoding="utf-8")
    with pytest.raises(TercelError, match=words.replace("|", r"\|")):
        read_table(file)


def test_settings_may_be_left_to_their_defaults() -> None:
    found = settings_of("lr: 5e-4\nwarmup: null\nfeature-layers: [1, 2]", "f")
    assert found == {"lr": 5e-4, "warmup": None, "feature_layers": (1, 2)}


def measured(seed: int, steps: list[int]) -> Measured:
    return Measured(
        **{"seed": seed, "tokens": [100] * len(steps), "steps": steps, "right": [[5, 2]] * len(steps)},
        **{"tried": [[10, 5]] * len(steps), "overlap": [3.0] * len(steps), "rows": [10] * len(steps)},
        **{"known_tokens": [100], "known_steps": [40], "seconds": 1.0, "train_tokens": 10, "weights": 1000},
    )


def test_a_difference_needs_its_interval_and_every_seed() -> None:
    base = [measured(0, [50, 60, 55, 45] * 5), measured(1, [51, 61, 56, 46] * 5)]
    better = [measured(0, [45, 54, 50, 41] * 5), measured(1, [46, 55, 51, 42] * 5)]
    divided = [measured(0, [40, 48, 44, 36] * 5), measured(1, [52, 62, 57, 47] * 5)]
    rows = {name: Row.of(name, runs, base) for name, runs in (("a", better), ("b", divided), ("c", base))}
    assert {name: row.differs for name, row in rows.items()} == {"a": True, "b": False, "c": False}
    assert rows["a"].gain is not None
    assert rows["a"].gain.value == pytest.approx((50 + 60 + 55 + 45 + 214) / (45 + 54 + 50 + 41 + 194))
    assert verdict(list(rows.values())).startswith("a gives 1.10 [1.1")
    assert verdict([rows["b"], rows["c"]]) == "nothing tried is shown to be better"
    worse = Row.of("d", base, better)
    assert verdict([worse]) == "the base is better than all that was tried"
    assert verdict([worse, rows["c"]]) == "nothing tried is shown to be better; worse: d"
