"""The moment that the chats of a run were rendered for, where their template writes the date."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

from tercel.chat import dates
from tercel.errors import TercelError
from tercel.file_set import RECORD, read_manifest
from tercel.files import sha256_file
from tercel.reading import read_json
from tercel.train.journal import Journal
from tercel.train.run_folder import RunFolder


def recorded_moment(folder: RunFolder) -> datetime | None:
    """What the run in `folder` recorded; None if there is no run to continue, or its template writes no date.

    A head that is as it was written says it for certain; before the first one, the journal does.
    Raises `TercelError` if it can be neither read nor ruled out.
    """
    for head in (folder.last, folder.out):
        if (moment := _of_a_head(head)) is not None:
            return moment
    journal = Journal(folder.metrics)
    moment = journal.rendered_at()
    if moment is None and os.path.lexists(folder.state) and (problem := journal.problem()):
        raise TercelError(
            f"{problem}; the date that the chat template wrote when this run began stood there, and the run cannot "
            "continue without it; bring the file back from a copy, or start over with --overwrite"
        )
    return moment


def _of_a_head(folder: Path) -> datetime | None:
    manifest = read_manifest(folder)
    try:
        if manifest is None or manifest.files.get(RECORD) != sha256_file(folder / RECORD):
            return None
        return dates.parse_moment(read_json(folder / RECORD)["training"])
    except (OSError, TercelError, KeyError):
        return None
