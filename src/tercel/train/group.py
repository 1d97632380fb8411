"""The ranks that `torchrun` starts: how they find each other, what they exchange, and how all of them end.

Tensors on the CPU go through gloo, those on CUDA through nccl. A rank that is killed closes its connections, which the
others notice in their next exchange; so CPU tensors are exchanged first, where nobody waits for a device.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tercel.errors import TercelError
from tercel.train.ranks import Alone, RankLostError, Ranks

T = TypeVar("T")
TO_MEET = timedelta(minutes=5)  # from the first process to the last
PATIENCE = timedelta(hours=1)  # of one rank for another: a large target read from a slow disk, a large state written
_LAUNCH = "start all processes with torchrun, such as torchrun --nproc-per-node 4 -m tercel train …"
_ENDED = "ended"  # where in the store the first rank that fails says why


@dataclass(frozen=True)
class Place:
    """Which of the processes of a run this is: `rank` of `count`, `local` among those of its machine."""

    rank: int
    count: int
    local: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Place | None:
        """What the launcher told in the variables that torchrun sets; None for a single process.

        Raises `TercelError` where they contradict each other or cannot be read.
        """
        if not {"RANK", "WORLD_SIZE"} & environment.keys():
            return None
        numbers = {name: _number(environment, name) for name in ("RANK", "WORLD_SIZE")}
        rank, count = numbers["RANK"], numbers["WORLD_SIZE"]
        if count == 1 and rank == 0:
            return None
        if rank >= count:
            raise TercelError(f"RANK is {rank} and WORLD_SIZE {count}, so ranks go from 0 to {count - 1}; {_LAUNCH}")
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not environment.get(name):
                raise TercelError(f"RANK and WORLD_SIZE are set and {name} is not; {_LAUNCH}")
        _number(environment, "MASTER_PORT")
        return cls(rank, count, _number(environment, "LOCAL_RANK") if "LOCAL_RANK" in environment else rank)

    def device(self, name: str) -> str:
        """The device of this rank, where all were told `name`. Raises `TercelError` if they would share one."""
        if name == "cuda":
            return f"cuda:{self.local}"
        if name != "cpu":
            raise TercelError(
                f"device {name} would be that of all {self.count} processes; give cuda, of which each takes its own, "
                "or cpu"
            )
        return name


def _number(environment: Mapping[str, str], name: str) -> int:
    """Raises `TercelError` for a variable that is not set, or no whole number from 0."""
    text = environment.get(name)
    if text is None:
        raise TercelError(f"{name} is not set, though another of torchrun's variables is; {_LAUNCH}, or unset that one")
    if not text.isdecimal():
        raise TercelError(f"{name} is {text!r}, not a whole number; {_LAUNCH}")
    return int(text)


@contextmanager
def joined(place: Place | None, device: str = "cpu", *, to_meet: timedelta = TO_MEET) -> Iterator[Ranks]:
    """Within, this process is one of the ranks of a run (`Alone` if `place` is None). If it leaves with an error, the
    others learn of it and why.

    Raises `TercelError` if the ranks do not find each other, or do not agree on how many they are.
    """
    if place is None:
        yield Alone()
        return
    store = _met(place, to_meet)
    cuda = torch.device(device).type == "cuda"
    if cuda:
        torch.cuda.set_device(torch.device(device))
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=dist.PrefixStore("tercel", store),
            rank=place.rank,
            world_size=place.count,
            timeout=PATIENCE,
        )
    except (RuntimeError, ValueError) as error:
        raise _not_met(place, error) from error
    try:
        yield Group(store)
    except BaseException as error:
        if not isinstance(error, RankLostError):
            why = "it was interrupted" if isinstance(error, KeyboardInterrupt) else str(error) or type(error).__name__
            with suppress(RuntimeError):
                store.compare_set(_ENDED, "", f"process {place.rank}: {why}")
        raise
    finally:
        dist.destroy_process_group()


def _met(place: Place, to_meet: timedelta) -> dist.Store:
    """The store that all ranks share. Raises `TercelError` if they do not come, or not as they should."""
    try:
        store, _, _ = next(dist.rendezvous("env://", place.rank, place.count, timeout=to_meet))
        store.set_timeout(to_meet)
        twice = store.add(f"came {place.rank}", 1) > 1
        store.set(f"count {place.rank}", str(place.count))
        counts = {rank: int(store.get(f"count {rank}")) for rank in (0, *_others(place, store))}
    except (RuntimeError, ValueError) as error:  # what torch raises for a port, a name, a silence
        raise _not_met(place, error) from error
    if twice:
        raise TercelError(f"two processes say that they are rank {place.rank} of {place.count}; {_LAUNCH}")
    for rank, count in counts.items():
        if count != place.count:
            raise TercelError(
                f"WORLD_SIZE is {place.count} at rank {place.rank} and {count} at rank {rank}; {_LAUNCH}"
            )
    return store


def _others(place: Place, store: dist.Store) -> Sequence[int]:
    """The ranks to wait for: none, where the first one counts otherwise and so some may never come."""
    return range(1, place.count) if int(store.get("count 0")) == place.count else ()


def _not_met(place: Place, error: Exception) -> TercelError:
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return TercelError(
        f"the {place.count} processes of the run did not find each other at {where} (MASTER_ADDR and MASTER_PORT): "
        f"{_first_line(error)}; see that all of them were started, with one WORLD_SIZE and ranks of their own"
    )


def _first_line(error: Exception) -> str:
    """What a library's error says, without the places in its code."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200].rstrip(".")


class Group:
    """The ranks of torch's process group. store: what they share beside it."""

    def __init__(self, store: dist.Store) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self._store = store

    def sum(self, tensors: Sequence[Tensor]) -> None:
        with self.meeting():
            for on_cpu in (True, False):
                some = [tensor for tensor in tensors if (tensor.device.type == "cpu") is on_cpu]
                for work in [dist.all_reduce(tensor, async_op=True) for tensor in some]:
                    work.wait()

    def gather(self, value: T) -> list[T]:
        found: list[T | None] = [None] * self.count
        with self.meeting():
            dist.all_gather_object(found, value)  # through the CPU, whatever the device
        return found  # type: ignore[return-value]

    def take_first(self, tensors: Sequence[Tensor]) -> None:
        with self.meeting():
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    @contextmanager
    def meeting(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RankLostError(self._lost(error)) from error

    def _lost(self, error: RuntimeError) -> str:
        why = _first_line(error)
        with suppress(RuntimeError):  # the store may be gone too
            if self._store.check([_ENDED]):
                why = self._store.get(_ENDED).decode(errors="replace")
        return (
            f"process {self.rank} of {self.count} stops, since another one is gone ({why}); the same command goes on "
            "from the last saved state"
        )
