"""Heads to and from the Hub, with a client that answers as the Hub does: none is reached here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

from tercel.draft import save_head
from tercel.errors import TercelError
from tercel.heads import resolve_head
from tercel.interop.hub import from_pretrained, push_to_hub, save_pretrained
from tests.cli.running import refused, run
from tests.draft.heads_for_tests import tiny_draft


class Hub:
    """Keeps what it is given in a folder, as a repository would."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, []

    def snapshot_download(self, name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        self.calls.append(("download", name, revision, allow_patterns))
        if not (self.folder / name).is_dir():
            raise RepositoryNotFoundError("404", response=MagicMock())
        return str(self.folder / name)

    def api(self, **_: Any) -> Any:
        return SimpleNamespace(create_repo=self.create_repo, upload_folder=self.upload_folder)

    def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> None:
        self.calls.append(("create", name, private, exist_ok))

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> Any:
        Path(folder_path).rename(self.folder.joinpath(*repo_id.split("/")[:-1]) / repo_id.split("/")[-1])
        return SimpleNamespace(commit_url=f"https://hub.invalid/{repo_id}/commit/1")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    (tmp_path / "hub" / "me").mkdir(parents=True)
    made = Hub(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.snapshot_download)
    monkeypatch.setattr(huggingface_hub, "HfApi", made.api)
    return made


def test_a_published_head_comes_back_as_it_was(hub: Hub) -> None:
    model = tiny_draft()
    address = push_to_hub(model, "me/head", data_licence="CC0", private=True, dtype=torch.float32)
    assert address.startswith("https://hub.invalid/me/head")
    back = from_pretrained("me/head")
    assert back.head.config == model.head.config
    assert back.info.target == model.info.target
    assert back.info.training.data_licence == "CC0"
    for name, weight in model.head.state_dict().items():
        assert torch.equal(weight, back.head.state_dict()[name])
    assert ("create", "me/head", True, True) in hub.calls
    assert not [p for p in (hub.folder / "me" / "head").iterdir() if p.name.startswith(".")]


def test_the_card_has_what_the_hub_reads_and_how_to_serve(hub: Hub) -> None:
    push_to_hub(tiny_draft(), "me/head", data_licence='CC BY 4.0 "attribution"')
    card = (hub.folder / "me" / "head" / "README.md").read_text()
    front = card.split("---")[1]
    assert "base_model: tiny" in front
    assert 'license_name: "CC BY 4.0 \\"attribution\\""' in front
    assert "tercel export . --to vllm" in card
    assert "Licence of the data: CC BY 4.0" in card or "Not recorded" in card


def test_only_the_files_of_a_head_are_fetched(hub: Hub) -> None:
    save_head(tiny_draft(), hub.folder / "me" / "head")
    assert resolve_head("me/head@v2", "x") == hub.folder / "me" / "head"
    ((_, name, revision, patterns),) = hub.calls
    assert (name, revision) == ("me/head", "v2")
    assert not any(p.endswith((".py", "*")) for p in patterns)


def test_a_licence_must_be_stated(hub: Hub) -> None:
    with pytest.raises(TercelError, match="licence of the data"):
        push_to_hub(tiny_draft(), "me/head")
    assert hub.calls == []


@pytest.mark.parametrize("name", ["head", "me/head@v1", "../x/y", ""])
def test_a_name_that_is_none(hub: Hub, name: str) -> None:
    with pytest.raises(TercelError, match="give owner/name"):
        push_to_hub(tiny_draft(), name, data_licence="CC0")


def test_what_the_hub_refuses_is_said(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> None:
        raise PermissionError("403 Forbidden: not yours")

    monkeypatch.setattr(hub, "create_repo", forbidden)
    with pytest.raises(TercelError, match=r"403 Forbidden.*hf auth login"):
        push_to_hub(tiny_draft(), "me/head", data_licence="CC0")


def test_no_such_repository_and_no_connection(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TercelError, match="no public repository me/none on the Hub"):
        resolve_head("me/none", "x")

    def offline(*_: Any, **__: Any) -> None:
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(TercelError, match="cannot be reached and the head of me/none is not in its cache"):
        resolve_head("me/none", "x")


def test_saving_writes_the_card_too(tmp_path: Path) -> None:
    assert save_pretrained(tiny_draft(), tmp_path / "h") == tmp_path / "h"
    assert {p.name for p in (tmp_path / "h").iterdir()} == {
        ".tercel-files.json",
        "README.md",
        "config.json",
        "model.safetensors",
        "tercel.json",
    }


def test_saving_into_a_folder_that_is_in_use_keeps_it(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "main.c").write_text("years of work")
    (tmp_path / "README.md").write_text("of the whole")
    save_pretrained(tiny_draft(), tmp_path)
    assert (tmp_path / "src" / "main.c").read_text() == "years of work"
    assert (tmp_path / "README.md").read_text() == "of the whole"


def test_push_as_a_user_runs_it(hub: Hub, tmp_path: Path) -> None:
    save_head(tiny_draft(), tmp_path / "h")
    refused(run("push", str(tmp_path / "h"), "me/head"), "data-licence")
    done = run("push", str(tmp_path / "h"), "me/head", "--data-licence", "MIT")
    assert done.code == 0, done.err
    assert "published: https://hub.invalid/me/head/commit/1" in done.out
    assert (hub.folder / "me" / "head" / "model.safetensors").is_file()
