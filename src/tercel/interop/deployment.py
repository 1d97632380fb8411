"""An engine's launch line on several machines, in containers, and as a file for Docker Compose."""

from __future__ import annotations

import csv
import io
import os
import shlex
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tercel.errors import TercelError
from tercel.interop.engines.base import Layout, ServingEngine

_CACHE = "/root/.cache/huggingface"  # of the Hub's client, inside
_EVERYWHERE = ("--host", "0.0.0.0")  # a container's own loopback is nobody else's
_PATIENCE = 1800  # seconds until a server that loads a large target counts as sick


@dataclass(frozen=True)
class Deployment:
    """line: as the engine starts on one machine and one GPU. read: folders and files that it reads, as they are called
    there, the head's first; inside a container they have the same names. from_hub: whether the target comes from the
    Hub."""

    engine: ServingEngine
    line: str
    read: tuple[Path, ...]
    from_hub: bool
    layout: Layout

    def lines(self) -> list[str]:
        """A line a machine."""
        return [self._with(self.line, self._spread(node)) for node in range(self.layout.nodes)]

    def container_lines(self) -> list[str]:
        """The same with Docker. Raises `TercelError` if no image of the engine is known, and for a path that Docker's
        command line does not take."""
        made = []
        for node in range(self.layout.nodes):
            words = ["docker", "run", "--rm", "--gpus", "all", "--ipc", "host"]
            # machines meet at ports of their own choice
            words += ["--network", "host"] if self.layout.nodes > 1 else ["--publish", self._port]
            for inside, source in self._mounts().items():
                words += ["--mount", _fields("type=bind", f"source={source}", f"target={inside}", "readonly")]
            cache = f" --env HF_TOKEN --volume ~/.cache/huggingface:{_CACHE}" if self.from_hub else ""
            made.append(f"{shlex.join(words)}{cache} {shlex.join([self._image, *self._inside(node)])}")
        return made

    def compose(self) -> str:
        """A `compose.yaml`. Raises `TercelError` as `container_lines`, and for more than one machine."""
        if self.layout.nodes > 1:
            raise TercelError("a compose file is for one machine; take a container's line on each of several")
        volumes: list[Any] = [
            {"type": "bind", "source": _literal(str(source)), "target": _literal(str(inside)), "read_only": True}
            for inside, source in self._mounts().items()
        ]
        gpus = {"driver": "nvidia", "count": self.layout.gpus, "capabilities": ["gpu"]}
        asks = f"import urllib.request as r; r.urlopen('http://127.0.0.1:{self.engine.port}/health', timeout=5)"
        service: dict[str, Any] = {
            "image": self._image,
            "command": [_literal(word) for word in self._inside(0)],
            "ports": [self._port],
            "ipc": "host",
            "volumes": volumes,
            "deploy": {"resources": {"reservations": {"devices": [gpus]}}},
            "healthcheck": {
                "test": ["CMD", "python3", "-c", asks],
                "interval": "30s",
                "timeout": "10s",
                "start_period": f"{_PATIENCE}s",
            },
            "restart": "unless-stopped",
        }
        whole: dict[str, Any] = {"services": {self.engine.run_by: service}}
        if self.from_hub:
            volumes.append({"type": "volume", "source": "hub", "target": _CACHE})
            service["environment"] = {"HF_TOKEN": "${HF_TOKEN:-}"}
            whole["volumes"] = {"hub": {}}
        return yaml.safe_dump(whole, sort_keys=False, allow_unicode=True, width=10**6)

    @property
    def _image(self) -> str:
        if self.engine.image is None:
            raise TercelError(f"no container of {self.engine.title} is known here; start it without one")
        return self.engine.image

    def _mounts(self) -> dict[Path, Path]:
        """By its name inside, what is there of this machine: what is read, and what links in it lead to, as in the
        Hub's cache, each by itself, so that nothing beside it covers what the image has."""
        mounts = {path: path for path in self.read}
        places = deque((path, path.resolve()) for path in self.read)
        while places:
            place, real = places.popleft()
            for link in _links(real):
                inside = Path(os.path.normpath((place / link.relative_to(real)).parent / link.readlink()))
                source = link.resolve()
                if not source.exists() or real.is_relative_to(source):  # a link to nothing, or to what holds all this
                    continue
                if not _there(inside, source, mounts):
                    mounts[inside] = source
                    places.append((inside, source))
        return mounts

    @property
    def _port(self) -> str:
        """For this machine alone: neither engine asks for a key unless told to."""
        return f"127.0.0.1:{self.engine.port}:{self.engine.port}"

    def _inside(self, node: int) -> list[str]:
        words = [word for word in shlex.split(self.line) if word.strip()][self.engine.entry :]
        return ["python3" if word == "python" else word for word in words[:1]] + [*words[1:], *self._spread(node, True)]

    def _spread(self, node: int, contained: bool = False) -> list[str]:
        open_to_others = (contained or self.layout.nodes > 1) and not node
        return [*self.engine.spread(self.layout, node), *(_EVERYWHERE if open_to_others else ())]

    @staticmethod
    def _with(line: str, words: Sequence[str]) -> str:
        if not words:
            return line
        more = " \\\n  " if "\n" in line else " "  # as the line itself goes on
        return f"{line}{more}{shlex.join(words)}"


def _links(folder: Path) -> Iterator[Path]:
    """Those in a folder, however deep; a file has none."""
    for path, folders, files in os.walk(folder):
        yield from (link for name in sorted([*folders, *files]) if (link := Path(path, name)).is_symlink())


def _there(inside: Path, source: Path, mounts: Mapping[Path, Path]) -> bool:
    """Whether what a link leads to is a part of something that is mounted."""
    above = (place for place in (inside, *inside.parents) if place in mounts)
    return any((mounts[place].resolve() / inside.relative_to(place)).resolve() == source for place in above)


def _fields(*fields: str) -> str:
    """As `docker run --mount` takes them: a line of CSV, whose fields neither end in white space nor hold other
    characters than printed ones."""
    if odd := next((field for field in fields if field != field.rstrip() or not field.isprintable()), None):
        raise TercelError(f"Docker mounts nothing called {odd.partition('=')[2]!r}; move it, or rename it")
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(fields)
    return line.getvalue()


def _literal(text: str) -> str:
    """Compose takes a dollar sign for a variable."""
    return text.replace("$", "$$")
