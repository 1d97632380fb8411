"""A small model made of a target's layers, which drafts for it (`bench/draft_model.py`)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import draft_model
import pytest
import torch

from tercel.cli.app import main
from tercel.errors import TercelError
from tests.tiny import save_tiny, tiny_model


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_layers_are_the_first_the_last_and_between(arch: str) -> None:
    whole = tiny_model(arch, num_hidden_layers=5)
    small = draft_model.thinned(whole, 3)
    assert small.config.num_hidden_layers == 3
    theirs, own = whole.get_decoder().layers, small.get_decoder().layers
    for place, layer in enumerate((0, 2, 4)):
        for name, weight in own[place].state_dict().items():
            assert torch.equal(weight, theirs[layer].state_dict()[name])
    tokens = torch.arange(5, 17)[None]
    with torch.no_grad():
        at_once = small(tokens, use_cache=False).logits
        first = small(tokens[:, :7], use_cache=True)
        rest = small(tokens[:, 7:], cache=first.past_key_values).logits
    torch.testing.assert_close(rest, at_once[:, 7:])  # each layer has a cache of its own
    with pytest.raises(TercelError, match="the target has 5 layers; --layers 6"):
        draft_model.thinned(whole, 6)


def test_it_learns_and_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    target, data, out = save_tiny(tmp_path / "target", "llama"), tmp_path / "answers.jsonl", tmp_path / "small"
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"count {n}"},
                {"role": "assistant", "content": "one two three four"},
            ]
        }
        for n in range(200)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    flags = ["--layers", "1", "--steps", "30", "--batch-tokens", "128", "--lr", "1e-2"]
    monkeypatch.setattr(sys, "argv", ["draft_model.py", str(target), str(data), str(out), *flags])
    draft_model.main()
    losses = [float(line.rsplit(" ", 1)[1]) for line in capsys.readouterr().out.splitlines()]
    assert losses[-1] < losses[0] / 2  # held out
    argv = ["tercel", "generate", str(target), "--draft", "sps", "--draft-model", str(out), "--prompt", "count 3"]
    monkeypatch.setattr(sys, "argv", [*argv, "--max-new-tokens", "8"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None), capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["draft_model.py", str(target), str(data), str(out), *flags])
    with pytest.raises(TercelError, match="exists already"):
        draft_model.main()
