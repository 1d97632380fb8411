"""How much memory is left."""

from __future__ import annotations

import re
from pathlib import Path

import torch


def available_memory(device: torch.device) -> int | None:
    """Bytes that can still be taken there; None where nobody says."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    told = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", told.read_text("utf-8")) if told.is_file() else None
    return int(found[1]) << 10 if found else None
