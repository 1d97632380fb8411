"""What is read off running servers, on real sockets; and servers that are not there, or something else."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tercel.decode.types import GenerationResult
from tercel.doctor.clients import connect
from tercel.doctor.clients.llamacpp import LlamaCppClient
from tercel.doctor.clients.sglang import SglangClient
from tercel.doctor.clients.vllm import VllmClient
from tercel.doctor.prometheus import read_counters
from tercel.draft.shape import TreeShape
from tercel.errors import TercelError
from tercel.http.client import Http
from tercel.measure.counts import Counts
from tests.doctor.servers_for_tests import Fake, FakeLlama, FakeSglang, FakeVllm, running
from tests.tiny import tiny_tokenizer

PROMPT, OTHER = (5, 6, 7), (8, 9)
# the first token is prefill's; then steps of 2 + 1, 0 + 1 and 3 + 1 tokens
RESULTS = {
    PROMPT: GenerationResult(tuple(range(40, 49)), "", "length", 3, 3, (2, 0, 3), 12, 0.0, 0.0, {}),
    OTHER: GenerationResult((40, 41, 42), "", "length", 2, 2, (0, 0), 8, 0.0, 0.0, {}),
}


def fake(kind: type[Fake], **more: Any) -> Fake:
    return kind(tiny_tokenizer(), RESULTS, 3, chat=(1, 2, 3, 4), **more)


@pytest.mark.parametrize(
    ("kind", "reader", "more"),
    [
        (FakeVllm, VllmClient, {}),
        (FakeSglang, SglangClient, {}),
        (FakeSglang, SglangClient, {"old": True}),
        (FakeLlama, LlamaCppClient, {}),
        (FakeLlama, LlamaCppClient, {"metrics": True}),
    ],
    ids=["vllm", "sglang", "sglang-old", "llamacpp", "llamacpp-metrics"],
)
def test_engines_are_recognised_and_counted(kind: type[Fake], reader: type, more: dict[str, Any]) -> None:
    server_side = fake(kind, **more)
    with running(server_side) as url:
        server = connect(Http.at(f"{url}/v1/"))
        assert isinstance(server, reader)
        first, second = server.answer(PROMPT, 16), server.answer(OTHER, 16)
        assert server.chat_prompt([{"role": "user", "content": "hi"}], {}).length == 4
        draft = server.draft()
    assert (first.counts.drafts, first.counts.accepted) == (3, 5)
    assert (second.counts.drafts, second.counts.accepted) == (2, 0)  # what came before is not counted again
    told = not more.get("old") and (kind is not FakeLlama or more.get("metrics"))
    assert first.counts.per_position == ((2, 2, 1) if told else None)
    assert (first.tokens, first.length) == (RESULTS[PROMPT].tokens, 9)
    assert first.text == server_side.text(RESULTS[PROMPT].tokens)
    assert draft == (None if kind is FakeLlama else TreeShape.chain(3))
    assert first.counts.drafted == (0 if more.get("old") else 9)


def test_a_server_that_gives_text_alone() -> None:
    with running(fake(FakeVllm, token_ids=False)) as url:
        served = connect(Http.at(url), "vllm").answer(PROMPT, 16)
    assert (served.tokens, served.length) == (None, 9)


def test_counters_of_several_engines_are_summed() -> None:
    page = "\n".join(
        line
        for engine in "01"
        for line in (
            f'vllm:spec_decode_num_drafts_total{{engine="{engine}",model_name="a b}}"}} 10',
            f'vllm:spec_decode_num_draft_tokens_total{{engine="{engine}"}} 2e1',
            f'vllm:spec_decode_num_accepted_tokens_total{{engine="{engine}"}} 7.0',
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="10",engine="{engine}"}} 1.0',
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="9",engine="{engine}"}} 6.0',
        )
    )
    assert read_counters(page, "vllm") == Counts(20, 40, 14, (12, 2))
    assert read_counters(page, "llamacpp") is None
    assert read_counters("", "vllm") is None


def test_positions_that_appear_with_their_first_draft() -> None:
    now, before = Counts(5, 15, 6, (4, 2)), Counts(2, 6, 1, None)
    assert now.since(before) == Counts(3, 9, 5, (4, 2))
    assert now.since(Counts(2, 6, 1, (1,))).per_position == (3, 2)


class Plain(FakeVllm):
    """Without speculative decoding."""

    def counters(self, prefix: str, labels: str) -> str:
        return "vllm:generation_tokens_total 3\n"


def test_a_server_without_a_head() -> None:
    with running(fake(Plain)) as url, pytest.raises(TercelError, match="runs without a head"):
        connect(Http.at(url)).answer(PROMPT, 16)
    with running(fake(FakeSglang)) as url, pytest.raises(TercelError, match="status 404"):
        connect(Http.at(url), "vllm").answer(PROMPT, 16)


def test_something_else_listens_there() -> None:
    with running(fake(Fake)) as url, pytest.raises(TercelError, match=r"not recognised.*--engine"):
        connect(Http.at(url))
    with running(fake(FakeVllm)) as url, pytest.raises(TercelError, match="no JSON"):
        Http.at(url).get("/metrics")


def test_no_server() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(TercelError, match="no server answers"):
        connect(Http.at(f"http://127.0.0.1:{port}"))


@contextmanager
def listening(reply: bytes | None) -> Iterator[str]:
    """A socket that accepts one connection and answers with `reply`, or never (None)."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        kept = []

        def accept() -> None:
            connection, _ = listener.accept()
            kept.append(connection)
            if reply is not None:
                connection.recv(4096)
                connection.sendall(reply)
                connection.close()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()
        for connection in kept:
            connection.close()


def test_a_server_that_never_answers_or_breaks_off() -> None:
    with listening(None) as url, pytest.raises(TercelError, match=r"did not answer within 0\.05 s"):
        Http.at(url, timeout=0.05).text("/metrics")
    for reply in (b"", b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nshort", b"garbage\r\n\r\n"):
        with listening(reply) as url, pytest.raises(TercelError, match="broke off"):
            Http.at(url).text("/metrics")


@pytest.mark.parametrize("kind", [FakeVllm, FakeSglang, FakeLlama])
def test_template_arguments_go_with_the_messages(monkeypatch: pytest.MonkeyPatch, kind: type[Fake]) -> None:
    sent: list[dict[str, Any]] = []
    post = Http.post
    with running(fake(kind)) as url:
        server = connect(Http.at(url))
        monkeypatch.setattr(Http, "post", lambda http, path, body: (sent.append(body), post(http, path, body))[1])
        server.chat_prompt([{"role": "user", "content": "hi"}], {"enable_thinking": False})
        server.chat_prompt([{"role": "user", "content": "hi"}], {})
    asked = [body.get("chat_template_kwargs") for body in sent if "messages" in body]
    assert asked == [{"enable_thinking": False}, None]
