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
from typer.main import get_command

from tercel.cli import (
    bench,
    chat,
    data,
    demo,
    doctor,
    explain,
    export,
    features,
    generate,
    inspect,
    methods,
    profile,
    push,
    regenerate,
    reproduce,
    serve,
    serve_command,
    train,
    tune,
    verify,
)
from tercel.cli.consoles import OutputClosed, result_console, say, silence
from tercel.errors import TercelError
from tercel.plain import never_fail
from tercel.stopping import Terminated, terminable

USER_ERROR, INTERNAL_ERROR, INTERRUPTED = 2, 1, 130
SENTENCE = 1500  # characters of an error at most
OUTPUT_CLOSED, TERMINATED = 141, 143  # what a shell gives for a program that SIGPIPE or SIGTERM has ended
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ADVICE = {
    errno.EACCES: "see to its permissions or choose another place",
    errno.EPERM: "see to its permissions or choose another place",
    errno.EROFS: "choose a place that can be written",
    errno.ENAMETOOLONG: "choose a shorter name",
}
_USAGE_ERROR: Any = typer.BadParameter.__mro__[1]  # click's UsageError, wherever this version of typer has it


class _Verbs(TyperGroup):
    """Every way to end goes through here: an exit code, and one sentence where something is wrong."""

    def main(self, *arguments: Any, **more: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            never_fail(stream)
        try:
            code = super().main(*arguments, **{**more, "standalone_mode": False})
        except _USAGE_ERROR as error:
            if message := " ".join(error.format_message().split()):  # none where the help was printed instead
                verb = error.ctx.command_path if error.ctx is not None else "tercel"
                say(f"error: {message[:1].lower()}{message[1:]} (`{verb} --help` says what there is)")
            code = USER_ERROR
        except SystemExit as error:  # of rich, while typer printed a help
            code = OUTPUT_CLOSED if isinstance(error.__context__, BrokenPipeError) else error.code
        sys.exit(code or 0)

    def make_context(self, *arguments: Any, **more: Any) -> Any:
        with _told_in_one_sentence():
            return super().make_context(*arguments, **more)

    def invoke(self, ctx: Any) -> Any:
        with _told_in_one_sentence(), terminable():
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Verbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train EAGLE-3 draft heads for Hugging Face causal language models; decode losslessly with them.",
)
app.command("train")(train.command)
app.command("features")(features.command)
app.command("generate")(generate.command)
app.command("chat")(chat.command)
app.command("explain")(explain.command)
app.command("verify")(verify.command)
app.command("bench")(bench.command)
app.command("reproduce")(reproduce.command)
app.command("methods")(methods.command)
app.command("profile")(profile.command)
app.command("tune")(tune.command)
app.command("inspect")(inspect.command)
app.command("export")(export.command)
app.command("doctor")(doctor.command)
app.command("serve")(serve.command)
app.command("serve-command")(serve_command.command)
app.command("push")(push.command)
app.command("demo")(demo.command)
data.app.command("regenerate")(regenerate.command)
app.add_typer(data.app, name="data")


def _print_version(value: bool) -> None:
    if value:
        result_console().print_line(f"tercel {installed_version('tercel')}")
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

    Codes: 0 done, 1 a check failed or an unexpected error, 2 a wrong input, 130 interrupted, 141 the reader of the
    output has gone (`… | head`), 143 terminated (SIGTERM).
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        with _quiet_libraries():
            app(arguments, prog_name="tercel")
    except Exception as error:
        if "--debug" in arguments:
            raise
        text = " ".join(str(error).split())[:300] or "no message"
        say(f"unexpected error: {type(error).__name__}: {text}; `tercel --debug …` shows where it happened")
        sys.exit(INTERNAL_ERROR)


def run_within(words: Sequence[str]) -> None:
    """A command in the midst of another one, as if it were typed. What goes wrong in it is raised as it is, for the
    outer one to do without it or to end by it. Raises `typer.Exit` for a code other than 0."""
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    with group.make_context("tercel", list(words)) as context:
        TyperGroup.invoke(group, context)


@contextmanager
def _told_in_one_sentence() -> Iterator[None]:
    """End what a user can do something about, or has done, with a sentence and its exit code."""
    try:
        yield
    except TercelError as error:
        raise _ended(f"error: {error}", USER_ERROR) from error
    except (OutputClosed, BrokenPipeError) as error:
        silence(sys.stdout)
        raise typer.Exit(OUTPUT_CLOSED) from error
    except Terminated as error:
        raise _ended(str(error) or "terminated", TERMINATED) from error
    except KeyboardInterrupt as error:
        raise _ended(str(error) or "interrupted", INTERRUPTED) from error
    except OSError as error:
        if error.errno not in _DISK and not error.filename:
            raise
        raise _ended(f"error: {_told(error)}", USER_ERROR) from error


def _ended(sentence: str, code: int) -> typer.Exit:
    words = " ".join(sentence.split())
    if len(words) > SENTENCE:  # a name or value out of a file may be of any length; what to do stands at the end
        words = f"{words[: SENTENCE * 2 // 3]} […] {words[-SENTENCE // 3 :]}"
    say(words)
    return typer.Exit(code)


def _told(error: OSError) -> str:
    """What an operating system's error means for the file that it names."""
    reason = error.strerror or type(error).__name__
    if error.errno in _DISK:
        what = f"writing {_name(error.filename)} failed" if error.filename else "writing failed"
        return f"{what}: {reason}; free space and try again"
    return f"{_name(error.filename)}: {reason}; {_ADVICE.get(error.errno or 0, 'check the path')}"


def _name(file: Any) -> str:
    return os.fsdecode(file) if isinstance(file, (str, bytes, os.PathLike)) else str(file)


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Without the chatter of the libraries underneath; what a user has set himself stays."""
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY", "DATASETS_VERBOSITY"):
        os.environ.setdefault(name, "critical")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # connections of processes that have ended
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
