"""`tercel data regenerate`: the target's own answers to a set of prompts, as training data."""

from __future__ import annotations

import time
from collections.abc import Callable
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
    from tercel.chat import RegenerateReport

LINE_EVERY = 60.0  # seconds


@with_groups
def command(
    prompts: Annotated[
        list[str],
        typer.Argument(parser=user_name, help="Files, names of data sets, or org/name[:split] of the Hub."),
    ],
    target: Annotated[str, typer.Option(metavar="TARGET", parser=user_name, help="The model that answers.")],
    out: Annotated[Path, typer.Option(metavar="FILE", parser=user_path, help="The JSONL file to write.")],
    model: DecodingModelOptions,
    draft: DraftOptions,
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
    """Let the target answer every user turn; the same command resumes a stopped run."""
    from tercel.chat import RegenerateSettings, regenerate
    from tercel.chat.prompts import answered_ids, read_prompts
    from tercel.decode.engine import Engine
    from tercel.decode.generation_config import Asked, described
    from tercel.decode.responder import EngineResponder

    given = {"temperature": temperature, "seed": seed, "max_new_tokens": max_new_tokens}
    asked = Asked(given, sample, generation_config)
    require_free(out)
    notes: list[str] = []
    conversations = read_prompts(prompts, limit, notes)
    elsewhere = answered_ids(answered or (), notes)
    loaded = open_target(target, model)
    if max_new_tokens >= loaded.context_length:
        raise TercelError(
            f"--max-new-tokens {max_new_tokens} leaves no room for a prompt in the {loaded.context_length} "
            f"tokens that {target} takes; lower it"
        )
    headless = head is None and shipped(target) is None
    if headless and draft.method == EAGLE3:
        draft = DraftOptions(draft=NOTHING)
    params = open_sampling(asked, loaded)
    slots = min(in_flight, len(conversations))
    engine = Engine(loaded, open_proposer(head, loaded, draft, slots), slots=slots)
    responder = EngineResponder(engine, params)
    settings = RegenerateSettings(
        target=loaded.fingerprint,
        temperature=params.temperature,
        seed=seed,
        max_new_tokens=max_new_tokens,
        context=loaded.context_length - max_new_tokens,
        sampling=described(params),
        template_arguments=loaded.template_arguments or None,
    )
    console = result_console(out)
    for note in notes:
        console.print_line(f"note: {note}")
    with AnswerProgress(console) as progress:
        try:
            report = regenerate(
                conversations,
                responder,
                out,
                tokenizer=loaded.tokenizer,
                settings=settings,
                in_flight=in_flight,
                answered=elsewhere,
                on_progress=progress.show,
            )
        except KeyboardInterrupt as stop:
            raise stopped(stop, f"stopped; {out}.part keeps the answers; the same command resumes") from None
    for line in report_lines(report, out):
        console.print_line(line)
    say_notes(engine.proposer)


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
        rates = self._rates(report, done, max(now - self._started, 1e-9))
        self.update(self._bar, total=report.read, completed=done, rates=rates)
        if not self._console.is_terminal and now - self._said >= LINE_EVERY:
            self._said = now
            self._console.print_line(f"{done:,} of {report.read:,} conversations  {rates}")

    @staticmethod
    def _rates(report: RegenerateReport, done: int, seconds: float) -> str:
        """What was done before this run cost it nothing, so the rest is not judged by it."""
        rates = f"{report.turns / seconds:.2f} answers/s  {report.tokens / seconds:,.0f} tokens/s"
        here = done - report.done_before - report.elsewhere
        if not here:
            return rates
        left = timedelta(seconds=round(seconds / here * (report.read - done)))
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
