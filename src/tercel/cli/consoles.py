"""Where results and progress are printed: tables on standard output, bars on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from tercel.wheels import OnBytes

PIPED_WIDTH = 140  # a file has no edge: wide enough for every table


def result_console(*, record: bool = False) -> Console:
    """Standard output; tables are not squeezed where it is no terminal."""
    console = Console(highlight=False, record=record)
    if not console.is_terminal:
        console.width = max(console.width, PIPED_WIDTH)
    return console


@contextmanager
def counting_bar(name: str) -> Iterator[Callable[[int, int, str], None]]:
    """A bar set with (done, total, note); it leaves no trace, and is absent without a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=None, note="")

        def show(done: int, total: int, note: str) -> None:
            bar.update(task, completed=done, total=total, note=note)

        yield show


def fetching_bar() -> AbstractContextManager[OnBytes | None]:
    """The bar of a download, or None without a terminal."""
    from tercel.wheels import progress_bar

    console = Console(stderr=True)
    return progress_bar(console) if console.is_terminal else nullcontext()
