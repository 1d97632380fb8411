"""What can be a name on the Hub, and what is refused before anything asks for it."""

from __future__ import annotations

import pytest

from tercel.errors import TercelError
from tercel.hub import HubName
from tercel.target_model.stored import StoredTarget


@pytest.mark.parametrize("text", ["gpt2", "owner/name", "Owner-1/na.me_2", "owner/name@v1.0", "owner/name@refs/pr/1"])
def test_names(text: str) -> None:
    name = HubName.parse(text)
    assert name is not None
    assert text == (name.id if name.revision is None else f"{name.id}@{name.revision}")


@pytest.mark.parametrize("text", ["9" * 97, "a--b/c", "a/b..c", ".a/b", "-a", "a/b.git", "a/b/c", "", "a b", "a@"])
def test_what_the_hub_would_refuse_is_no_name(text: str) -> None:
    assert HubName.parse(text) is None
    if text:
        with pytest.raises(TercelError, match="it cannot be a Hub id"):
            StoredTarget.find(text, ask_hub=False)
