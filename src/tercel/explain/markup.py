"""HTML and SVG as elements, so that no text in them can be read as markup, wherever it came from."""

from __future__ import annotations

from xml.etree.ElementTree import Element, tostring

SVG = "http://www.w3.org/2000/svg"


def element(tag: str, *content: Element | str, **attributes: str | float) -> Element:
    """`element("p", "text", element("b", "more"), class_="a", data_x=1)`: a trailing underscore of a name is dropped,
    the others are hyphens. Characters that a page cannot hold or would obey have to be visible by then
    (`plain.visible`)."""
    made = Element(tag, {_name(name): _value(value) for name, value in attributes.items()})
    last: Element | None = None
    for part in content:
        if isinstance(part, Element):
            made.append(part)
            last = part
        elif last is None:
            made.text = (made.text or "") + part
        else:
            last.tail = (last.tail or "") + part
    return made


def html(of: Element) -> str:
    return tostring(of, encoding="unicode", method="html")


def xml(of: Element) -> str:
    return tostring(of, encoding="unicode")


def _name(name: str) -> str:
    return name.rstrip("_").replace("_", "-") if name not in ("viewBox", "preserveAspectRatio") else name


def _value(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:g}"
