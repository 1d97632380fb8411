"""An engine's launch line on several machines, in containers, and as a file for Docker Compose."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
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
    """line: as the engine starts on one machine and one GPU. folders: that it reads, as they are called there, the
    head's first; inside a container they have the same names. from_hub: whether the target comes from the Hub."""

    engine: ServingEngine
    line: str
    folders: tuple[Path, ...]
    from_hub: bool
    layout: Layout

    def lines(self) -> list[str]:
        """A line a machine."""
        return [self._with(self.line, self._spread(node)) for node in range(self.layout.nodes)]

    def container_lines(self) -> list[str]:
        """The same with Docker. Raises `TercelError` if no image of the engine is known."""
        made = []
        for node in range(self.layout.nodes):
            words = ["docker", "run", "--rm", "--gpus", "all", "--ipc", "host"]
            # machines meet at ports of their own choice
            words += ["--network", "host"] if self.layout.nodes > 1 else ["--publish", self._port]
            for folder in self._mounted:
                words += ["--mount", f"type=bind,source={folder},target={folder},readonly"]
            cache = f" --env HF_TOKEN --volume ~/.cache/huggingface:{_CACHE}" if self.from_hub else ""
            made.append(f"{shlex.join(words)}{cache} {shlex.join([self._image, *self._inside(node)])}")
        return made

    def compose(self) -> str:
        """A `compose.yaml`. Raises `TercelError` as `container_lines`, and for more than one machine."""
        if self.layout.nodes > 1:
            raise TercelError("a compose file is for one machine; take --container for several")
        volumes: list[Any] = [
            {"type": "bind", "source": _literal(str(folder)), "target": _literal(str(folder)), "read_only": True}
            for folder in self._mounted
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
            raise TercelError(f"no container of {self.engine.title} is known here; leave out --container and --compose")
        return self.engine.image

    @property
    def _mounted(self) -> tuple[Path, ...]:
        """The folders, and those that links in them lead to, as in the Hub's cache."""
        links = [file for folder in self.folders for file in folder.iterdir() if file.is_symlink()]
        led_to = (Path(os.path.normpath(link.parent / link.readlink())).parent for link in links)
        return tuple(dict.fromkeys((*self.folders, *led_to)))

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


def _literal(text: str) -> str:
    """Compose takes a dollar sign for a variable."""
    return text.replace("$", "$$")
