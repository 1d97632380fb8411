"""How much memory the tokens of requests take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheMemory:
    """Bytes that a cache holds, and those of slots in use: of committed tokens and of a block in flight."""

    held: int
    used: int

    @property
    def waste(self) -> float:
        """The share of what is held and not in use."""
        return 1 - self.used / self.held if self.held else 0.0

    def __add__(self, other: CacheMemory) -> CacheMemory:
        return CacheMemory(self.held + other.held, self.used + other.used)
