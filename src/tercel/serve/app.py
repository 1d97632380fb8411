"""The server's paths."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
from anyio import CapacityLimiter, to_thread
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tercel import explain
from tercel.pages import COLOURS_FILE
from tercel.reading import UnreadableError, parse_json
from tercel.serve.answers import Writer, writer_of
from tercel.serve.asked import Job, Reader
from tercel.serve.failures import ApiError
from tercel.serve.flight import Flight
from tercel.serve.guards import Guards
from tercel.serve.metrics import CONTENT_TYPE, Metrics
from tercel.serve.scheduler import Scheduler
from tercel.serve.schema import ChatRequest, CompletionRequest, read
from tercel.serve.settings import ServerSettings
from tercel.target_model.protocol import TargetModel

logger = logging.getLogger("tercel.serve")
BODY = 8 << 20  # bytes: the ids of a long context, or the text of a book
BODY_SECONDS = 60.0  # in which it has to come
SLOW_SECONDS = 60.0  # that a client may take to make room for the next piece of a stream
_DONE = ServerSentEvent(data="[DONE]", sep="\n")  # line ends as OpenAI's
_PAGE = Path(__file__).with_name("page")  # its files, by name
_STATIC = Path(explain.__file__).with_name("static")
_LOOKS = [COLOURS_FILE, _STATIC / "look.css", _STATIC / "tree.css"]  # of steps
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


class Server:
    """Answers requests for one target."""

    def __init__(
        self, target: TargetModel, settings: ServerSettings, scheduler: Scheduler, metrics: Metrics, created: int
    ) -> None:
        self._target, self._settings, self._created = target, settings, created
        self._scheduler, self._metrics = scheduler, metrics
        self._reader = Reader(target, settings)
        self._readers = CapacityLimiter(1)  # templates and tokenizers are read by one at a time

    @property
    def app(self) -> Starlette:
        answers = {"/v1/chat/completions": self._chat, "/v1/completions": self._completion}
        looks: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/v1/models": self._models,
            "/v1/models/{name:path}": self._model,
            "/health": self._health,
            "/metrics": self._counters,
        }
        files = {
            "/" if file.name == "index.html" else f"/{file.name}": _file(file)
            for file in (*sorted(_PAGE.iterdir()), *_LOOKS)
        }
        return Starlette(
            routes=[
                *(Route(path, answer, methods=["POST"]) for path, answer in answers.items()),
                *(Route(path, look, methods=["GET"]) for path, look in {**looks, **files}.items()),
            ],
            middleware=[Middleware(Guards, settings=self._settings)],
            exception_handlers={ApiError: _refused, HTTPException: _refused_by_path, ClientDisconnect: _gone},
        )

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, ChatRequest, self._reader.chat)

    async def _completion(self, request: Request) -> Response:
        return await self._answer(request, CompletionRequest, self._reader.completion)

    async def _answer(self, request: Request, kind: type[Any], reader: Callable[[Any], Job]) -> Response:
        asked = read(kind, await self._body(request))
        self._check_name(asked.model)
        self._scheduler.check_open()
        job = await to_thread.run_sync(reader, asked, limiter=self._readers)
        writer = writer_of(asked, job, asked.model or self._settings.name, self._target.tokenizer)
        flight = Flight(self._scheduler, self._metrics, job, self._settings.timeout)
        if not asked.stream:
            return await self._whole(request, flight, writer)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(flight)
            held = stack.pop_all()  # the reply gives the seats back
        return _Stream(held, _pieces(flight, writer))

    async def _whole(self, request: Request, flight: Flight, writer: Writer) -> Response:
        """The body, unless the client goes away before it is there."""
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(_left(request))
            work = tasks.create_task(_collect(flight, writer))
            await asyncio.wait((watch, work), return_when=asyncio.FIRST_COMPLETED)
            watch.cancel()
            work.cancel()
        if work.cancelled():
            raise ClientDisconnect
        failure = work.result()
        return failure.response if failure is not None else JSONResponse(writer.body())

    async def _body(self, request: Request) -> Any:
        """The JSON of a body. Raises `ApiError` for one that is none, that is too large, or that does not come."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError("give the body as JSON, with Content-Type: application/json", 415)
        body = bytearray()
        try:
            with anyio.fail_after(BODY_SECONDS):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > BODY:
                        raise ApiError(f"the body has more than {BODY >> 20} MiB", 413)
            return parse_json(body.decode("utf-8"))
        except TimeoutError:
            raise ApiError(f"the body did not come within {BODY_SECONDS:g} seconds", 408) from None
        except (UnicodeDecodeError, UnreadableError) as error:
            raise ApiError(f"the body is not readable: {error}") from None

    def _check_name(self, name: str | None) -> None:
        if name is not None and name not in self._names:
            raise ApiError(
                f"there is no model {name[:200]!r} here; this server has {self._settings.name!r}",
                404,
                param="model",
                code="model_not_found",
            )

    @property
    def _names(self) -> tuple[str, str]:
        return self._settings.name, self._target.source.name

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card]})

    async def _model(self, request: Request) -> Response:
        self._check_name(request.path_params["name"])
        return JSONResponse(self._card)

    @property
    def _card(self) -> dict[str, Any]:
        length = self._target.context_length
        name = {"id": self._settings.name, "object": "model", "created": self._created, "owned_by": "tercel"}
        return {**name, "max_model_len": length}

    async def _health(self, request: Request) -> Response:
        state = self._scheduler.state
        return JSONResponse({"status": state}, 200 if state == "ok" else 503)

    async def _counters(self, request: Request) -> Response:
        return Response(self._metrics.page(), headers={"Content-Type": CONTENT_TYPE})


async def _collect(flight: Flight, writer: Writer) -> ApiError | None:
    """Have all answers written; why not, if one fails."""
    try:
        async with flight:
            async for number, event in flight.events():
                writer.note(number, event)
    except ApiError as error:
        return error
    return None


class _Stream(EventSourceResponse):
    """A stream that leaves what it holds when it has ended, though nobody has read the first piece of it."""

    def __init__(self, held: AsyncExitStack, pieces: AsyncIterator[ServerSentEvent]) -> None:
        super().__init__(pieces, sep="\n", send_timeout=SLOW_SECONDS)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            await super().__call__(scope, receive, send)


async def _pieces(flight: Flight, writer: Writer) -> AsyncIterator[ServerSentEvent]:
    """The answers, piece by piece; the last event says that there are no more, whatever happened."""
    try:
        async for number, event in flight.events():
            for chunk in writer.take(number, event):
                yield _sent(chunk)
        for chunk in writer.last():
            yield _sent(chunk)
    except Exception as error:
        if not isinstance(error, ApiError):
            logger.exception("a stream failed")
        yield _sent(ApiError.of(error).body)
    yield _DONE


def _sent(value: Any) -> ServerSentEvent:
    return ServerSentEvent(data=json.dumps(value, ensure_ascii=False, allow_nan=False), sep="\n")


async def _left(request: Request) -> None:
    """Returns when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _file(file: Path) -> Callable[[Request], Awaitable[Response]]:
    async def give(request: Request) -> Response:
        return FileResponse(file, media_type=_KINDS[file.suffix])

    return give


async def _refused(request: Request, error: Exception) -> Response:
    return ApiError.of(error).response


async def _refused_by_path(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    what = "there is no such path" if status == 404 else "the path is asked with another method"
    return ApiError(f"{what}: {request.method} {request.url.path[:200]}", status).response


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it
