"""From a fork to a command: streams, limits, rights, and what the interpreter does around a script."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import resource
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NoReturn

MIB = 1 << 20
PROGRAM = "from tercel.cli.app import main; main()"
NEW_USER_NAMESPACE = 0x10000000
CAPABILITIES = 0x20080522  # version 3 of the kernel's structure
NOBODY = 54321  # a user id that no passwd file knows


@dataclass(frozen=True)
class Limits:
    """memory: bytes beyond those the parent maps; cpu, wall: seconds; file: bytes of the largest file written; output:
    bytes of each stream that are kept, beyond which the child is ended; files: descriptors."""

    memory: int = 1200 * MIB
    cpu: int = 20
    wall: float = 120.0
    file: int = 256 * MIB
    output: int = 4 * MIB
    files: int = 256


@dataclass(frozen=True, kw_only=True)
class Manner:
    """How a process is run. stdout: a path that takes standard output ("" closes it before the start; None: a pipe).
    encoding: of standard output and error. hang_up: stop reading standard output after so many bytes and close it, as
    `head` does. stranger: run under a user id that has no name, no home and no right to what others protect. twin: two
    processes with the same command, started together; their exit codes and what they print lie in `tmp` (codes,
    one.err, two.err, …) when both have ended."""

    stdin: bytes = b""
    terminal: bool = False
    stdout: str | None = None
    encoding: str = "utf-8"
    hang_up: int | None = None
    stranger: bool = False
    twin: bool = False


@dataclass(frozen=True)
class Surroundings(Manner):
    """What a process finds, and how it is run. environment: all of it."""

    environment: Mapping[str, str]
    folder: Path

    @classmethod
    def like(cls, manner: Manner, environment: Mapping[str, str], folder: Path) -> Surroundings:
        return cls(environment, folder, **{f.name: getattr(manner, f.name) for f in fields(Manner)})


def become(
    arguments: Sequence[str],
    around: Surroundings,
    limits: Limits,
    main: Callable[[Sequence[str]], None] | None,
    own: tuple[int, int, int],
    others: Sequence[int],
) -> NoReturn:
    """Never returns: the child is the command from here on."""
    code = 70
    try:
        os.setsid()
        for fd in others:
            os.close(fd)
        for fd, standard in zip(own, (0, 1, 2), strict=True):
            os.dup2(fd, standard)
            os.close(fd)
        if around.stdout:
            fd = os.open(around.stdout, os.O_WRONLY)
            os.dup2(fd, 1)
            os.close(fd)
        os.chdir(around.folder)
        os.environ.clear()
        os.environ.update(around.environment)
        limit(limits)
        if around.stranger:
            _become_stranger()
        if around.stdout == "":
            os.close(1)
        if main is None:
            os.execve(sys.executable, [sys.executable, "-c", PROGRAM, *arguments], dict(around.environment))
        if around.twin:
            code = _two(lambda: _as_interpreter(arguments, around.encoding, main))
        else:
            code = _as_interpreter(arguments, around.encoding, main)
    except BaseException:
        os.write(2, traceback.format_exc().encode("utf-8", "replace"))
    finally:
        os._exit(code)


def _as_interpreter(arguments: Sequence[str], encoding: str, main: Callable[[Sequence[str]], None]) -> int:
    """What the interpreter does around a script: streams, the exit code, an uncaught exception's traceback."""
    sys.stdin = io.TextIOWrapper(io.FileIO(0, "r", closefd=False), encoding="utf-8", errors="surrogateescape")
    sys.stdout = _writer(1, encoding, "strict") if _is_open(1) else None  # type: ignore[assignment]
    sys.stderr = _writer(2, encoding, "backslashreplace")
    code = 0
    try:
        main(arguments)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError):
        code = 120  # the interpreter's own code for output that was lost
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    return code


def _two(command: Callable[[], int]) -> int:
    children = []
    for name in ("one", "two"):
        child = os.fork()
        if child == 0:
            for fd, stream in ((1, "out"), (2, "err")):
                os.dup2(os.open(f"tmp/{name}.{stream}", os.O_WRONLY | os.O_CREAT, 0o644), fd)
            os._exit(command())
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    Path("tmp/codes").write_text(repr(codes), encoding="ascii")
    return 0


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _writer(fd: int, encoding: str, errors: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(fd, "w", closefd=False)), encoding=encoding, errors=errors, line_buffering=fd == 2
    )


def limit(limits: Limits) -> None:
    for kind, value in (
        (resource.RLIMIT_AS, _mapped() + limits.memory),
        (resource.RLIMIT_CPU, limits.cpu),
        (resource.RLIMIT_FSIZE, limits.file),
        (resource.RLIMIT_NOFILE, limits.files),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as stream:
        stream.write("1000")  # should memory run short all the same, this goes first


def _mapped() -> int:
    with open("/proc/self/statm", encoding="ascii") as stream:
        return int(stream.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _become_stranger() -> None:
    """A user id without a name, in a namespace where it owns nothing but what the caller owns, and may no more."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.geteuid(), os.getegid()  # before they are lost
    if libc.unshare(NEW_USER_NAMESPACE) != 0:
        raise OSError(ctypes.get_errno(), "no user namespaces here")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{NOBODY} {user} 1"),
        ("gid_map", f"{NOBODY} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as stream:
            stream.write(text)
    # the maker of a namespace may do everything in it: give that up, as running a program would
    header, nothing = (ctypes.c_uint32 * 2)(CAPABILITIES, 0), (ctypes.c_uint32 * 6)()
    if libc.capset(header, nothing) != 0:
        raise OSError(ctypes.get_errno(), "capabilities cannot be given up")
