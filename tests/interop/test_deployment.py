"""What containers see of this machine."""

from __future__ import annotations

import os
from pathlib import Path

import yaml

from tercel.interop.deployment import Deployment
from tercel.interop.engines import ENGINES
from tercel.interop.engines.base import Layout


def mounts_of(*read: Path) -> dict[str, str]:
    deployment = Deployment(ENGINES["vllm"], f"vllm serve {read[0]}", read, False, Layout())
    volumes = yaml.safe_load(deployment.compose())["services"]["vllm"]["volumes"]
    return {volume["target"]: volume["source"] for volume in volumes}


def seen(mounts: dict[str, str], path: Path) -> Path | None:
    """Where on this machine that lies which a container sees at `path`, through the links that it sees."""
    above = [str(place) for place in (path, *path.parents) if str(place) in mounts]
    if not above:
        return None
    there = Path(mounts[above[0]]) / path.relative_to(above[0])
    if not there.is_symlink():
        return there.resolve() if there.exists() else None
    return seen(mounts, Path(os.path.normpath(path.parent / there.readlink())))


def laid(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(path.name)
    return path


def linked(path: Path, to: Path | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(to)
    return path


def test_a_single_file_is_mounted_by_itself(tmp_path: Path) -> None:
    head, target = tmp_path / "head", laid(tmp_path / "models" / "target.gguf")
    laid(head / "config.json")
    laid(tmp_path / "models" / "other.gguf")
    assert mounts_of(head, target) == {str(path): str(path) for path in (head, target)}


def test_a_folder_whose_files_lie_in_several_places(tmp_path: Path) -> None:
    """Through links of links, in folders within, by a name of the folder that is a link itself."""
    one, two = laid(tmp_path / "disk" / "one.bin"), laid(tmp_path / "disk" / "two" / "two.bin")
    beside = laid(tmp_path / "disk" / "secret")
    real = tmp_path / "store" / "model"
    laid(real / "config.json")
    linked(real / "same.json", "config.json")
    linked(tmp_path / "store" / "hop.bin", one)
    linked(real / "a.bin", "../hop.bin")
    linked(real / "deep" / "b.bin", two)
    linked(real / "folder", two.parent)
    linked(real / "gone", tmp_path / "nothing")
    linked(real / "up", "..")
    name = linked(tmp_path / "names" / "latest", real)
    mounts = mounts_of(name)
    for path, wanted in {
        "config.json": real / "config.json",
        "same.json": real / "config.json",
        "a.bin": one,
        "deep/b.bin": two,
        "folder/two.bin": two,
    }.items():
        assert seen(mounts, name / path) == wanted, path
    assert len(mounts) == 3  # of what lies in disk/two, the folder alone
    assert seen(mounts, beside) is None
