"""The walls between rooms, as docs/structure.md draws them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tercel.doctor.clients import CLIENTS
from tercel.interop.engines import ENGINES

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "tercel"
LOADERS = PACKAGE / "interop" / "loaders"
PAGE = (ROOT / "docs" / "structure.md").read_text("utf-8")
ROOMS = re.findall(r"^\| `(\w+)` \|", PAGE, re.M)
FILES = sorted(PACKAGE.rglob("*.py"))
# the rooms in which an engine's name may be spelled; formats and backends, some of which have a maker of the same name
OWN_FILES = (
    *("interop/engines/", "interop/loaders/", "interop/formats/", "doctor/clients/"),
    "target_model/backend_names.py",
)


def imports(file: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Modules of this package that a file imports anywhere in it, with the names taken from each."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names if alias.name.split(".")[0] == "tercel")
        elif isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] == "tercel"):
            assert node.level == 0, f"{file} has a relative import, which the walls do not see"
            yield node.module or "", tuple(alias.name for alias in node.names)


def room_of(module: str, names: tuple[str, ...]) -> set[str]:
    """Rooms that an import reaches into; modules that stand in no room are of all."""
    parts = module.split(".")
    reached = {parts[1]} if len(parts) > 1 else set(names)
    rooms = {room for room in reached if (PACKAGE / room).is_dir()}
    public = [name for name in reached - rooms if not (PACKAGE / f"{name}.py").is_file()]
    assert not public, f"{', '.join(public)} taken from tercel, not from a room, which the walls do not see"
    return rooms


def where(file: Path) -> str:
    return file.relative_to(PACKAGE).as_posix()


def test_the_page_names_every_room_once() -> None:
    assert sorted(ROOMS) == sorted(folder.parent.name for folder in PACKAGE.glob("*/__init__.py"))


def test_a_room_imports_only_from_those_before_it() -> None:
    back = []
    for file in FILES:
        inside = where(file).split("/")
        if inside in (["__init__.py"], ["__main__.py"]):  # public names, fetched when they are asked for; the verbs
            continue
        allowed = ROOMS[: ROOMS.index(inside[0]) + 1] if len(inside) > 1 else []
        back += [
            f"{where(file)} imports {module}"
            for module, names in imports(file)
            if not room_of(module, names) <= set(allowed)
        ]
    assert back == []


def test_training_and_decoding_do_not_know_each_other() -> None:
    for one, other in (("train", "decode"), ("decode", "train")):
        for file in (PACKAGE / one).glob("*.py"):
            assert not any(other in room_of(*found) for found in imports(file)), where(file)


def test_loaders_share_nothing_with_what_they_check() -> None:
    """Neither code nor a constant: a second reader that borrows from the writer would repeat its mistakes."""
    for file in LOADERS.glob("*.py"):
        for module, names in imports(file):
            assert module == "tercel.errors" or module.startswith("tercel.interop.loaders."), (
                f"{where(file)} imports {', '.join(names)} from {module}"
            )


def test_nothing_is_borrowed_from_loaders_either() -> None:
    """What engines and the proof take of them is what they see, never a name, an id or a list."""
    view, chain = re.compile(r"view_\w+|EngineView"), {"draft_logits", "frequencies_of", "look_up"}
    for file in FILES:
        if LOADERS in file.parents:
            continue
        for module, names in imports(file):
            if module.startswith("tercel.interop.loaders"):
                assert all(view.fullmatch(name) or name in chain for name in names), (where(file), names)
    for file in (PACKAGE / "interop" / "formats").glob("*.py"):
        for module, _ in imports(file):
            assert not module.startswith(("tercel.interop.loaders", "tercel.interop.engines")), (where(file), module)


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_is_said_in_its_own_files(name: str) -> None:
    """No other file of the package has its name as a text of its own, which is how lists of engines begin."""
    assert (LOADERS / f"{ENGINES[name].run_by}.py").is_file()
    assert (PACKAGE / "interop" / "engines" / f"{ENGINES[name].run_by}.py").is_file()
    for file in FILES:
        if where(file).startswith(OWN_FILES):
            continue
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            assert not (isinstance(node, ast.Constant) and node.value == name), f"{where(file)}:{node.lineno}"


def test_every_engine_that_tells_counters_has_its_client() -> None:
    assert set(CLIENTS) == {name for name, engine in ENGINES.items() if engine.tells_counters}
    for name in CLIENTS:
        assert (PACKAGE / "doctor" / "clients" / f"{name}.py").is_file()


def test_the_documentation_names_every_engine() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    for name in ENGINES:
        assert f"`{name}`" in readme, name
