"""A further kind of head joins with a class and a line: it is saved, loaded, inspected and run as the others are."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from tercel.decode.eagle3 import Eagle3
from tercel.decode.engine import Engine
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import Request
from tercel.draft import DraftModel, Eagle1Head, Eagle3Head, HeadConfig, load_head, save_head
from tercel.draft.inspect import inspect_head
from tercel.draft.kinds import KINDS, head_class, new_head
from tercel.draft.shape import TreeShape
from tercel.errors import TercelError
from tercel.train.config import TrainConfig
from tercel.train.initial import head_from
from tests.decode.drafts import random_draft, tiny_target


@dataclass(frozen=True)
class CoolConfig(HeadConfig):
    """Of a head whose logits are cooled down."""

    kind: ClassVar[str] = "cool"

    factor: float = 0.5


class CoolHead(Eagle3Head):
    title = "COOL"
    config_class = CoolConfig
    config: CoolConfig

    def in_words(self) -> str:
        return f"cooled by {self.config.factor}"

    def logits(self, output: Tensor) -> Tensor:
        return super().logits(output) * self.config.factor


@pytest.fixture
def cool(monkeypatch: pytest.MonkeyPatch) -> DraftModel:
    monkeypatch.setitem(KINDS, "cool", f"{__name__}:CoolHead")
    plain = random_draft(tiny_target("llama"))
    head = new_head(CoolConfig(**vars(plain.head.config), factor=0.25))
    assert type(head) is CoolHead
    head.load_state_dict(plain.head.state_dict())
    return replace(plain, head=head.eval().requires_grad_(False))


def test_it_is_saved_loaded_and_inspected(cool: DraftModel, tmp_path: Path) -> None:
    save_head(cool, tmp_path / "head", dtype=torch.float32)
    again = load_head(tmp_path / "head")
    assert isinstance(again.head, CoolHead)
    assert again.head.config == cool.head.config
    for name, tensor in cool.head.state_dict().items():
        assert torch.equal(again.head.state_dict()[name], tensor)
    assert inspect_head(again, dict(again.head.state_dict())).kind == "cooled by 0.25"


def test_it_drafts(cool: DraftModel) -> None:
    target = tiny_target("llama")
    asked = [Request((5, 17, 33), SamplingParams(max_new_tokens=6))]
    drafted = Engine(target, Eagle3(cool, target, TreeShape(3, 2, 6))).generate(asked)[0]
    assert drafted.nodes > drafted.steps


def test_training_goes_on_with_its_kind(cool: DraftModel) -> None:
    assert type(head_from(cool, TrainConfig())) is CoolHead


def test_a_kind_that_this_version_does_not_know(cool: DraftModel, tmp_path: Path) -> None:
    save_head(cool, tmp_path / "head")
    del KINDS["cool"]
    with pytest.raises(TercelError, match=r"tercel\.json: there is no kind of head 'cool'.* update tercel"):
        load_head(tmp_path / "head")


def test_the_usual_kind_is_not_told(tmp_path: Path) -> None:
    save_head(random_draft(tiny_target("llama")), tmp_path / "head")
    assert "kind" not in json.loads((tmp_path / "head" / "tercel.json").read_text())["head"]


def test_where_only_one_kind_will_do(cool: DraftModel) -> None:
    assert cool.eagle3 is cool.head  # a subclass is one
    with pytest.raises(TercelError, match="is a head of COOL, and this takes one of EAGLE-1 or EAGLE-2 only"):
        cool.head_as(Eagle1Head)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_says_what_it_is(kind: str) -> None:
    found = head_class(kind)
    assert found.config_class.kind == kind
    assert found.title
