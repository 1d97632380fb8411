"""What goes wrong with a request, in the shape of OpenAI's errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.responses import JSONResponse

from tercel.errors import TercelError

INVALID = "invalid_request_error"


class ApiError(Exception):
    """A request that gets no answer. status: of HTTP. kind, param, code: fields of OpenAI's error, which the client
    makes an exception of. retry_after: seconds to wait before another try."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code, self.retry_after = status, kind, param, code, retry_after

    @classmethod
    def of(cls, error: BaseException) -> ApiError:
        """What a client is told of any error: of those that nobody foresaw, only that there was one."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, TercelError):
            return cls(str(error))
        return cls("the server failed over this request; its log says more", 500, kind="server_error")

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status, headers)


@contextmanager
def fault_of(param: str | None) -> Iterator[None]:
    """What this package cannot do in the block is the fault of a field of the request."""
    try:
        yield
    except TercelError as error:
        raise ApiError(str(error), param=param) from error


def queue_full(slots: int, queue: int) -> ApiError:
    return ApiError(
        f"the server decodes {slots} requests at a time and lets {queue} wait, and all places are taken; try again",
        429,
        kind="rate_limit_error",
        code="queue_full",
        retry_after=1,
    )


def shutting_down() -> ApiError:
    return ApiError("the server is being stopped", 503, kind="server_error", code="shutting_down", retry_after=5)


def broken() -> ApiError:
    return ApiError(
        "the server has failed and answers nothing any more; start it again (its log says why)",
        503,
        kind="server_error",
        code="server_failed",
    )


def timed_out(seconds: float) -> ApiError:
    return ApiError(
        f"the answer was cut after {seconds:g} seconds, the most that a request may take here",
        504,
        kind="timeout_error",
        code="timeout",
    )
