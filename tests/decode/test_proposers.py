"""Proposers by name, and the worked example of docs/proposers.md, run as it stands there."""

from __future__ import annotations

import doctest
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tercel.decode.cost_aware import CostAware
from tercel.decode.costs import StepCosts
from tercel.decode.eagle3 import Eagle3
from tercel.decode.engine import Engine
from tercel.decode.proposers import KINDS, make_proposer, proposer_kind
from tercel.decode.sampled_chain import SampledChain
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import Request
from tercel.decode.vanilla import Vanilla
from tercel.draft import TrainingRecord
from tercel.draft.history import Recipe
from tercel.draft.kinds import KINDS as HEAD_KINDS
from tercel.draft.kinds import METHODS_OF, methods_of
from tercel.draft.shape import WIDEST, TreeShape
from tercel.errors import TercelError
from tests.decode.drafts import random_draft, tiny_target
from tests.methods.heads import random_head_of

PAGE = Path(__file__).parents[2] / "docs" / "proposers.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)


@pytest.fixture
def ngram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The page's first block as `ngram.py` in a folder on the path."""
    (tmp_path / "ngram.py").write_text(BLOCKS[0], encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("ngram", "broken"):
        sys.modules.pop(name, None)


def test_the_worked_example_works_as_it_is_traced(ngram: Path) -> None:
    names: dict[str, object] = {}
    exec(compile(BLOCKS[0], "ngram.py", "exec"), names)  # the project's own page
    traced = "\n".join(block for block in BLOCKS[1:] if block.startswith(">>>"))
    test = doctest.DocTestParser().get_doctest(traced, names, "proposers.md", str(PAGE), 0)
    told: list[str] = []
    done = doctest.DocTestRunner(verbose=False).run(test, out=told.append)
    assert done.attempted > 8
    assert not done.failed, "".join(told)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_drafts_without_changing_the_text(ngram: Path, temperature: float) -> None:
    target = tiny_target("llama")
    params = SamplingParams(max_new_tokens=40, temperature=temperature, logit_bias={9: 60.0, 10: 59.5}, seed=1)
    asked = [Request((9, 10, 9, 9, 10, 9), params), Request((5, 6, 7), params)]
    plain = Engine(target, make_proposer("vanilla", target), slots=2).generate(asked)
    for shape in (None, TreeShape.chain(4)):  # as large as pays, and all that it proposes
        drafted = Engine(target, make_proposer("ngram:NGRAM", target, shape=shape), slots=2).generate(asked)
        assert [result.tokens for result in drafted] == [result.tokens for result in plain]
    assert max(result.tau for result in drafted) > 1.5


def test_names_make_what_they_name() -> None:
    target = tiny_target("llama")
    draft, shape = random_draft(target), TreeShape(3, 2, 5)
    assert isinstance(make_proposer("vanilla", target), Vanilla)
    assert isinstance(make_proposer("vanilla", target, head=draft, shape=shape), Vanilla)  # has no use for them
    tree = make_proposer("eagle3", target, head=draft, shape=shape)
    assert isinstance(tree, Eagle3)
    assert (tree.shape, tree.draft) == (shape, draft)
    sized = make_proposer("eagle3", target, head=draft, costs=StepCosts({1: {1: 1.0}}))
    assert isinstance(sized, CostAware)
    assert (sized.max_nodes, sized.needs_tree) == (WIDEST.nodes, True)
    chain = make_proposer("eagle3-sampled-chain", target, head=draft, shape=shape)
    assert isinstance(chain, SampledChain)
    assert chain.max_nodes == shape.depth + 1
    assert [name for name in KINDS if proposer_kind(name).draws] == ["eagle3-sampled-chain", "sps"]


@pytest.mark.parametrize("name", KINDS)
def test_a_proposer_goes_by_the_name_it_is_made_by(name: str) -> None:
    target = tiny_target("llama")
    costs = StepCosts({1: {1: 1.0}})
    head = random_head_of(name, target) or random_draft(target)
    assert make_proposer(name, target, head=head, model=target, costs=costs).name == name


def test_what_is_missing_is_said(ngram: Path) -> None:
    target = tiny_target("llama")
    with pytest.raises(TercelError, match="the method eagle3 drafts with a draft head, and none is given"):
        make_proposer("eagle3", target)
    (ngram / "broken.py").write_text(
        "from tercel import ProposerKind\nTWO = ProposerKind(print, needs=('model',))\nNO = print\n", encoding="utf-8"
    )
    with pytest.raises(TercelError, match="the method broken:TWO drafts with a second model, and none is given"):
        make_proposer("broken:TWO", target)
    with pytest.raises(TercelError, match="broken:NO is no ProposerKind"):
        make_proposer("broken:NO", target)
    with pytest.raises(TercelError, match=r"broken:THREE cannot be imported .*THREE.*PYTHONPATH"):
        make_proposer("broken:THREE", target)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("eagel", "there is no method eagel; did you mean eagle?"),
        ("xyz", "known are vanilla, .*eagle3-sampled-chain, .*and MODULE:ATTRIBUTE"),
        ("no_such_module:KIND", "no_such_module:KIND cannot be imported .*no_such_module.*PYTHONPATH"),
        (":", "cannot be imported"),
        ("", "there is no method"),
    ],
)
def test_names_of_nothing(name: str, words: str) -> None:
    with pytest.raises(TercelError, match=words):
        proposer_kind(name)


def test_a_module_that_fails_is_one_sentence(ngram: Path) -> None:
    (ngram / "broken.py").write_text("1 / 0\n", encoding="utf-8")
    with pytest.raises(TercelError, match=r"broken:KIND cannot be imported \(division by zero\)"):
        proposer_kind("broken:KIND")


def test_heads_of_every_kind_have_methods() -> None:
    assert set(METHODS_OF) == set(HEAD_KINDS)
    assert {name for names in METHODS_OF.values() for name in names} <= set(KINDS)
    recipe = Recipe(epochs=1, lr=1e-3, clip=1, ttt_steps=3, decay=1, loss="soft", max_length=64, method="hass")
    assert methods_of("eagle1", TrainingRecord(recipe=recipe)) == ("hass",)
    assert methods_of("eagle1", TrainingRecord()) == ("eagle", "eagle2")
