"""Servers of tiny targets in a thread of the test's own process, on a port of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
from openai import OpenAI

from tercel.decode.proposer import Proposer
from tercel.serve.running import address_of, bound, start
from tercel.serve.settings import ServerSettings
from tercel.target_model.protocol import TargetModel


@dataclass(frozen=True)
class Running:
    """A server that answers. stop: as a first signal would."""

    url: str
    parts: Any

    def openai(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=600)

    def http(self, **more: Any) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, **{"timeout": 600, **more})


@contextmanager
def serving(target: TargetModel, proposer: Proposer, **settings: Any) -> Iterator[Running]:
    given = ServerSettings(**{"name": "tiny", "port": 0, "grace": 0.0, "prefill_chunk": 16, **settings})
    taken = bound(given)
    ready = threading.Event()
    running = start(target, proposer, given, taken, lambda url: ready.set())
    thread = threading.Thread(target=lambda: asyncio.run(running.serve([taken])), daemon=True)
    thread.start()
    try:
        assert ready.wait(600)
        yield Running(address_of(taken), running)
    finally:
        running.handle_exit(0, None)
        thread.join(600)
        running.scheduler.stop()
        taken.close()
        assert not thread.is_alive()
