"""Looking up a server's name for no longer than its answer may take."""

from __future__ import annotations

import asyncio
import socket
import threading
from concurrent.futures import Future
from typing import Any


class LookUpLoop(asyncio.SelectorEventLoop):
    """An event loop that does not wait for the look-up of a name once nobody wants it any more.

    The system's resolver cannot be interrupted. asyncio asks it in threads that the loop waits for at its end, and then
    the interpreter at its own; here it is asked in one that nobody waits for.
    """

    async def getaddrinfo(
        self,
        host: bytes | str | None,
        port: bytes | str | int | None,
        *,
        family: int = 0,
        type: int = 0,
        proto: int = 0,
        flags: int = 0,
    ) -> list[Any]:
        found: Future[list[Any]] = Future()
        found.set_running_or_notify_cancel()  # from here on nobody can take it from the thread

        def look_up() -> None:
            try:
                found.set_result(socket.getaddrinfo(host, port, family, type, proto, flags))
            except (OSError, UnicodeError) as error:
                found.set_exception(error)

        threading.Thread(target=look_up, name=f"look-up of {host!r}", daemon=True).start()
        return await asyncio.wrap_future(found)
