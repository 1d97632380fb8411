"""A run whose template writes the date goes on with that of its beginning, or says why it cannot."""

from __future__ import annotations

import shutil
from datetime import datetime
from pathlib import Path

import pytest

from tercel.chat.dates import RECORD
from tercel.errors import TercelError
from tercel.train.journal import Journal
from tercel.train.moment import recorded_moment
from tercel.train.run_folder import RunFolder
from tercel.train.run_writer import RunWriter
from tests.train.test_loop import SMALL, run

MOMENT = datetime(2025, 3, 5, 6, 7, 8)
DAMAGED = ['{"step": 0, "rendered_at": "2O25-03-05T06:07:08"}', "\0" * 40, None]
OTHER = '{"step": 0, "rendered_at": "2026-03-05T06:07:08"}'


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped before it was first evaluated: its only head is the last one."""
    out = tmp_path_factory.mktemp("dated") / "run"
    run(out, SMALL, rendered_at=MOMENT, stop_after=1)
    assert not (out / "tercel.json").exists()
    return out


@pytest.fixture
def folder(stopped: Path, tmp_path: Path) -> RunFolder:
    return RunFolder(shutil.copytree(stopped, tmp_path / "run"))


def journal_begins(folder: RunFolder, line: str | None) -> None:
    """With another line than the one that has the moment; None: there is no journal."""
    if line is None:
        folder.metrics.unlink()
        return
    old = folder.metrics.read_text("utf-8").splitlines()[1:]
    folder.metrics.write_text("".join(f"{one}\n" for one in (line, *old)), encoding="utf-8")


@pytest.mark.parametrize("line", [*DAMAGED, OTHER])
def test_a_head_knows_the_moment_that_the_journal_lost(folder: RunFolder, line: str | None) -> None:
    journal_begins(folder, line)
    assert recorded_moment(folder) == MOMENT


def test_the_journal_gets_it_again(folder: RunFolder) -> None:
    journal_begins(folder, DAMAGED[0])
    summary = run(folder.out, SMALL, rendered_at=recorded_moment(folder), stop_after=2)
    assert "neither a loss nor an evaluation; it is left out" in " ".join(summary.notes)
    assert Journal(folder.metrics).rendered_at() == MOMENT


@pytest.mark.parametrize("line", DAMAGED)
@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_text('{"training": {}}')])
def test_without_a_sound_head_the_reason_is_told(folder: RunFolder, line: str | None, damage) -> None:
    damage(folder.last / "tercel.json")
    assert recorded_moment(folder) == MOMENT  # the journal says it
    journal_begins(folder, line)
    with pytest.raises(TercelError, match=r"metrics\.jsonl(, line 1: | is missing).*date.*; bring the file back"):
        recorded_moment(folder)
    folder.state.unlink()  # nothing is there to go on with
    assert recorded_moment(folder) is None


def test_a_run_without_a_date(tmp_path: Path) -> None:
    assert recorded_moment(RunFolder(tmp_path / "none")) is None
    run(tmp_path / "run", SMALL, stop_after=1)
    assert recorded_moment(RunFolder(tmp_path / "run")) is None


def test_a_run_that_saved_nothing_leaves_no_moment(tmp_path: Path) -> None:
    writer = RunWriter(RunFolder(tmp_path / "run"), "key")
    writer.journal.add({"step": 0, RECORD: "2026-03-05T06:07:08"})
    writer.begin(MOMENT.isoformat())
    assert writer.journal.rendered_at() == MOMENT
    writer.begin(None)
    assert writer.journal.entries() == []
