"""`tercel generate`: one prompt, one answer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from tercel.cli.answer import LEGEND, as_json, rate_line, stream_answer
from tercel.cli.groups import with_groups
from tercel.cli.models import check_prompt, open_proposer, open_target
from tercel.cli.options import DraftOptions, HeadName, JsonFile, ModelOptions, SamplingOptions, TargetName
from tercel.errors import TercelError
from tercel.files import write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@with_groups
def command(
    target: TargetName,
    model: ModelOptions,
    draft: DraftOptions,
    sampling: SamplingOptions,
    head: HeadName = None,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", help="The question; left out, it is read from standard input."),
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option(metavar="FILE", help="Read the question from a file.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message before it.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Go on with the text as it stands, without a chat template.")
    ] = False,
    show: Annotated[bool, typer.Option("--show", help="Colour accepted drafts, and print rate and τ.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Answer a prompt, the text streamed as it is verified."""
    params = sampling.params()
    text = read_prompt(prompt, prompt_file)
    loaded = open_target(target, model)
    ids = prompt_tokens(loaded.tokenizer, text, system, raw)
    proposer = open_proposer(head, loaded, draft)
    check_prompt(proposer, loaded, len(ids), params.max_new_tokens)
    from tercel.decode.engine import Engine
    from tercel.decode.types import Request

    console = Console(highlight=False)
    if show:
        console.print(LEGEND)
    shown = stream_answer(Engine(loaded, proposer), Request(tuple(ids), params), console, colours=show)
    if show:
        console.print(Text(rate_line(shown), style="dim"))
    if json_file is not None:
        write_json(json_file, as_json(shown))


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The text of `--prompt`, of the file, or of standard input. Raises `TercelError` if there is none."""
    if prompt is not None and file is not None:
        raise TercelError("both --prompt and --prompt-file are given; give one of them")
    if prompt is not None:
        text = prompt
    elif file is not None:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TercelError(f"cannot read the prompt from {file}: {error}; give a UTF-8 text file") from error
    elif sys.stdin.isatty():
        raise TercelError("there is no prompt; give --prompt TEXT, --prompt-file FILE, or pipe a text in")
    else:
        text = sys.stdin.read()
    if not text.strip():
        raise TercelError("the prompt is empty; give --prompt TEXT, --prompt-file FILE, or pipe a text in")
    return text


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, text: str, system: str | None, raw: bool) -> list[int]:
    """Token ids of a question as a server would send it, or of the bare text.

    Raises `TercelError` if the tokenizer has no chat template and `raw` is not set.
    """
    from tercel.chat import Message, serving_prompt

    if raw:
        if system is not None:
            raise TercelError("--system needs the chat template that --raw leaves out; give one of them")
        return list(tokenizer(text, verbose=False)["input_ids"])
    if not tokenizer.chat_template:
        raise TercelError(f"{tokenizer.name_or_path} has no chat template; give --raw to go on with the text itself")
    first = [] if system is None else [Message("system", system)]
    return serving_prompt(tokenizer, [*first, Message("user", text)])
