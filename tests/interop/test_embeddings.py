"""Embeddings a head repeats from its target are dropped, others stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tercel.decode.compat import load_draft
from tercel.draft import DraftModel
from tercel.draft.binding import share_embeddings
from tercel.interop.formats.read import read_head
from tercel.target_model.stored import stored_embeddings
from tests.cli.running import refused, run
from tests.decode.drafts import random_draft, tiny_target
from tests.draft.heads_for_tests import tiny_draft
from tests.interop.foreign import write_speculators
from tests.tiny import save_tiny, tiny_config, tiny_model


def repeating(of_target: torch.Tensor) -> DraftModel:
    model = tiny_draft(own_embeddings=True, hidden_size=of_target.shape[1], target_hidden_size=of_target.shape[1])
    with torch.no_grad():
        model.head.embed_tokens.weight.copy_(of_target.bfloat16())
    return model


def test_what_repeats_the_target_is_dropped_and_said() -> None:
    of_target = torch.randn(128, 32, generator=torch.Generator().manual_seed(0))
    shared = share_embeddings(repeating(of_target), of_target)
    assert not shared.head.config.own_embeddings
    assert "embed_tokens.weight" not in dict(shared.head.named_parameters())
    assert ("embeddings", "the target's") in {(c.name, c.value) for c in shared.conventions}


def test_what_differs_in_one_number_stays() -> None:
    of_target = torch.randn(128, 32, generator=torch.Generator().manual_seed(0))
    model = repeating(of_target)
    with torch.no_grad():
        model.head.embed_tokens.weight[77, 5] += 0.1
    assert share_embeddings(model, of_target) is model
    assert share_embeddings(tiny_draft(), of_target).head.config.own_embeddings is False


@pytest.mark.parametrize(("arch", "scaled"), [("llama", False), ("gemma3", True), ("gpt_neox", False)])
def test_embeddings_of_a_folder(arch: str, scaled: bool, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, arch)
    found = stored_embeddings(folder, tiny_config(arch).to_dict())
    if scaled:
        assert found is None
    else:
        assert torch.equal(found, tiny_model(arch).get_input_embeddings().weight)


def test_a_speculators_head_goes_to_sglang(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "llama")
    target = tiny_target("llama")
    config = random_draft(target).head.config.to_dict()
    model = tiny_draft(**{**config, "feature_layers": tuple(config["feature_layers"]), "own_embeddings": True,
                          "draft_vocab_size": 40})  # fmt: skip
    write_speculators(model, tmp_path / "random")
    to_sglang = ["--to", "sglang", "--target", str(folder), "--out", str(tmp_path / "out")]
    refused(run("export", str(tmp_path / "random"), *to_sglang), "in place of the head's own")
    with torch.no_grad():
        model.head.embed_tokens.weight.copy_(target.model.get_input_embeddings().weight)
    write_speculators(model, tmp_path / "head")
    done = run("export", str(tmp_path / "head"), *to_sglang)
    assert done.code == 0, done.err
    assert not read_head(tmp_path / "out").head.config.own_embeddings
    assert not load_draft(str(tmp_path / "head"), target).head.config.own_embeddings
