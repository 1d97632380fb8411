"""One thread that owns the decoding loops; requests join and leave between its steps.

The rest of the server runs in another thread (HTTP's event loop) and hands this one things to do; what becomes known of
a request goes back through the function that it was submitted with.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Literal, Protocol

from tercel.decode.loop import DecodingLoop
from tercel.decode.prefixes import PrefixStore
from tercel.decode.proposer import Proposer
from tercel.decode.types import Event, Request
from tercel.decode.vanilla import Vanilla
from tercel.serve.failures import ApiError, broken, queue_full, shutting_down
from tercel.target_model.protocol import TargetModel

logger = logging.getLogger("tercel.serve")
News = Event | ApiError
Deliver = Callable[[News], None]


class Observer(Protocol):
    """Who counts what happens; called in the scheduler's thread."""

    def stepped(self, event: Event) -> None: ...


@dataclass(eq=False)
class Seat:
    """One answer with the scheduler, until its last news. deliver: called with them in the scheduler's thread; they end
    with an event that has a result, or with an error. number: in its loop, once it is there."""

    request: Request
    deliver: Deliver
    number: int = -1


@dataclass(eq=False)
class _Lane:
    """A loop with one proposer, and who sits in it."""

    proposer: Proposer
    loop: DecodingLoop
    seats: dict[int, Seat] = field(default_factory=dict)


class Scheduler:
    """slots: requests decoded at a time, by each of two proposers (with drafts, and without where somebody asks for
    that); waiting: how many more are taken. prefill_chunk: prompt tokens of a step, at most. prefixes: where it is kept
    what was computed, for prompts that begin alike."""

    def __init__(
        self,
        target: TargetModel,
        proposer: Proposer,
        observer: Observer,
        slots: int,
        waiting: int,
        prefill_chunk: int,
        prefixes: PrefixStore,
    ) -> None:
        self._target, self._observer = target, observer
        self._slots, self._waiting, self._chunk, self._prefixes = slots, waiting, prefill_chunk, prefixes
        self._drafting, self._plain = (self._lane(one) for one in (proposer, Vanilla()))
        self._todo: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()
        self._taken = 0  # seats in use
        self._closed = self._over = self._ended = self._failed = False
        self._thread = threading.Thread(target=self._run, name="tercel-scheduler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def state(self) -> Literal["ok", "stopping", "failed"]:
        """failed: the thread has ended although nobody asked for it."""
        return "failed" if self._failed else "stopping" if self._closed else "ok"

    def check_open(self) -> None:
        """Raises `ApiError` if nobody is let in any more."""
        if self._closed:
            raise self._refusal()

    @property
    def load(self) -> tuple[int, int]:
        """Requests that are decoded, and requests that wait for a slot."""
        taken = self._taken
        running = min(sum(lane.loop.pending - lane.loop.waiting for lane in self._lanes), taken)
        return running, taken - running

    # -- called by whoever serves

    def submit(self, requests: Sequence[Request], deliver: Sequence[Deliver], draft: bool) -> Future[list[Seat]]:
        """Let the requests in, all or none; the future has their seats once the loop has taken them, or the `ApiError`
        of the first that it refuses.

        Raises `ApiError` if there is no room, or the server is being stopped.
        """
        seats = [Seat(*pair) for pair in zip(requests, deliver, strict=True)]
        entered: Future[list[Seat]] = Future()
        entered.set_running_or_notify_cancel()
        with self._lock:  # whoever is let in is so before the thread looks for the last time who is there
            self.check_open()
            if self._taken + len(seats) > self._slots + self._waiting:
                raise queue_full(self._slots, self._waiting)
            self._taken += len(seats)
            self._todo.put(partial(self._enter, seats, self._drafting if draft else self._plain, entered))
        return entered

    def abort(self, seats: Sequence[Seat]) -> None:
        """Free these seats at the next step."""
        self._todo.put(partial(self._abort, seats))

    def close(self) -> None:
        """Let nobody in from now on; those who are in go on."""
        self._closed = True  # without the lock: a signal may have come to whoever holds it

    def cut(self) -> None:
        """End every answer where it is."""
        self._todo.put(self._abort_all)

    def stop(self) -> None:
        """End every answer, and the thread."""
        self.close()
        self._todo.put(self._finish)
        self._thread.join()

    # -- in the thread

    def _run(self) -> None:
        try:
            while not self._over or any(lane.loop.pending for lane in self._lanes):
                self._do_all()
                for lane in self._lanes:
                    if lane.loop.pending:
                        self._step(lane)
        except BaseException:  # of the scheduler itself, or of who counts
            logger.critical("the thread that decodes has failed; nothing is answered any more", exc_info=True)
            self._failed = True
        finally:
            self._tell_all()

    def _tell_all(self) -> None:
        """The end of everything that was let in, whether a loop has taken it already or not."""
        with self._lock:
            self._closed = self._ended = True
        for lane in self._lanes:
            self._fail(lane, self._refusal())
        while not self._todo.empty():
            self._todo.get()()

    def _refusal(self) -> ApiError:
        return broken() if self._failed else shutting_down()

    def _do_all(self) -> None:
        """What there is to do; waits for something if no answer is under way."""
        idle = not any(lane.loop.pending for lane in self._lanes)
        while idle or not self._todo.empty():
            self._todo.get()()
            idle = False

    def _step(self, lane: _Lane) -> None:
        try:
            events = lane.loop.step()
        except Exception as error:  # of all rows together: none of them can go on
            logger.exception("a decoding step failed; the answers in it are lost")
            self._fail(lane, ApiError.of(error))
            lane.loop = self._loop(lane.proposer)
            return
        for event in events:
            self._observer.stepped(event)
            seat = lane.seats.get(event.index)
            if event.result is not None:
                self._leave(lane, event.index)
            if seat is not None:
                seat.deliver(event)

    def _enter(self, seats: list[Seat], lane: _Lane, entered: Future[list[Seat]]) -> None:
        try:
            if self._ended:
                raise self._refusal()
            for seat in seats:
                seat.number = lane.loop.submit(seat.request)
                lane.seats[seat.number] = seat
        except Exception as error:
            there = [seat.number for seat in seats if seat.number >= 0]
            for number in there:
                lane.loop.abort(number)
                self._leave(lane, number)
            self._release(len(seats) - len(there))
            if not isinstance(error, ApiError) and ApiError.of(error).status >= 500:
                logger.exception("a request could not be taken in")
            entered.set_exception(ApiError.of(error))
        else:
            entered.set_result(seats)

    def _abort(self, seats: Sequence[Seat]) -> None:
        for lane in self._lanes:
            for seat in seats:
                if lane.seats.get(seat.number) is seat:
                    lane.loop.abort(seat.number)

    def _abort_all(self) -> None:
        for lane in self._lanes:
            self._abort(list(lane.seats.values()))

    def _finish(self) -> None:
        self._over = True
        self._abort_all()

    def _fail(self, lane: _Lane, error: ApiError) -> None:
        seats, lane.seats = lane.seats, {}
        self._release(len(seats))
        for seat in seats.values():
            try:
                seat.deliver(error)
            except Exception:  # the others are told all the same
                logger.exception("the end of an answer could not be told")

    def _leave(self, lane: _Lane, number: int) -> None:
        if lane.seats.pop(number, None) is not None:
            self._release(1)

    def _release(self, count: int) -> None:
        with self._lock:
            self._taken -= count

    @property
    def _lanes(self) -> tuple[_Lane, _Lane]:
        return self._drafting, self._plain

    def _lane(self, proposer: Proposer) -> _Lane:
        return _Lane(proposer, self._loop(proposer))

    def _loop(self, proposer: Proposer) -> DecodingLoop:
        return DecodingLoop(self._target, proposer, self._slots, self._chunk, prefixes=self._prefixes)
