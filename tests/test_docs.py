"""What the sources say of the documentation has to be there."""

from __future__ import annotations

import re
from pathlib import Path

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
