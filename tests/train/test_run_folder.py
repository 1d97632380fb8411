"""Whose folder it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tercel.errors import TercelError
from tercel.train.run_folder import RunFolder


def taken(folder: Path) -> None:
    with RunFolder(folder).held():
        pass


# What people have in folders; the first three were once taken for a run, and lost.
SOMEBODYS = [
    ["training/notes.txt", "src/main.c", ".git/HEAD"],
    ["training/state.pt", "thesis.tex"],
    ["tercel.json"],
    ["config.json", "model.safetensors"],
    ["thesis.tex"],
    [".hidden"],
]


@pytest.mark.parametrize("names", SOMEBODYS)
def test_a_folder_that_no_run_made_is_never_touched(tmp_path, names):
    out = tmp_path / "out"
    for name in names:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("years of work")
    with pytest.raises(TercelError, match=r"is not empty and holds no training run .*; choose another --out"):
        taken(out)
    assert {str(p.relative_to(out)): p.read_text() for p in out.rglob("*") if p.is_file()} == dict.fromkeys(
        names, "years of work"
    )


def test_a_run_of_an_earlier_version_is_refused_and_kept(tmp_path):
    for name in ("training/state.pt", "tercel.json", "model.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    with pytest.raises(TercelError, match="holds a run of an earlier version"):
        taken(tmp_path)


def test_a_place_that_cannot_be_used_is_told(tmp_path):
    (tmp_path / "file").write_text("x")
    for out, message in (
        (tmp_path / "file", "is a file; choose another --out"),
        (tmp_path / "file" / "below", "is a file; choose another --out"),
        (tmp_path / ("n" * 300), "File name too long"),
        (Path("/proc/run"), "cannot write /proc/run"),
    ):
        with pytest.raises(TercelError, match=message):
            taken(out)


def test_an_empty_folder_is_free_and_stays_empty_if_nothing_comes_of_it(tmp_path):
    taken(tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".tercel-lock").write_text("1")  # a process that was killed at once
    taken(tmp_path / "empty")
    assert [p.name for p in tmp_path.iterdir()] == ["empty"]


def test_a_marker_that_cannot_be_read_is_no_licence_to_begin_anew(tmp_path):
    folder = RunFolder(tmp_path)
    with folder.held():
        folder.begin("key", False)
    folder.marker.write_text("{")
    with pytest.raises(TercelError, match=r"run\.json, which says whose run this is, cannot be read"):
        taken(tmp_path)
