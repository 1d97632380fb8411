"""A kill anywhere loses nothing: the same command again gives what an undisturbed one gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash_scenarios import SCENARIOS
from tests.crashes import crash_points

POINTS = 9  # of each scenario, evenly spread; a campaign tries them all


@pytest.mark.parametrize("name", SCENARIOS)
def test_killed_anywhere(tmp_path: Path, name: str) -> None:
    tried, points = crash_points(SCENARIOS[name], tmp_path, most=POINTS)
    assert tried == POINTS < points
