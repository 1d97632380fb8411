"""The official client against a running server: what it asks for is what the loop gives alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tercel.decode.eagle3 import Eagle3
from tercel.decode.engine import Engine
from tercel.decode.generation_config import sampling_for
from tercel.decode.types import GenerationResult, Request
from tercel.decode.vanilla import Vanilla
from tercel.draft.shape import TreeShape
from tests.overfit import TEXTS, World
from tests.serve.servers import Running, serving

TREE = TreeShape(3, 3, 8)


@pytest.fixture(scope="module")
def server(world: World) -> Iterator[Running]:
    with serving(world.target, Eagle3(world.head, world.target, TREE), slots=4) as running:
        yield running


def alone(world: World, text: str, **params) -> GenerationResult:
    """Token by token, without a server."""
    request = Request.chat(world.target, text, sampling_for(world.target, **params))
    return Engine(world.target, Vanilla()).generate([request])[0]


def asked(text: str, **more) -> dict:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], "temperature": 0, **more}


def test_a_chat_is_answered_as_without_a_server(server: Running, world: World) -> None:
    client = server.openai()
    answer = client.chat.completions.create(**asked(TEXTS[0], max_completion_tokens=16))
    truth = alone(world, TEXTS[0], max_new_tokens=16)
    choice, usage = answer.choices[0], answer.usage
    assert (choice.message.content, choice.finish_reason) == (truth.text, truth.finish_reason)
    assert choice.message.role == "assistant"
    assert (usage.prompt_tokens, usage.completion_tokens) == (truth.prompt_tokens, len(truth.tokens))
    assert usage.completion_tokens_details.accepted_prediction_tokens > 0
    assert usage.completion_tokens_details.rejected_prediction_tokens > 0


def test_a_stream_adds_up_to_the_same(server: Running, world: World) -> None:
    with server.openai() as client:
        chunks = list(
            client.chat.completions.create(
                **asked(TEXTS[1], max_tokens=16), stream=True, stream_options={"include_usage": True}
            )
        )
    truth = alone(world, TEXTS[1], max_new_tokens=16)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == truth.text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == truth.finish_reason
    assert not chunks[-1].choices
    assert chunks[-1].usage.completion_tokens == len(truth.tokens)
    assert len(chunks) > 4
