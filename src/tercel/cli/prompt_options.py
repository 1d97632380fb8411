"""Where a prompt comes from, in verbs that answer one."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tercel import limits
from tercel.cli.paths import user_path
from tercel.errors import TercelError
from tercel.reading import UnreadableError, bounded, read_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PromptOptions:
    """The question."""

    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", help="The question; left out, it is read from standard input."),
    ] = None
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=user_path,
            help="Read the question from a UTF-8 text. Of this and of standard input, a byte order mark and one line "
            "end at the very end, which editors add, are not part of the question.",
        ),
    ] = None
    system: Annotated[str | None, typer.Option(help="A system message before it.")] = None
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it stands, without a chat template.")] = False

    def read(self) -> str:
        """Raises `TercelError` as `read_prompt`."""
        return read_prompt(self.prompt, self.prompt_file)

    def tokens(self, tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
        """Raises `TercelError` as `prompt_tokens`."""
        return tuple(prompt_tokens(tokenizer, text, self.system, self.raw))


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The text of `--prompt` as it is, or of the file or of standard input without a byte order mark and one last
    line end: the same words are the same tokens, however they come.

    Raises `TercelError` if there is none, and if it is no text.
    """
    if prompt is not None and file is not None:
        raise TercelError("both --prompt and --prompt-file are given; give one of them")
    if prompt is None and file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise TercelError("there is no prompt; give --prompt TEXT, --prompt-file FILE, or pipe a text in")
    try:
        if prompt is not None:
            prompt.encode()  # bytes that are no UTF-8 come as halves of characters
            text = prompt
        else:
            most = limits.PROMPT_BYTES
            text = _words(bounded(sys.stdin.buffer, most) if file is None else read_bytes(file, most))
    except (OSError, UnreadableError) as error:
        reason = getattr(error, "strerror", None) or error
        where = file or "standard input"
        raise TercelError(f"cannot read the prompt from {where}: {reason}; give a UTF-8 text") from error
    except UnicodeError as error:
        where = "--prompt" if prompt is not None else str(file or "standard input")
        raise TercelError(f"the prompt from {where} is not UTF-8 ({error}); convert it") from error
    if not text.strip():
        raise TercelError("the prompt is empty; give --prompt TEXT, --prompt-file FILE, or pipe a text in")
    return text


def _words(read: bytes) -> str:
    """What was written, without what editors add to it."""
    return read.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n")


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, text: str, system: str | None, raw: bool) -> list[int]:
    """Token ids of a question as a server would send it, or of the bare text.

    Raises `TercelError` if the tokenizer has no chat template and `raw` is not set.
    """
    from tercel.chat import Message, serving_prompt
    from tercel.chat.tokenizing import tokenize

    if raw:
        if system is not None:
            raise TercelError("--system needs the chat template that --raw leaves out; give one of them")
        return list(tokenize(tokenizer, text, special_tokens=True)["input_ids"])
    if not tokenizer.chat_template:
        raise TercelError(f"{tokenizer.name_or_path} has no chat template; give --raw to continue the text itself")
    first = [] if system is None else [Message("system", system)]
    return serving_prompt(tokenizer, [*first, Message("user", text)])
