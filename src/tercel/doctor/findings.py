"""What a check-up says: one finding a check, one sentence of what was found and one of what to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["ok", "note", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """check: what was looked at. level: "note" needs no action, "warning" may cost acceptance, "problem" will fail or
    does cost acceptance. advice: empty where there is nothing to do."""

    check: str
    level: Level
    found: str
    advice: str = ""

    def to_json(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True)
class CheckUp:
    """All findings on a head beside its target; `server` holds the numbers behind those on a running server."""

    target: str
    head: str
    format: str
    findings: tuple[Finding, ...]
    server: dict[str, Any] | None = None

    @property
    def ok(self) -> bool:
        """No problem was found; warnings may have been."""
        return not any(finding.level == "problem" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "head": self.head,
            "format": self.format,
            "ok": self.ok,
            "findings": [finding.to_json() for finding in self.findings],
            "server": self.server,
        }
