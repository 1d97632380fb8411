"""Plain HTTP to a server that is not trusted: bounded in time and size, with its failures as sentences."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import anyio
import httpx2
from anyio.from_thread import start_blocking_portal

from tercel.errors import TercelError
from tercel.http.address import is_local, is_same_server, parse_address
from tercel.http.look_up import LookUpLoop

TIMEOUT = 120.0  # seconds for one answer, from the look-up of the name to the last byte
MOST = 8 << 20  # bytes of an answer: counters of dozens of engines, or the ids of a long context
_REFUSAL = 4096  # bytes read of an answer that is a refusal
_REDIRECTS = 3  # within the server, as from /metrics to /metrics/
_SHOWN = 200
_UNLIMITED = httpx2.Limits()  # whoever asks many things at once bounds them


class HttpStatusError(TercelError):
    """The server refused a request; `status` is its code. retry_after: how many seconds it asks to wait, if it does."""

    def __init__(self, url: str, status: int, body: str, retry_after: float | None = None) -> None:
        said = " ".join(body.split())[:_SHOWN] or "no reason given"
        super().__init__(f"{url} answers with status {status} ({said}); is it the engine you think it is?")
        self.status, self.retry_after = status, retry_after


class SilentServerError(TercelError):
    """No whole answer came: the server cannot be reached, is too slow, or broke off."""


@dataclass(frozen=True)
class Http:
    """base: `http://host:port`, to which paths are added. headers: sent with every request."""

    base: str
    timeout: float = TIMEOUT
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # a key may be among them

    @classmethod
    def at(cls, url: str, timeout: float = TIMEOUT, headers: Mapping[str, str] | None = None) -> Http:
        """Raises `TercelError` unless `url` is an http or https address; a trailing `/v1` is dropped."""
        if not timeout > 0:
            raise TercelError(f"the time to wait for an answer must be positive, not {timeout:g} s")
        return cls(str(parse_address(url)).rstrip("/"), timeout, headers or {})

    def text(self, path: str) -> str:
        """What GET gives. Raises `HttpStatusError` if the server refuses, and `TercelError` if it cannot be reached,
        sends too much, is too slow, or wants to send us elsewhere."""
        return self._send("GET", path)

    def get(self, path: str) -> dict[str, Any]:
        """The JSON object that GET gives; raises as `text`, and for anything else."""
        return self._object(path, self.text(path))

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The JSON object that POST gives; raises as `get`."""
        return self._object(path, self._send("POST", path, json.dumps(body).encode()))

    def _send(self, method: str, path: str, body: bytes | None = None) -> str:
        # a portal works where a loop runs already, as in notebooks
        with start_blocking_portal(backend_options={"loop_factory": LookUpLoop}) as portal:
            return portal.call(self._alone, method, path, body)

    async def _alone(self, method: str, path: str, body: bytes | None) -> str:
        async with self.client() as client:
            return await self._within_time(client, method, path, body)

    async def post_with(self, client: httpx2.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """`post` in a running loop, with a client that serves many requests (`client`)."""
        return self._object(path, await self._within_time(client, "POST", path, json.dumps(body).encode()))

    async def _within_time(self, client: httpx2.AsyncClient, method: str, path: str, body: bytes | None) -> str:
        try:
            with anyio.fail_after(self.timeout):
                return await self._exchange(client, method, httpx2.URL(self.base + path), body)
        except TimeoutError as error:
            raise SilentServerError(
                f"the server at {self.base} did not answer within {self.timeout:g} s; raise --timeout"
            ) from error
        except httpx2.ProxyError as error:
            raise self._no_proxy(error) from error
        except httpx2.ConnectError as error:
            raise SilentServerError(f"no server answers at {self.base} ({error}); is it running there?") from error
        except (httpx2.TransportError, OSError) as error:
            raise SilentServerError(
                f"the server at {self.base} broke off ({error or type(error).__name__}); look at its log"
            ) from error

    def client(self) -> httpx2.AsyncClient:
        """One without time limits of its own; the settings for proxies hold unless the host is a local one."""
        transport = httpx2.AsyncHTTPTransport(limits=_UNLIMITED) if is_local(httpx2.URL(self.base)) else None
        try:
            return httpx2.AsyncClient(
                timeout=None, transport=transport, limits=_UNLIMITED, event_hooks={"response": [_stay_there]}
            )
        except (ValueError, ImportError, httpx2.InvalidURL) as error:
            raise self._no_proxy(error) from error

    def _no_proxy(self, error: Exception) -> TercelError:
        return TercelError(
            f"the proxy on the way to {self.base} cannot be used ({error}); fix http_proxy, https_proxy or all_proxy, "
            "or add the host to no_proxy"
        )

    async def _exchange(self, client: httpx2.AsyncClient, method: str, url: httpx2.URL, body: bytes | None) -> str:
        headers = {"Accept-Encoding": "identity", **self.headers}
        if body is not None:
            headers["Content-Type"] = "application/json"
        for _ in range(_REDIRECTS + 1):
            async with client.stream(method, url, content=body, headers=headers) as response:
                if not response.has_redirect_location:
                    return await self._read(response)
                url = url.join(response.headers["location"])
        raise TercelError(f"{self.base} sends every question on to another place; is it the engine you think it is?")

    async def _read(self, response: httpx2.Response) -> str:
        packed = response.headers.get("content-encoding", "identity").strip().lower()
        if packed != "identity":
            raise TercelError(
                f"{response.url} answers in {packed[:_SHOWN]!r}, though asked not to pack; ask the engine directly"
            )
        most, body = MOST if response.is_success else _REFUSAL, bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > most:
                break
        text = bytes(body[:most]).decode("utf-8", "replace")
        if not response.is_success:
            wait = _seconds(response.headers.get("retry-after", ""))
            raise HttpStatusError(str(response.url), response.status_code, text, wait)
        if len(body) > most:
            raise TercelError(f"{response.url} sends more than {most >> 20} MiB; is an inference server running there?")
        return text

    def _object(self, path: str, text: str) -> dict[str, Any]:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:  # no JSON; numbers of thousands of digits; too deep
            raise TercelError(f"{self.base}{path} gives no JSON; is an inference server running there?") from error
        if not isinstance(value, dict):
            raise TercelError(f"{self.base}{path} answers with a {type(value).__name__} instead of an object")
        return value


async def _stay_there(response: httpx2.Response) -> None:
    """Refuse to be sent to another server; within it a GET may be."""
    if not response.has_redirect_location:
        return
    url, wanted = response.url, response.headers["location"]
    try:
        stays = is_same_server(url.join(wanted), url)
    except (httpx2.InvalidURL, ValueError):
        stays = False
    if not stays or response.request.method != "GET":
        raise TercelError(
            f"{url} wants to send us on to {wanted[:_SHOWN]!r}, where nothing was asked; give that address as --url if "
            "it is the server you mean"
        )


def _seconds(wait: str) -> float | None:
    """What a header Retry-After asks for, a number of seconds or a date; None for anything else."""
    try:
        seconds = float(wait)
    except ValueError:
        try:
            until = parsedate_to_datetime(wait)
        except ValueError:
            return None
        seconds = (until.replace(tzinfo=until.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    return max(seconds, 0.0) if math.isfinite(seconds) else None
