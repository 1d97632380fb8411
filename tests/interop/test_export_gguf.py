"""The GGUF draft for llama.cpp: its keys, the target's tokenizer in it, and faults in its writer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGUFReader

from tercel.errors import TercelError
from tercel.interop.engines import find, gguf_draft
from tercel.interop.proof import compare
from tests.interop.export_worlds import DEPTH, LLAMA3, draft, export
from tests.tiny import save_tiny_gguf


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("target") / "target.gguf"
    save_tiny_gguf(file)
    return file


def test_a_draft_says_what_llamacpp_needs(gguf: Path, tmp_path: Path) -> None:
    model = draft(norm_before_residual=True)
    export(model, "llamacpp", tmp_path / "out", gguf)
    reader = GGUFReader(tmp_path / "out" / "draft.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    mine = {name: field.contents() for name, field in GGUFReader(gguf).fields.items()}
    assert fields["eagle3.target_layers"] == [2, 3, 6]
    assert fields["eagle3.norm_before_residual"] is True
    assert {k: v for k, v in fields.items() if k.startswith("tokenizer.")} == {
        k: v for k, v in mine.items() if k.startswith("tokenizer.")
    }
    d2t = next(tensor for tensor in reader.tensors if tensor.name == "d2t")
    assert torch.equal(torch.from_numpy(d2t.data.copy()), model.vocabulary.ids)  # ids of the target
    for other in (draft(), draft(norm_before_residual=True, feature_layers=(1, 2, 5))):
        other.head.load_state_dict(model.head.state_dict())
        with pytest.raises(TercelError, match=r"norm_before_residual|inputs of layers"):
            compare(other, find("llamacpp").view(tmp_path / "out", DEPTH))


def test_llamacpp_needs_the_targets_own_gguf(gguf: Path, tmp_path: Path) -> None:
    with pytest.raises(TercelError, match=r"give the target as FILE\.gguf"):
        export(draft(), "llamacpp", tmp_path / "out")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(gguf.read_bytes()[:400])
    with pytest.raises(TercelError, match="not a whole GGUF"):
        export(draft(), "llamacpp", tmp_path / "out", broken)
    with pytest.raises(TercelError, match="128 tokens, but the head is for a target of 256"):
        export(draft(vocab_size=256, draft_vocab_size=256), "llamacpp", tmp_path / "out", gguf)
    assert [entry.name for entry in tmp_path.iterdir()] == ["broken.gguf"]


@pytest.mark.parametrize("part", ["_pairs", "_frequency_factors"])
def test_a_wrong_gguf_writer_is_found_out(
    part: str, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {"_pairs": lambda weight, heads: weight, "_frequency_factors": lambda c: torch.ones(c.head_dim // 2)}
    monkeypatch.setattr(gguf_draft, part, wrong[part])
    with pytest.raises(TercelError, match=r"other values|would rotate"):
        export(draft(rope_parameters=LLAMA3), "llamacpp", tmp_path / "out", gguf)
    assert list(tmp_path.iterdir()) == []
