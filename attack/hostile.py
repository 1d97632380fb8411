"""How servers answer: honestly, or without an end, slowly, from elsewhere, with less or more than they promise."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from attack.mutate import ESCAPE, to_json
from attack.world import DEPTH

Reply = bytes | Iterator[bytes]
Answering = Callable[[str, str, bytes], Reply]  # method, path and body to all that is sent back


def honest(served: dict[str, Any], change: Callable[[str, Any], Reply | None] | None = None) -> Answering:
    """A vLLM that answers the world's questions as it should; `change` gets path and answer and may give another."""
    state = {"drafts": 0, "accepted": [0] * DEPTH}

    def answer(method: str, path: str, body: bytes) -> Reply:
        value = _right(served, state, path, body)
        other = change(path, value) if change is not None else None
        if other is not None:
            return other
        return (
            http(404, b"{}")
            if value is None
            else http(200, value if isinstance(value, bytes) else json.dumps(value).encode())
        )

    return answer


def _right(served: dict[str, Any], state: dict[str, Any], path: str, body: bytes) -> Any:
    if path == "/metrics":
        return counters(state["drafts"], state["accepted"])
    if path == "/v1/models":
        return {"object": "list", "data": [{"id": "tiny"}]}
    if path == "/v1/completions":
        prompt = json.loads(body)["prompt"]
        result = served.get(json.dumps(prompt)) or next(iter(served.values()))
        for taken in result["accepted"]:
            state["drafts"] += 1
            for place in range(taken):
                state["accepted"][place] += 1
        choice = {"text": result["text"], "finish_reason": "length", "token_ids": result["tokens"]}
        return {"choices": [choice], "usage": {"completion_tokens": len(result["tokens"])}}
    if path == "/v1/chat/completions":
        ids = json.loads(next(iter(served)))
        return {"choices": [{}], "prompt_token_ids": ids, "usage": {"prompt_tokens": len(ids)}}
    return None


def counters(drafts: Any, accepted: list[Any], drafted: Any = None) -> bytes:
    name = "vllm:spec_decode_num"
    lines = [f'{name}_drafts_total{{engine="0"}} {drafts}', f"{name}_accepted_tokens_total {sum(map(float, accepted))}"]
    lines.append(f"{name}_draft_tokens_total {float(drafts) * len(accepted) if drafted is None else drafted}")
    lines += [f'{name}_accepted_tokens_per_pos_total{{position="{i}"}} {n}' for i, n in enumerate(accepted)]
    return ("\n".join(lines) + "\n").encode()


def http(status: int, body: bytes, *headers: str, length: int | None = None) -> bytes:
    lines = [
        f"HTTP/1.1 {status} x",
        f"Content-Length: {len(body) if length is None else length}",
        "Connection: close",
        *headers,
    ]
    return "\r\n".join(lines).encode("utf-8", "surrogateescape") + b"\r\n\r\n" + body


def listen(answering: Answering, listening: socket.socket) -> None:
    """Answer every request in a thread of its own, until the process is ended."""
    listening.listen(16)
    while True:
        connection, _ = listening.accept()
        threading.Thread(target=_one, args=(answering, connection), daemon=True).start()


def _one(answering: Answering, connection: socket.socket) -> None:
    try:
        with connection, connection.makefile("rb") as stream:
            method, _, rest = stream.readline().decode("latin-1").partition(" ")
            length = 0
            while line := stream.readline().strip():
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            reply = answering(method, rest.split(" ")[0], stream.read(length))
            port = str(connection.getsockname()[1]).encode()
            for part in [reply.replace(b"{port}", port)] if isinstance(reply, bytes) else reply:
                connection.sendall(part)
    except OSError:
        pass  # the other side has gone, as it should


# --------------------------------------------------------------------------------- answers that never are ones


def endless(block: bytes, headers: bytes = b"") -> Answering:
    def answer(method: str, path: str, body: bytes) -> Iterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\n" + headers + b"\r\n"
        while True:
            yield block

    return answer


def endless_head(method: str, path: str, body: bytes) -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\n"
    while True:
        yield b"X-More: " + b"a" * 200 + b"\r\n"


def drip(method: str, path: str, body: bytes) -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"
    while True:
        time.sleep(0.5)
        yield b"x"


def drip_head(method: str, path: str, body: bytes) -> Iterator[bytes]:
    for letter in b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000:
        time.sleep(0.5)
        yield bytes([letter])


def silence(method: str, path: str, body: bytes) -> Iterator[bytes]:
    time.sleep(3600)
    yield b""


def packed(method: str, path: str, body: bytes) -> Reply:
    return http(200, gzip.compress(b" " * (64 << 20)), "Content-Encoding: gzip")


def fixed(reply: bytes) -> Answering:
    return lambda method, path, body: reply


def to(place: str, status: int = 302) -> Answering:
    return fixed(http(status, b"", f"Location: {place}"))


def elsewhere(served: dict[str, Any]) -> Answering:
    """Counters lie at another host, which is this one by its other name."""
    right = honest(served)

    def answer(method: str, path: str, body: bytes) -> Reply:
        if path == "/metrics":
            return http(302, b"", "Location: http://localhost:{port}/elsewhere/metrics")
        return right(method, path.removeprefix("/elsewhere"), body)

    return answer


def round_about(method: str, path: str, body: bytes) -> Reply:
    return http(302, b"", f"Location: /{len(path)}{path}")


NEVER: dict[str, Answering] = {
    "a body without an end": endless(b"x" * 65536),
    "lines without an end": endless(b"a 1\n" * 9000),
    "chunks without an end": endless(b"FFFF\r\n" + b"x" * 65535 + b"\r\n", b"Transfer-Encoding: chunked\r\n"),
    "a chunk of 2^60": fixed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1000000000000000\r\nx"),
    "a chunk below zero": fixed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nx"),
    "a chunk of letters": fixed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\nx"),
    "headers without an end": endless_head,
    "one header without an end": endless(b"a" * 65536, b"X: "),
    "a drip": drip,
    "a drip of headers": drip_head,
    "silence": silence,
    "a packed body": packed,
    "a length of 2^60": fixed(http(200, b"x", length=2**60)),
    "a length below zero": fixed(http(200, b"x", length=-1)),
    "less than promised": fixed(http(200, b"x", length=1000)),
    "nothing": fixed(b""),
    "another protocol": fixed(b"SSH-2.0-OpenSSH_9\r\n"),
    "a status of letters": fixed(b"HTTP/1.1 abc x\r\n\r\n"),
    "a status of 99999": fixed(b"HTTP/1.1 99999 x\r\n\r\n"),
    "a status 100 again and again": fixed(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
    "a status line with an escape": fixed(b"HTTP/1.1 500 " + ESCAPE.encode() + b"\r\n\r\n"),
    "an error with an escape": fixed(http(500, ESCAPE.encode() * 20)),
    "an error of much text": fixed(http(500, b"a" * 3_000_000)),
    "an error without an end": lambda m, p, b: (
        part for part in (b"HTTP/1.1 500 x\r\n\r\n", *[b"x" * 65536] * 200_000)
    ),
    "bytes that are no text": fixed(http(200, bytes(range(256)) * 100)),
    "a redirect to itself": to("/metrics"),
    "a redirect round about": round_about,
    "a redirect to a file": to("file:///etc/passwd"),
    "a redirect to ftp": to("ftp://127.0.0.1:9/x"),
    "a redirect to another host": to("http://127.0.0.2:9/metrics"),
    "a redirect to nowhere": to(""),
    "a redirect with an escape": to("http://127.0.0.1:9/\x1b[2J"),
    "a redirect that is no address": to("http://[::1"),
    "a redirect with no place": fixed(http(302, b"")),
    "a password wanted": fixed(http(401, b"", "WWW-Authenticate: Basic realm=x")),
    "not modified": fixed(http(304, b"")),
    "gone": fixed(http(404, b"{}")),
    "no content": fixed(http(204, b"")),
    "a proxy wanted": fixed(http(407, b"")),
}


# ------------------------------------------------------------------------------------ honest servers of other engines

INFO = dict.fromkeys(("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"), 2)
META = {
    "completion_tokens": 5,
    "spec_verify_ct": 2,
    "spec_correct_drafts_histogram": [1, 1],
    "spec_num_proposed_drafts": 6,
}
SAID = {"text": "a", "output_ids": [5, 6, 7, 8, 9], "meta_info": META}
TIMINGS = {"predicted_n": 5, "draft_n": 3, "draft_n_accepted": 2}


def sglang(info: Any, reply: Any) -> Answering:
    def answer(method: str, path: str, body: bytes) -> Reply:
        replies = {"/server_info": info, "/generate": reply, "/v1/chat/completions": {"choices": [{}], "usage": {}}}
        return http(200, to_json(replies[path])) if path in replies else http(404, b"{}")

    return answer


def llama(reply: Any) -> Answering:
    def answer(method: str, path: str, body: bytes) -> Reply:
        replies = {
            "/completion": reply,
            "/props": {"default_generation_settings": {}},
            "/apply-template": {"prompt": "x"},
            "/tokenize": {"tokens": [1, 2]},
        }
        return http(200, to_json(replies[path])) if path in replies else http(404, b"{}")

    return answer
