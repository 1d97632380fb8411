"""The requests of `bench/soak.py`, and clients that ask them: patient ones, slow ones, and some that leave or die."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx2

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
JSON_BODY = {"Content-Type": "application/json"}
TRIES = 200  # of a request that is told to come again
HEAD = 9 << 20  # bytes of a body that is too large
PATIENCE = 300.0  # seconds until an answer has to have begun, or gone on
SLOW_BUFFER, SLOW_PAUSE = 4096, 0.02  # bytes that a slow reader's socket takes, and seconds between two reads
FORM = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "fine": {"type": "boolean"}},
    "required": ["n", "fine"],
    "additionalProperties": False,
}
# a client without this package, which is killed: it says when it has had a piece of its stream
DYING = """
import socket, sys
host, port, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
body = sys.stdin.buffer.read(size)
with socket.create_connection((host, port)) as server:
    head = "POST /v1/chat/completions HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Type: application/json\\r\\n"
    server.sendall((head + f"Content-Length: {size}\\r\\n\\r\\n").encode() + body)
    seen = b""
    while b"data:" not in seen and b" 429 " not in seen:
        seen += server.recv(4096) or sys.exit("closed")
    print("429" if b" 429 " in seen else "piece", flush=True)
    while server.recv(4096):
        pass
"""
How = Literal["whole", "stream", "slow", "leave", "die"]


@dataclass(frozen=True)
class Case:
    """One request. content: what is sent in place of `body`, where that is no JSON. status: the answer's, as it has to
    be. how: its client reads it whole, as a stream, slowly, leaves in the middle of it, or is killed there."""

    kind: str
    path: str
    body: dict[str, Any]
    how: How = "whole"
    status: int = 200
    content: bytes | None = None

    @property
    def answered(self) -> bool:
        """Whether there is an answer, which has to be that of the same request alone."""
        return self.status == 200 and self.how in ("whole", "stream", "slow")

    @property
    def sent(self) -> bytes:
        return json.dumps(self.body).encode() if self.content is None else self.content


@dataclass(frozen=True)
class Outcome:
    """What became of a request. texts: of its choices, if they were all told to their ends. refused: how often it was
    told to come again. fault: what was wrong; None if nothing was. times: as `serving.Told` has them, for streams."""

    case: Case
    texts: tuple[str, ...] | None = None
    refused: int = 0
    fault: str | None = None
    times: tuple[tuple[float, int], ...] = ()


@dataclass
class Stream:
    """A stream that is read. ended: whether it had its last event; error: the code of one that says why it was cut."""

    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    times: list[tuple[float, int]] = field(default_factory=list)
    ended: bool = False
    error: str | None = None

    async def read(self, lines: AsyncIterator[str], began: float) -> AsyncIterator[None]:
        """Yields after every piece."""
        async for line in lines:
            if not line.startswith("data:"):
                continue
            data = line[5:].strip()
            if data == "[DONE]":
                self.ended = True
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                self.error = str(chunk["error"]["code"] or chunk["error"]["message"])
                continue
            for choice in chunk["choices"]:
                number, tokens = choice["index"], len(choice.get("token_ids", ()))
                text = choice.get("text") or choice.get("delta", {}).get("content") or ""
                self.texts[number] = self.texts.get(number, "") + text
                if choice.get("finish_reason"):
                    self.reasons[number] = choice["finish_reason"]
                if tokens:
                    self.times.append((time.perf_counter() - began, tokens))
            yield

    @property
    def whole(self) -> tuple[str, ...] | None:
        """All texts, if all were told to their ends."""
        if not self.ended or self.error is not None or set(self.reasons) != set(self.texts):
            return None
        return tuple(self.texts[number] for number in sorted(self.texts))


def cases(texts: Sequence[str], long_prompt: Sequence[int], most: int, draft: bool) -> list[Case]:
    """Of one round, unlike each other and mixed. long_prompt: token ids. most: tokens of the longest answer."""
    greedy = {"temperature": 0, "draft": draft}
    drawn = {"temperature": 0.9, "top_p": 0.95, "seed": 11, "draft": draft}
    streamed = {"stream": True, "return_token_ids": True}
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": FORM}}
    chats = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    short, half = max(most // 4, 2), max(most // 2, 2)
    made: list[Case] = []
    for number, chat in enumerate(chats):
        made += [
            Case("short", CHAT, {**chat, **greedy, "max_tokens": short}),
            Case("streamed", CHAT, {**chat, **greedy, **streamed, "max_tokens": most}, "stream"),
            Case("drawn", CHAT, {**chat, **drawn, **streamed, "max_tokens": half, "n": 2}, "stream"),
            Case("left", CHAT, {**chat, **greedy, **streamed, "max_tokens": most, "ignore_eos": True}, "leave"),
            BROKEN[number % len(BROKEN)],
        ]
    long = {"prompt": list(long_prompt), **greedy, **streamed, "max_tokens": short}
    slow = {**chats[0], **greedy, **streamed, "max_tokens": most, "trace": True}
    made += [
        Case("long", COMPLETIONS, long, "stream"),
        Case("form", CHAT, {**chats[0], **greedy, "response_format": form, "max_tokens": 60}),
        Case("slow", CHAT, slow, "slow"),
        Case("killed", CHAT, {**chats[-1], **greedy, "stream": True, "max_tokens": most, "ignore_eos": True}, "die"),
        Case("oversized", CHAT, {}, status=413, content=b" " * HEAD),
        Case("oversized", COMPLETIONS, {"prompt": [1] * 400_000}, status=400),
        Case("oversized", COMPLETIONS, {"prompt": "a", "n": 100_000}, status=400),
    ]
    return made


BROKEN = [
    Case("malformed", CHAT, {}, status=400, content=b'{"messages": [{"role": "user", '),
    Case("malformed", CHAT, {}, status=400, content=b"\xff\xfe\x00"),
    Case("malformed", CHAT, {"messages": [{"role": "king", "content": "x"}]}, status=400),
    Case("malformed", COMPLETIONS, {"prompt": {"a": 1}}, status=400),
    Case("malformed", COMPLETIONS, {"prompt": "a", "max_tokens": "many"}, status=400),
    Case("malformed", COMPLETIONS, {"prompt": "a", "model": "no such model"}, status=404),
    Case("malformed", "/v1/nothing", {}, status=404),
]


async def ask(url: str, case: Case) -> Outcome:
    """The request, again and again while it is told to come later."""
    for refused in range(TRIES):
        try:
            outcome = await (_die(url, case) if case.how == "die" else _ask_once(url, case))
        except (httpx2.HTTPError, OSError, ValueError) as error:
            return Outcome(case, refused=refused, fault=f"{type(error).__name__}: {error}")
        if outcome is not None:
            return Outcome(case, outcome.texts, refused, outcome.fault, outcome.times)
        await asyncio.sleep(0.2)  # less than it says, so that the queue stays full
    return Outcome(case, refused=TRIES, fault="never let in")


async def _ask_once(url: str, case: Case) -> Outcome | None:
    """None if the request was told to come again."""
    options = [(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER)] if case.how == "slow" else []
    transport = httpx2.AsyncHTTPTransport(socket_options=options)
    async with httpx2.AsyncClient(base_url=url, timeout=PATIENCE, transport=transport) as client:
        began = time.perf_counter()
        async with client.stream("POST", case.path, content=case.sent, headers=JSON_BODY) as reply:
            if reply.status_code == 429:
                assert int(reply.headers["retry-after"]) >= 1
                return None
            if reply.status_code != case.status:
                return Outcome(case, fault=f"status {reply.status_code}: {(await reply.aread())[:200]!r}")
            if case.status != 200:
                told = json.loads(await reply.aread())["error"]["message"]
                return Outcome(case, fault=None if told else "an error that says nothing")
            if case.how == "whole":
                choices = json.loads(await reply.aread())["choices"]
                return Outcome(case, tuple(c.get("text") or c["message"]["content"] for c in choices))
            stream, pieces = Stream(), 0
            async with aclosing(stream.read(reply.aiter_lines(), began)) as reading:
                async for _ in reading:
                    pieces += 1
                    if case.how == "leave" and pieces > 2:
                        return Outcome(case)
                    if case.how == "slow":
                        await asyncio.sleep(SLOW_PAUSE)
            fault = None if stream.whole is not None else f"a stream without its end (error {stream.error})"
            return Outcome(case, stream.whole, fault=fault, times=tuple(stream.times))


async def _die(url: str, case: Case) -> Outcome | None:
    """A client that is a process, killed when it has had a piece of its stream."""
    host, port = url.removeprefix("http://").split(":")
    command = (sys.executable, "-I", "-S", "-c", DYING, host, port, str(len(case.sent)))
    pipe = asyncio.subprocess.PIPE
    client = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    try:
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write(case.sent)
        client.stdin.close()
        said = (await asyncio.wait_for(client.stdout.readline(), PATIENCE)).strip()
    finally:
        if client.returncode is None:
            client.kill()
        await client.wait()
    if said == b"429":
        return None
    return Outcome(case, fault=None if said == b"piece" else "its stream did not begin")
