"""The pictures of the documentation, drawn from what the shipped head really does and from what the log records.

    python bench/pictures.py [answer] [tree] [curve]

Writes docs/img/NAME.svg, by default all three:
answer: what `tercel generate --show` prints, accepted drafts in colour.
tree:   one draft tree of an answer, with the draft's probabilities and the path that the target accepted.
curve:  held-out acceptance while the shipped head was trained, from the tables of docs/log.md.
"""

from __future__ import annotations

import io
import math
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from rich.terminal_theme import TerminalTheme
from rich.text import Text
from torch import Tensor

from tercel import Eagle3, Engine, Request, Target, load_draft, sampling_for
from tercel.cli.answer import LEGEND, ColouredText
from tercel.cli.consoles import PlainConsole
from tercel.decode.draft_tree import DraftTree
from tercel.files import write_text

ROOT = Path(__file__).parents[1]
IMAGES, LOG = ROOT / "docs/img", ROOT / "docs/log.md"
TARGET, NEW_TOKENS = "smollm2-135m", 64
QUESTION = "Write a Python function that reverses a string."  # of the README
IN_A_TREE = "Why does the moon look larger near the horizon than high in the sky?"  # of the demo's questions
COLUMNS = 96  # of the terminal
INK, PALE, PAPER, GREEN, LIGHT_GREEN, BLUE = "#1f2328", "#6e7781", "#ffffff", "#1a7f37", "#dafbe1", "#0969da"
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


@dataclass(frozen=True)
class Step:
    """One round of decoding: the tree, the draft's probability of every proposed token by its path from the root, and
    the tokens that became text: accepted drafts and one of the target's own."""

    tree: DraftTree
    probs: dict[tuple[int, ...], float]
    tokens: tuple[int, ...]

    def path(self, node: int) -> tuple[int, ...]:
        """Tokens from the root, which is left out, to the node."""
        tokens: list[int] = []
        while node > 0:
            tokens.insert(0, self.tree.token_list[node])
            node = self.tree.parent_list[node]
        return tuple(tokens)

    @property
    def accepted(self) -> tuple[int, ...]:
        return self.tokens[:-1]

    @property
    def surprise(self) -> int:
        """How many accepted tokens were not the likeliest of their siblings, so that a chain would have missed them."""
        likeliest: dict[tuple[int, ...], float] = {}
        for path, prob in self.probs.items():
            likeliest[path[:-1]] = max(prob, likeliest.get(path[:-1], 0.0))
        prefixes = (self.accepted[: n + 1] for n in range(len(self.accepted)))
        return sum(self.probs[prefix] < likeliest[prefix[:-1]] for prefix in prefixes)


class Watched(Eagle3):
    """Drafts as ever and keeps every step of the one request that it serves."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.steps: list[Step] = []
        self._proposed: tuple[DraftTree, dict[tuple[int, ...], float]] | None = None

    def propose(self, rows: Any) -> Any:
        levels: list[Tensor] = []
        hook = self.draft.head.lm_head.register_forward_hook(lambda *call: levels.append(call[-1][0].float()))
        proposals = super().propose(rows)
        hook.remove()
        self._proposed = proposals[0].tree, self._probabilities(levels)
        return proposals

    def commit(self, committed: Any) -> None:
        if self._proposed is not None:
            self.steps.append(Step(*self._proposed, committed[0].tokens))
        super().commit(committed)

    def _probabilities(self, levels: Sequence[Tensor]) -> dict[tuple[int, ...], float]:
        """Spec section 8 once more, from the logits of every level: `[W]`, then `[K, W]`."""
        probs: dict[tuple[int, ...], float] = {}
        frontier: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        for logits in levels:
            grown = []
            for (score, path), row in zip(frontier, logits.reshape(len(frontier), -1), strict=True):
                best = torch.log_softmax(row, -1).topk(self.shape.top_k)
                for log_prob, draft in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                    child = (*path, int(self.draft.vocabulary.ids[draft]))
                    probs[child] = math.exp(log_prob)
                    grown.append((score + log_prob, child))
            frontier = sorted(grown, key=lambda node: -node[0])[: self.shape.top_k]
        return probs


class Shown:
    """The answer to a question: as text with colours, and step by step."""

    def __init__(self, target: Target, question: str) -> None:
        self.target, self.question = target, question
        watched = Watched(load_draft(TARGET, target), target)
        params = sampling_for(target, max_new_tokens=NEW_TOKENS)
        coloured = ColouredText(target.tokenizer, params.stop)
        self.pieces = [
            piece
            for event in Engine(self.target, watched).stream([Request.chat(target, question, params)])
            for piece in coloured.of(event)
        ]
        self.steps = watched.steps

    def token(self, token: int) -> str:
        """A token as it stands in the tree: spaces and line ends made visible."""
        return self.target.tokenizer.decode([token]).replace(" ", "␣").replace("\n", "⏎")


def draw_answer(shown: Shown) -> str:
    """A terminal after `tercel generate --show`, as SVG, without the line on how fast this machine was."""
    console = PlainConsole(record=True)
    console.width = COLUMNS
    with redirect_stdout(io.StringIO()):
        console.print(Text(f'$ tercel generate {TARGET} --prompt "{shown.question}" --show'))
        console.print(LEGEND)
        console.print(Text.assemble(*shown.pieces))
    return console.export_svg(title="", theme=DARK, code_format=TERMINAL, unique_id="tercel")


def draw_tree(shown: Shown) -> Figure:
    """The step that went furthest, and of those the one whose path was least what the draft held likeliest."""
    step = max(shown.steps, key=lambda step: (len(step.accepted), step.surprise))
    tree, token = step.tree, shown.token
    rows: dict[int, float] = {}
    leaves = iter(range(len(tree)))

    def place(node: int) -> float:
        below = [place(child) for child in tree.children(node)]
        rows[node] = (below[0] + below[-1]) / 2 if below else float(next(leaves))
        return rows[node]

    place(0)
    depths = tree.depth_list
    height = next(leaves)
    figure = Figure(figsize=(9.2, 1.1 + 0.56 * height), facecolor=PAPER)
    axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
    axes.set_axis_off()
    axes.set(xlim=(-0.55, max(depths) + 1.6), ylim=(height - 0.5, -1.75))
    on_path = {step.accepted[:n] for n in range(len(step.accepted) + 1)}
    for node in range(len(tree)):
        path = step.path(node)
        taken = path in on_path
        if node:
            parent = tree.parent_list[node]
            _edge(axes, (depths[parent], rows[parent]), (depths[node], rows[node]), GREEN if taken else None)
        label = "" if node == 0 else f"{step.probs[path]:.2f}"
        _box(axes, (depths[node], rows[node]), token(tree.token_list[node]), label, taken, node == 0)
        if path == step.accepted:
            own = (depths[node] + 1, rows[node])
            _edge(axes, (depths[node], rows[node]), own, BLUE)
            _box(axes, own, token(step.tokens[-1]), "", False, True, BLUE)
    for column, heading in enumerate(["last token", *(f"draft, level {n}" for n in range(1, max(depths) + 1))]):
        axes.text(column, -0.95, heading, ha="center", color=PALE, fontsize=10)
    axes.text(len(step.accepted) + 1, -0.95, "model", ha="center", color=BLUE, fontsize=10)
    title = (
        f"{len(tree) - 1} drafted tokens checked in one forward pass: {len(step.accepted)} accepted (green), "
        "1 added by the model (blue)"
    )
    axes.text(-0.4, -1.42, title, color=INK, fontsize=11, fontweight="bold")
    return figure


def _edge(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str | None) -> None:
    axes.plot(
        [start[0] + 0.36, start[0] + 0.5, end[0] - 0.5, end[0] - 0.36],
        [start[1], start[1], end[1], end[1]],
        color=colour or "#c4cad0",
        linewidth=2.2 if colour else 1.2,
        zorder=2 if colour else 1,
        solid_joinstyle="round",
    )


def _box(axes: Axes, at: tuple[float, float], text: str, label: str, taken: bool, own: bool, colour: str = INK) -> None:
    edge = GREEN if taken and not own else colour if own else "#c4cad0"
    axes.add_patch(
        FancyBboxPatch(
            (at[0] - 0.36, at[1] - 0.3),
            0.72,
            0.6,
            boxstyle="round,pad=0,rounding_size=0.08",
            facecolor=LIGHT_GREEN if taken and not own else PAPER,
            edgecolor=edge,
            linewidth=1.8 if taken or own else 1.1,
            zorder=3,
        )
    )
    dark = taken or own
    middle = at[0] - 0.31 if label else at[0]
    axes.text(
        middle,
        at[1],
        text,
        ha="left" if label else "center",
        va="center",
        family="monospace",
        fontsize=11,
        color=INK if dark else PALE,
        zorder=4,
    )
    axes.text(at[0] + 0.31, at[1], label, ha="right", va="center", fontsize=9, color=GREEN if taken else PALE, zorder=4)


@dataclass(frozen=True)
class Stage:
    """A part of a training as the log has it: held-out τ and 0-α by its own steps."""

    steps: tuple[int, ...]
    tau: tuple[float, ...]
    alpha: tuple[float, ...]


STAGES = ("first head\n(chains of 5)", "trained on, same data\n(chains of 3)", "more data\n(chains of 4)")


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
        for stage, name, value, colour in zip(found, STAGES, values, (PALE, BLUE, GREEN), strict=True):
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
            save(draw_tree(Shown(target, IN_A_TREE)), IMAGES / "tree.svg")


if __name__ == "__main__":
    main(sys.argv[1:])
