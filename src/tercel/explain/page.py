"""An explanation as one HTML file, and its parts for pages that a server makes.

The page is whole without its script, step after step; the script shows one at a time. It loads nothing, and a policy in
its head lets nothing run but that script. All text in it passes `markup.element`.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree.ElementTree import Element

from tercel.explain.draw import static, tree_svg
from tercel.explain.markup import element, html
from tercel.explain.pieces import shown
from tercel.explain.steps import BEHIND, Explanation, Step
from tercel.explain.words import LEGEND, headline, standing, told, total
from tercel.pages import COLOURS_FILE
from tercel.plain import one_line, visible

STYLES, SCRIPT = ("look.css", "tree.css", "explain.css"), "explain.js"


def page(explanation: Explanation) -> str:
    """The file's text."""
    style = "\n".join((COLOURS_FILE.read_text("utf-8"), *map(static, STYLES)))
    script = static(SCRIPT)
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    )
    title = one_line(f"tercel explain: {explanation.prompt.strip()[-60:]}")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        _verbatim("style", style),
    )
    body = element(
        "body",
        _header(explanation),
        _answer(explanation.steps),
        _walk(explanation.steps),
        element("main", *(step_section(step) for step in explanation.steps), id="steps"),
        _verbatim("script", script),
    )
    return f"<!doctype html>\n{html(element('html', head, body, lang='en'))}\n"


def step_section(step: Step) -> Element:
    """All there is to say of a step: what it added, its tree, how the target chose, and every score."""
    choices = [_choice(step, place) for place in range(len(step.trace.choices))]
    parts = [
        element("h2", headline(step)),
        element("p", standing(step), class_="standing"),
        element("p", element("span", _before(step), class_="before"), *_words(step), class_="text"),
        element("div", tree_svg(step), class_="wide", tabindex=0, role="group", aria_label="The draft tree"),
        element("h3", "What the target said"),
        element("ol", *choices, class_="choices"),
    ]
    if len(step.trace.nodes) > 1:
        parts.append(element("details", element("summary", "Every node and its scores"), _table(step)))
    return element("section", *parts, class_="step", id=f"step-{step.number}", tabindex=-1)


def step_html(step: Step) -> str:
    """The section as text, for a page that shows a step when it is asked for."""
    return html(step_section(step))


def _header(explanation: Explanation) -> Element:
    prompt = element("details", element("summary", "Prompt"), element("pre", visible(explanation.prompt)))
    facts = element("dl", class_="facts")
    for name, value in explanation.facts.items():
        facts.append(
            element("div", element("dt", one_line(name.replace("_", " "))), element("dd", one_line(_in_words(value))))
        )
    title = element("h1", "How this answer was decoded")
    return element("header", title, element("p", total(explanation), class_="total"), facts, prompt)


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{str(name).replace('_', ' ')} {_in_words(own)}" for name, own in value.items())
    return ", ".join(map(_in_words, value)) if isinstance(value, (list, tuple)) else str(value)


def _answer(steps: Sequence[Step]) -> Element:
    legend = element(
        "p",
        element("span", "solid line", class_="word drafted"),
        ": drafted and accepted; ",
        element("span", "dotted line", class_="word own"),
        ": the target's own. Choose a token to see its step.",
        class_="legend",
    )
    text = element("p", class_="text answer")
    for step in steps:
        text.extend(_words(step, link=True))
    return element("section", element("h2", "Answer"), legend, text, id="answer")


def _words(step: Step, link: bool = False) -> list[Element]:
    """The step's pieces as text, those of accepted drafts unlike the target's own. link: whether they lead to it."""
    words = []
    for piece in step.pieces:
        blank = "" if piece.text.strip() or not piece.text else " blank"
        kind = f"word {'drafted' if piece.drafted else 'own'}{blank}"
        text = visible(piece.text) or ("" if piece.token is None else "·")  # a part of a character, or a special token
        if link:
            words.append(element("a", text, class_=kind, href=f"#step-{step.number}", data_step=step.number))
        else:
            words.append(element("span", text, class_=kind))
    return words


def _walk(steps: Sequence[Step]) -> Element:
    """The way from step to step; of use with the script alone, which shows it."""
    last = steps[-1].number
    return element(
        "nav",
        element("button", "◀", type="button", id="back", aria_label="previous step", title="previous step (←)"),
        element("input", type="range", id="at", min=0, max=last, value=0, aria_label="step"),
        element("output", f"0 / {last}", id="shown", for_="at"),
        element("button", "▶", type="button", id="on", aria_label="next step", title="next step (→)"),
        aria_label="Steps",
        hidden="",
    )


def _before(step: Step) -> str:
    return ("…" if len(step.before) == BEHIND else "") + visible(step.before)


def _choice(step: Step, place: int) -> Element:
    choice = step.trace.choices[place]
    drafted = {step.trace.nodes[child].token for child in step.children(choice.node)}
    bars = element("ul", class_="bars")
    for (token, p), name in zip(choice.likeliest, step.likeliest[place], strict=True):
        marks = " taken" * (token == choice.token) + " drafted" * (token in drafted)
        bar = element("svg", element("rect", width=100 * p, height=6), class_="bar", viewBox="0 0 100 6",
                      preserveAspectRatio="none", aria_hidden="true")  # fmt: skip
        note = ", ".join(word for word in ("← taken" * (token == choice.token), "drafted" * (token in drafted)) if word)
        bars.append(
            element(
                "li",
                element("span", shown(name), class_="token"),
                bar,
                element("span", f"{p:.3f}", class_="number"),
                element("span", note, class_="note"),
                class_=f"candidate{marks}",
            )
        )
    return element("li", element("p", told(step, place)), bars)


def _table(step: Step) -> Element:
    names = ("node", "behind", "token", "q", "p", "")
    rows = [element("tr", *(element("th", name, scope="col") for name in names))]
    path = set(step.trace.path)
    for number, (node, name) in enumerate(zip(step.trace.nodes, step.names, strict=True)):
        if number:
            scores = ("" if value is None else f"{value:.4f}" for value in (node.draft, node.target))
            came = "accepted" if number in path else ""
            cells = (str(number), str(node.parent), shown(name), *scores, came)
            rows.append(element("tr", *(element("td", cell) for cell in cells), class_=came))
    table = element("table", element("caption", LEGEND), *rows)
    return element("div", table, class_="wide", tabindex=0, role="group", aria_label="Scores")


def _verbatim(tag: str, content: str) -> Element:
    """A style or script of our own, which HTML holds as it is."""
    own = element(tag)
    own.text = content
    return own


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
