"""Heads whose files hold no output layer draft with their target's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tercel.decode.compat import load_draft
from tercel.decode.eagle3 import Eagle3
from tercel.decode.engine import Engine
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import Request
from tercel.draft import DraftModel, load_head
from tercel.errors import TercelError
from tercel.interop.formats.read import read_head
from tercel.interop.hub import save_pretrained
from tercel.target_model.model import Target
from tests.cli.running import refused, run
from tests.decode.drafts import random_draft, tiny_target
from tests.interop.foreign import write_sglang, write_speculators
from tests.tiny import save_tiny


def drafting_with_its_targets(target: Target, pruned: bool) -> DraftModel:
    """A whole head whose output layer is the target's: what a file without one has to come to."""
    model = random_draft(target, pruned=pruned)
    with torch.no_grad():
        model.head.lm_head.weight.copy_(target.output_layer.rows(model.vocabulary.ids))
    return model


def without_output_layer(model: DraftModel) -> DraftModel:
    head = model.eagle3
    bare = type(head)(replace(head.config, own_output=False))
    bare.load_state_dict({name: value for name, value in head.state_dict().items() if name != "lm_head.weight"})
    return replace(model, head=bare)


@pytest.mark.parametrize("write", [write_sglang, write_speculators])
@pytest.mark.parametrize("pruned", [True, False])
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_it_is_the_whole_head(tmp_path: Path, arch: str, pruned: bool, write) -> None:  # type: ignore[no-untyped-def]
    target = tiny_target(arch)
    whole = drafting_with_its_targets(target, pruned)
    folder = write(without_output_layer(whole), tmp_path / "head")
    assert "lm_head.weight" not in dict(read_head(folder).head.named_parameters())
    lent = load_draft(str(folder), target)
    output = torch.randn(3, target.hidden_size)
    torch.testing.assert_close(lent.head.logits(output), whole.head.logits(output), rtol=0, atol=0)
    place = "the target's, in the rows of the draft vocabulary" if pruned else "the target's"
    assert ("output layer", place) in {(c.name, c.value) for c in lent.conventions}
    request = Request(tuple(range(20, 30)), SamplingParams(max_new_tokens=12))
    answers = [Engine(target, Eagle3(model, target)).generate([request])[0] for model in (lent, whole)]
    assert answers[0].tokens == answers[1].tokens


def test_without_a_target_it_says_what_it_needs(tmp_path: Path) -> None:
    target = tiny_target("llama")
    folder = write_sglang(without_output_layer(drafting_with_its_targets(target, True)), tmp_path / "head")
    head = read_head(folder).head
    with pytest.raises(TercelError, match="drafts with its target's output layer; load it together with the target"):
        head.logits(torch.zeros(1, target.hidden_size))
    shown = run("inspect", str(folder))
    assert shown.code == 0
    assert "output layer" in shown.out


def test_once_saved_with_the_targets_it_is_a_head_like_others(tmp_path: Path) -> None:
    place = save_tiny(tmp_path, "llama")
    target = Target.load(str(place))
    bare = write_sglang(without_output_layer(drafting_with_its_targets(target, True)), tmp_path / "bare")
    asked = ["--to", "vllm", "--target", str(place), "--out", str(tmp_path / "export")]
    refused(run("export", str(bare), *asked), "drafts with its target's output layer", "save_pretrained")
    saved = save_pretrained(load_draft(str(bare), target), tmp_path / "saved")
    rows = target.output_layer.rows(load_head(saved).vocabulary.ids)
    torch.testing.assert_close(load_head(saved).head.lm_head.weight, rows.bfloat16().float())
    assert run("export", str(saved), *asked).code == 0


def test_a_narrower_head_cannot_do_without(tmp_path: Path) -> None:
    model = random_draft(tiny_target("llama"))
    with pytest.raises(TercelError, match=r"of width \d+ cannot share the output layer of a target of width 7"):
        replace(model.head.config, target_hidden_size=7, own_output=False)
