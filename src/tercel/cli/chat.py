"""`tercel chat`: a conversation in the terminal."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from tercel.cli.answer import LEGEND, rate_line, stream_answer
from tercel.cli.consoles import OutputClosed, PlainConsole, result_console
from tercel.cli.groups import with_groups
from tercel.cli.models import open_proposer, open_sampling, open_target, say_notes
from tercel.cli.options import DecodingModelOptions, DraftOptions, HeadName, TargetName
from tercel.cli.sampling_options import SamplingOptions
from tercel.errors import TercelError
from tercel.stopping import Terminated

if TYPE_CHECKING:
    from tercel.chat import Message
    from tercel.decode.engine import Engine
    from tercel.decode.sampling import SamplingParams

HELP = "/reset forgets the conversation, /quit leaves; Ctrl-C stops an answer"


@with_groups
def command(
    target: TargetName,
    model: DecodingModelOptions,
    draft: DraftOptions,
    sampling: SamplingOptions,
    head: HeadName = None,
    system: Annotated[str | None, typer.Option(help="A system message before the conversation.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Colour accepted drafts, and print rate and τ.")] = False,
) -> None:
    """Talk to the target; answers are streamed as they are verified.

    As with `generate`, control characters in an answer are shown on a terminal and go into a pipe as they are.
    """
    asked = sampling.asked()
    loaded = open_target(target, model)
    if not loaded.tokenizer.chat_template:
        raise TercelError(f"{target} has no chat template; `tercel generate --raw` continues a text")
    from tercel.decode.engine import Engine
    from tercel.decode.prefixes import MB, PREFIX_MB

    params = open_sampling(asked, loaded)
    engine = Engine(loaded, open_proposer(head, loaded, draft), prefix_cache=PREFIX_MB * MB)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # bytes that are no text are the user's slip, and not the end
    console = result_console()
    console.print_line(HELP, "dim")
    if show:
        console.print(LEGEND)
    ChatSession(engine, params, console, system, show).talk()
    say_notes(engine.proposer)


class ChatSession:
    """Messages so far and what answers them."""

    def __init__(
        self, engine: Engine, params: SamplingParams, console: PlainConsole, system: str | None, show: bool
    ) -> None:
        self._engine, self._params, self._console = engine, params, console
        self._system, self._show = system, show
        self._messages = self._beginning()

    def talk(self) -> None:
        """Until /quit or the end of the input."""
        self._engine.target.expect_many()
        while True:
            try:
                line = self._console.input(Text("> ", "bold")).strip()
            except EOFError:
                return
            if line == "/quit":
                return
            if line == "/reset":
                self._messages = self._beginning()
                self._console.print_line("forgotten", "dim")
            elif line.startswith("/"):
                self._console.print_line(f"there is no command {line}; {HELP}", "dim")
            elif line:
                self._turn(line)

    def _turn(self, question: str) -> None:
        """Answer, and keep the turn only if the whole answer came."""
        from tercel.chat import Message

        asked = [*self._messages, Message("user", question)]
        try:
            answer = self._answer(asked)
        except TercelError as error:
            self._console.print_line(str(error), "yellow")
        except (OutputClosed, Terminated):
            raise
        except KeyboardInterrupt:
            self._console.print()
            self._console.print_line("stopped; this turn is forgotten", "dim")
        else:
            self._messages = [*asked, answer]

    def _answer(self, asked: list[Message]) -> Message:
        from tercel.chat import Message, serving_prompt
        from tercel.decode.types import Request

        target = self._engine.target
        prompt = tuple(serving_prompt(target.tokenizer, asked))
        if len(prompt) >= target.context_length:
            raise TercelError(
                f"the conversation has grown to {len(prompt)} tokens, but {target.source.name} takes "
                f"{target.context_length} with the answer; /reset starts a new one"
            )
        shown = stream_answer(self._engine, Request(prompt, self._params), self._console, colours=self._show)
        if self._show:
            self._console.print_line(rate_line(shown), "dim")
        return Message("assistant", shown.result.text)

    def _beginning(self) -> list[Message]:
        from tercel.chat import Message

        return [] if self._system is None else [Message("system", self._system)]
