"""The page in a real browser, on a running server: a message is sent, streamed, and its trees open."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tercel.decode.eagle3 import Eagle3
from tercel.draft.shape import TreeShape
from tests.explain.browser import chromium, page_of
from tests.overfit import TEXTS, World
from tests.serve.servers import Running, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WIDTHS = (360, 1440)


@pytest.fixture(scope="module")
def server(world: World) -> Iterator[Running]:
    with serving(world.target, Eagle3(world.head, world.target, TreeShape(3, 3, 8)), slots=2) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


def ask(page: Page, text: str, answers: int = 1) -> None:
    page.locator("#text").fill(text)
    page.keyboard.press("Enter")
    page.wait_for_function(
        "n => document.querySelectorAll('.answer').length === n && !document.querySelector('#send').disabled",
        arg=answers,
    )


def test_its_files_are_given_with_headers_that_let_nothing_else_in(server: Running) -> None:
    with server.http() as client:
        styles = ("/colours.css", "/look.css", "/tree.css")
        for path, kind in (("/", "html"), ("/page.js", "javascript"), *((style, "css") for style in styles)):
            answer = client.get(path)
            assert answer.status_code == 200
            assert kind in answer.headers["content-type"]
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert answer.headers["x-frame-options"] == "DENY"
        assert client.get("/..%2fanswers.py").status_code == 404


def test_a_traced_stream_has_the_record_of_every_step(server: Running) -> None:
    asked = {"messages": [{"role": "user", "content": TEXTS[0]}], "temperature": 0, "max_tokens": 12, "trace": True}
    with server.http() as client:
        lines = client.post("/v1/chat/completions", json={**asked, "stream": True}).text.splitlines()
        plain = client.post("/v1/chat/completions", json=asked).json()["choices"][0]
    chunks = [json.loads(line[5:]) for line in lines if line.startswith("data:") and "[DONE]" not in line]
    steps = [chunk["choices"][0]["trace"] for chunk in chunks if "trace" in chunk["choices"][0]]
    assert [step["step"] for step in steps] == list(range(len(steps)))
    assert "".join(token["text"] for step in steps for token in step["tokens"]) == plain["message"]["content"]
    assert any(node["accepted"] for step in steps for node in step["nodes"])
    assert all(step["html"].startswith('<section class="step"') for step in steps)
    assert "trace" not in plain


@pytest.mark.parametrize("width", WIDTHS)
def test_a_message_is_answered_and_its_tokens_lead_to_their_trees(
    server: Running, browser: Browser, world: World, width: int
) -> None:
    with page_of(browser, f"{server.url}/", width) as page:
        page.locator("summary").click()
        page.locator("#most").fill("12")
        page.locator("#model", has_text="tiny").wait_for()  # which it asks the server for
        ask(page, TEXTS[0])
        words = page.locator(".answer .word")
        assert {"drafted", "own"} == {words.nth(n).get_attribute("class").split()[1] for n in range(words.count())}
        assert "τ" in page.locator(".figures").inner_text()
        assert "target" in page.locator(".figures").inner_text()
        words.nth(words.count() - 1).click()
        tree = page.locator("#step svg.tree")
        assert tree.is_visible()
        assert tree.locator("g.own").count() == 1
        place = page.locator("#place").inner_text()
        page.keyboard.press("ArrowLeft")
        assert page.locator("#place").inner_text() != place
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.keyboard.press("Escape")
        assert page.locator("#panel").is_hidden()
        assert page.evaluate("document.activeElement.classList.contains('word')")
        ask(page, TEXTS[1], answers=2)  # the conversation goes on
        assert page.locator(".question").count() == 2


def test_the_same_with_and_without_drafts_side_by_side(server: Running, browser: Browser) -> None:
    with page_of(browser, f"{server.url}/", color_scheme="dark") as page:
        page.locator("summary").click()
        page.locator("#most").fill("12")
        page.locator("#both").check()
        ask(page, TEXTS[0], answers=2)
        texts = page.locator(".answer .text").all_inner_texts()
        assert texts[0] == texts[1] != ""
        assert page.locator(".answer").nth(1).locator(".drafted").count() == 0
        boxes = [page.locator(".answer").nth(n).bounding_box() for n in range(2)]
        assert boxes[0]["y"] == boxes[1]["y"]
        page.locator("#new").click()
        assert page.locator(".answer").count() == 0


def test_what_goes_wrong_is_said_and_the_page_goes_on(server: Running, browser: Browser) -> None:
    with page_of(browser, f"{server.url}/", expected="400") as page:
        page.locator("summary").click()
        page.locator("#most").fill("12")
        page.locator("#temperature").fill("-1")
        ask(page, TEXTS[0], answers=0)
        assert "temperature" in page.locator("#said").inner_text()
        page.locator("#temperature").fill("0")
        ask(page, TEXTS[0])
        assert page.locator(".answer .word").count() > 4
        assert "temperature" not in page.locator("#said").inner_text()
