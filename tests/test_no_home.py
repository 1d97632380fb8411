"""A user without HOME and without an entry in passwd, as in a container that runs under some number."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from tercel.draft import save_head
from tercel.errors import TercelError
from tercel.files import cache_dir
from tercel.heads import resolve_head
from tercel.target_model.sources import resolve
from tests.draft.heads_for_tests import tiny_draft
from tests.tiny import save_tiny

HOMELESS = """
import contextlib, io, json, os, pwd, sys

def unknown(*_):
    raise KeyError("uid not found")

pwd.getpwuid = pwd.getpwnam = unknown
from tercel.cli.app import main

for arguments in json.loads(sys.argv[1]):
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            main(arguments)
    except SystemExit as ended:
        print(json.dumps([ended.code, said.getvalue()]))
"""


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for name in ("HOME", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "USER", "LOGNAME", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    return dict(os.environ)


def test_what_needs_a_home_says_so_and_the_rest_works(homeless: dict[str, str], tmp_path: Path) -> None:
    target = str(save_tiny(tmp_path, "llama"))
    rows = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}]
    save_head(tiny_draft(), tmp_path / "head")
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cases = {
        "set XDG_CACHE_HOME": [["generate", "smollm2-135m", "-p", "x"]],
        "set HF_HOME": [
            ["generate", "no/such", "-p", "x"],
            ["data", "show", "no/such", "--target", target],
            ["push", str(tmp_path / "head"), "me/head", "--data-licence", "MIT"],
        ],
        "no home is known": [["generate", "~", "-p", "x"], ["generate", "~nobody/x", "-p", "x"]],
        "": [["data", "show", str(tmp_path / "chats.jsonl"), "--target", target]],
    }
    flat = [(part, arguments) for part, several in cases.items() for arguments in several]
    here = tmp_path / "here"
    here.mkdir()
    command = [sys.executable, "-c", HOMELESS, json.dumps([arguments for _, arguments in flat])]
    done = subprocess.run(command, env=homeless, cwd=here, capture_output=True, text=True, check=True)
    ends = [json.loads(line) for line in done.stdout.splitlines()]
    for (part, arguments), (code, said) in zip(flat, ends, strict=True):
        assert (code, part in said) == (2 if part else 0, True), (arguments, said)
        assert len(said.splitlines()) == bool(part), said
    assert not list(here.iterdir())  # such as a folder named ~


def test_where_the_cache_is(homeless: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pwd, "getpwuid", lambda _: (_ for _ in ()).throw(KeyError("uid not found")))
    with pytest.raises(TercelError, match=r"no home folder.*set XDG_CACHE_HOME"):
        cache_dir()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "tercel"
    monkeypatch.setenv("XDG_CACHE_HOME", "~/elsewhere")
    assert cache_dir() == tmp_path / "elsewhere" / "tercel"
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(TercelError, match=r"cannot keep a cache in .*Not a directory; set XDG_CACHE_HOME"):
        cache_dir()


def test_names_that_begin_like_a_home(
    homeless: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pwd, "getpwuid", lambda _: (_ for _ in ()).throw(KeyError("uid not found")))
    for name in ("~", "~/model", "~nobody-here/model"):
        with pytest.raises(TercelError, match="there is no folder or file ~"):
            resolve(name)
        with pytest.raises(TercelError, match="there is no head ~"):
            resolve_head(name, "smollm2-135m")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "head").mkdir()
    assert resolve_head("~/head", "smollm2-135m") == tmp_path / "head"
