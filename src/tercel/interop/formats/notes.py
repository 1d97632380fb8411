"""What is found out while a folder is read: conventions with their source, and doubts."""

from __future__ import annotations

from dataclasses import dataclass, field

from tercel.draft import Convention


@dataclass
class Notes:
    """Filled while reading; ends up in `DraftModel.conventions` and `DraftModel.warnings`."""

    conventions: list[Convention] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)

    def holds(self, name: str, value: str, source: str) -> None:
        self.conventions.append(Convention(name, value, source))

    def doubt(self, sentence: str) -> None:
        self.doubts.append(sentence)
