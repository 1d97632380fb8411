"""A date in a template stands still for a run, whatever the template does with it."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from tercel.chat import Conversation, Message
from tercel.chat.dates import as_of, parse_moment, writes_date
from tercel.chat.render import Renderer
from tercel.chat.template import render_text
from tests.cli.conftest import RECIPE, write_prompts
from tests.cli.running import run
from tests.tiny import CHATML, save_tiny, tiny_tokenizer

MOMENT = datetime(2025, 3, 5, 6, 7, 8)
HELLO = [Message("user", "hello")]


@pytest.mark.parametrize(
    ("template", "rendered"),
    [
        ("{{ strftime_now('%d %b %Y') }}", "05 Mar 2025"),
        ("{{ strftime_now('%B %-d, %Y') ~ '.' }}", "March 5, 2025."),
        ("{{ strftime_now('100%% on %%d %d, %H:%M:%S.%f') }}", "100% on %d 05, 06:07:08.000000"),
        ("{%- set form = '%Y' %}{% if strftime_now is defined %}{{ strftime_now(form)|int + 1 }}{% endif %}", "2026"),
        (
            "{% macro date() %}{{ strftime_now('%Y')[2:] }}{% endmacro %}\n  {% if true %}\n  {{ date() }}{% endif %}",
            "  25",
        ),
        ("\n{{ ' ' ~ strftime_now(' %j ') ~ strftime_now('') }}\n", "\n  064 "),
        ("{% set day = strftime_now('%d') %}{{ messages[0].content ~ day }}", "hello05"),
    ],
)
def test_the_clock_stands_still(template: str, rendered: str) -> None:
    tokenizer = tiny_tokenizer(template)
    assert writes_date(tokenizer)
    assert render_text(as_of(tokenizer, MOMENT), HELLO) == rendered
    now = datetime.now()
    assert tokenizer.chat_template == template  # whose own clock goes on
    if str(now.year) in (today := render_text(tokenizer, HELLO)):
        assert today == render_text(as_of(tokenizer, now), HELLO)


@pytest.mark.parametrize("start", ["", "\n", "  ", "\t{% if true %} ", "{{ 'x' }}", "{%- if true -%}\n\n", "{# c #}\n"])
def test_nothing_else_changes(start: str) -> None:
    end = "{% endif %}" if "if" in start else ""
    source = start + CHATML + end + "{% if false %}{{ strftime_now('%Y') }}{% endif %}"
    tokenizer = tiny_tokenizer(source)
    assert render_text(as_of(tokenizer, MOMENT), HELLO) == render_text(tokenizer, HELLO)


def test_templates_without_a_clock_and_several_templates() -> None:
    plain = tiny_tokenizer(CHATML)
    assert not writes_date(plain)
    assert as_of(plain, MOMENT) is plain
    assert not writes_date(tiny_tokenizer(None))
    several = tiny_tokenizer(None)
    several.chat_template = {"default": CHATML, "tool_use": "{{ strftime_now('%Y') }}"}
    assert render_text(as_of(several, MOMENT), HELLO, [{"type": "function"}]) == "2025"
    assert render_text(as_of(several, MOMENT), HELLO) == render_text(several, HELLO)


def test_generation_blocks_see_the_same_text() -> None:
    source = CHATML.replace("message['content']", "message['content'] ~ (strftime_now('%f') if loop.first else '')")
    marked = source.replace("{% endfor %}", "{% generation %}{% endgeneration %}{% endfor %}")
    renderer = Renderer(as_of(tiny_tokenizer(marked), MOMENT))
    turns = (Message("user", "hello"), Message("assistant", "you"))
    assert [c.tokens.tolist() for c in renderer.render(Conversation("c", turns, "")).chats] != []


@pytest.mark.parametrize("value", [None, 3, "yesterday", {}, "2025-13-01"])
def test_moments_that_are_none(value: object) -> None:
    assert parse_moment({"rendered_at": value}) is None
    assert parse_moment({}) is None


def test_a_run_of_another_day_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny(tmp_path, "llama")
    tiny_tokenizer("{{ strftime_now('%d %b %Y %f') ~ '\n' }}" + CHATML).save_pretrained(folder)
    prompts = write_prompts(tmp_path / "prompts.jsonl", 20).read_text("utf-8").splitlines()
    rows = [json.loads(line)["turns"][0] for line in prompts]
    data = tmp_path / "chats.jsonl"
    said = [[{"role": "user", "content": text}, {"role": "assistant", "content": text}] for text in rows]
    data.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in said))
    out = tmp_path / "head"
    command = ["train", str(folder), "--data", str(data), "--out", str(out), *RECIPE, "--max-steps", "2"]
    with monkeypatch.context() as then:
        then.setattr("tercel.cli.train.rendering_moment", lambda *_: MOMENT)
        first = run(*command)
    assert "all of this run uses 2025-03-05" in " ".join(first.out.split())
    second = run(*command)
    assert (second.code, second.err) == (0, "")
    assert "has done all of its 2 steps" in second.out
    training = json.loads((out / "tercel.json").read_text("utf-8"))["training"]
    assert training["rendered_at"] == "2025-03-05T06:07:08"
    third = run(*command, "--overwrite")
    assert third.code == 0
    assert "2025-03-05" not in third.out
