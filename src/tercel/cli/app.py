"""`tercel`: the verbs, and how every error reaches the user: one sentence and an exit code, no traceback."""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version as installed_version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tercel.cli import (
    bench,
    chat,
    data,
    demo,
    doctor,
    export,
    generate,
    inspect,
    push,
    regenerate,
    serve_command,
    train,
    verify,
)
from tercel.errors import TercelError

USER_ERROR, INTERNAL_ERROR, INTERRUPTED = 2, 1, 130
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


class _Verbs(TyperGroup):
    """Ends a verb that raised something a user can do something about with one sentence."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TercelError as error:
            raise _ended(f"error: {' '.join(str(error).split())}", USER_ERROR) from error
        except KeyboardInterrupt as error:
            raise _ended(str(error) or "interrupted", INTERRUPTED) from error
        except OSError as error:
            if error.errno not in _DISK:
                raise
            what = f"writing {error.filename} failed" if error.filename else "writing failed"
            raise _ended(f"error: {what}: {error.strerror}; free space and try again", USER_ERROR) from error


app = typer.Typer(
    cls=_Verbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train EAGLE-3 draft heads for Hugging Face causal language models; decode losslessly with them.",
)
app.command("train")(train.command)
app.command("generate")(generate.command)
app.command("chat")(chat.command)
app.command("verify")(verify.command)
app.command("bench")(bench.command)
app.command("inspect")(inspect.command)
app.command("export")(export.command)
app.command("doctor")(doctor.command)
app.command("serve-command")(serve_command.command)
app.command("push")(push.command)
app.command("demo")(demo.command)
data.app.command("regenerate")(regenerate.command)
app.add_typer(data.app, name="data")


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"tercel {installed_version('tercel')}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print the traceback of an unexpected error.")] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; always ends with `SystemExit`.

    Codes: 0 done, 1 a check failed or an unexpected error, 2 a wrong input, 130 interrupted.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        with _quiet_libraries():
            app(arguments, prog_name="tercel")
    except Exception as error:
        if "--debug" in arguments:
            raise
        text = " ".join(str(error).split())[:300] or "no message"
        typer.echo(
            f"unexpected error: {type(error).__name__}: {text}; `tercel --debug …` shows where it happened",
            err=True,
        )
        sys.exit(INTERNAL_ERROR)


def _ended(sentence: str, code: int) -> typer.Exit:
    typer.echo(sentence, err=True)
    return typer.Exit(code)


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Without the chatter of the libraries underneath; what a user has set himself stays."""
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY", "DATASETS_VERBOSITY"):
        os.environ.setdefault(name, "error")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
