"""The pictures of the documentation, drawn from what the shipped head really does and from what the log records.

    python bench/pictures.py [answer] [tree] [curve]

Writes docs/img/NAME.svg, by default all three:
answer: what `tercel generate --show` prints, accepted drafts in colour.
tree:   one draft tree of an answer, with the draft's probabilities and the path that the target accepted.
curve:  held-out acceptance while the shipped head was trained, from the tables of docs/log.md.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from tercel import Eagle3, Engine, Request, Target, TreeShape, load_draft, sampling_for
from tercel.cli.answer import LEGEND, ColouredText
from tercel.cli.consoles import Piece, PlainConsole
from tercel.explain.draw import tree_file
from tercel.explain.steps import Narrator, Step
from tercel.files import write_text

ROOT = Path(__file__).parents[1]
IMAGES, LOG = ROOT / "docs/img", ROOT / "docs/log.md"
TARGET, NEW_TOKENS = "smollm2-135m", 64
QUESTION = "Write a Python function that reverses a string."  # of the README
IN_A_TREE = "Why does the moon look larger near the horizon than high in the sky?"  # of the demo's questions
SMALL = TreeShape(6, 3, 10)  # a tree that fits on a page
COLUMNS = 96  # of the terminal
INK, PALE, PAPER, GREEN, BLUE = "#1f2328", "#6e7781", "#ffffff", "#1a7f37", "#0969da"
TERMINAL = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; }}
{styles}
</style>
<defs>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})">{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""  # rich's own fetches a font, which a picture on a page may not
DARK = TerminalTheme((22, 27, 34), (201, 209, 217), [(22, 27, 34), (248, 81, 73), (63, 185, 80)], None)


class Shown:
    """The answer to a question: as text with colours, and step by step."""

    def __init__(self, target: Target, question: str, shape: TreeShape | None = None) -> None:
        self.question = question
        params = sampling_for(target, max_new_tokens=NEW_TOKENS)
        proposer = Eagle3(load_draft(TARGET, target), target, shape)
        coloured, narrator = ColouredText(target.tokenizer, params.stop), Narrator(target.tokenizer, params.stop)
        self.pieces: list[Piece] = []
        self.steps: list[Step] = []
        for event in Engine(target, proposer).stream([replace(Request.chat(target, question, params), traced=True)]):
            self.pieces += coloured.of(event)
            if (step := narrator.of(event)) is not None:
                self.steps.append(step)


def draw_answer(shown: Shown) -> str:
    """A terminal after `tercel generate --show`, as SVG, without the line on how fast this machine was."""
    console = PlainConsole(record=True)
    console.width = COLUMNS
    with redirect_stdout(io.StringIO()):
        console.print(Text(f'$ tercel generate {TARGET} --prompt "{shown.question}" --show'))
        console.print(LEGEND)
        console.print(Text.assemble(*shown.pieces))
    return console.export_svg(title="", theme=DARK, code_format=TERMINAL, unique_id="tercel")


def draw_tree(shown: Shown) -> str:
    """The step that went furthest, and of those the one whose path was least what the draft held likeliest."""
    return tree_file(max(shown.steps, key=lambda step: (len(step.trace.path), surprise(step))))


def surprise(step: Step) -> int:
    """How many accepted tokens were not the likeliest of their siblings, so that a chain would have missed them."""
    nodes = step.trace.nodes
    likeliest = {
        node.parent: max(nodes[child].draft or 0 for child in step.children(node.parent)) for node in nodes[1:]
    }
    return sum((nodes[node].draft or 0) < likeliest[nodes[node].parent] for node in step.trace.path)


@dataclass(frozen=True)
class Stage:
    """A part of a training as the log has it: held-out τ and 0-α by its own steps."""

    steps: tuple[int, ...]
    tau: tuple[float, ...]
    alpha: tuple[float, ...]


STAGES = (
    "first head\n(chains of 5)",
    "trained on, same data\n(chains of 3)",
    "more data\n(chains of 4)",
    "Muon\n(chains of 5)",
    "Muon, a higher rate\n(chains of 5)",
    "further answers\n(chains of 5)",
)
COLOURS = (PALE, BLUE, GREEN, "C1", "C3", "C4")


def stages(log: str) -> list[Stage]:
    """The tables of held-out acceptance, the oldest first; a step marked `then` begins a new stage in its table."""
    tables = re.findall(r"^\| step \|(.*)\|\n\|[-|]+\|\n\| τ \|(.*)\|\n\| 0-α \|(.*)\|$", log, re.MULTILINE)
    found: list[Stage] = []
    for table in reversed(tables):
        columns: list[list[tuple[int, float, float]]] = [[]]
        for step, tau, alpha in zip(*(row.split("|") for row in table), strict=True):
            if "then" in step:
                columns.append([])
            columns[-1].append((int(step.replace("then", "")), float(tau), float(alpha)))
        found += [Stage(*zip(*stage, strict=True)) for stage in columns]
    return found


def draw_curve(found: Sequence[Stage]) -> Figure:
    """τ and 0-α over the optimizer steps of all stages, one after another."""
    figure = Figure(figsize=(9.2, 3.9), layout="constrained", facecolor=PAPER)
    for axes, title, values in zip(
        figure.subplots(1, 2),
        ("held-out acceptance length τ", "first draft accepted (0-α)"),
        ([stage.tau for stage in found], [stage.alpha for stage in found]),
        strict=True,
    ):
        before = 0
        for stage, name, value, colour in zip(found, STAGES, values, COLOURS, strict=True):
            axes.plot([before + s for s in stage.steps], value, marker="o", markersize=4, color=colour, label=name)
            before += stage.steps[-1]
        axes.set_title(title, fontsize=12, color=INK)
        axes.set_xlabel("optimizer steps, all stages", color=INK)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[1].legend(fontsize=9, frameon=False, loc="lower right")
    return figure


def save(figure: Figure, path: Path) -> None:
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(text, format="svg", metadata={"Date": None}, facecolor=PAPER)
    write_text(path, text.getvalue())


def main(names: Sequence[str]) -> None:
    if unknown := set(names) - {"answer", "tree", "curve"}:
        raise SystemExit(f"no picture is called {', '.join(sorted(unknown))}; there are answer, tree and curve")
    wanted = set(names) or {"answer", "tree", "curve"}
    if "curve" in wanted:
        save(draw_curve(stages(LOG.read_text("utf-8"))), IMAGES / "curve.svg")
    if wanted & {"answer", "tree"}:
        target = Target.load(TARGET)
        if "answer" in wanted:
            write_text(IMAGES / "answer.svg", draw_answer(Shown(target, QUESTION)))
        if "tree" in wanted:
            write_text(IMAGES / "tree.svg", draw_tree(Shown(target, IN_A_TREE, SMALL)))


if __name__ == "__main__":
    main(sys.argv[1:])
