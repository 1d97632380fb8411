"""What sources and pages say of the documentation has to be there."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from scale_training import KINDS, MODELS, features, rows

ROOT = Path(__file__).parents[1]
CITED = re.compile(r"\bspec\s+sections?\s+(\d+)(?:-(\d+))?(?:(?:,\s*\d+)*\s+and\s+(\d+))?")


def cited_sections() -> dict[str, set[int]]:
    """Sections of the specification by the file that cites them; a citation may run over a line's end."""
    found: dict[str, set[int]] = {}
    for file in sorted([*ROOT.glob("src/**/*.py"), *ROOT.glob("tests/**/*.py"), *ROOT.glob("bench/*.py")]):
        text = re.sub(r"\s*\n\s*(#\s*)?", " ", file.read_text(encoding="utf-8"))
        for match in CITED.finditer(text):
            numbers = {int(group) for group in match.groups() if group}
            found.setdefault(str(file.relative_to(ROOT)), set()).update(numbers)
    return found


def test_every_cited_section_of_the_specification_exists() -> None:
    cited = cited_sections()
    assert len(cited) > 15
    sections = {int(n) for n in re.findall(r"^## (\d+)\. ", (ROOT / "docs/spec.md").read_text("utf-8"), re.M)}
    missing = {file: numbers - sections for file, numbers in cited.items() if numbers - sections}
    assert not missing


def links(text: str) -> set[str]:
    """Relative addresses that a Markdown text links to or shows, outside its code blocks."""
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.M | re.S)
    found = re.findall(r"\]\(([^)\s]+)\)", prose) + re.findall(r"(?:src|href)=\"([^\"]+)\"", prose)
    return {address for address in found if not re.match(r"[a-z]+:", address)}


def headings(text: str) -> set[str]:
    """What `#` may name in a page, as GitHub makes it of the headings."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    titles = re.findall(r"^#+ (.*)$", prose, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def dangling(page: Path) -> list[str]:
    """Relative links of a page that lead nowhere."""
    wrong = []
    for address in sorted(links(page.read_text("utf-8"))):
        path, _, part = address.partition("#")
        target = page if not path else page.parent / path
        if not target.is_file() or (part and part not in headings(target.read_text("utf-8"))):
            wrong.append(address)
    return wrong


PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_and_picture_leads_somewhere(page: Path) -> None:
    assert not dangling(page)


def test_a_link_that_leads_nowhere_would_be_noticed(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("## A part, and more\n", encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text(
        '[a](there.md) [b](there.md#a-part-and-more) ![c](gone.svg) [d](there.md#no-part) <img src="gone.png">\n'
        "[e](https://example.org/gone) `[f](code.md)`\n```\n[g](code.md)\n```\n",
        encoding="utf-8",
    )
    assert dangling(page) == ["gone.png", "gone.svg", "there.md#no-part"]


def test_every_page_and_picture_is_linked_and_pictures_are_small() -> None:
    linked = {
        (page.parent / address.partition("#")[0]).resolve()
        for page in PAGES
        for address in links(page.read_text("utf-8"))
    }
    pictures = sorted(ROOT.glob("docs/img/*"))
    assert len(pictures) > 2
    assert {*pictures, *ROOT.glob("docs/*.md")} <= linked
    assert all(picture.stat().st_size < 150_000 for picture in pictures)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "log.md"], ids=lambda page: page.name)
def test_every_source_file_named_with_its_folder_exists(page: Path) -> None:
    """From the root or a room of the package; capitals stand for any name. The log is history: what it names may have
    moved."""
    named = set(re.findall(r"`(?:python )?((?:\w+/)+[a-z]\w*\.py)", page.read_text("utf-8")))
    gone = {file for file in named if not (ROOT / file).is_file() and not list(ROOT.glob(f"src/**/{file}"))}
    assert not gone


def test_the_curve_is_that_of_the_shipped_head() -> None:
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "bench/pictures.py")
    assert spec is not None
    assert spec.loader is not None
    pictures = importlib.util.module_from_spec(spec)
    sys.modules["pictures"] = pictures  # dataclasses look their module up
    spec.loader.exec_module(pictures)
    found = pictures.stages((ROOT / "docs/log.md").read_text("utf-8"))
    head = json.loads((ROOT / "src/tercel/heads/smollm2-135m/tercel.json").read_text("utf-8"))
    held_out = head["measured"]["held_out"]
    assert [len(stage.steps) for stage in found] == [9, 5, 5, 8, 7, 8]
    assert found[-1].steps[-1] == head["training"]["steps"]
    assert found[-1].tau[-1] == pytest.approx(held_out["tau"], abs=5e-4)
    assert found[-1].alpha[-1] == pytest.approx(held_out["alpha"][0], abs=5e-4)


def test_the_forecast_of_large_models_is_the_scripts() -> None:
    page = (ROOT / "docs/scale.md").read_text("utf-8")
    assert "\n".join(rows()) in page
    for model in MODELS.values():
        assert features(model, KINDS["H200 SXM"], 1) > features(model, KINDS["H200 SXM"], 0)
    assert MODELS["70B"].head + MODELS["70B"].output == pytest.approx(1.4e9, rel=0.01)
