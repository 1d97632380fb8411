"""What every request passes before anything else looks at it, and what every answer carries."""

from __future__ import annotations

import hmac
import logging

from sse_starlette.sse import SendTimeoutError
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tercel.serve.failures import ApiError
from tercel.serve.settings import ServerSettings

logger = logging.getLogger("tercel.serve")
# a page of this server may run its own files and speak to this server; nobody may frame it or add to it
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_LOCAL = ("localhost", "127.0.0.1", "[::1]")


class Guards:
    """Headers on every answer; the key, where one is asked for; and, where none is, only names of this machine as the
    host: pages of others that get their own name resolved to it (DNS rebinding) must not speak to it."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started = False

        async def guarded(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started, headers = True, MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        try:
            self._check(scope["path"], Headers(scope=scope))
            await self._app(scope, receive, guarded)
        except SendTimeoutError:
            logger.info("a client read its stream too slowly and was let go")
        except ApiError as error:
            await error.response(scope, receive, guarded)
        except Exception as error:
            logger.exception("a request failed")
            if started:
                raise
            await ApiError.of(error).response(scope, receive, guarded)

    def _check(self, path: str, headers: Headers) -> None:
        key = self._settings.api_key
        if key is None:
            host = headers.get("host", "").lower()
            name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
            if self._settings.only_here and name not in (*_LOCAL, self._settings.host):
                raise ApiError(
                    f"this server is reached as localhost, not as {name[:80]!r}; start it with --api-key to let it be "
                    "reached by other names",
                    403,
                    code="host_not_allowed",
                )
        elif path.startswith("/v1/"):
            kind, _, given = headers.get("authorization", "").partition(" ")
            if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), key.encode()):
                raise ApiError("the API key is missing or wrong", 401, param=None, code="invalid_api_key")
