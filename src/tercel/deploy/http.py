"""Plain HTTP to an inference server, with its failures as sentences."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from tercel.errors import TercelError

TIMEOUT = 120.0  # seconds for one answer
_SHOWN = 200


class HttpStatusError(TercelError):
    """The server refused a request; `status` is its code."""

    def __init__(self, url: str, status: int, body: str) -> None:
        said = " ".join(body.split())[:_SHOWN] or "no reason given"
        super().__init__(f"{url} answers with status {status} ({said}); is it the engine you think it is?")
        self.status = status


@dataclass(frozen=True)
class Http:
    """base: `http://host:port`, to which paths are added."""

    base: str
    timeout: float = TIMEOUT

    @classmethod
    def at(cls, url: str, timeout: float = TIMEOUT) -> Http:
        """Raises `TercelError` unless `url` is an http or https address; a trailing `/v1` is dropped."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise TercelError(f"{url!r} is no address of a server; give one such as http://localhost:8000")
        return cls(url.rstrip("/").removesuffix("/v1"), timeout)

    def text(self, path: str) -> str:
        """What GET gives. Raises `TercelError` if the server cannot be reached, `HttpStatusError` if it refuses."""
        return self._send(urllib.request.Request(self.base + path))

    def get(self, path: str) -> dict[str, Any]:
        """The JSON object that GET gives; raises as `text`, and for anything else."""
        return self._object(path, self.text(path))

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The JSON object that POST gives; raises as `get`."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, {"Content-Type": "application/json"})
        return self._object(path, self._send(request))

    def _send(self, request: urllib.request.Request) -> str:
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as response:
                return str(response.read().decode("utf-8", "replace"))
        except urllib.error.HTTPError as error:
            raise HttpStatusError(request.full_url, error.code, error.read(4096).decode("utf-8", "replace")) from error
        except TimeoutError as error:
            raise self._silent() from error
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise self._silent() from error
            raise TercelError(f"no server answers at {self.base} ({error.reason}); is it running there?") from error
        except (OSError, HTTPException) as error:
            raise TercelError(
                f"the server at {self.base} broke off ({error or type(error).__name__}); look at its log"
            ) from error

    def _silent(self) -> TercelError:
        return TercelError(f"the server at {self.base} did not answer within {self.timeout:g} s; raise --timeout")

    def _object(self, path: str, text: str) -> dict[str, Any]:
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise TercelError(f"{self.base}{path} gives no JSON; is an inference server running there?") from error
        if not isinstance(value, dict):
            raise TercelError(f"{self.base}{path} answers with a {type(value).__name__} instead of an object")
        return value
