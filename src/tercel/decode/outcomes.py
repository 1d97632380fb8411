"""What was learned of a head's drafts, kept in the cache from one run to the next."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path

import torch

from tercel.decode.chances import Chances
from tercel.decode.proposer import Proposer
from tercel.draft import DraftHead
from tercel.errors import TercelError
from tercel.files import atomic_file, cache_dir, put_text
from tercel.reading import read_json
from tercel.target_model.protocol import TargetModel

ENOUGH = 200  # new outcomes that are worth a file
SAMPLE = 4096  # numbers of a tensor that tell one head from another


class Outcomes:
    """Where the chances of a proposer's drafts are kept. file: None if nowhere."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self.chances = Chances()
        if file is not None:
            with suppress(OSError, TercelError):  # not there yet, or damaged: it is learned again
                self.chances = Chances.from_json(read_json(file))
        self._kept = self.chances.outcomes

    @classmethod
    def of(cls, target: TargetModel, proposer: Proposer) -> Outcomes:
        """Those of a head's drafts for this target; of other drafts nothing is kept."""
        if proposer.head is None:
            return cls(None)
        try:
            name = hashlib.sha256(f"{target.fingerprint} {digest_of(proposer.head)}".encode()).hexdigest()[:24]
            return cls(cache_dir() / "outcomes" / f"{name}.json")
        except TercelError:
            return cls(None)

    def keep(self) -> None:
        """Write what is new, if that is much; a cache that cannot be written keeps nothing."""
        if self._file is None or self.chances.outcomes - self._kept < ENOUGH:
            return
        self._kept = self.chances.outcomes
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(self._file, durable=False) as partial:
                put_text(partial, json.dumps(self.chances.to_json()))
        except (OSError, TercelError):
            self._file = None


@torch.no_grad()
def digest_of(head: DraftHead) -> str:
    """Of some of its numbers."""
    digest = hashlib.sha256(repr(head.config).encode())
    for name, tensor in sorted(head.state_dict().items()):
        flat = tensor.flatten()
        some = flat[:: max(1, len(flat) // SAMPLE)].float().cpu().contiguous()
        digest.update(name.encode() + some.numpy().tobytes())
    return digest.hexdigest()
