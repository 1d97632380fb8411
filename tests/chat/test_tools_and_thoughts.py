"""Tool calls, answers of tools and thoughts, as data sets write them and as templates want them."""

from __future__ import annotations

import json
from itertools import groupby

import pytest

from tercel.chat import Conversation, Message, RawText, Renderer, TokenizedChat, load_chats, serving_prompt
from tercel.chat.arguments import with_arguments
from tercel.chat.records import parse_record
from tercel.errors import TercelError
from tercel.target_model.model import Target
from tercel.target_model.sources import Source
from tercel.train.batches import split
from tercel.train.config import TrainConfig
from tercel.train.loop import train
from tests.tiny import tiny_model

from .tokenizers_for_tests import make_tokenizer

SEARCH = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}


def read(*messages: dict, **more) -> Conversation:
    record = parse_record({"messages": list(messages), **more}, where="x", default_id="c", default_source="test")
    assert isinstance(record, Conversation)
    return record


def call(arguments, id: str = "call12345") -> dict:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": id, "type": "function", "function": {"name": "search", "arguments": arguments}}],
    }


ASKED = {"role": "user", "content": "What is two?"}
FOUND = {"role": "tool", "tool_call_id": "call12345", "name": "search", "content": "two is 2"}
SAID = {"role": "assistant", "content": "Two."}


def supervised(chat: TokenizedChat, tokenizer) -> list[str]:
    pairs = zip(chat.tokens.tolist(), chat.supervised.tolist(), strict=True)
    runs = [(own, [token for token, _ in run]) for own, run in groupby(pairs, lambda pair: pair[1])]
    return [tokenizer.decode(run) for own, run in runs if own]


def all_supervised(conversation: Conversation, tokenizer, **more) -> list[str]:
    rendered = Renderer(tokenizer, **more).render(conversation)
    assert not rendered.dropped_turns, rendered.refusal
    return [part for chat in rendered.chats for part in supervised(chat, tokenizer)]


@pytest.mark.parametrize("family", ["tool-ids", "thinking-tools", "tools", "chatml"])
def test_arguments_are_encoded_once_however_they_are_written(family):
    tokenizer = make_tokenizer(family)
    as_object = all_supervised(read(ASKED, call({"q": "two é"}), FOUND, SAID), tokenizer)
    as_text = all_supervised(read(ASKED, call('{"q": "two é"}'), FOUND, SAID), tokenizer)
    assert as_text == as_object
    assert '{"q": "two é"}' in as_text[0]
    assert '\\"' not in as_text[0]


def test_arguments_that_are_no_object_stay_as_the_model_wrote_them():
    tokenizer = make_tokenizer("tool-ids")
    for written, seen in (("", "{}"), ('{"q": ', r'"{\"q\": "'), ("[1]", '"[1]"')):
        (first, _) = all_supervised(read(ASKED, call(written), FOUND, SAID), tokenizer)
        assert first == f"[call12345 search {seen}]<|im_end|>"


def test_a_tools_answer_keeps_its_name_and_the_id_of_its_call():
    tokenizer = make_tokenizer("tool-ids")
    conversation = read(ASKED, call("{}"), FOUND, SAID)
    again = parse_record(conversation.to_json(), where="x", default_id="c", default_source="test")
    assert again == conversation
    assert all_supervised(conversation, tokenizer) == ["[call12345 search {}]<|im_end|>", "Two.<|im_end|>"]
    rendered = Renderer(tokenizer).render(read(ASKED, call("{}"), {**FOUND, "tool_call_id": None}, SAID))
    assert dict(rendered.dropped_turns) == {"the chat template refuses the messages": 1}
    with pytest.raises(TercelError, match="message 1: tool_call_id must be text, got"):
        read({**FOUND, "tool_call_id": [1]})


def test_tools_stand_in_the_prompt_and_only_the_assistant_is_supervised():
    tokenizer = make_tokenizer("thinking-tools")
    conversation = read(ASKED, call('{"q": "two"}'), FOUND, SAID, tools=[SEARCH["function"]])
    rendered = Renderer(tokenizer).render(conversation)
    assert rendered.turns == 2
    for chat in rendered.chats:
        assert tokenizer.decode(chat.tokens).startswith('<|im_start|>system\nTools:{"type": "function"')
    assert [part for chat in rendered.chats for part in supervised(chat, tokenizer)] == [
        '<tool_call>\n{"name": "search", "arguments": {"q": "two"}}\n</tool_call><|im_end|>',
        "Two.<|im_end|>",
    ]


THANKED = [{"role": "user", "content": "Thanks."}, {"role": "assistant", "content": "Welcome."}]


@pytest.mark.parametrize("family", ["tool-ids", "thinking-tools", "tools", "chatml", "generation"])
def test_the_last_turn_alone_has_its_calls_and_its_answer(family):
    """Of a turn with a tool all that the assistant says after the question; what came before is context."""
    tokenizer = make_tokenizer(family)
    turn = read(ASKED, SAID, ASKED, call('{"q": "two"}'), FOUND, SAID)
    whole, last = (all_supervised(turn, tokenizer, last_turn=which) for which in (False, True))
    assert len(whole) == 3
    assert last == whole[1:]
    thanked = read(ASKED, call('{"q": "two"}'), FOUND, SAID, *THANKED)
    assert all_supervised(thanked, tokenizer, last_turn=True) == ["Welcome.<|im_end|>"]
    unanswered = read(ASKED, SAID, *THANKED[:1])
    assert all_supervised(unanswered, tokenizer, last_turn=True) == ["Two.<|im_end|>"]


def test_the_last_turn_of_ids_and_of_preformatted_text():
    tokenizer = make_tokenizer("chatml")
    ids = tuple(tokenizer("Two.<|im_end|>")["input_ids"])
    two, thanks = Message("assistant", "Two.", token_ids=ids), Message("user", "Thanks.")
    conversation = Conversation("c", (Message("user", "What is two?"), two, thanks, two), "test")
    assert all_supervised(conversation, tokenizer) == ["Two.<|im_end|>"] * 2
    (chat,) = Renderer(tokenizer, last_turn=True).render(conversation).chats
    assert chat.supervised.tolist() == [False] * (len(chat) - len(ids)) + [True] * len(ids)
    text = RawText("r", "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n" * 2, "test")
    (chat,) = Renderer(tokenizer, last_turn=True).render_text(text).chats
    assert supervised(chat, tokenizer) == ["b<|im_end|>"]
    assert chat.supervised.argmax() > len(chat) / 2


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("family", ["thinking-tools", "tool-ids"])
def test_thoughts_are_learned_under_whatever_name_they_come(family, key):
    tokenizer = make_tokenizer(family)
    conversation = read(ASKED, {**SAID, key: "one and one"})
    assert conversation.messages[1].reasoning_content == "one and one"
    (part,) = all_supervised(conversation, tokenizer)
    assert part.startswith("<think>")
    assert "one and one" in part
    assert part.endswith("Two.<|im_end|>")


def test_a_thought_must_be_text():
    with pytest.raises(TercelError, match=r"message 2: thinking must be text, got \{"):
        read(ASKED, {**SAID, "thinking": {"budget": 3}})


@pytest.mark.parametrize("thought", [None, "", " \n"])
def test_an_empty_thought_is_context(thought):
    """Without thoughts an answer follows, as serving has it that is told not to think, an empty one of the prompt."""
    tokenizer = make_tokenizer("thinking-tools")
    for conversation in (
        read(ASKED, {**SAID, "reasoning_content": thought}),
        Conversation("c", (Message("user", "What is two?"), Message("assistant", "Two.", None, thought)), ""),
    ):
        (chat,) = Renderer(tokenizer).render(conversation).chats
        assert supervised(chat, tokenizer) == ["Two.<|im_end|>"]
        told = with_arguments(tokenizer, {"enable_thinking": False})
        start = int(chat.supervised.argmax())
        assert chat.tokens[:start].tolist() == serving_prompt(told, conversation.messages[:1])
        (same,) = Renderer(told).render(conversation).chats
        assert same.tokens.tolist() == chat.tokens.tolist()
        assert same.supervised.tolist() == chat.supervised.tolist()


def test_a_head_learns_from_calls_and_thoughts_and_from_nothing_else(tmp_path):
    """Rows as sets of tool calls have them, from the file to a trained head."""
    tokenizer = make_tokenizer("thinking-tools")
    asked = {"role": "user", "content": "What is two?"}
    called = {"role": "function_call", "content": '{"name": "search", "arguments": {"q": "two"}}'}
    thoughts = [f"<think>{n} and {n}</think>Two and {n}." for n in range(12)]
    rows = [
        {"tools": [SEARCH["function"]], "messages": [asked, called, FOUND, {**SAID, "content": said}]}
        for said in thoughts
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    model = tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=1024)
    target = Target(model, tokenizer, Source("t", "t", "folder", None))
    chats, report = load_chats([file], tokenizer, max_length=1024)
    assert (report.kept, report.turns) == (12, 24)
    said = [part for chat in chats for part in supervised(chat, tokenizer)]
    assert sum(part.startswith("<tool_call>") for part in said) == 12
    assert all(part.endswith("<|im_end|>") and "two is 2" not in part and "Tools:" not in part for part in said)
    config = TrainConfig(max_steps=2, batch_tokens=400, ttt_steps=2, eval_share=0.3, draft_vocab=0)
    summary = train(target, chats, config, tmp_path / "head")
    assert summary.steps == 2
    held_out = split(chats, 0.3).held_out
    assert summary.supervised_tokens == report.supervised - sum(int(chat.supervised.sum()) for chat in held_out)


def test_an_empty_thought_that_was_said_is_learned():
    """As models do that are asked in words not to think."""
    tokenizer = make_tokenizer("chatml")
    said = "<think>\n\n</think>\n\nTwo."
    assert all_supervised(read(ASKED, {**SAID, "content": said}), tokenizer) == [said + "<|im_end|>"]
    thinking = make_tokenizer("qwen3")
    assert all_supervised(read(ASKED, {**SAID, "content": said}), thinking) == [said + "<|im_end|>"]


@pytest.mark.parametrize("family", ["chatml", "llama3", "gemma", "mistral", "tools", "tool-ids", "generation"])
def test_most_templates_write_no_empty_thought(family):
    assert Renderer(make_tokenizer(family)).template.empty_thought == ""
