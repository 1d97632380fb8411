"""What tests of several rooms share: an overfitted head, a cache and a package index of a test's own; and how they
are spread over cores."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tercel.target_model.openvino  # noqa: F401  before a test imports openvino, whose helper would call home
from tercel import wheels
from tercel.decode import calibrate, outcomes
from tercel.wheels import Wheel
from tests.overfit import World, make_world

CORES = torch.get_num_threads()  # that torch would take
# files that take longest, the longest first: what begins last should be short
LONG = ("test_attack.py", "test_crash_points.py", "test_readme.py")


def pytest_configure() -> None:
    """Processes side by side share the cores."""
    torch.set_num_threads(max(1, CORES // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONG)))


@pytest.fixture
def every_core() -> Iterator[None]:
    """As many threads as a user has, where bits might hang on them."""
    before = torch.get_num_threads()
    torch.set_num_threads(CORES)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the package keeps what can be made again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tercel"


@pytest.fixture(scope="session", autouse=True)
def _measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is measured and learned here stays here."""
    folder = tmp_path_factory.mktemp("measured")
    with pytest.MonkeyPatch.context() as patch:
        for module in (calibrate, outcomes):
            patch.setattr(module, "cache_dir", lambda: folder)
        yield


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the package index, for pip itself."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return tmp_path / "index"


@pytest.fixture
def by_copy(index: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let downloads be copies from the index folder, without pip; the names asked for, in order."""
    asked: list[str] = []

    def copy(wheel: Wheel, folder: Path, on_bytes: wheels.OnBytes | None = None) -> Path:
        asked.append(wheel.requirement)
        stem = wheel.requirement.replace("-", "_").replace("==", "-")
        return Path(shutil.copy(index / f"{stem}-py3-none-any.whl", folder))

    monkeypatch.setattr(wheels, "download", copy)
    return asked


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("overfit"))
