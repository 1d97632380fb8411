"""The official client against a running server: what it asks for is what the loop gives alone."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest

from tercel.chat import Message, serving_prompt
from tercel.decode.eagle3 import Eagle3
from tercel.decode.engine import Engine
from tercel.decode.generation_config import sampling_for
from tercel.decode.types import GenerationResult, Request
from tercel.decode.vanilla import Vanilla
from tercel.doctor.clients import connect
from tercel.draft.shape import TreeShape
from tercel.http.client import Http
from tercel.serve.answers import Writer
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


def test_a_stream_that_fails_says_so_and_ends(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*of: object) -> None:
        raise RuntimeError("a fault that nobody foresaw")

    monkeypatch.setattr(Writer, "take", fails)
    with server.http() as client:
        text = client.post("/v1/chat/completions", json=asked(TEXTS[0], stream=True)).text
    told, end = (line.removeprefix("data:").strip() for line in text.splitlines() if line.startswith("data:"))
    assert end == "[DONE]"
    assert json.loads(told)["error"]["type"] == "server_error"
    assert "foresaw" not in told


def test_choices_have_seeds_of_their_own(server: Running, world: World) -> None:
    how = {"temperature": 1.0, "top_p": 0.95, "frequency_penalty": 0.3, "logit_bias": {"70": 2.0}}
    with server.openai() as client:
        answer = client.chat.completions.create(
            **asked(TEXTS[2], **how, max_tokens=10, n=3, seed=-1, extra_body={"top_k": 60, "min_p": 0.01})
        )
    ours = {**how, "logit_bias": {70: 2.0}, "top_k": 60, "min_p": 0.01, "max_new_tokens": 10, "sample": True}
    for number, choice in enumerate(answer.choices):
        seed = (2**64 - 1 + number) % 2**64
        assert choice.message.content == alone(world, TEXTS[2], **ours, seed=seed).text
    assert len({choice.message.content for choice in answer.choices}) == 3


def test_stop_strings_end_a_stream_before_them(server: Running, world: World) -> None:
    whole = alone(world, TEXTS[0], max_new_tokens=16).text
    stop = whole[5:7]
    with server.openai() as client:
        chunks = list(client.chat.completions.create(**asked(TEXTS[0], max_tokens=16, stop=[stop]), stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole[: whole.find(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_logprobs_are_of_every_token(server: Running, world: World) -> None:
    with server.openai() as client:
        plain, drafted = (
            client.chat.completions.create(
                **asked(TEXTS[0], max_tokens=8, logprobs=True, top_logprobs=3, extra_body={"draft": draft})
            )
            for draft in (False, True)
        )
    assert plain.usage.completion_tokens_details.rejected_prediction_tokens == 0
    truth = alone(world, TEXTS[0], max_new_tokens=8)
    for answer in (plain, drafted):
        told = answer.choices[0].logprobs.content
        assert "".join(entry.token for entry in told if entry.token != "<|im_end|>") == truth.text
        assert len(told) == len(truth.tokens)
        for entry in told:
            assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob)  # greedy: the likeliest
            assert bytes(entry.bytes).decode() == entry.token
    pairs = zip(plain.choices[0].logprobs.content, drafted.choices[0].logprobs.content, strict=True)
    assert all(one.logprob == pytest.approx(other.logprob, abs=1e-4) for one, other in pairs)


def test_prompts_are_scored_as_harnesses_ask_for_it(server: Running, world: World) -> None:
    """`echo` with logprobs, several prompts as ids: what lm-eval's local-completions sends."""
    prompts = [[10, 20, 30, 40], [50, 60, 70]]
    with server.openai() as client:
        answer = client.completions.create(
            model="tiny", prompt=prompts, max_tokens=1, temperature=0, logprobs=1, echo=True, seed=1
        )
        nothing = client.completions.create(model="tiny", prompt=prompts[0], max_tokens=0, logprobs=1, echo=True)
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        told = choice.logprobs
        assert len(told.token_logprobs) == len(told.top_logprobs) == len(told.tokens) == len(prompt) + 1
        assert told.token_logprobs[0] is None
        for top, logprob in list(zip(told.top_logprobs, told.token_logprobs, strict=True))[1:]:
            assert max(top.values()) >= logprob
        assert choice.text == "".join(told.tokens)
        for at, token in zip(told.text_offset, told.tokens, strict=True):
            assert choice.text[at:].startswith(token)
    assert nothing.choices[0].logprobs.token_logprobs == answer.choices[0].logprobs.token_logprobs[:-1]
    assert nothing.usage.completion_tokens == 0


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"type": "boolean"}},
    "required": ["n", "b"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "pair", "strict": True, "schema": SCHEMA}}


@pytest.mark.parametrize("how", [{"temperature": 0}, {"temperature": 1.2, "seed": 5}])
def test_answers_keep_to_a_schema_and_are_the_same_with_drafts(server: Running, how: dict) -> None:
    request = {**asked("one", **how), "response_format": FORM, "max_tokens": 60}
    with server.openai() as client:
        drafted = client.chat.completions.create(**request)
        plain = client.chat.completions.create(**request, extra_body={"draft": False})
    value = json.loads(drafted.choices[0].message.content)
    assert set(value) == {"n", "b"}
    assert type(value["b"]) is bool
    assert 0 <= value["n"] <= 99
    assert drafted.choices[0].finish_reason == "stop"
    assert drafted.choices[0].message.content == plain.choices[0].message.content
    assert drafted.usage.completion_tokens_details.rejected_prediction_tokens > 0


PICTURE = {"type": "image_url", "image_url": {"url": "file:///etc/hosts"}}


def test_every_wrong_request_is_told_what_is_wrong(server: Running) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    wrong: list[tuple[dict, str, str]] = [
        ({"messages": []}, "messages", "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "unknown role", "messages"),
        ({"messages": [{"role": "user", "content": [PICTURE]}]}, "other than text", "messages"),
        ({"temperature": -1}, "temperature", "temperature"),
        ({"temperature": "hot"}, "temperature", "temperature"),
        ({"top_p": 2}, "top_p", "top_p"),
        ({"n": 17}, "16 answers", "n"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "logit_bias"),
        ({"top_logprobs": 3}, "logprobs: true", "top_logprobs"),
        ({"stop": [""]}, "stop", "stop"),
        ({"stop": "a<|im_end|>"}, "special token", "stop"),
        ({"extra_body": {"temprature": 0.5}}, "did you mean 'temperature'", "temprature"),
        ({"tools": [tool]}, "knows no tools", "tools"),
        ({"tool_choice": "required"}, "needs tools", "tool_choice"),
        ({"presence_penalty": 1e31}, "presence_penalty", "presence_penalty"),
        ({"extra_body": {"repetition_penalty": 0}}, "repetition_penalty", "repetition_penalty"),
        ({"response_format": {**FORM, "json_schema": {"schema": {"type": "cow"}}}}, "form", "response_format"),
        ({"response_format": FORM, "extra_body": {"ignore_eos": True}}, "ignore_eos", "ignore_eos"),
        ({"messages": [{"role": "user", "content": "a " * 300}]}, "shorten", "messages"),
    ]
    with server.openai() as client:
        for change, part, param in wrong:
            with pytest.raises(openai.BadRequestError, match=part) as refused:
                client.chat.completions.create(**{**asked("x", max_tokens=2), **change})
            assert refused.value.param == param
        for change, part, param in (
            ({"prompt": []}, "empty", "prompt"),
            ({"prompt": ""}, "empty", "prompt"),
            ({"prompt": [5] * 300}, "shorten", "prompt"),
            ({"prompt": [999]}, "token id 999", "prompt"),
            ({"prompt": [[5]] * 17}, "16 answers", "prompt"),
            ({"prompt": [[5]] * 8, "n": 3}, "16 answers", "n"),
            ({"best_of": 3}, "best_of", "best_of"),
        ):
            with pytest.raises(openai.BadRequestError, match=part) as refused:
                client.completions.create(**{"model": "tiny", "prompt": [5, 6], "max_tokens": 2, **change})
            assert refused.value.param == param
        with pytest.raises(openai.NotFoundError, match="no model 'other'"):
            client.chat.completions.create(**asked("x") | {"model": "other"})
        fine = asked("x", max_tokens=2, user="me", extra_body={"some_unknown_thing": 1})
        assert client.chat.completions.create(**fine).choices
        assert [model.id for model in client.models.list().data] == ["tiny"]
        assert client.models.retrieve("tiny").id == "tiny"


def test_the_doctors_client_reads_its_counters(server: Running, world: World) -> None:
    client = connect(Http.at(server.url))
    assert client.engine == "vllm"
    prompt = tuple(serving_prompt(world.target.tokenizer, [Message("user", TEXTS[3])]))
    served = client.answer(prompt, 12)
    truth = alone(world, TEXTS[3], max_new_tokens=12)
    assert served.tokens == truth.tokens
    assert served.counts.drafts > 0
    # the target's own token of the last step may be past the end
    assert served.counts.accepted + served.counts.drafts - (len(truth.tokens) - 1) in (0, 1)
    assert served.counts.drafted > served.counts.accepted
    seen = client.chat_prompt([{"role": "user", "content": TEXTS[3]}], {})
    assert seen.tokens == prompt
