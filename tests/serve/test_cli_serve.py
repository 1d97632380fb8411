"""`tercel serve` as a program: it says when it is ready, and ends as it is asked to."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest

from tests.cli.running import refused, run
from tests.overfit import World

BODY = {"prompt": [5, 6, 7], "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}


def test_a_server_under_load_ends_with_a_last_event_for_everyone(world: World, tmp_path: Path) -> None:
    ready, log = tmp_path / "ready.json", tmp_path / "log"
    program = "from tercel.cli.app import main; main()"
    arguments = ["serve", str(world.folder), str(world.head_folder), "--tree", "chain:3", "--dtype", "float32"]
    arguments += ["--backend", "torch", "--port", "0", "--json-ready", str(ready), "--grace", "0"]
    with log.open("wb") as errors:
        process = subprocess.Popen([sys.executable, "-c", program, *arguments], stderr=errors)
    try:
        end = time.monotonic() + 120
        while not ready.is_file():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end
            time.sleep(0.02)
        told = json.loads(ready.read_text())
        assert told["pid"] == process.pid
        with httpx2.Client(base_url=told["url"], timeout=60) as http:
            taken = run("serve", str(world.folder), "--port", told["url"].rpartition(":")[2])
            refused(taken, "cannot listen", "port")
            with http.stream("POST", "/v1/completions", json=BODY) as reply:
                lines = reply.iter_lines()
                assert "choices" in next(line for line in lines if line.startswith("data:"))
                process.send_signal(signal.SIGTERM)
                rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        last = json.loads(rest[-2].removeprefix("data: "))
        assert last["error"]["code"] == "shutting_down" or last["choices"][0]["finish_reason"]
        assert process.wait(60) == 143
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert "Traceback" not in log.read_text()


def test_a_port_that_is_taken_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        refused(run("serve", str(tmp_path / "no-such-model"), "--port", port), "cannot listen at 127.0.0.1", port)


def test_keys_are_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TERCEL_TEST_KEY", raising=False)
    refused(run("serve", "x", "--api-key-env", "TERCEL_TEST_KEY"), "holds no key")
    refused(run("serve", "x", "--api-key-env", "TERCEL_TEST_KEY", "--api-key", "k"), "give one of them")
    assert "TERCEL_TEST_KEY" not in os.environ
