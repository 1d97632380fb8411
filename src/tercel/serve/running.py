"""From settings to a server that answers, and to its end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType

import uvicorn
from sse_starlette.sse import AppStatus

from tercel.decode.prefixes import MB, PrefixStore
from tercel.decode.proposer import Proposer, innermost
from tercel.errors import TercelError
from tercel.serve.app import Server
from tercel.serve.metrics import Metrics
from tercel.serve.scheduler import Scheduler
from tercel.serve.settings import ServerSettings
from tercel.target_model.protocol import TargetModel

_BACKLOG = 512  # connections that wait to be taken
_KEEP_ALIVE = 30  # seconds that an idle connection is kept
OnReady = Callable[[str], None]


def bound(settings: ServerSettings) -> socket.socket:
    """The server's address, taken: before a model is loaded for nothing. Raises `TercelError` if it cannot be had."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    taken = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that has ended just now is no obstacle
        taken.bind((settings.host, settings.port))
    except (OSError, UnicodeError) as error:
        taken.close()
        raise _taken(settings.host, settings.port, error) from error
    return taken


def _taken(host: str, port: int, error: OSError | UnicodeError) -> TercelError:
    reason = getattr(error, "strerror", None) or error
    return TercelError(
        f"the server cannot listen at {host} port {port}: {reason}; choose another --port or --host, or stop who "
        "listens there"
    )


def address_of(taken: socket.socket) -> str:
    """As a URL, for clients on this machine where every address is listened at."""
    host, port = taken.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    target: TargetModel, proposer: Proposer, settings: ServerSettings, taken: socket.socket, on_ready: OnReady
) -> None:
    """Answer requests at `taken` until SIGINT or SIGTERM, which is raised again when all answers have ended or were
    cut.

    on_ready: called with the URL when requests are accepted.
    """
    running = start(target, proposer, settings, taken, on_ready)
    try:
        running.run([taken])
    finally:
        running.scheduler.stop()


def start(
    target: TargetModel, proposer: Proposer, settings: ServerSettings, taken: socket.socket, on_ready: OnReady
) -> HttpServer:
    """What answers at `taken` once it is run; the scheduler runs already."""
    load: list[Scheduler] = []
    metrics = Metrics(settings.name, proposer.max_nodes > 1, _depth(proposer), lambda: load[0].load)
    prefixes = PrefixStore(settings.prefix_cache * MB)
    scheduler = Scheduler(target, proposer, metrics, settings.slots, settings.queue, settings.prefill_chunk, prefixes)
    load.append(scheduler)
    server = Server(target, settings, scheduler, metrics, int(time.time()))
    AppStatus.disable_automatic_graceful_drain()  # streams end by themselves, each with its last event
    config = uvicorn.Config(
        server.app,
        host=settings.host,
        port=settings.port,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE,
    )
    scheduler.start()
    return HttpServer(config, scheduler, settings.grace, lambda: on_ready(address_of(taken)))


class HttpServer(uvicorn.Server):
    """Closes the door at the first signal, and cuts what is left after `grace` seconds."""

    def __init__(
        self, config: uvicorn.Config, scheduler: Scheduler, grace: float, on_ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self.scheduler, self._grace, self._on_ready = scheduler, grace, on_ready
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as error:  # somebody was faster while the model was loaded
            raise _taken(self.config.host, self.config.port, error) from error
        self._loop = asyncio.get_running_loop()
        if self.started:
            self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.scheduler.close()
        if self._loop is not None:
            again = self.should_exit and sig == signal.SIGINT
            self._loop.call_soon_threadsafe(self._loop.call_later, 0.0 if again else self._grace, self.scheduler.cut)
        super().handle_exit(sig, frame)


def _depth(proposer: Proposer) -> int:
    """Levels of drafts of one shape, where the proposer has one; 0 where drafts are sized step by step."""
    inner = innermost(proposer)
    return 0 if inner is not proposer or inner.needs_tree else inner.max_nodes - 1
