"""What the tests of several methods share."""

from __future__ import annotations

from functools import cache

import pytest

from tests.methods.mtp_worlds import Checkpoints, save_with_modules


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """By architecture and number of modules; not to be written to."""
    return cache(lambda arch, modules=1: save_with_modules(tmp_path_factory.mktemp("mtp"), arch, modules))
