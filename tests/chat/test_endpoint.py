"""Answers of a real local server with OpenAI's interface: concurrency, patience, resume, and what ends a run."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tercel.chat import Conversation, Message, RegenerateReport, read_conversations, regenerate
from tercel.chat.endpoint import Asking, EndpointResponder, Patience
from tercel.errors import TercelError
from tercel.http.client import Http
from tests.cli.running import refused
from tests.cli.running import run as tercel

from .echo import SETTINGS, asks, lines

QUICK = Patience(tries=3, first=0.001, most=0.002)
Reply = tuple[int, dict[str, str], Any]  # status, headers, body


def said(text: str, **more: Any) -> Reply:
    choice = {"index": 0, "message": {"role": "assistant", "content": text, **more}, "finish_reason": "stop"}
    return 200, {}, {"choices": [choice], "usage": {"completion_tokens": len(text.split())}}


@dataclass
class World:
    """A server, and what it saw. before: the reply to the n-th request of a question, n from 1; None: the answer."""

    url: str = ""
    before: Callable[[str, int], Reply | None] = lambda question, tries: None
    models: Reply = (200, {}, {"data": [{"id": "m"}]})
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    tries: dict[str, int] = field(default_factory=dict)
    together: threading.Barrier | None = None  # as many requests have to be there at once
    lock: threading.Lock = field(default_factory=threading.Lock)

    def reply(self, body: dict[str, Any], headers: dict[str, str]) -> Reply:
        question = body["messages"][-1]["content"]
        with self.lock:
            self.asked.append(body)
            self.headers.append(headers)
            self.tries[question] = self.tries.get(question, 0) + 1
            fault = self.before(question, self.tries[question])
        if self.together is not None:
            self.together.wait(30)
        return fault or said(f"re: {question}")


@contextmanager
def serving(world: World) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(*world.models)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            reply = (404, {}, {"error": "no such place"})
            self._send(*(world.reply(body, dict(self.headers)) if self.path == "/v1/chat/completions" else reply))

        def _send(self, status: int, headers: dict[str, str], body: Any) -> None:
            text = json.dumps(body).encode()
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(text))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        world.url = f"http://127.0.0.1:{server.server_port}/v1"
        try:
            yield world.url
        finally:
            server.shutdown()


def run(
    world: World, prompts: list[Conversation], out: Path, *, in_flight: int = 4, temperature: float = 0.0
) -> RegenerateReport:
    asking = Asking("m", temperature, 7, 64)
    with EndpointResponder(Http.at(world.url, 20.0), asking, QUICK) as respond:
        return regenerate(prompts, respond, out, tokenizer=None, settings=SETTINGS, in_flight=in_flight)


def test_turns_are_answered_in_context_and_many_at_once(tmp_path: Path) -> None:
    out, world = tmp_path / "out.jsonl", World(together=threading.Barrier(4))
    tools = ({"type": "function", "function": {"name": "f"}},)
    prompts = [asks(f"c{i}", f"one {i}", f"two {i}") for i in range(4)]
    prompts[0] = Conversation("c0", (Message("system", "Be."), *prompts[0].messages), "test", tools)
    with serving(world):
        report = run(world, prompts, out)  # the barrier lets nobody through before four have come
    assert (report.answered, report.turns, report.tokens) == (4, 8, 8 * 3)
    rows = {row["id"]: row for row in lines(out)}
    assert [m["content"] for m in rows["c1"]["messages"]] == ["one 1", "re: one 1", "two 1", "re: two 1"]
    assert rows["c1"]["finish"] == ["stop", "stop"]
    assert "answer_ids" not in rows["c1"]
    (asked,) = (body for body in world.asked if body["messages"][-1]["content"] == "two 0")
    assert [m["role"] for m in asked["messages"]] == ["system", "user", "assistant", "user"]
    assert (asked["model"], asked["max_tokens"], asked["temperature"]) == ("m", 64, 0.0)
    assert (asked["tools"], "seed" in asked) == (list(tools), False)
    assert len(list(read_conversations(out))) == 4


def test_seeds_belong_to_the_question(tmp_path: Path) -> None:
    world = World()
    with serving(world):
        for name in ("a", "b"):
            run(world, [asks("c", "x"), asks("d", "y")], tmp_path / name, temperature=1.0)
    seeds = [{body["messages"][0]["content"]: body["seed"] for body in world.asked[at : at + 2]} for at in (0, 2)]
    assert seeds[0] == seeds[1]
    assert seeds[0]["x"] != seeds[0]["y"]


@pytest.mark.parametrize(
    "fault",
    [
        (429, {"Retry-After": "0.05"}, {"error": "slow down"}),
        (429, {"Retry-After": formatdate(time.time() - 60, usegmt=True)}, {}),
        (503, {}, {}),
        (500, {"Retry-After": "soon"}, {}),
    ],
)
def test_passing_faults_are_waited_out(tmp_path: Path, fault: Reply) -> None:
    world = World(before=lambda question, tries: fault if question == "bad" and tries < 3 else None)
    with serving(world):
        report = run(world, [asks("a", "bad"), asks("b", "good")], tmp_path / "out.jsonl")
    assert report.answered == 2
    assert world.tries == {"bad": 3, "good": 1}


def test_a_server_is_given_the_time_that_it_asks_for(tmp_path: Path) -> None:
    world = World(before=lambda question, tries: (429, {"Retry-After": "0.3"}, {}) if tries == 1 else None)
    with serving(world):
        began = time.monotonic()
        run(world, [asks("a", "x")], tmp_path / "out.jsonl")
        assert time.monotonic() - began >= 0.3  # QUICK alone would wait 2 ms
        world.before = lambda question, tries: (429, {"Retry-After": "86400"}, {})
        with pytest.raises(TercelError, match="asks for a pause of 86,400 s"):
            run(world, [asks("a", "x")], tmp_path / "other.jsonl")


def test_what_is_refused_fails_alone_and_a_lasting_fault_ends_the_run(tmp_path: Path) -> None:
    out, world = tmp_path / "out.jsonl", World()
    prompts = [asks("long", "long"), asks("good", "good"), asks("filtered", "f"), asks("empty", "e")]
    cut = said("re")[2]
    cut["choices"][0]["finish_reason"] = "content_filter"
    faults = {"long": (400, {}, {"error": "too long"}), "f": (200, {}, cut), "e": said("")}
    world.before = lambda question, tries: faults.get(question)
    with serving(world):
        report = run(world, prompts, out)
        assert (report.answered, report.failed) == (1, 3)
        assert any("too long" in reason for reason in report.reasons)
        assert any('"content_filter"' in reason or "'content_filter'" in reason for reason in report.reasons)
        down, part = tmp_path / "down.jsonl", tmp_path / "down.jsonl.part"
        world.before = lambda question, tries: (503, {}, {}) if question == "late" else None
        prompts = [asks("a", "first question"), asks("b", "late")]
        with pytest.raises(TercelError, match=r"status 503 .* so it was 3 times; run again later, to resume"):
            run(world, prompts, down, in_flight=1)
        assert [row["id"] for row in lines(part)] == ["a"]
        world.before = lambda question, tries: None
        world.asked.clear()
        assert run(world, prompts, down, in_flight=1).done_before == 1
        assert [body["messages"][0]["content"] for body in world.asked] == ["late"]
    assert {row["id"] for row in lines(down)} == {"a", "b"}


def test_an_edited_answer_is_kept_and_an_edited_question_is_not(tmp_path: Path) -> None:
    out, world = tmp_path / "out.jsonl", World()
    with serving(world):
        run(world, [asks("a", "x")], out)
        part = tmp_path / "out.jsonl.part"
        out.rename(part)
        part.write_text(part.read_text().replace('"re: x"', '"re: y"'))
        assert run(world, [asks("a", "x")], out).done_before == 1
        out.rename(part)
        part.write_text(part.read_text().replace('"content": "x"', '"content": "z"'))
        with pytest.raises(TercelError, match="line 1: it is not its prompt with answers"):
            run(world, [asks("a", "x")], out)


def test_thoughts_and_calls_are_kept_and_thoughts_not_sent_back(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    first = said("", reasoning_content="hm", tool_calls=[call])
    first[2]["choices"][0]["finish_reason"] = "tool_calls"
    world = World(before=lambda question, tries: first if question == "x" else None)
    with serving(world):
        run(world, [asks("a", "x", "y")], tmp_path / "out.jsonl")
    (row,) = lines(tmp_path / "out.jsonl")
    assert row["messages"][1] == {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]}
    assert world.asked[1]["messages"][1] == {"role": "assistant", "content": "", "tool_calls": [call]}


@pytest.mark.parametrize(
    ("models", "answer", "message"),
    [
        ((200, {}, {"data": [{"id": "other"}]}), None, "has no model 'm'; give one of 'other' as --model"),
        ((401, {}, {}), None, "it wants a key: name the environment variable that holds one with --api-key-env"),
        ((404, {}, {}), (403, {}, {}), "it wants a key"),
        ((404, {}, {}), (404, {}, {"error": "no such model"}), "status 404 .*no such model"),
        ((404, {}, {}), (200, {}, {"object": "text"}), "without a choice with a message; is it OpenAI-compatible"),
    ],
)
def test_a_wrong_server_is_one_sentence(tmp_path: Path, models: Reply, answer: Reply | None, message: str) -> None:
    world = World(models=models, before=lambda question, tries: answer)
    with serving(world), pytest.raises(TercelError, match=message):
        run(world, [asks(f"c{i}", f"x {i}") for i in range(20)], tmp_path / "out.jsonl", in_flight=2)
    assert len(world.asked) <= 4
    assert list(tmp_path.iterdir()) == []


def test_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, out, world = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl", World()
    prompts.write_text(json.dumps({"id": "a", "turns": ["x", "y"]}) + "\n")
    asked = ["data", "regenerate", str(prompts), "--out", str(out), "--api-key-env", "TERCEL_TEST_KEY"]
    refused(tercel(*asked), "--target TARGET, or --endpoint URL")
    with serving(world) as url:
        server = ["--endpoint", url, "--model", "m"]
        refused(tercel(*asked, *server), "TERCEL_TEST_KEY of --api-key-env holds no key")
        monkeypatch.setenv("TERCEL_TEST_KEY", "sesame")
        refused(tercel(*asked, *server, "--head", "h"), "--head")
        ended = tercel(*asked, *server)
    assert ended.code == 0, ended.err
    assert "1 answered + 0 failed + 0 skipped = 1 read" in ended.out
    assert all(headers["Authorization"] == "Bearer sesame" for headers in world.headers)
    assert "sesame" not in ended.out + ended.err + "".join(p.read_text() for p in tmp_path.iterdir())
    refused(tercel(*asked[:3], "--out", str(tmp_path / "b"), *server), "no server answers at", url.removesuffix("/v1"))
