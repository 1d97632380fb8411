"""Pages, pictures and records of steps: whole, true to the record, and no text in them is more than text."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import replace
from html.parser import HTMLParser
from math import prod
from xml.etree import ElementTree

import pytest

from tercel.cli.explain import explained
from tercel.decode import trace
from tercel.decode.engine import Engine
from tercel.decode.types import Request
from tercel.decode.vanilla import Vanilla
from tercel.explain.draw import static, tree_file
from tercel.explain.page import STYLES, page, step_html
from tercel.explain.pieces import TokenNames, shown
from tercel.explain.words import headline, standing, told, total
from tercel.pages import COLOURS_FILE
from tests.decode.drafts import tiny_target
from tests.decode.test_streaming import BYTE_FALLBACK, BYTE_LEVEL
from tests.explain.explained import EVIL, GREEDY, PROMPT, evil, explanation

TAGS = (
    *("html", "head", "meta", "title", "style", "body", "header", "h1", "h2", "h3", "p", "details", "summary", "pre"),
    *("dl", "div", "dt", "dd", "section", "span", "a", "nav", "button", "input", "output", "main", "ol", "ul", "li"),
    *("svg", "rect", "text", "path", "g", "table", "caption", "tr", "th", "td", "script"),
)


class Reader(HTMLParser):
    """Tags with their attributes, and the texts in scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.raw: dict[str, list[str]] = {"script": [], "style": []}
        self.words: list[str] = []
        self._in = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._in = tag

    def handle_endtag(self, tag):
        self._in = ""

    def handle_data(self, data):
        self.raw.get(self._in, self.words).append(data)


@pytest.mark.parametrize("of", [explanation, evil])
def test_nothing_in_a_page_is_run_or_fetched_but_its_own_script(of):
    read = Reader(page(of()))
    assert read.raw["script"] == [static("explain.js")]
    assert read.raw["style"] == ["\n".join((COLOURS_FILE.read_text("utf-8"), *map(static, STYLES)))]
    for tag, attributes in read.tags:
        assert tag in TAGS, tag
        assert not any(name.startswith("on") or name in ("src", "style", "action") for name in attributes), attributes
        assert attributes.get("href", "#step-").startswith("#step-")
    policies = [own["content"] for _, own in read.tags if own.get("http-equiv") == "Content-Security-Policy"]
    hashes = {
        tag: base64.b64encode(hashlib.sha256(texts[0].encode()).digest()).decode() for tag, texts in read.raw.items()
    }
    assert policies == [
        f"default-src 'none'; style-src 'sha256-{hashes['style']}'; script-src 'sha256-{hashes['script']}'; "
        "base-uri 'none'; form-action 'none'"
    ]
    whole = "".join(read.words)
    assert not set("\x1b\x00\u202e\ud800\uffff") & set(whole)
    page(of()).encode()


def test_the_page_and_the_script_speak_of_the_same_elements():
    tags = Reader(page(explanation())).tags
    ids = {own["id"] for _, own in tags if "id" in own}
    assert {"answer", "steps", "back", "on", "at", "shown"} <= ids
    for step in explanation().steps:
        assert f"step-{step.number}" in ids
        linked = [own for _, own in tags if own.get("data-step") == str(step.number)]
        assert [own["class"].split()[1] for own in linked] == [
            "drafted" if piece.drafted else "own" for piece in step.pieces
        ]


def test_a_picture_is_xml_with_a_box_a_node_and_a_mark_an_accepted_one():
    for step in (*explanation().steps, *explanation(drawn=True).steps, *evil().steps):
        svg = ElementTree.fromstring(tree_file(step))
        names = "{http://www.w3.org/2000/svg}"
        boxes = [group.get("class") for group in svg.iter(f"{names}g")]
        path = step.trace.path
        kinds = ["last", *("accepted" if n in path else "rejected" for n in range(1, len(step.trace.nodes))), "own"]
        assert boxes == [f"node {kind}" for kind in kinds]
        assert [text.text for text in svg.iter(f"{names}text") if text.get("class") == "mark"] == ["✓"] * len(path)
        width, height = float(svg.get("width")), float(svg.get("height"))
        for rect in svg.iter(f"{names}rect"):
            assert 0 <= float(rect.get("x", 0)) <= width - float(rect.get("width"))
            assert 0 <= float(rect.get("y", 0)) <= height - float(rect.get("height"))
        places = [(rect.get("x"), rect.get("y")) for rect in svg.iter(f"{names}rect")]
        assert len(set(places)) == len(places)


@pytest.mark.parametrize("drawn", [False, True])
def test_a_record_has_every_node_with_its_scores(drawn):
    whole = explanation(drawn)
    told_of = json.loads(json.dumps(whole.to_json(), allow_nan=False))
    assert [word["token"] for step in told_of["steps"] for word in step["tokens"]] == told_of["tokens"]
    assert "".join(word["text"] for step in told_of["steps"] for word in step["tokens"]) == told_of["text"]
    assert told_of["steps"][-1]["tau"] == pytest.approx(told_of["tau"])
    for step, own in zip(told_of["steps"], whole.steps, strict=True):
        nodes = step["nodes"]
        assert len(nodes) == len(own.trace.nodes)
        assert [node["node"] for node in nodes if node["accepted"]] == list(own.trace.path)
        for node in nodes[1:]:
            parents, at = [], node
            while at["parent"] >= 0:
                parents.append(at["draft_probability"])
                at = nodes[at["parent"]]
            assert len(parents) == node["depth"]
            if drawn:
                assert node["draft_path_probability"] == pytest.approx(prod(parents))
            else:
                assert node["draft_path_probability"] is None
        assert [choice["drafted"] for choice in step["choices"]] == [True] * len(own.trace.path) + [False]


def test_texts_of_pieces_are_the_answers_however_it_ends():
    target = tiny_target("llama", num_hidden_layers=3)
    whole = Engine(target, Vanilla()).generate([Request(PROMPT, GREEDY)])[0]
    ends = [{}, {"stop": (whole.text[6:8],)}, {"stop_token_ids": (whole.tokens[5],)}]
    assert target.tokenizer.decode([whole.tokens[5]])  # which would be seen
    for end in ends:
        told_of = explained(Engine(target, Vanilla()), Request(PROMPT, replace(GREEDY, **end), traced=True), {})
        pieces = [piece for step in told_of.steps for piece in step.pieces]
        assert "".join(piece.text for piece in pieces) == told_of.result.text
        assert tuple(piece.token for piece in pieces) == told_of.result.tokens
        assert (told_of.result.tokens == whole.tokens) == (not end)


def test_sentences_say_what_was_taken_and_how():
    steps = explanation().steps
    assert headline(steps[0]).startswith("The prompt")
    assert headline(steps[1]) == "Step 1: 3 of 6 drafted tokens accepted, 4 tokens from one forward pass"
    assert standing(steps[1]) == "So far: 5 tokens, acceptance length τ 4.00."
    assert standing(steps[-1]).startswith("The answer ends after 3 of them. So far: 12 tokens")
    assert "accepted (2 drafted there)" in told(steps[1], 0)
    assert "where nothing was drafted" in told(steps[1], 3)
    assert total(explanation()).startswith("12 tokens in 3 steps, τ 3.67; ")
    drawn = [told(step, place) for step in explanation(True).steps for place in range(len(step.trace.choices))]
    assert any("rejected" in sentence and "what the rejections left of p" in sentence for sentence in drawn)
    assert any("It was drawn: this position's number" in sentence for sentence in drawn)


def test_a_section_by_itself_is_that_of_the_page():
    step = explanation().steps[1]
    assert step_html(step) in page(explanation())


def test_tokens_are_called_by_their_text_in_its_place():
    names = TokenNames(BYTE_FALLBACK)
    ids = {piece: BYTE_FALLBACK.convert_tokens_to_ids(piece) for piece in ("▁a", "b", "<0xE6>", "<end>")}
    assert names.of(ids["▁a"], ids["b"]) == " a"
    assert names.of(ids["<0xE6>"], ids["b"]) == "<0xE6>"
    assert names.of(ids["<end>"]) == "<end>"
    level = TokenNames(BYTE_LEVEL)
    half, the = (BYTE_LEVEL.convert_tokens_to_ids(piece) for piece in ("ðŁ", "Ġthe"))
    assert (level.of(half), level.of(the), level.of(the, half)) == ("ðŁ", " the", " the")
    assert level.of(10_000) == "#10000"
    assert shown(" a\n\tb\x1b") == "␣a⏎⇥b␛"
    assert EVIL not in shown(EVIL)


def test_steps_whose_record_cannot_be_made_keep_their_place(monkeypatch):
    """With their tree and text, as far as they are known: those behind them are numbered as they are."""
    whole, own, calls = explanation(), trace.trace_step, []

    def fails(*of):
        calls.append(of)
        if len(calls) in (1, 3):
            raise RuntimeError("a constraint that contradicts itself")
        return own(*of)

    monkeypatch.setattr(trace, "trace_step", fails)
    explanation.cache_clear()
    told_of = explanation()
    explanation.cache_clear()
    for made, truth in zip(told_of.steps, whole.steps, strict=True):
        assert (made.number, made.tau, made.pieces, made.names) == (truth.number, truth.tau, truth.pieces, truth.names)
        known = made.to_json()["choices"][-1]["probability"] is not None
        assert known == (made.number not in (0, 2))
        assert ("(p " in told(made, 0)) == known
    assert {(t, a.get("id")) for t, a in Reader(page(told_of)).tags} == {
        (t, a.get("id")) for t, a in Reader(page(whole)).tags
    }
