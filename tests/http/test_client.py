"""Servers that mean harm, on real sockets, and addresses that are none: one sentence each, in bounded time and room."""

from __future__ import annotations

import gzip
import math
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from tercel.errors import TercelError
from tercel.http import client
from tercel.http.address import is_local, parse_address
from tercel.http.client import Http, HttpStatusError

HEAD = b"HTTP/1.1 200 OK\r\n"
FOREVER = 300.0  # seconds: nothing here may come near it


@contextmanager
def answering(*pieces: bytes, again: bytes = b"", pause: float = 0.0) -> Iterator[tuple[str, list[bytes]]]:
    """A server that sends the pieces, then `again` until the client goes; its address, and what it was asked."""
    asked: list[bytes] = []
    over = threading.Event()

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            asked.append(connection.recv(1 << 16))
            for piece in pieces:
                connection.sendall(piece)
            while again and not over.is_set():
                connection.sendall(again)
                over.wait(pause)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", asked
        finally:
            over.set()
            listener.shutdown(socket.SHUT_RDWR)
    thread.join()


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


# --------------------------------------------------------------------------------------------------------------- sizes


def test_a_body_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MOST", 1 << 20)
    too_much = pytest.raises(TercelError, match="sends more than 1 MiB")
    with answering(HEAD, b"\r\n", again=b"x" * 65536) as (url, _), too_much:
        Http.at(url, FOREVER).text("/metrics")
    chunks = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    with answering(HEAD, b"Transfer-Encoding: chunked\r\n\r\n", again=chunks) as (url, _), too_much:
        Http.at(url, FOREVER).post("/generate", {})


def test_a_refusal_without_end() -> None:
    refused = pytest.raises(HttpStatusError, match="status 500")
    with answering(b"HTTP/1.1 500 No\r\n\r\n", again=b"no " * 1000) as (url, _), refused as caught:
        Http.at(url, FOREVER).text("/metrics")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("again", [b"X: y\r\n" * 1000, b"HTTP/1.1 100 Continue\r\n\r\n"], ids=["headers", "interim"])
def test_headers_without_end(again: bytes) -> None:
    first = HEAD if again.startswith(b"X") else b""
    with answering(first, again=again) as (url, _):
        began = time.monotonic()
        with pytest.raises(TercelError, match=r"broke off|did not answer within 0\.5 s"):
            Http.at(url, 0.5).text("/metrics")
        assert time.monotonic() - began < FOREVER / 10


def test_answers_are_not_unpacked() -> None:
    bomb = gzip.compress(bytes(100 << 20), 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = pytest.raises(TercelError, match="answers in 'gzip', though asked not to pack")
    with answering(HEAD, b"Content-Encoding: gzip\r\n\r\n", bomb) as (url, asked), refused:
        Http.at(url, FOREVER).text("/metrics")
    assert b"accept-encoding: identity" in asked[0].lower()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


@pytest.mark.parametrize(
    "body",
    [b"[" * 100_000, b'{"a":' * 100_000, b'{"a":' + b"9" * 5000 + b"}", b"{" + b"\xff" * 10, b"", b"nul"],
    ids=["lists", "objects", "digits", "bytes", "empty", "word"],
)
def test_json_that_is_none(body: bytes) -> None:
    with answering(HEAD, b"\r\n", body) as (url, _), pytest.raises(TercelError, match="gives no JSON"):
        Http.at(url, FOREVER).get("/server_info")


# ---------------------------------------------------------------------------------------------------------------- time


@pytest.mark.parametrize("first", [b"", HEAD, HEAD + b"\r\n"], ids=["status line", "headers", "body"])
def test_a_drip_does_not_outlive_the_timeout(first: bytes) -> None:
    with answering(first or b"HTTP", again=b"x", pause=0.02) as (url, _):
        began = time.monotonic()
        with pytest.raises(TercelError, match=r"did not answer within 0\.3 s; raise --timeout"):
            Http.at(url, 0.3).text("/metrics")
        assert time.monotonic() - began < FOREVER / 10


@pytest.fixture
def stalled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[threading.Thread]]:
    """Name servers that do not answer before the test has ended; gives the threads that ask them."""
    released, asking, real = threading.Event(), [], socket.getaddrinfo

    def stall(host: str | bytes, *more: Any, **named: Any) -> Any:
        if b"stalled.test" not in (host if isinstance(host, bytes) else host.encode()):
            return real(host, *more, **named)
        asking.append(threading.current_thread())
        released.wait(FOREVER / 10)
        raise socket.gaierror(socket.EAI_AGAIN, "no name server answers")

    monkeypatch.setattr(socket, "getaddrinfo", stall)
    yield asking
    released.set()
    for thread in asking:
        thread.join()


@pytest.mark.parametrize("proxied", [False, True])
def test_a_look_up_does_not_outlive_the_timeout(
    monkeypatch: pytest.MonkeyPatch, stalled: list[threading.Thread], proxied: bool
) -> None:
    if proxied:
        monkeypatch.setenv("http_proxy", "http://stalled.test:3128")
    url = "http://elsewhere.test" if proxied else "http://stalled.test:8000"
    with pytest.raises(TercelError, match=r"did not answer within 0\.3 s; raise --timeout"):
        Http.at(url, 0.3).text("/metrics")
    (thread,) = stalled
    assert thread.is_alive()  # still asking, and nothing waits for it
    assert thread.daemon  # nor does the end of the program


def test_a_name_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(TercelError, match=r"no server answers at http://nowhere\.test:8000 \(.*not known"):
        Http.at("http://nowhere.test:8000", FOREVER).text("/metrics")


def test_a_time_that_is_none() -> None:
    for timeout in (0.0, -1.0, math.nan):
        with pytest.raises(TercelError, match="must be positive"):
            Http.at("http://localhost", timeout)


# ----------------------------------------------------------------------------------------------------------- redirects


@pytest.mark.parametrize(
    "location",
    ["http://OTHER/", "https://SAME/", "//OTHER/x", "ftp://SAME/", "file:///etc/passwd", "http://[::1", "http://xn--a/"],
)
def test_nobody_is_sent_to_another_place(location: str) -> None:
    with answering() as (elsewhere, asked_there), socket.create_server(("127.0.0.1", 0)) as listener:
        same = f"127.0.0.1:{listener.getsockname()[1]}"
        wanted = location.replace("OTHER", elsewhere.removeprefix("http://")).replace("SAME", same)
        reply = f"HTTP/1.1 302 Found\r\nLocation: {wanted}\r\nContent-Length: 0\r\n\r\n"

        def serve() -> None:
            with listener.accept()[0] as connection:
                connection.recv(1 << 16)
                connection.sendall(reply.encode())

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with pytest.raises(TercelError, match=r"send us on to .*--url"):
            Http.at(f"http://{same}", FOREVER).text("/metrics")
        thread.join()
        assert asked_there == []


def test_within_the_server_a_question_may_be_sent_on_but_not_for_ever() -> None:
    moved = b"HTTP/1.1 307 Moved\r\nLocation: /metrics/\r\nContent-Length: 0\r\n\r\n"
    with answering(moved) as (url, asked):
        with pytest.raises(TercelError, match="sends every question on"):
            Http.at(url, FOREVER).text("/metrics")
        assert [line.split()[1] for line in asked] == [b"/metrics", *[b"/metrics/"] * 3]
        with pytest.raises(TercelError, match="send us on to '/metrics/'"):
            Http.at(url, FOREVER).post("/generate", {"secret": 1})


# ------------------------------------------------------------------------------------------------------------- proxies


def test_local_servers_are_asked_directly_and_others_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = HEAD + b"Content-Length: 2\r\n\r\nhi"
    with answering(answer) as (proxy, through_proxy), answering(answer) as (url, directly):
        monkeypatch.setenv("http_proxy", proxy)
        monkeypatch.setenv("all_proxy", proxy)
        assert Http.at(url, FOREVER).text("/metrics") == "hi"
        assert Http.at(url.replace("127.0.0.1", "localhost"), FOREVER).text("/metrics") == "hi"
        assert (len(directly), len(through_proxy)) == (2, 0)
        assert Http.at("http://gpu-box.example:8000", FOREVER).text("/metrics") == "hi"
        assert through_proxy[0].startswith(b"GET http://gpu-box.example:8000/metrics ")


@pytest.mark.parametrize("proxy", ["nonsense://x", "http://[::1", "socks5://127.0.0.1:1"])
def test_a_proxy_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    monkeypatch.setenv("http_proxy", proxy)
    with pytest.raises(TercelError, match=r"proxy on the way to http://gpu-box\.example cannot be used .*no_proxy"):
        Http.at("http://gpu-box.example", FOREVER).text("/metrics")


@pytest.mark.parametrize(
    ("host", "local"),
    [("localhost", True), ("a.localhost", True), ("localhost.", True), ("127.0.0.1", True), ("[::1]", True),
     ("10.1.2.3", True), ("192.168.0.9", True), ("100.64.0.1", True), ("0.0.0.0", True), ("[fe80::1]", True),
     ("[fd00::1]", True), ("[::ffff:127.0.0.1]", True), ("8.8.8.8", False), ("[2600::1]", False),
     ("localhost.example.org", False), ("gpu-box", False)],
)  # fmt: skip
def test_which_hosts_are_local(host: str, local: bool) -> None:
    assert is_local(parse_address(f"http://{host}:8000")) is local


# ----------------------------------------------------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    "url",
    ["", "localhost:8000", "ftp://host", "file:///etc/passwd", "http://", "http:/x", "http:host", "http://[::1",
     "http://[::1]x", "http://[v1.x]", "http://a..b", "http://.", f"http://{'a' * 70}", "http://1.2.3.400",
     "http://host:99999", "http://host:0", "http://host:-1", "http://host:eight", "http://höst", "http://host/ä",
     "http://host:８０００", "http://ho st", " http://host", "http://host\n", "http://host\\x", "http://host?x", "http://host#x",
     "http://user:secret@host", "http://@host", "http://" + "a." * 40_000],
)  # fmt: skip
def test_no_address(url: str) -> None:
    with pytest.raises(TercelError, match=r"address of a server") as caught:
        Http.at(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "base"),
    [("http://localhost:8000", "http://localhost:8000"), ("HTTP://Host:80/v1/", "http://host:80"),
     ("https://h/engine/v1", "https://h/engine"), ("http://[::1]:8000/", "http://[::1]:8000"),
     ("http://xn--bcher-kva.example", "http://xn--bcher-kva.example"), ("http://h/%C3%A4", "http://h/%C3%A4")],
)  # fmt: skip
def test_addresses(url: str, base: str) -> None:
    assert Http.at(url).base == base
