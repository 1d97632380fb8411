"""Many at a time: each as it would be alone, none held up by another, and every place given back."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import openai
import pytest

from tercel.decode.eagle3 import Eagle3
from tercel.decode.engine import Engine
from tercel.decode.generation_config import sampling_for
from tercel.decode.proposer import PassingOn
from tercel.decode.types import Request
from tercel.decode.vanilla import Vanilla
from tercel.draft.shape import TreeShape
from tercel.target_model.model import Target
from tests.decode.drafts import random_draft, tiny_target
from tests.serve.servers import Running, serving

MIXED = 64


@cache
def target() -> Target:
    return tiny_target("llama", num_hidden_layers=3)


def drafting() -> Eagle3:
    return Eagle3(random_draft(target()), target(), TreeShape(2, 2, 4))


class Gate(PassingOn):
    """Holds every step but the first until it is opened; `entered` when one waits."""

    def __init__(self) -> None:
        super().__init__(Vanilla())
        self.open, self.entered, self.steps = threading.Event(), threading.Event(), 0

    def __enter__(self) -> None:
        return

    def __exit__(self, *error: object) -> None:
        self.open.set()  # before the server is stopped, which waits for the step

    def propose(self, rows):
        self.steps += 1
        if self.steps > 1:
            self.entered.set()
            assert self.open.wait(600)
        return super().propose(rows)


@pytest.fixture
def gate() -> Gate:
    return Gate()


def until(fine: Callable[[], bool]) -> None:
    end = time.monotonic() + 600
    while not fine():
        assert time.monotonic() < end
        time.sleep(0.005)


def load(server: Running) -> tuple[int, int]:
    return server.parts.scheduler.load


def ask(client: openai.OpenAI, number: int):
    """One of many unlike requests: short and long prompts, greedy and drawn, whole and streamed."""
    prompt = [5 + (number * 7 + place) % 100 for place in range(3 + (number * 13) % 60)]
    how = {"temperature": 0.0} if number % 3 == 0 else {"temperature": 0.9, "top_p": 0.95, "seed": number}
    if number % 4 == 0:
        how["frequency_penalty"] = 0.5
    most = 4 + number % 7
    request = Request(
        tuple(prompt), sampling_for(target(), sample=number % 3 != 0, max_new_tokens=most, **_ours(number, how))
    )
    given = {"model": "tiny", "prompt": prompt, "max_tokens": most, **how}

    def call() -> list[int]:
        more = {"return_token_ids": True, "draft": number % 5 != 4}
        if number % 2:
            return client.completions.create(**given, extra_body=more).choices[0].token_ids
        with client.completions.create(**given, stream=True, extra_body=more) as chunks:
            return [token for chunk in chunks for token in chunk.choices[0].token_ids]

    return request, call


def _ours(number: int, how: dict) -> dict:
    return {name: value for name, value in how.items() if name != "temperature" or number % 3 != 0}


def test_many_at_once_are_each_as_alone() -> None:
    with serving(target(), drafting(), slots=12, queue=MIXED) as server, server.openai() as client:
        asked = [ask(client, number) for number in range(MIXED)]
        with ThreadPoolExecutor(MIXED) as pool:
            answers = list(pool.map(lambda pair: tuple(pair[1]()), asked))
        assert load(server) == (0, 0)
    truth = [result.tokens for result in Engine(target(), Vanilla()).generate([request for request, _ in asked])]
    assert answers == truth


def test_who_comes_when_all_places_are_taken_is_told_to_wait(gate: Gate) -> None:
    with (
        serving(target(), gate, slots=1, queue=1) as server,
        server.openai() as client,
        ThreadPoolExecutor(2) as pool,
        gate,
    ):
        given = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0}
        first = [pool.submit(client.completions.create, **given) for _ in range(2)]
        until(lambda: load(server) == (1, 1))
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(**given)
        assert int(refused.value.response.headers["retry-after"]) >= 1
        assert refused.value.code == "queue_full"
        gate.open.set()
        assert len({answer.result().choices[0].text for answer in first}) == 1
        assert client.completions.create(**given).choices[0].text == first[0].result().choices[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_frees_its_place(gate: Gate, stream: bool) -> None:
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    with serving(target(), gate, slots=1) as server, gate:
        with server.http() as http, http.stream("POST", "/v1/completions", json=body | {"stream": True}) as reply:
            lines = reply.iter_lines()  # the reply is closed with it
            assert next(line for line in lines if line.startswith("data:"))
            assert gate.entered.wait(600)
            assert load(server) == (1, 0)
        if not stream:  # one that waits for its whole answer, and gives up
            content = json.dumps(body).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
            with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as client:
                client.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + content)
                until(lambda: load(server) == (1, 1))
        # that the first has gone is known, and that a second came, before the loop goes on
        until(lambda: server.parts.scheduler._todo.qsize() == (1 if stream else 2))
        gate.open.set()
        until(lambda: load(server) == (0, 0))
        with server.openai() as client, server.http() as http:
            assert client.completions.create(model="tiny", prompt=[5, 6], max_tokens=1).choices
            ended = re.search(r'finished_reason="abort".*} (\d)', http.get("/metrics").text)
        assert int(ended[1]) == (1 if stream else 2)


def test_a_client_that_goes_before_a_streams_first_piece_frees_its_place(gate: Gate) -> None:
    """Nobody reads the stream then, not even its beginning."""
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 200, "temperature": 0, "stream": True}
    scope = {
        **{"type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"", "query_string": b""},
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }

    async def gone(app) -> None:
        news = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

        async def receive():
            return news.pop() if news else {"type": "http.disconnect"}

        async def send(message):
            await asyncio.sleep(0)  # as a socket may: whoever waits for the end of the request comes first

        await app(scope, receive, send)

    with serving(target(), gate, slots=1) as server, gate:
        asyncio.run(gone(server.parts.config.app))
        gate.open.set()
        until(lambda: load(server) == (0, 0))
        with server.http() as http:
            assert 'finished_reason="abort"' in http.get("/metrics").text


def test_a_thread_that_fails_is_told_to_everyone() -> None:
    """Those who are answered, those whom no loop has taken in yet, and those who come later."""
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    entered, go_on = threading.Event(), threading.Event()

    def fails(event) -> None:
        entered.set()
        assert go_on.wait(600)
        raise RuntimeError("a counter that nobody foresaw")

    with (
        serving(target(), drafting(), slots=4) as server,
        server.http() as http,
        ThreadPoolExecutor(3) as pool,
    ):
        assert http.get("/health").json() == {"status": "ok"}
        server.parts.scheduler._observer.stepped = fails
        first = pool.submit(http.post, "/v1/completions", json=body | {"stream": True})
        assert entered.wait(600)
        others = [pool.submit(http.post, "/v1/completions", json=body | {"stream": way}) for way in (True, False)]
        until(lambda: server.parts.scheduler._todo.qsize() == 2)
        go_on.set()
        lines = [line for line in first.result().text.split("\n") if line]
        assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "server_failed"
        for reply in (*(other.result() for other in others), http.post("/v1/completions", json=body)):
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "server_failed")
        health = http.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "failed"})
        assert load(server) == (0, 0)


def test_time_ends_an_answer(gate: Gate) -> None:
    """Its stream, where there is one already; and its own status, also if the loop has not taken it in yet."""
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 50, "temperature": 0}
    with serving(target(), gate, slots=2, timeout=0.5) as server, gate, server.http() as http:
        lines = [line for line in http.post("/v1/completions", json=body | {"stream": True}).text.split("\n") if line]
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "timeout"
        assert lines[-1] == "data: [DONE]"
        whole = http.post("/v1/completions", json=body)
        assert (whole.status_code, whole.json()["error"]["code"]) == (504, "timeout")
        gate.open.set()
        until(lambda: load(server) == (0, 0))


def test_a_long_prompt_holds_nobody_up() -> None:
    """While it is run, chunk by chunk, those beside it get a token between any two chunks."""
    order: list[str] = []

    class Noting(PassingOn):
        def propose(self, rows):
            order.append("token")
            return super().propose(rows)

    class Chunks:
        def __init__(self, inner: Target) -> None:
            self._inner = inner

        def __getattr__(self, name):
            return getattr(self._inner, name)

        def prefill_chunk(self, remaining, *more, **named):
            order.append("chunk")
            return self._inner.prefill_chunk(remaining, *more, **named)

    short = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 200, "temperature": 0}
    with (
        serving(Chunks(target()), Noting(Vanilla()), slots=2) as server,
        server.openai() as client,
        client.completions.create(**short, stream=True, extra_body={"ignore_eos": True}) as stream,
    ):
        next(stream)
        client.completions.create(model="tiny", prompt=list(range(4, 124)), max_tokens=1)
        assert sum(1 for _ in stream) > 10
    chunks = [place for place, what in enumerate(order) if what == "chunk"][1:]  # the first is of the short prompt
    assert len(chunks) == 120 // 16 + 1
    assert all("token" in order[one:other] for one, other in itertools.pairwise(chunks))


def test_a_step_that_fails_ends_its_answers_and_not_the_server() -> None:
    class Failing(PassingOn):
        fails = True

        def propose(self, rows):
            if self.fails:
                self.fails = False
                raise RuntimeError("secret")
            return super().propose(rows)

    given = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}
    with serving(target(), Failing(Vanilla())) as server, server.openai() as client:
        with pytest.raises(openai.InternalServerError) as failed:
            client.completions.create(**given)
        assert "secret" not in str(failed.value)
        assert client.completions.create(**given).choices[0].text
        assert load(server) == (0, 0)


def test_who_is_answered_when_the_server_stops_gets_a_last_event(gate: Gate) -> None:
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 240, "temperature": 0, "stream": True}
    with (
        serving(target(), gate) as server,
        gate,
        server.http() as http,
        http.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as reply,
    ):
        lines = reply.iter_lines()
        assert next(line for line in lines if line.startswith("data:"))
        assert gate.entered.wait(600)
        server.parts.handle_exit(0, None)
        gate.open.set()
        rest = [line for line in lines if line]
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert rest[-1] == "data: [DONE]"
