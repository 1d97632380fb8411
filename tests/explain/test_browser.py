"""The page of an explanation in a real browser: by keys and by pointer, narrow and wide, by day and by night."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tercel.explain.page import page
from tercel.files import write_text
from tests.explain.browser import chromium, page_of
from tests.explain.explained import evil, explanation

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WIDTHS, SCHEMES = (360, 1440), ("light", "dark")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("page") / "page.html"
    write_text(file, page(explanation()))
    return file.as_uri()


def shown(at: Page) -> list[str]:
    return [section.get_attribute("id") or "" for section in at.locator("main section").all() if section.is_visible()]


def test_steps_are_walked_by_keys_and_pointer(browser: Browser, address: str) -> None:
    last = explanation().steps[-1].number
    with page_of(browser, address) as at:
        assert shown(at) == ["step-1"]
        for key, number in (("ArrowRight", 2), ("ArrowLeft", 1), ("End", last), ("ArrowRight", last), ("Home", 0)):
            at.keyboard.press(key)
            assert shown(at) == [f"step-{number}"]
        assert at.locator("#back").is_disabled()
        at.locator("#on").click()
        assert shown(at) == ["step-1"]
        assert at.locator("#shown").inner_text() == f"1 / {last}"
        at.locator("#at").focus()
        at.keyboard.press("ArrowRight")
        assert shown(at) == ["step-2"]
        at.reload()
        assert shown(at) == ["step-2"]


def test_a_token_leads_to_the_tree_of_its_step(browser: Browser, address: str) -> None:
    with page_of(browser, address) as at:
        words = at.locator("#answer a")
        owners = [(step, piece) for step in explanation().steps for piece in step.pieces]
        assert words.count() == len(owners)
        place, (step, piece) = next((n, own) for n, own in enumerate(owners) if own[0].number == 2 and own[1].drafted)
        words.nth(place).click()
        at.locator("#step-2").wait_for()
        assert shown(at) == ["step-2"]
        assert words.nth(place).get_attribute("aria-current") == "step"
        tree = at.locator("#step-2 svg.tree")
        assert tree.is_visible()
        assert tree.locator("g.node").count() == len(step.trace.nodes) + 1
        assert tree.locator("g.accepted").count() == len(step.trace.path)
        looks = [styles(words.nth(n), "color", "border-bottom-style") for n in (place, own_of(owners))]
        assert looks[0]["color"] != looks[1]["color"]
        assert (looks[0]["border-bottom-style"], looks[1]["border-bottom-style"]) == ("solid", "dotted")
        assert piece.drafted


def own_of(owners) -> int:
    return next(n for n, (_, piece) in enumerate(owners) if not piece.drafted)


def styles(locator, *names: str) -> dict[str, str]:
    return {name: locator.evaluate("(e, name) => getComputedStyle(e).getPropertyValue(name)", name) for name in names}


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_wider_than_the_window_and_all_can_be_read(browser: Browser, address: str, width: int) -> None:
    grounds = set()
    for scheme in SCHEMES:
        with page_of(browser, address, width, color_scheme=scheme) as at:
            at.locator("#step-1 details").click()
            assert at.evaluate("document.documentElement.scrollWidth") <= width
            body = styles(at.locator("body"), "background-color", "color", "font-size")
            grounds.add(body["background-color"])
            assert contrast(body["color"], body["background-color"]) > 7
            for place in (".standing", "#answer a.drafted", ".candidate .note", ".legend"):
                ink = styles(at.locator(place).first, "color")["color"]
                assert contrast(ink, body["background-color"]) > 4.5, (place, scheme)
    assert len(grounds) == len(SCHEMES)


def contrast(one: str, other: str) -> float:
    """By WCAG."""
    lights = sorted(luminance(colour) for colour in (one, other))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_without_a_script_every_step_stands_there(browser: Browser, address: str) -> None:
    with page_of(browser, address, java_script_enabled=False) as at:
        assert len(shown(at)) == len(explanation().steps)
        assert at.locator("nav").is_hidden()


def test_foreign_text_runs_nothing(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "evil.html"
    write_text(file, page(evil()))
    with page_of(browser, file.as_uri()) as at:
        assert at.evaluate("typeof owned") == "undefined"
        assert at.locator("img").count() == 0
        at.keyboard.press("ArrowRight")
        assert shown(at) == ["step-2"]
