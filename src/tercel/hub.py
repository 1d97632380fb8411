"""The Hugging Face Hub: what a name of it looks like, and in plain words why it could not be read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from tercel.errors import TercelError

NO_HOME = "this user has no home folder for what goes to the Hub or comes from it; set HF_HOME to a writable folder"

_HUB_ID = re.compile(r"(?P<id>[\w.-]+(/[\w.-]+)?)(@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True)
class HubName:
    """`owner/name`, with the revision if one was given as `owner/name@revision`."""

    id: str
    revision: str | None

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        """None if `text` cannot be such a name."""
        match = _HUB_ID.fullmatch(text)
        if match is None:
            return None
        try:
            validate_repo_id(match["id"])  # a name that the Hub's client would refuse wherever it meets it
        except HFValidationError:
            return None
        return cls(match["id"], match["revision"])


def why_unreadable(
    error: BaseException, name: str, revision: str | None, part: str, *, otherwise: str, offline: str
) -> str | None:
    """One sentence for what the Hub's client raised, or None if it was something else.

    part: what was wanted of `name`; otherwise, offline: what to do if there is no such name, or no connection.
    """
    causes = tuple(_chain(error))
    if lacks_home(error):
        return NO_HOME
    if any(isinstance(cause, GatedRepoError) for cause in causes):
        return f"{name} is gated; ask for access on its Hub page and log in with `hf auth login`"
    if any(isinstance(cause, RevisionNotFoundError) for cause in causes):
        return f"{name} has no revision {revision}; give one that its Hub page lists"
    if any(isinstance(cause, RepositoryNotFoundError) for cause in causes):
        return f"there is no public repository {name} on the Hub; {otherwise}"
    unconnected = (LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError)
    if any(isinstance(cause, unconnected) for cause in causes) or "couldn't connect" in str(error):
        return f"the Hub cannot be reached and the {part} of {name} is not in its cache; go online, {offline}"
    return None


def require_home() -> None:
    """Raises `TercelError` where the Hub's client has no place for a login and what it uploads: it would take a folder
    named ~ in the current one."""
    if constants.HF_HOME.startswith("~"):
        raise TercelError(NO_HOME)


def lacks_home(error: BaseException) -> bool:
    """Whether the Hub's client failed because it found no place for its cache."""
    return any(isinstance(cause, RuntimeError) and "home directory" in str(cause) for cause in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
