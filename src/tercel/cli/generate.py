"""`tercel generate`: one prompt, one answer."""

from __future__ import annotations

from typing import Annotated

import typer

from tercel.cli.answer import LEGEND, as_json, rate_line, stream_answer
from tercel.cli.consoles import result_console
from tercel.cli.groups import with_groups
from tercel.cli.models import open_proposer, open_sampling, open_target, say_notes
from tercel.cli.options import DecodingModelOptions, DraftOptions, HeadName, JsonFile, TargetName
from tercel.cli.prompt_options import PromptOptions
from tercel.cli.sampling_options import SamplingOptions
from tercel.files import write_json


@with_groups
def command(
    target: TargetName,
    model: DecodingModelOptions,
    draft: DraftOptions,
    sampling: SamplingOptions,
    prompt: PromptOptions,
    head: HeadName = None,
    show: Annotated[bool, typer.Option("--show", help="Colour accepted drafts, and print rate and τ.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Answer a prompt, the text streamed as it is verified.

    The text is the model's own, tabs and line ends included, and one line end. On a terminal its control characters
    are shown (as ␛) and not sent; into a pipe or a file they go as they are.
    """
    asked = sampling.asked()
    text = prompt.read()
    loaded = open_target(target, model)
    ids = prompt.tokens(loaded.tokenizer, text)
    params = open_sampling(asked, loaded)
    proposer = open_proposer(head, loaded, draft)
    from tercel.decode.engine import Engine
    from tercel.decode.types import Request

    console = result_console(json_file)
    if show:
        console.print(LEGEND)
    shown = stream_answer(Engine(loaded, proposer), Request(ids, params), console, colours=show)
    if json_file is not None:
        write_json(json_file, as_json(shown))
    if show:
        console.print_line(rate_line(shown), "dim")
    say_notes(proposer)
