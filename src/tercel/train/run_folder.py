"""Where a run keeps its things, and whose folder it is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tercel.errors import TercelError
from tercel.file_set import HEAD_FILES, RECORD, read_manifest, refuse_foreign, remove_set, settle
from tercel.files import write_json
from tercel.locks import OURS, folder_lock
from tercel.reading import check_utf8, read_json

STATE = "state.pt"


def other_run(run: Path) -> str:
    """The sentence for a folder of a run with other settings, data or target."""
    return f"{run} holds a run with other settings, data or target; choose another --out, or --overwrite"


@dataclass(frozen=True)
class RunFolder:
    """Where a run keeps its things. The folder itself is the best head so far.

    A marker with the run's key makes a folder a run. Only files that runs write are ever replaced or removed, by name;
    whatever else is put there stays.
    """

    out: Path

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the folder for this process, and finish what a killed one left half done there.

        Raises `TercelError` if another process holds it, if it is neither empty nor a run's, or files of somebody else
        are in the way.
        """
        self._check()
        with folder_lock(self.out):
            self._check()
            for folder, files in ((self.out, HEAD_FILES), (self.last, HEAD_FILES), (self.training, (STATE,))):
                settle(folder)
                refuse_foreign(folder, files)
            yield

    def begin(self, key: str, overwrite: bool) -> None:
        """Mark the folder as that of the run `key`; `overwrite` removes the files of the run that is there.

        Raises `TercelError` if it is another run's, or one whose state is gone.
        """
        found = self._key()
        heads = any(read_manifest(folder) is not None for folder in (self.out, self.last))
        state = read_manifest(self.training) is not None
        if not overwrite and found not in (None, key) and (heads or state):  # a run that saved nothing binds nobody
            raise TercelError(other_run(self.out))
        if not overwrite and heads and not state:
            raise TercelError(
                f"{self.out} holds a head of this run, but {self.training} is gone, so it cannot resume; bring it back "
                "from a copy, or start over with --overwrite"
            )
        if found != key:
            write_json(self.marker, {"format": 1, "key": key}, held=True)
        if overwrite:
            self._clear()

    def _key(self) -> str | None:
        """The key of the run that is here; None if there is no run."""
        if not os.path.lexists(self.marker):
            return None
        try:
            key = read_json(self.marker)["key"]
        except (TercelError, KeyError) as error:
            raise TercelError(
                f"{self.marker}, which says whose run this is, cannot be read; bring it back or choose another --out"
            ) from error
        return str(key)

    def _check(self) -> None:
        """Raises `TercelError` unless the folder is missing, empty, or a run's, where weights can be kept."""
        check_utf8(Path(os.path.realpath(self.out)))
        try:
            found = sorted(name for name in os.listdir(self.out) if not name.startswith(OURS))
        except FileNotFoundError:
            return
        except NotADirectoryError as error:
            raise TercelError(f"{self.out} is a file; choose another --out") from error
        except OSError as error:
            raise TercelError(f"cannot use {self.out}: {error.strerror or error}; choose another --out") from error
        if self._key() is not None or not found:
            return
        if (self.training / STATE).is_file() and (self.out / RECORD).is_file():
            raise TercelError(
                f"{self.out} holds a run of an earlier version, which this one neither continues nor replaces; "
                "choose another --out"
            )
        raise TercelError(
            f"{self.out} is not empty and holds no training run (it has {found[0]}); choose another --out"
        )

    def _clear(self) -> None:
        for folder in (self.out, self.last, self.training):  # the state goes last: a head without one cannot go on
            remove_set(folder)
        for file in (self.metrics, self.curves, self.tracked, self.failure, self.failure.with_suffix(".json")):
            file.unlink(missing_ok=True)
        for folder in (self.last, self.training):
            with suppress(OSError):
                folder.rmdir()

    @property
    def marker(self) -> Path:
        return self.out / f"{OURS}run.json"

    @property
    def last(self) -> Path:
        return self.out / "last"

    @property
    def training(self) -> Path:
        return self.out / "training"

    @property
    def state(self) -> Path:
        return self.training / STATE

    @property
    def metrics(self) -> Path:
        return self.training / "metrics.jsonl"

    @property
    def tracked(self) -> Path:
        """The id under which a tracker knows the run."""
        return self.training / "tracked.txt"

    @property
    def failure(self) -> Path:
        """A step whose loss was no number; what it was is told in the `.json` of the same name."""
        return self.training / "not-finite.safetensors"

    @property
    def curves(self) -> Path:
        return self.training / "curves.png"
