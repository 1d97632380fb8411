"""Where everything is printed: results on standard output, bars and errors on standard error.

All of it passes `PlainConsole`, so that no text from a file, a model or a server reaches the terminal as a command,
nor is read as rich's markup. Styles are given apart from the text.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.text import Text

from tercel.plain import encodable, one_line, visible

if TYPE_CHECKING:
    from tercel.wheels import OnBytes

PIPED_WIDTH = 140  # a file has no edge: wide enough for every table
STANDARD_OUTPUT = (Path("-"), Path("/dev/stdout"))  # as the FILE of an option
Piece = tuple[str, str]  # a text and its style


class OutputClosed(KeyboardInterrupt):
    """Whoever read our output has gone (`… | head`): an interruption, so that what is worth keeping is kept."""


class PlainConsole(Console):
    """A console that shows control characters instead of sending them, parses no markup, and never fails on a
    character that its output cannot write.

    Tables, titles and bars get their texts as plain strings, which are made safe before they are measured; whatever
    else is rendered is made safe as it leaves.
    """

    def __init__(self, *, stderr: bool = False, record: bool = False) -> None:
        super().__init__(stderr=stderr, record=record, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **how: Any) -> Text:
        return super().render_str(self._shown(text), **how)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(self._shown(segment.text), segment.style)

    def print_line(self, text: str, style: str = "") -> None:
        """Print one line: whatever `text` holds it stays one, and it is not broken at the terminal's edge."""
        self.print(one_line(text), style=style, soft_wrap=True)

    def print_text(self, pieces: Iterable[Piece]) -> None:
        """Print text with its own tabs, spaces and line ends: nothing is expanded, wrapped, trimmed or added."""
        self.print(_Pieces(pieces), soft_wrap=True)

    def print_answer(self, pieces: Iterable[Piece]) -> None:
        """Print a model's words: on a terminal as `print_text`; elsewhere, where a program reads, as they are."""
        if self.is_terminal:
            self.print_text(pieces)
            return
        try:
            self.file.write("".join(text for text, _ in pieces))
            self.file.flush()
        except BrokenPipeError:
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """Called by rich. Raises `OutputClosed`; this console and the stream are silent from here on."""
        self.quiet = True
        silence(self.file)
        raise OutputClosed

    def _shown(self, text: str) -> str:
        return encodable(visible(text), self.encoding)


class _Pieces:
    """Renders as the very pieces: rich's own texts would expand tabs and trim what a wrapped line ends with."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._pieces = pieces

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for text, style in self._pieces:
            yield Segment(text, console.get_style(style))


def silence(stream: IO[str] | None) -> None:
    """Lead a stream whose reader has gone nowhere, so that not even the end of the program fails on it."""
    if stream is None:
        return
    try:
        number = stream.fileno()
    except io.UnsupportedOperation:  # one in memory
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)


def result_console(*files: Path | None, record: bool = False) -> PlainConsole:
    """Standard output, or standard error where one of the verb's `files` is standard output (`--json -`).

    Tables are not squeezed where it is no terminal.
    """
    console = PlainConsole(stderr=any(file in STANDARD_OUTPUT for file in files), record=record)
    if not console.is_terminal:
        console.width = max(console.width, PIPED_WIDTH)
    return console


def say(sentence: str) -> None:
    """One line on standard error, if anybody is there to read it."""
    with suppress(OutputClosed, OSError):
        PlainConsole(stderr=True).print_line(sentence)


def working(what: str) -> AbstractContextManager[object]:
    """A spinner with a word on what goes on, on standard error; nothing without a terminal."""
    return PlainConsole(stderr=True).status(Text(visible(what)))


@contextmanager
def unseen() -> Iterator[None]:
    """Nothing printed within is shown: of several processes of one command, the first alone says how it goes."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def text_column(template: str) -> TextColumn:
    """A text of a bar, such as `{task.description}`; foreign text in it is no markup."""
    return TextColumn(template, markup=False)


@contextmanager
def counting_bar(name: str) -> Iterator[Callable[[int, int, str], None]]:
    """A bar set with (done, total, note); it leaves no trace, and is absent without a terminal."""
    console = PlainConsole(stderr=True)
    columns = (
        text_column("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        text_column("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=None, note="")

        def show(done: int, total: int, note: str) -> None:
            bar.update(task, completed=done, total=total, note=one_line(note))

        yield show


def fetching_bar() -> AbstractContextManager[OnBytes | None]:
    """The bar of a download, or None without a terminal."""
    from tercel.wheels import progress_bar

    console = PlainConsole(stderr=True)
    return progress_bar(console) if console.is_terminal else nullcontext()
