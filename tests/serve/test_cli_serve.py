"""What `tercel serve` refuses before it loads anything; `test_soak.py` has it as a program, from start to end."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tests.cli.running import refused, run


def test_a_port_that_is_taken_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        refused(run("serve", str(tmp_path / "no-such-model"), "--port", port), "cannot listen at 127.0.0.1", port)


def test_keys_are_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TERCEL_TEST_KEY", raising=False)
    refused(run("serve", "x", "--api-key-env", "TERCEL_TEST_KEY"), "holds no key")
    refused(run("serve", "x", "--api-key-env", "TERCEL_TEST_KEY", "--api-key", "k"), "give one of them")
    assert "TERCEL_TEST_KEY" not in os.environ
