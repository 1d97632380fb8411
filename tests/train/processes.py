"""Several processes of one run, forked from this one, with the variables that torchrun would set."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch

from tercel.errors import TercelError
from tercel.train.group import Place, joined

FORK = multiprocessing.get_context("fork")  # torch is loaded already
TIMEOUT = 240  # seconds, on a machine that has much else to do


def together(count: int, task: Callable[..., Any], *arguments: Any, join: bool = True, **variables: str) -> list[Any]:
    """What `task(ranks, *arguments)` returns in each of `count` processes; the sentence of a `TercelError`, the code of
    a `SystemExit`, None for one that is killed. Without `join`, each gets its number instead of `Ranks`.

    variables: of the environment, instead of those of torchrun.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    running = []
    for rank in range(count):
        here, there = FORK.Pipe(duplex=False)
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = FORK.Process(
            target=_child, args=(there, {**common, **own, **variables}, task, rank if not join else None, arguments)
        )
        process.start()
        there.close()
        running.append((process, here))
    outcomes = []
    for process, here in running:
        try:
            assert here.poll(TIMEOUT), "a process hangs"
            outcomes.append(here.recv())
        except EOFError:
            outcomes.append(None)
        finally:
            process.join(10)
            if process.is_alive():
                process.kill()
    for outcome in outcomes:
        if isinstance(outcome, RuntimeError):
            raise outcome
    return outcomes


def _child(
    answer: Connection, variables: dict[str, str], task: Callable[..., Any], number: int | None, arguments: tuple
) -> None:
    torch.set_num_threads(1)  # threads do not survive a fork
    os.environ.update(variables)
    try:
        if number is not None:
            outcome = task(number, *arguments)
        else:
            with joined(Place.of(os.environ), to_meet=timedelta(seconds=60)) as ranks:
                outcome = task(ranks, *arguments)
    except TercelError as error:
        outcome = str(error)
    except SystemExit as error:
        outcome = error.code
    except BaseException:
        outcome = RuntimeError(traceback.format_exc())
    answer.send(outcome)
    answer.close()
    os._exit(0)  # without what pytest would do at the end
