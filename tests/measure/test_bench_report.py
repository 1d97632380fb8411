"""A benchmark that is interrupted and goes on, and its numbers in every form: table, CSV, JSON, page."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from tercel.decode.sampling import SamplingParams
from tercel.errors import TercelError
from tercel.measure import paper
from tercel.measure.bench import BenchSettings, run_bench
from tercel.measure.bench_journal import journal_of, open_journal
from tercel.measure.bench_page import bench_page
from tercel.measure.entrants import Heads, what_answers_depend_on
from tercel.measure.manifest import Entry, as_manifest, read_manifest
from tercel.measure.methods import Run
from tercel.measure.report import csv_text, report_json, table1_text
from tercel.measure.summary import BenchReport
from tercel.measure.table import BEHIND, BEST, LEVEL, table1
from tercel.measure.tasks import Question, Task
from tercel.pages import Bar, Series, bars, lines, nice_ticks, page
from tercel.target_model.model import Target
from tests.measure.worlds import chat_target

TASKS = [
    Task("gsm8k", tuple(Question(f"g{i}", (f"{i}?", "and?")) for i in range(6))),
    Task("alpaca", tuple(Question(f"a{i}", (f"{i}!",)) for i in range(6))),
]
KEY = {"target": "tiny"}


@dataclass
class Noted:
    """Answers that hang on the prompt alone, as fast as `seconds` says, `wander` more or less; off: other tokens."""

    seconds: float
    steps: int
    wander: float = 0.0
    off: int = 0
    stop_after: int | None = None
    asked: list[tuple[int, ...]] = field(default_factory=list)
    coupled: bool = True
    lossy: str | None = None

    def run(self, prompt: tuple[int, ...], params: SamplingParams) -> Run:
        if self.stop_after is not None and len(self.asked) >= self.stop_after:
            raise KeyboardInterrupt
        self.asked.append(prompt)
        sway = 1 + self.wander * ((sum(prompt) % 7) - 3) / 3
        tokens = tuple((sum(prompt) + place) % 90 + 20 + self.off for place in range(13))
        return Run(tokens, self.seconds * sway, self.steps, (1, 1), 6, {"target": 0.4, "head": 0.2})


def methods(**more: Noted) -> dict[str, Noted]:
    return {"vanilla": Noted(1.0, 12), **more}


def reports(temperatures: Sequence[float] = (0.0, 1.0), **more: Noted) -> list[BenchReport]:
    params = SamplingParams(max_new_tokens=12, seed=0)
    compared = methods(**(more or {"eagle3": Noted(0.5, 4), "eagle2": Noted(0.5, 6, 0.2), "pld": Noted(0.9, 10)}))
    return [
        run_bench(chat_target(), compared, TASKS, BenchSettings(replace(params, temperature=warmth), head="<b>head"))
        for warmth in temperatures
    ]


def numbers(report: BenchReport) -> object:
    return [[row.to_json() for row in task.rows] for task in report.tasks]


@pytest.mark.parametrize("stop", [1, 5, 8, 17])
def test_an_interrupted_benchmark_goes_on_where_it_stopped(tmp_path: Path, stop: int) -> None:
    path = journal_of(None, Path("-"), tmp_path / "out.json", tmp_path / "page.html")
    assert path == tmp_path / "out.json.journal.jsonl"
    settings = BenchSettings(SamplingParams(max_new_tokens=12))
    whole = run_bench(chat_target(), methods(pld=Noted(0.5, 4)), TASKS, settings)
    first = methods(pld=Noted(0.5, 4, stop_after=stop + 1))  # one more for the warm-up
    with pytest.raises(KeyboardInterrupt), open_journal(path, KEY) as journal:
        run_bench(chat_target(), first, TASKS, settings, journal=journal)
    assert path.is_file()
    with path.open("a", encoding="utf-8") as stream:
        stream.write('{"sitting": 1, "tempera')  # a kill in the middle of a line
    second = methods(pld=Noted(0.5, 4))
    with open_journal(path, KEY) as journal:
        report = run_bench(chat_target(), second, TASKS, settings, journal=journal)
        assert journal.kept >= 2 * 18
        journal.done()
    assert not path.exists()
    assert numbers(report) == numbers(whole)
    assert (report.sittings, whole.sittings) == (2, 1)
    # a turn is asked again by all methods unless all had answered it; the warm-up is not counted
    assert len(second["pld"].asked) - 1 == len(second["vanilla"].asked) - 1 == 18 - stop


def test_a_journal_of_another_benchmark_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "j"
    settings = BenchSettings(SamplingParams(max_new_tokens=12))
    with pytest.raises(KeyboardInterrupt), open_journal(path, KEY) as journal:
        run_bench(chat_target(), methods(pld=Noted(1, 4, stop_after=3)), TASKS, settings, journal=journal)
    with pytest.raises(TercelError, match="had target 'tiny', not 'other'"), open_journal(path, {"target": "other"}):
        pass
    kept = path.read_text("utf-8")
    path.write_text(kept + '{"no": "answer"}\n', encoding="utf-8")
    with pytest.raises(TercelError, match=r"line 7: .* no answer of a benchmark"), open_journal(path, KEY):
        pass
    path.write_text('{"text": "mine"}\n', encoding="utf-8")
    with pytest.raises(TercelError, match="no journal of a benchmark"), open_journal(path, KEY):
        pass
    path.unlink()
    with open_journal(path, KEY):  # nothing answered: nothing is left
        assert path.exists()
    assert not path.exists()


def test_marks_follow_what_the_questions_support() -> None:
    table = table1(reports()[0])
    assert table.columns == ("gsm8k", "alpaca", "mean")
    cells = {line.method: line.cells["mean"] for line in table.lines}
    assert (cells["eagle3"].tau.standing, cells["eagle2"].tau.standing) == (BEST, BEHIND)
    speeds = {name: cell.speedup.standing for name, cell in cells.items()}
    assert {speeds["eagle3"], speeds["eagle2"]} == {BEST, LEVEL}  # the same but for noise
    assert (speeds["pld"], speeds["vanilla"]) == (BEHIND, BEHIND)
    assert table.told_apart["eagle3", "pld"] == (1, 1)
    assert table.told_apart["vanilla", "eagle3"] == (-1, -1)
    assert table.told_apart["eagle3", "eagle2"] == (0, 1)
    assert cells["eagle3"].paper == (5.51, 6.62)
    assert paper.table1(1, "pld", "mean") is None
    assert paper.table1(0, "eagle3", "qa") is None


def test_csv_and_json_say_what_the_text_says(tmp_path: Path) -> None:
    found = reports()
    value = json.loads(json.dumps(report_json(found), allow_nan=False))
    rows = list(csv.DictReader(io.StringIO(csv_text(found))))
    assert len(rows) == 2 * 3 * 4
    console = Console(width=160, record=True, file=(tmp_path / "out").open("w"))
    for report in found:
        console.print(table1_text(table1(report)))
    text = console.export_text()
    for row in rows:
        table = next(t for t in value["table1"] if f"{t['temperature']:g}" == row["temperature"])
        cell = table["methods"][row["method"]][row["task"]]
        for name in ("speedup", "tau", "paper_speedup", "paper_tau"):
            assert (float(row[name]) if row[name] else None) == cell[name]
        assert [float(row["speedup_low"]), float(row["speedup_high"])] == cell["speedup_ci95"]
        assert f"{cell['speedup']:.2f}" in text
        if row["task"] != "mean":
            report = value["reports"][int(row["temperature"])]
            summary = report["tasks"][row["task"]][row["method"]]
            assert float(row["speedup"]) == summary["speedup"] == cell["speedup"]
            assert cell["speedup_ci95"] == summary["speedup_ci95"]
            assert int(row["questions"]) == summary["questions"]
    assert "paper 5.51, τ 6.62" in text
    assert set(report_json(found[:1])) > {"tasks", "table1", "sittings"}


def test_no_form_hides_that_a_method_is_lossy() -> None:
    found = reports((0.0,), loose=Noted(0.4, 4, off=1, lossy="anything goes"))
    rows = list(csv.DictReader(io.StringIO(csv_text(found))))
    assert {(row["method"], row["lossy"]) for row in rows} == {("vanilla", ""), ("loose", "anything goes")}
    words = checked(bench_page(found))
    assert "Fastest is loose (LOSSY): " in words
    assert "loose is LOSSY: anything goes changes the text" in words
    assert found[0].same_bits  # of the methods that promise so


class Balance(HTMLParser):
    """Fails on a tag that is closed without being open; notes what the page would fetch, and its words."""

    VOID = frozenset({"meta", "br", "link", "img", "circle", "line", "polyline", "polygon"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset", "data")]
        assert tag not in ("script", "link", "iframe")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def checked(text: str) -> str:
    """The words of a page that is whole and fetches nothing."""
    seen = Balance()
    seen.feed(text)
    assert (seen.open, seen.fetched) == ([], [])
    style = text[text.index("<style>") : text.index("</style>")]
    assert not re.search(r"@import|url\(|https?:", style)
    return " ".join(seen.words)


def test_the_page_is_one_file_that_tells_all(tmp_path: Path) -> None:
    found = reports()
    text = bench_page(found)
    words = checked(text)
    for part in ("Temperature 0", "Temperature 1", "eagle3", "mean", "paper 5.51, τ 6.62", "<b>head", "Fastest is"):
        assert part in words
    assert "<b>" not in text
    cell = table1(found[0]).lines[2].cells["mean"].speedup.interval
    assert cell is not None
    assert f"{cell.value:.2f} [{cell.low:.2f}, {cell.high:.2f}]" in words
    for need in ("prefers-color-scheme: dark", "max-width: 640px", 'name="viewport"'):
        assert need in text


def test_plots() -> None:
    here = Series("measured & more", [(0, 1.0, 0.9, 1.1), (1, 2.0, None, None)])
    beside = Series("paper", [(0, 3.0, None, None)], dashed=True)
    drawn = lines([here, beside], x="data", y="τ", ticks=[(0, "1"), (1, "2")])
    checked(page("t", drawn))
    assert drawn.count("<svg") == 2
    assert "measured &amp; more" in drawn
    checked(page("t", bars([Bar("a", 0.0, "0")], one=True)))
    for low, high in ((0.31, 1.7), (0, 0), (1, 1), (-3, 1e6), (0.02, 0.021)):
        ticks = nice_ticks(low, high)
        assert ticks[0] <= low <= high <= ticks[-1]
        assert 2 <= len(ticks) <= 8


def test_heads_by_name(tmp_path: Path) -> None:
    (tmp_path / "runs" / "m").mkdir(parents=True)
    file = tmp_path / "heads.yaml"
    file.write_text("medusa: runs/m\ntop: {method: eagle3, head: owner/name, tree: 2x3x6}\n", encoding="utf-8")
    entries = read_manifest(file)
    assert entries == {
        "medusa": Entry("medusa", str(tmp_path / "runs" / "m")),
        "top": Entry("eagle3", "owner/name", "2x3x6"),
    }
    file.write_text(json.dumps(as_manifest(entries)), encoding="utf-8")
    assert read_manifest(file) == entries
    for text, words in (
        ("- a", "names no heads"),
        ("a: 3", "'a' is 3"),
        ("a: {heat: x}", "'heat', which means nothing"),
        ("a,b: x", "no name of a method"),
        ("a: [", "neither YAML nor JSON"),
    ):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(TercelError, match=words):
            read_manifest(file)
    with pytest.raises(TercelError, match="cannot read"):
        read_manifest(tmp_path / "none")


def test_a_journal_belongs_to_its_questions_and_its_second_model() -> None:
    heads = Heads(lambda name: pytest.fail("no head is asked for"))
    target, entries, params = chat_target(), {"pld": Entry("pld")}, SamplingParams()

    def key(tasks: Sequence[Task], model: Target | None = None) -> object:
        return what_answers_depend_on(target, entries, heads, model, tasks, params)

    others = [replace(TASKS[0], questions=tuple(replace(q, turns=("other",)) for q in TASKS[0].questions))]
    assert key(TASKS[:1]) == key(TASKS[:1])
    assert key(TASKS[:1]) != key(others)
    assert key(TASKS) != key(TASKS, target)
