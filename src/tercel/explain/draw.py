"""A step's tree as a picture: SVG whose looks are classes of `static/tree.css`, for pages and for files alike.

From left to right it grows; every box has a token and below it the draft's probability q and the target's p. What tells
accepted drafts and the target's own token from the rest is a mark, a line's width and a box's form, besides colours.
"""

from __future__ import annotations

from importlib.resources import files
from xml.etree.ElementTree import Element

from rich.cells import cell_len, set_cell_size

from tercel.explain.markup import SVG, element, xml
from tercel.explain.pieces import shown
from tercel.explain.steps import Step
from tercel.explain.words import headline

ROW, COLUMN_GAP, BOX, TOP, EDGE = 50, 34, 40, 30, 4  # pixels
LETTER, LETTERS = 8, (10, 18)  # pixels of one, and how many a box has room for: at least, at most
MARK = " ✓"


def static(name: str) -> str:
    """A file of the pages: style or script."""
    return files("tercel.explain").joinpath("static", name).read_text("utf-8")


def tree_file(step: Step) -> str:
    """The picture as a file of its own, on light paper wherever it is shown."""
    svg = tree_svg(step)
    width, height = svg.attrib["width"], svg.attrib["height"]
    svg.insert(0, element("rect", class_="paper", width=width, height=height))
    style = element("style")
    style.text = static("tree.css")
    svg.insert(0, style)
    return xml(svg) + "\n"


def tree_svg(step: Step) -> Element:
    """The picture as a part of a page, as large as it needs to be."""
    nodes, depths = step.trace.nodes, step.depths()
    own = len(nodes)  # the target's token, behind the end of the accepted path
    end = (0, *step.trace.path)[-1]
    parents = [*(node.parent for node in nodes), end]
    columns = [*depths, depths[end] + 1]
    labels = [shown(name) for name in (*step.names, step.taken[-1])]
    letters = min(max(LETTERS[0], *map(cell_len, labels)) + len(MARK), LETTERS[1])
    box = letters * LETTER + 14
    rows = _rows(parents)
    at = [(EDGE + column * (box + COLUMN_GAP), TOP + row * ROW) for column, row in zip(columns, rows, strict=True)]
    width = EDGE * 2 + (max(columns) + 1) * (box + COLUMN_GAP) - COLUMN_GAP
    height = TOP + (max(rows) + 1) * ROW
    taken = {0, own, *step.trace.path}
    svg = element("svg", element("title", headline(step)), class_="tree", role="img", width=width, height=height,
                  viewBox=f"0 0 {width:g} {height:g}", xmlns=SVG)  # fmt: skip
    for column in range(max(columns) + 1):
        x = EDGE + column * (box + COLUMN_GAP)
        svg.append(element("text", _heading(column, max(depths)), class_="level", x=x + 2, y=TOP - 14))
    edges = sorted(range(1, own + 1), key=lambda node: node in taken)  # those that count lie above the others
    svg.extend(_edge(at[parents[node]], at[node], box, _kind(node, own, taken)) for node in edges)
    for node, place in enumerate(at):
        svg.append(_box(step, node, place, box, labels[node], letters, _kind(node, own, taken)))
    return svg


def _rows(parents: list[int]) -> list[float]:
    """By node: leaves one below the other, a parent in the middle of its children."""
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], start=1):
        children[parent].append(node)
    order, ahead = list[int](), [0]
    while ahead:
        order.append(ahead.pop())
        ahead += reversed(children[order[-1]])
    leaves = [node for node in order if not children[node]]
    rows = [0.0] * len(parents)
    for place, leaf in enumerate(leaves):
        rows[leaf] = float(place)
    for node in reversed(order):
        if below := children[node]:
            rows[node] = (rows[below[0]] + rows[below[-1]]) / 2
    return rows


def _kind(node: int, own: int, taken: set[int]) -> str:
    if node == own:
        return "own"
    return "last" if node == 0 else "accepted" if node in taken else "rejected"


def _heading(column: int, deepest: int) -> str:
    if column == 0:
        return "last token"
    return f"draft {column}" if column <= deepest else "target"


def _edge(start: tuple[float, float], end: tuple[float, float], box: float, kind: str) -> Element:
    x, y, to_x, to_y = start[0] + box, start[1] + BOX / 2, end[0], end[1] + BOX / 2
    middle = (x + to_x) / 2
    path = f"M{x:g} {y:g}C{middle:g} {y:g} {middle:g} {to_y:g} {to_x:g} {to_y:g}"
    return element("path", class_=f"edge {kind}", d=path)


def _box(step: Step, node: int, at: tuple[float, float], box: float, label: str, letters: int, kind: str) -> Element:
    x, y = at
    inside = x + (14 if kind == "own" else 7)
    room = letters - (len(MARK) if kind in ("accepted", "own") else 0)
    short = label if cell_len(label) <= room else set_cell_size(label, room - 1) + "…"
    told = scores(step, node)
    whole = f"{label}: {', '.join((_MEANING[kind], *told))}"
    group = element(
        "g",
        element("title", whole),
        element("rect", x=x, y=y, width=box, height=BOX, rx=BOX / 2 if kind == "own" else 5),
        element("text", short, class_="token", x=inside, y=y + (17 if told else 25)),
        class_=f"node {kind}",
    )
    if kind == "accepted":
        group.append(element("text", "✓", class_="mark", x=x + box - 7, y=y + 17))
    if told:
        group.append(element("text", "  ".join(told), class_="score", x=inside, y=y + 32))
    return group


_MEANING = {
    "last": "the last token so far",
    "accepted": "drafted and accepted",
    "rejected": "drafted in vain",
    "own": "the target's own token",
}


def scores(step: Step, node: int) -> list[str]:
    """A node's probabilities, as far as they are known; behind the last node, that of the target's own token."""
    nodes = step.trace.nodes
    own = (("p", step.trace.choices[-1].probability),)
    told = own if node == len(nodes) else (("q", nodes[node].draft), ("p", nodes[node].target))
    return [f"{name} {value:.2f}" for name, value in told if value is not None]
