"""A request's answers while they come: from the scheduler's thread into HTTP's event loop, within the time that they
may take."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from functools import partial
from types import TracebackType

from tercel.decode.types import Event
from tercel.serve.asked import Job
from tercel.serve.failures import ApiError, shutting_down, timed_out
from tercel.serve.metrics import Metrics
from tercel.serve.scheduler import News, Scheduler, Seat


class Flight:
    """The answers of one job, as an asynchronous context: whoever leaves it gives all seats back, whatever became of
    the answers. seconds: that they may take."""

    def __init__(self, scheduler: Scheduler, metrics: Metrics, job: Job, seconds: float) -> None:
        self._scheduler, self._metrics, self._job, self._seconds = scheduler, metrics, job, seconds
        self._news: asyncio.Queue[tuple[int, News]] = asyncio.Queue()
        self._seats: dict[int, Seat] = {}  # of answers that have not ended
        self._began = time.monotonic()
        self._last = [self._began] * len(job.requests)

    async def __aenter__(self) -> Flight:
        """Raises `ApiError` if the scheduler does not take the job, or not in time."""
        loop = asyncio.get_running_loop()
        deliver = [partial(self._deliver, loop, number) for number in range(len(self._job.requests))]
        entering = asyncio.wrap_future(self._scheduler.submit(self._job.requests, deliver, self._job.draft))
        try:
            async with asyncio.timeout(self._left):
                self._seats = dict(enumerate(await asyncio.shield(entering)))
        except TimeoutError:
            entering.add_done_callback(self._give_back)
            raise timed_out(self._seconds) from None
        except asyncio.CancelledError:  # the client has gone meanwhile
            entering.add_done_callback(self._give_back)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._seats:
            self._scheduler.abort(list(self._seats.values()))

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """What becomes known, with the number of the answer that it is about, until all have ended.

        Raises `ApiError` if one fails, time is up, or the server stops.
        """
        while self._seats:
            try:
                async with asyncio.timeout(self._left):
                    number, news = await self._news.get()
            except TimeoutError:
                raise timed_out(self._seconds) from None
            if isinstance(news, ApiError):
                del self._seats[number]
                raise news
            self._clock(number, news)
            if news.result is not None:
                del self._seats[number]
                if news.result.error is not None:
                    raise ApiError.of(news.result.error)
                if news.result.finish_reason == "abort":
                    raise shutting_down()
            yield number, news

    @property
    def _left(self) -> float:
        return self._began + self._seconds - time.monotonic()

    def _clock(self, number: int, event: Event) -> None:
        now, tokens = time.monotonic(), len(event.emission.tokens)
        if self._last[number] == self._began:
            self._metrics.first.observe(now - self._began)
        elif tokens:
            for _ in range(tokens):
                self._metrics.between.observe((now - self._last[number]) / tokens)
        self._last[number] = now
        if event.result is not None:
            self._metrics.whole.observe(now - self._began)

    def _deliver(self, loop: asyncio.AbstractEventLoop, number: int, news: News) -> None:
        with contextlib.suppress(RuntimeError):  # the server's loop has ended before its answers
            loop.call_soon_threadsafe(self._news.put_nowait, (number, news))

    def _give_back(self, entering: asyncio.Future[list[Seat]]) -> None:
        if not entering.cancelled() and entering.exception() is None:
            self._scheduler.abort(entering.result())
