"""Medusa's and Hydra's heads as modules: what they compute, how they begin, and their files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tercel.draft import DraftModel, load_head, save_head
from tercel.draft.config import LAST_HIDDEN
from tercel.draft.inspect import inspect_head
from tercel.errors import TercelError
from tercel.interop.card import head_card
from tercel.interop.formats.read import read_head
from tercel.methods.last_hidden import LastHiddenHead
from tests.decode.drafts import tiny_target
from tests.methods.heads import CONFIGS, random_parts

FORMS = [{}, {"num_layers": 2}, {"shared_output": True}]


def head_of(kind: str, **settings: Any) -> tuple[DraftModel, LastHiddenHead]:
    model = random_parts(kind, tiny_target("llama"), **settings)
    assert isinstance(model.head, LastHiddenHead)
    return model, model.head


@pytest.mark.parametrize("settings", FORMS, ids=str)
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_part_is_what_the_paper_says(kind: str, settings: dict[str, Any]) -> None:
    _, head = head_of(kind, **settings)
    weights, size = head.state_dict(), head.config.hidden_size
    hidden, read = torch.randn(3, size), torch.randn(3, 4, size)
    for step in range(4):
        if kind == "medusa":
            x, names = hidden, f"medusa_heads.{step}"
            last = f"{names}.{head.config.num_layers}.weight"
        else:
            x, names = torch.cat([hidden, read[:, : step + 1].flatten(1)], -1), f"hydra_mlp.{step}"
            last = f"hydra_lm_head.{step}.weight"
        for block in range(head.config.num_layers):
            into = weights.get(f"{names}.{block}.res_connection.weight")
            grown = F.silu(x @ weights[f"{names}.{block}.linear.weight"].T + weights[f"{names}.{block}.linear.bias"])
            x = grown + (x if into is None else x @ into.T)
        output = head.output(step, hidden, read[:, : step + 1])
        torch.testing.assert_close(output, x)
        rows = weights["lm_head.weight" if head.config.shared_output else last]
        torch.testing.assert_close(head.logits(step, output), x @ rows.T)


@pytest.mark.parametrize("settings", FORMS, ids=str)
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_new_head_says_what_the_target_says(kind: str, settings: dict[str, Any]) -> None:
    target = tiny_target("llama")
    model, head = head_of(kind, **settings)
    head.initialise(target.output_rows(model.vocabulary.ids))
    hidden = target.encode(torch.tensor([[5, 6, 7]])).hidden[0]
    said = target.logits(hidden)[:, model.vocabulary.ids]
    for step in range(head.config.num_parts):
        read = torch.randn(3, step + 1, head.config.hidden_size)
        torch.testing.assert_close(head.logits(step, head.output(step, hidden, read)), said)


@pytest.mark.parametrize("settings", FORMS, ids=str)
@pytest.mark.parametrize("kind", CONFIGS)
def test_it_is_saved_loaded_and_inspected(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model, head = head_of(kind, **settings)
    save_head(model, tmp_path / "head", dtype=torch.float32)
    for again in (load_head(tmp_path / "head"), read_head(tmp_path / "head", num_layers=8)):
        assert again.head.config == head.config
        for name, tensor in head.state_dict().items():
            assert torch.equal(again.head.state_dict()[name], tensor)
    assert f"--draft {kind} --prompt" in head_card(again)  # no record says how it was trained
    assert f"--methods vanilla,{kind}\n" in head_card(again)
    report = inspect_head(again, dict(again.head.state_dict()))
    assert report.kind.startswith(f"{kind.capitalize()} (4 parts, ")
    assert report.reads == LAST_HIDDEN
    assert report.cost.drafted_macs > 0
    with pytest.raises(TercelError, match=f"is a head of {head.title}, and this takes one of EAGLE-3 only"):
        _ = again.eagle3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_parts": 0}, "num_parts of a head must be a whole number from 1 to 128, not 0"),
        ({"num_layers": True}, "num_layers of a head must be a whole number from 1 to 16, not True"),
        ({"shared_output": 1}, "shared_output of a head must be true or false, not 1"),
        ({"hidden_size": 16, "own_embeddings": True}, "has its target's width"),
        ({"feature_layers": (2,)}, "reads the target's last hidden state, not layers"),
    ],
)
def test_settings_that_make_no_head(settings: dict[str, Any], words: str) -> None:
    config = head_of("medusa")[1].config
    with pytest.raises(TercelError, match=words):
        replace(config, **settings)
