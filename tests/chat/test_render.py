"""The mask, template by template, against expectations written by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercel.chat import Conversation, Message, RawText, Renderer, TokenizedChat, render_plain, serving_prompt
from tercel.errors import TercelError

from .tokenizers_for_tests import LIKE_GPT2, LINE_ENDS_TOGETHER, make_tokenizer

TWO_TURNS = ["Hello there", "I am fine.", "What is two?", "Four 🦅 é."]


def talk(*texts: str, id: str = "c", system: str | None = None) -> Conversation:
    roles = ["user", "assistant"] * len(texts)
    messages = [Message(role, text) for role, text in zip(roles, texts, strict=False)]
    return Conversation(id, tuple([Message("system", system)] * (system is not None) + messages), "test")


def supervised_parts(chat: TokenizedChat, tokenizer) -> list[str]:
    """Texts of the runs of supervised tokens."""
    pairs = zip(chat.tokens.tolist(), chat.supervised.tolist(), strict=True)
    runs = [(own, [token for token, _ in run]) for own, run in groupby(pairs, lambda pair: pair[1])]
    return [tokenizer.decode(run) for own, run in runs if own]


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("chatml", ["I am fine.<|im_end|>", "Four 🦅 é.<|im_end|>"]),
        ("chatml-without-prompt", ["I am fine.<|im_end|>", "Four 🦅 é.<|im_end|>"]),
        ("llama3", ["I am fine.<|eot_id|>", "Four 🦅 é.<|eot_id|>"]),
        ("gemma", ["I am fine.<end_of_turn>", "Four 🦅 é.<end_of_turn>"]),
        ("qwen3", ["I am fine.<|im_end|>", "Four 🦅 é.<|im_end|>"]),
        ("generation", ["I am fine.<|im_end|>", "Four 🦅 é.<|im_end|>"]),
        ("mistral", [" I am fine.</s>", " Four 🦅 é.</s>"]),
        ("names", [" I am fine.", " Four 🦅 é."]),
    ],
)
def test_two_turns(family: str, expected: list[str]) -> None:
    tokenizer = make_tokenizer(family)
    conversation = talk(*TWO_TURNS)
    rendered = Renderer(tokenizer).render(conversation)
    assert rendered.turns == 2
    assert not rendered.dropped_turns
    (chat,) = rendered.chats
    assert chat.id == "c"
    assert supervised_parts(chat, tokenizer) == expected
    rows = [message.to_json() for message in conversation.messages]
    assert chat.tokens.tolist() == tokenizer.apply_chat_template(rows, return_dict=False)
    assert chat.tokens.dtype == np.int32
    assert chat.supervised.dtype == np.bool_


def test_the_mask_token_by_token() -> None:
    """One row in full: header, the line end after the end of turn and system prompt are not the answer's."""
    tokenizer = make_tokenizer("chatml")
    (chat,) = Renderer(tokenizer).render(talk("Hello", "fine")).chats
    expected = [
        ("<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n", False),
        ("<|im_start|>assistant\n", False),
        ("fine", True),
        ("<|im_end|>", True),
        ("\n", False),
    ]
    tokens, mask = [], []
    for text, own in expected:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens += ids
        mask += [own] * len(ids)
    assert chat.tokens.tolist() == tokens
    assert chat.supervised.tolist() == mask


def test_thoughts_that_the_template_strips_get_a_row_of_their_own() -> None:
    tokenizer = make_tokenizer("qwen3")
    first, second = "<think>\nhow\n</think>\n\nI am fine.", "<think>\ntwo\n</think>\n\nFour."
    rendered = Renderer(tokenizer).render(talk("Hello", first, "What?", second))
    assert [chat.id for chat in rendered.chats] == ["c#turn1", "c"]
    assert rendered.turns == 2
    parts = [supervised_parts(chat, tokenizer) for chat in rendered.chats]
    assert parts == [[first + "<|im_end|>"], [second + "<|im_end|>"]]
    assert "how" not in tokenizer.decode(rendered.chats[1].tokens)


def test_a_template_unlike_serving_drops_the_turns_and_says_so() -> None:
    rendered = Renderer(make_tokenizer("r1")).render(talk(*TWO_TURNS))
    assert rendered.chats == ()
    assert dict(rendered.dropped_turns) == {"the template renders the answer unlike the serving prompt": 2}


def test_generated_ids_are_used_where_they_are_known() -> None:
    """Rows are prompt + generated ids, also for a template whose text cannot give them back (r1)."""
    tokenizer = make_tokenizer("r1")

    def answer(text: str) -> Message:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return Message("assistant", text.removesuffix("</s>"), token_ids=tuple(ids))

    one, two = answer("how</think>fine</s>"), answer("two</think>four</s>")
    messages = (Message("user", "Hello"), one, Message("user", "What"), two)
    rendered = Renderer(tokenizer).render(Conversation("c", messages, "test"))
    assert [chat.id for chat in rendered.chats] == ["c#turn1", "c"]
    for chat, at in zip(rendered.chats, (1, 3), strict=True):
        prompt = serving_prompt(tokenizer, messages[:at])
        ids = list(messages[at].token_ids or ())
        assert chat.tokens.tolist() == prompt + ids
        assert chat.supervised.tolist() == [False] * len(prompt) + [True] * len(ids)


def test_generated_ids_share_a_row_when_the_next_prompt_begins_with_them() -> None:
    tokenizer = make_tokenizer("chatml")
    letters = tokenizer.convert_tokens_to_ids(list("fine"))  # not how the tokenizer would do it
    spelled = (*letters, tokenizer.eos_token_id)
    messages = (
        Message("user", "Hello"),
        Message("assistant", "fine", token_ids=(*tokenizer("fine")["input_ids"], tokenizer.eos_token_id)),
        Message("user", "What"),
        Message("assistant", "fine", token_ids=spelled),
    )
    rendered = Renderer(tokenizer).render(Conversation("c", messages, "test"))
    (chat,) = rendered.chats
    assert supervised_parts(chat, tokenizer) == ["fine<|im_end|>", "fine<|im_end|>"]
    assert chat.tokens.tolist()[-5:] == list(spelled)


def test_ids_of_another_tokenizer_are_not_used() -> None:
    tokenizer = make_tokenizer("chatml")
    messages = (Message("user", "Hello"), Message("assistant", "fine", token_ids=(10_000,)))
    (chat,) = Renderer(tokenizer).render(Conversation("c", messages, "test")).chats
    assert supervised_parts(chat, tokenizer) == ["fine<|im_end|>"]


def test_an_answer_that_merges_with_the_prompt_gets_a_row_of_its_own() -> None:
    """A line end before and after the boundary becomes one token, which serving would never produce."""
    tokenizer = make_tokenizer("llama3")
    tokenizer.chat_template = tokenizer.chat_template.replace(" | trim", "")
    conversation = talk("Hello", "\nfine", "What", "Four")
    rendered = Renderer(tokenizer).render(conversation)
    assert rendered.turns == 2
    assert [chat.id for chat in rendered.chats] == ["c#turn1", "c"]
    own, whole = rendered.chats
    prompt = serving_prompt(tokenizer, conversation.messages[:1])
    assert own.tokens.tolist()[: len(prompt)] == prompt != whole.tokens.tolist()[: len(prompt)]
    assert supervised_parts(own, tokenizer) == ["\nfine<|eot_id|>"]
    assert supervised_parts(whole, tokenizer) == ["Four<|eot_id|>"]


def test_a_tokenizer_that_splits_the_header_unlike_the_prompt() -> None:
    """GPT-2's rule parts the two line ends of Llama 3's header if a word follows; serving has them joined."""
    tokenizer = make_tokenizer("llama3", LIKE_GPT2)
    conversation = talk(*TWO_TURNS)
    rendered = Renderer(tokenizer).render(conversation)
    assert [chat.id for chat in rendered.chats] == ["c#turn1", "c#turn2"]
    for chat, at in zip(rendered.chats, (1, 3), strict=True):
        prompt = serving_prompt(tokenizer, conversation.messages[:at])
        assert chat.tokens.tolist()[: len(prompt)] == prompt
        assert supervised_parts(chat, tokenizer) == [conversation.messages[at].content + "<|eot_id|>"]


def test_refused_messages_are_counted_and_other_turns_kept() -> None:
    renderer = Renderer(make_tokenizer("gemma"))
    messages = [Message(role, role) for role in ("user", "assistant", "user", "user", "assistant")]
    rendered = renderer.render(Conversation("c", tuple(messages), "test"))
    assert rendered.turns == 1
    assert dict(rendered.dropped_turns) == {"the chat template refuses the messages": 1}
    assert "must alternate" in rendered.refusal


@pytest.mark.parametrize("family", ["gemma", "chatml"])
def test_a_piece_of_a_conversation_that_begins_with_an_answer(family: str) -> None:
    tokenizer = make_tokenizer(family)
    renderer = Renderer(tokenizer)
    whole = talk("Hello", "fine", "What", "Four")
    piece = replace(whole, messages=whole.messages[1:])
    rendered = renderer.render(piece)
    assert dict(rendered.dropped_turns) == {"no question comes before the answer": 1}
    (chat,) = rendered.chats
    (expected,) = renderer.render(talk("What", "Four")).chats
    assert chat.tokens.tolist() == expected.tokens.tolist()
    only = renderer.render(replace(whole, messages=whole.messages[1:2]))
    assert (only.chats, dict(only.dropped_turns)) == ((), {"no question comes before the answer": 1})


def test_tool_calls_with_and_without_a_template_for_them() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    tools = ({"type": "function", "function": {"name": "add"}},)
    messages = (
        Message("user", "two plus two"),
        Message("assistant", "", tool_calls=(call,)),
        Message("tool", "4"),
        Message("assistant", "Four."),
    )
    conversation = Conversation("c", messages, "test", tools)
    spoken = '{"name": "add", "arguments": {"a": 2}}'
    for family, expected in (
        ("tools", f"<tool_call>{spoken}</tool_call><|im_end|>"),
        ("chatml", spoken + "<|im_end|>"),
    ):
        tokenizer = make_tokenizer(family)
        (chat,) = Renderer(tokenizer).render(conversation).chats
        assert supervised_parts(chat, tokenizer) == [expected, "Four.<|im_end|>"]
        assert ('{"type": "function", "function": {"name": "add"}}' in tokenizer.decode(chat.tokens)) == (
            family == "tools"
        )


def test_generation_blocks_may_leave_out_the_end_of_turn() -> None:
    tokenizer = make_tokenizer("generation")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "<|im_end|>\n{% endgeneration %}", "{% endgeneration %}<|im_end|>\n"
    )
    (chat,) = Renderer(tokenizer).render(talk(*TWO_TURNS)).chats
    assert supervised_parts(chat, tokenizer) == ["I am fine.<|im_end|>", "Four 🦅 é.<|im_end|>"]


def test_generation_blocks_may_leave_out_part_of_an_answer() -> None:
    tokenizer = make_tokenizer("generation")
    tokenizer.chat_template = tokenizer.chat_template.replace("{% generation %}", "<think>{% generation %}")
    (chat,) = Renderer(tokenizer).render(talk("Hello", "fine")).chats
    assert supervised_parts(chat, tokenizer) == ["fine<|im_end|>"]


@pytest.mark.parametrize("family", ["chatml", "llama3", "gemma", "generation"])
def test_preformatted_text_equals_messages(family: str) -> None:
    tokenizer = make_tokenizer(family)
    renderer = Renderer(tokenizer)
    (expected,) = renderer.render(talk(*TWO_TURNS)).chats
    text = tokenizer.decode(expected.tokens)
    for variant in (text, text.removeprefix(tokenizer.bos_token or "")):
        (chat,) = renderer.render_text(RawText("t", variant, "test")).chats
        assert chat.tokens.tolist() == expected.tokens.tolist()
        assert chat.supervised.tolist() == expected.supervised.tolist()


def test_preformatted_text_of_another_template() -> None:
    renderer = Renderer(make_tokenizer("chatml"))
    rendered = renderer.render_text(RawText("t", "USER: hello ASSISTANT: fine", "test"))
    assert rendered.chats == ()
    assert dict(rendered.dropped_turns) == {"the text does not follow the chat template": 1}
    with pytest.raises(TercelError, match="no header and end token"):
        Renderer(make_tokenizer("names")).render_text(RawText("t", "user: a", "test"))


def test_a_preformatted_answer_without_its_end_goes_to_the_end_of_the_text() -> None:
    tokenizer = make_tokenizer("chatml")
    text = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nI am"
    (chat,) = Renderer(tokenizer).render_text(RawText("t", text, "test")).chats
    assert supervised_parts(chat, tokenizer) == ["I am"]


def test_without_a_template() -> None:
    tokenizer = make_tokenizer("base")
    with pytest.raises(TercelError, match="no chat template"):
        Renderer(tokenizer)
    with pytest.raises(TercelError, match="no chat template"):
        serving_prompt(tokenizer, [Message("user", "x")])
    chat = render_plain(tokenizer, RawText("t", "Hello there", "test"))
    assert chat.supervised.tolist() == [False] + [True] * (len(chat) - 1)


WORDS = st.text(st.sampled_from("ab \n.é🦅"), min_size=1, max_size=12)


@given(question=WORDS, answer=WORDS, system=st.none() | WORDS)
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("pattern", [LINE_ENDS_TOGETHER, LIKE_GPT2])
@pytest.mark.parametrize("family", ["chatml", "llama3", "qwen3", "generation", "mistral", "names"])
def test_training_rows_begin_with_the_serving_prompt(
    family: str, pattern: str, question: str, answer: str, system: str | None
) -> None:
    tokenizer = make_tokenizer(family, pattern)
    conversation = talk(question, answer, system=system)
    prompt = serving_prompt(tokenizer, conversation.messages[:-1])
    rows = [message.to_json() for message in conversation.messages[:-1]]
    served = tokenizer.apply_chat_template(rows, add_generation_prompt=True, return_dict=False)
    assert prompt == served
    rendered = Renderer(tokenizer).render(conversation)
    for chat in rendered.chats:
        assert chat.tokens.tolist()[: len(prompt)] == prompt
        assert not chat.supervised[: len(prompt)].any()
        assert chat.supervised[len(prompt)]
    assert len(rendered.chats) + sum(rendered.dropped_turns.values()) == 1


@given(texts=st.lists(WORDS, min_size=2, max_size=8))
@settings(max_examples=60, deadline=None)
def test_every_answer_of_a_long_conversation_is_found(texts: list[str]) -> None:
    tokenizer = make_tokenizer("llama3")
    rendered = Renderer(tokenizer).render(talk(*texts))
    (chat,) = rendered.chats
    answers = [text.strip() + "<|eot_id|>" for text in texts[1::2]]
    assert supervised_parts(chat, tokenizer) == answers
