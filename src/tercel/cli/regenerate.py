"""`tercel data regenerate`: the target's own answers to a set of prompts, as training data."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress

from tercel import limits
from tercel.cli.consoles import PlainConsole, result_console, text_column
from tercel.cli.groups import with_groups
from tercel.cli.models import open_proposer, open_sampling, open_target, say_notes
from tercel.cli.options import NOTHING, DecodingModelOptions, DraftOptions
from tercel.cli.paths import user_name, user_path
from tercel.cli.sampling_options import FollowConfig, Sample, Temperature
from tercel.decode.proposers import EAGLE3
from tercel.errors import TercelError
from tercel.files import require_free
from tercel.heads import shipped
from tercel.stopping import stopped

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tercel.chat import Conversation, RegenerateReport, RegenerateSettings, Responder
    from tercel.decode.generation_config import Asked

LINE_EVERY = 60.0  # seconds
_ENDPOINT = "Endpoint"


@dataclass(frozen=True)
class EndpointOptions:
    """A model behind a server, in the place of one that is loaded here."""

    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Ask an OpenAI-compatible server there, such as http://localhost:8000/v1, instead of --target.",
            rich_help_panel=_ENDPOINT,
        ),
    ] = None
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="What the server calls the model.", rich_help_panel=_ENDPOINT)
    ] = None
    api_key_env: Annotated[
        str | None,
        typer.Option(
            metavar="VAR", help="The environment variable that holds the server's key.", rich_help_panel=_ENDPOINT
        ),
    ] = None
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds to wait for an answer of the server.", rich_help_panel=_ENDPOINT)
    ] = 600.0

    @property
    def headers(self) -> dict[str, str]:
        """Raises `TercelError` if the variable holds no key."""
        if self.api_key_env is None:
            return {}
        key = os.environ.get(self.api_key_env, "").strip()
        if not key.isascii() or not key.isprintable() or not key:
            raise TercelError(f"the environment variable {self.api_key_env} of --api-key-env holds no key; set it")
        return {"Authorization": f"Bearer {key}"}


@dataclass(frozen=True)
class _Work:
    """The prompts, and where their answers go."""

    prompts: list[Conversation]
    elsewhere: set[str]
    out: Path
    in_flight: int
    notes: list[str]

    def answer(
        self, respond: Responder, settings: RegenerateSettings, tokenizer: PreTrainedTokenizerBase | None
    ) -> None:
        """Have them answered, with a bar, and tell what came of it."""
        from tercel.chat import regenerate

        console = result_console(self.out)
        for note in self.notes:
            console.print_line(f"note: {note}")
        with AnswerProgress(console) as progress:
            try:
                report = regenerate(
                    self.prompts,
                    respond,
                    self.out,
                    tokenizer=tokenizer,
                    settings=settings,
                    in_flight=self.in_flight,
                    answered=self.elsewhere,
                    on_progress=progress.show,
                )
            except KeyboardInterrupt as stop:
                part = f"{self.out}.part"
                raise stopped(stop, f"stopped; {part} keeps the answers; the same command resumes") from None
        for line in report_lines(report, self.out):
            console.print_line(line)


@with_groups
def command(
    prompts: Annotated[
        list[str],
        typer.Argument(parser=user_name, help="Files, names of data sets, or org/name[:split] of the Hub."),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", parser=user_path, help="The JSONL file to write.")],
    model: DecodingModelOptions,
    draft: DraftOptions,
    server: EndpointOptions,
    target: Annotated[
        str | None,
        typer.Option(metavar="TARGET", parser=user_name, help="The model that answers.", show_default=False),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(
            metavar="HEAD",
            parser=user_name,
            help="Draft with this head.",
            show_default="the target's shipped one, or no drafts",
        ),
    ] = None,
    temperature: Temperature = None,
    sample: Sample = False,
    seed: Annotated[int, typer.Option(help="Makes sampled answers repeatable.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens per answer.")] = 512,
    in_flight: Annotated[int, typer.Option(min=1, max=limits.SLOTS, help="Conversations answered at a time.")] = 32,
    limit: Annotated[int | None, typer.Option(min=1, help="Read at most that many prompts of each source.")] = None,
    answered: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            parser=user_name,
            help="Leave out prompts whose ids are in this file of answers; may be repeated.",
            show_default=False,
        ),
    ] = None,
    generation_config: FollowConfig = True,
) -> None:
    """Let a model answer every user turn; the same command resumes a stopped run."""
    from tercel.chat.prompts import answered_ids, read_prompts
    from tercel.decode.generation_config import Asked

    if (target is None) == (server.endpoint is None):
        raise TercelError("say what answers: --target TARGET, or --endpoint URL with --model NAME")
    asked = Asked(
        {"temperature": temperature, "seed": seed, "max_new_tokens": max_new_tokens}, sample, generation_config
    )
    require_free(out)
    notes: list[str] = []
    conversations, elsewhere = read_prompts(prompts, limit, notes), answered_ids(answered or (), notes)
    work = _Work(conversations, elsewhere, out, in_flight, notes)
    if target is None:
        if head is not None or sample:
            option = "--head" if head is not None else "--sample"
            raise TercelError(f"{option} is for a model that is loaded here; leave it out with --endpoint")
        _ask_server(work, server, model, temperature or 0.0, seed, max_new_tokens)
        return
    for option, value in (("--model", server.model), ("--api-key-env", server.api_key_env)):
        if value is not None:
            raise TercelError(f"{option} is for a server; give --endpoint URL too, or leave it out")
    headless = head is None and shipped(target) is None
    if headless and draft.method == EAGLE3:
        draft = DraftOptions(draft=NOTHING)
    _ask_target(work, target, head, model, draft, asked)


def _ask_target(
    work: _Work, name: str, head: str | None, model: DecodingModelOptions, draft: DraftOptions, asked: Asked
) -> None:
    from tercel.chat import RegenerateSettings
    from tercel.decode.engine import Engine
    from tercel.decode.generation_config import described
    from tercel.decode.responder import EngineResponder

    draft.require_lossless("the answers")
    loaded, seed, most = open_target(name, model), asked.params.seed or 0, asked.params.max_new_tokens
    if most >= loaded.context_length:
        raise TercelError(
            f"--max-new-tokens {most} leaves no room for a prompt in the {loaded.context_length} "
            f"tokens that {name} takes; lower it"
        )
    params = open_sampling(asked, loaded)
    slots = min(work.in_flight, len(work.prompts))
    engine = Engine(loaded, open_proposer(head, loaded, draft, slots), slots=slots)
    settings = RegenerateSettings(
        target=loaded.fingerprint,
        temperature=params.temperature,
        seed=seed,
        max_new_tokens=most,
        context=loaded.context_length - most,
        sampling=described(params),
        template_arguments=loaded.template_arguments or None,
    )
    work.answer(EngineResponder(engine, params), settings, loaded.tokenizer)
    say_notes(engine.proposer)


def _ask_server(
    work: _Work, server: EndpointOptions, model: DecodingModelOptions, temperature: float, seed: int, most: int
) -> None:
    from tercel.chat import RegenerateSettings
    from tercel.chat.arguments import parse_arguments
    from tercel.chat.endpoint import Asking, EndpointResponder
    from tercel.http.client import Http

    assert server.endpoint is not None
    if server.model is None:
        raise TercelError("--endpoint needs the model's name there; give --model NAME")
    arguments = parse_arguments(model.template_arg or ())
    http = Http.at(server.endpoint, server.timeout, server.headers)
    asking = Asking(server.model, temperature, seed, most, arguments)
    settings = RegenerateSettings(
        target=f"{server.model} behind an endpoint",
        temperature=temperature,
        seed=seed,
        max_new_tokens=most,
        context=None,
        template_arguments=arguments or None,
    )
    with EndpointResponder(http, asking) as respond:
        work.answer(respond, settings, None)


class AnswerProgress(Progress):
    """A bar over conversations, with answers and tokens a second and the time left; without a terminal a line a minute.

    clock: seconds, for tests.
    """

    def __init__(self, console: PlainConsole, clock: Callable[[], float] = time.monotonic) -> None:
        columns = (text_column("answering"), BarColumn(), MofNCompleteColumn(), text_column("{task.fields[rates]}"))
        super().__init__(*columns, console=console)
        self._bar = self.add_task("answering", total=None, rates="")
        self._console, self._clock = console, clock
        self._started = self._said = clock()

    def show(self, report: RegenerateReport) -> None:
        now = self._clock()
        done = report.answered + report.failed + report.skipped
        rates = self._rates(report, max(now - self._started, 1e-9))
        self.update(self._bar, total=report.read, completed=done, rates=rates)
        if not self._console.is_terminal and now - self._said >= LINE_EVERY:
            self._said = now
            self._console.print_line(f"{done:,} of {report.read:,} conversations  {rates}")

    @staticmethod
    def _rates(report: RegenerateReport, seconds: float) -> str:
        """Tokens count as they are made: of many answers at a time the first ends late."""
        rates = f"{report.turns / seconds:.2f} answers/s  {report.made / seconds:,.0f} tokens/s"
        if report.tokens_left is None or not report.made:
            return rates
        left = timedelta(seconds=round(seconds / report.made * report.tokens_left))
        return f"{rates}  {left} left"


def report_lines(report: RegenerateReport, out: Path) -> list[str]:
    """The account of a run: its counts always add up."""
    lines = [f"{report.answered} answered + {report.failed} failed + {report.skipped} skipped = {report.read} read"]
    if report.done_before:
        lines.append(f"{report.done_before} of the skipped were answered by an earlier run")
    if report.elsewhere:
        lines.append(f"{report.elsewhere} of the skipped are answered in the files of --answered")
    lines += [f"{count} × {reason}" for reason, count in report.reasons.items()]
    cut = f", {report.cut} of them cut at the token limit" if report.cut else ""
    if report.rendered_at is not None:
        lines.append(f"the chat template writes the date; all of them use {report.rendered_at:%Y-%m-%d}")
    lines.append(f"{report.turns:,} answers of {report.tokens:,} tokens{cut}, in {out}")
    return lines
