"""Arguments of chat templates: read, checked against the template, and seen by everything that renders."""

from __future__ import annotations

import copy
import json
from datetime import datetime

import pytest

from tercel.chat import Message, Renderer, serving_prompt
from tercel.chat.arguments import parse_arguments, template_variables, with_arguments
from tercel.chat.dates import as_of
from tercel.chat.identity import TemplateIdentity
from tercel.errors import TercelError

from .tokenizers_for_tests import GENERATION, make_tokenizer

QUESTION = [Message("user", "Hello there")]
NO_THOUGHT = "<think>\n\n</think>\n\n"


def test_values_are_json_or_words():
    given = ["a=false", 'b={"c": [1, null]}', "effort=low", "date=26 Jul 2024", 'word="true"', "empty="]
    assert parse_arguments(given) == {
        "a": False,
        "b": {"c": [1, None]},
        "effort": "low",
        "date": "26 Jul 2024",
        "word": "true",
        "empty": "",
    }
    for wrong in ("thinking", "=1", "a-b=1", "1=2"):
        with pytest.raises(TercelError, match="is not NAME=VALUE, such as enable_thinking=false"):
            parse_arguments([wrong])
    for almost, right in (("a=False", "false"), ("a=TRUE", "true"), ("a=None", "null")):
        with pytest.raises(TercelError, match=f"write {right}, as in JSON"):
            parse_arguments([almost])
    with pytest.raises(TercelError, match="a is given twice"):
        parse_arguments(["a=1", "a=2"])


def test_whoever_renders_gives_them_and_nobody_else_does():
    tokenizer = make_tokenizer("thinking-tools")
    told = with_arguments(tokenizer, {"enable_thinking": False})
    plain, quiet = serving_prompt(tokenizer, QUESTION), serving_prompt(told, QUESTION)
    assert tokenizer.decode(quiet[len(plain) :]) == NO_THOUGHT
    assert quiet[: len(plain)] == plain
    rows = [QUESTION[0].to_json()]
    assert told.apply_chat_template(rows, add_generation_prompt=True, return_dict=False) == quiet  # transformers' own
    assert serving_prompt(copy.deepcopy(told), QUESTION) == quiet
    assert serving_prompt(with_arguments(told, {}), QUESTION) == plain
    assert Renderer(told).template.header.endswith(NO_THOUGHT)
    before, now = TemplateIdentity.of(tokenizer), TemplateIdentity.of(told)
    assert before.source == now.source
    assert before.rendered != now.rendered


def test_an_argument_that_changes_nothing_is_refused():
    tokenizer = make_tokenizer("thinking-tools")
    assert "enable_thinking" in template_variables(tokenizer)
    with pytest.raises(TercelError, match="reads no argument enable_thinkin; did you mean enable_thinking"):
        with_arguments(tokenizer, {"enable_thinkin": False})
    with pytest.raises(TercelError, match="reads no argument x; it reads none at all"):
        with_arguments(make_tokenizer("llama3"), {"x": 1})
    for ours in ("messages", "tools", "add_generation_prompt", "tokenize", "eos_token", "strftime_now"):
        with pytest.raises(TercelError, match=f"{ours} cannot be a template argument"):
            with_arguments(tokenizer, {ours: 1})
    with pytest.raises(TercelError, match="has no chat template"):
        with_arguments(make_tokenizer("base"), {"x": 1})
    assert with_arguments(make_tokenizer("base"), {}).chat_template is None


def test_templates_by_name_and_with_blocks_of_their_own():
    tokenizer = make_tokenizer("generation")
    tokenizer.chat_template = {
        "default": "{% if shout %}!{% endif %}" + GENERATION,
        "tool_use": "{{ style }}{% for m in messages %}{% break %}{% endfor %}",
    }
    assert template_variables(tokenizer) == {"shout", "style"}
    told = with_arguments(tokenizer, {"shout": True})
    assert told.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False).startswith("!<|im_start|>")
    tokenizer.chat_template = "{% if %}"
    with pytest.raises(TercelError, match="cannot be read: Expected an expression"):
        with_arguments(tokenizer, {"x": 1})


VALUES = {
    "word": 'a "quoted" \\ word, é 🦅,\n{% raw %} %} }} {# #}',
    "nothing": None,
    "yes": True,
    "number": -2.5e30,
    "nested": {"a b": [1, None, {"c": False}], "": "x"},
}


@pytest.mark.parametrize("lead", ["", "\n", "  ", "\n  \n", "x"])
def test_the_template_sees_what_was_given_and_is_the_same_for_the_rest(lead: str):
    """In loops and macros too, and in whatever way it begins."""
    shown = "{{ [word, nothing, yes, number, nested] | tojson }}"
    rest = "{% if true %}b{% endif %}{% macro m() %}" + shown + "{% endmacro %}{{ messages[0].content }}"
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = lead + rest + "{% for x in [1] %}|" + shown + "|{{ m() }}{% endfor %}"
    told = with_arguments(tokenizer, VALUES)
    rows = [{"role": "user", "content": "hi"}]
    text = told.apply_chat_template(rows, tokenize=False)
    by_call = tokenizer.apply_chat_template(rows, tokenize=False, **VALUES)
    assert text == by_call
    first, second = (json.loads(part) for part in text.split("|")[1:])
    assert first == second == list(VALUES.values())


def test_given_again_they_take_the_place_of_the_first():
    tokenizer = make_tokenizer("thinking-tools")
    once = with_arguments(tokenizer, {"enable_thinking": False})
    again = with_arguments(once, {"enable_thinking": True})
    assert again.chat_template == with_arguments(tokenizer, {"enable_thinking": True}).chat_template
    assert with_arguments(once, {}).chat_template == tokenizer.chat_template
    assert "enable_thinking = false" in once.chat_template


def test_with_a_day_that_stands_still():
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = "{{ strftime_now('%d') }} {{ style }} " + tokenizer.chat_template
    told = as_of(with_arguments(tokenizer, {"style": "x"}), datetime(2001, 2, 3))
    assert told.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False).startswith("03 x ")
