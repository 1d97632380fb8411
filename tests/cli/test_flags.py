"""Flags and the settings they stand for have the same names and defaults."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from typer.main import get_command

from tercel.cli.app import app
from tercel.cli.options import DraftOptions
from tercel.cli.sampling_options import SamplingOptions, parse_logit_bias
from tercel.cli.settings import parse_layers
from tercel.decode.sampling import SamplingParams
from tercel.draft.shape import PAPER, TreeShape
from tercel.errors import TercelError
from tercel.train.config import TrainConfig

from .running import run


def test_every_setting_of_training_is_an_option_with_its_default() -> None:
    command = get_command(app).commands["train"]  # type: ignore[attr-defined]
    options = {option.name: option for option in command.params}
    flags = [name for name, option in options.items() if option.param_type_name == "option" and not option.hidden]
    assert len(flags) <= 20
    for field in fields(TrainConfig):
        assert (field.name in flags) == (TrainConfig.told()[field.name].flag is not None)
        default = options[field.name].default
        assert (parse_layers(default) if field.name == "feature_layers" else default) == field.default


def in_words(value: object) -> str:
    """A default as the page of settings has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value in ("", (), None) else f"{value:g}" if isinstance(value, float) else str(value)


def test_the_page_of_settings_lists_them_all() -> None:
    page = (Path(__file__).parents[2] / "docs" / "settings.md").read_text("utf-8")
    as_flags, in_file = page.split("## In the file alone")
    for field in fields(TrainConfig):
        told = TrainConfig.told()[field.name]
        line = f"| `{field.name.replace('_', '-')}` | {in_words(field.default)} | {told.help} |\n"
        assert line in (in_file if told.flag is None else as_flags)


@pytest.mark.parametrize(
    ("typed", "flag", "line"),
    [
        (["--final-lr", "0.2"], "--final-lr", "final-lr: 0.2"),
        (["--freeze-lm-head"], "--freeze-lm-head", "freeze-lm-head: true"),
        (["--feature-layers", "1,2"], "--feature-layers", "feature-layers: [1, 2]"),
        (["--loss=hard"], "--loss", 'loss: "hard"'),
        (["--limit", "5"], "--limit", "limit: 5"),
        (["--eval-share", "0.1"], "--eval-share", "eval-share: 0.1"),
        (["--check-overlap", "a.jsonl"], "--check-overlap", 'check-overlap: ["a.jsonl"]'),
    ],
)
def test_what_is_no_flag_is_told_where_it_belongs(typed: list[str], flag: str, line: str) -> None:
    ended = run("train", "t", "--data", "d", "--out", "o", *typed)
    assert (ended.code, ended.err) == (2, f"error: {flag} is no flag; put `{line}` into a YAML file, for --config\n")


def test_sampling_flags_are_the_settings_of_sampling() -> None:
    assert SamplingOptions().asked().params == SamplingParams()
    ours = SamplingOptions(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=3, stop=["a", "b"], logit_bias=["4=-1"])
    expected = SamplingParams(
        temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=3, stop=("a", "b"), logit_bias={4: -1.0}
    )
    assert ours.asked().params == expected


def test_the_tree_is_one_flag() -> None:
    assert DraftOptions().shape is None  # as large as pays
    assert DraftOptions(tree="10x8x60").shape == PAPER
    assert DraftOptions(tree="chain:2").shape == TreeShape.chain(2)
    assert DraftOptions(tree="3x2x9").shape == TreeShape(3, 2, 9)
    for wrong in ("", "chain", "chain:", "chain:0", "chain:x", "3x2", "3x2x9x1", "ax2x9", "-1x2x9", "0x2x9", "3x2x1"):
        with pytest.raises(TercelError, match="--tree"):
            DraftOptions(tree=wrong)


def test_lists_in_flags() -> None:
    assert parse_layers("2,15, 27") == (2, 15, 27)
    assert parse_layers("") == ()
    assert parse_logit_bias(["1=2", "3=-1e2"]) == {1: 2.0, 3: -100.0}
    for wrong in ("x=1", "1", "1=", "=2"):
        with pytest.raises(TercelError, match="ID=VALUE"):
            parse_logit_bias([wrong])
