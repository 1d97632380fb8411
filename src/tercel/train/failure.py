"""A step whose loss or gradient is no finite number: kept beside the run, so that it can be computed again."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tercel.chat.conversation import TokenizedChat
from tercel.draft import DraftVocabulary
from tercel.draft.kinds import config_of, new_head
from tercel.errors import TercelError
from tercel.files import UNWRITTEN, atomic_file, write_json
from tercel.reading import read_json
from tercel.target_model.protocol import TargetModel
from tercel.train.batches import seed_of
from tercel.train.config import TrainConfig
from tercel.train.features import Encoded, FeatureSupply
from tercel.train.lesson import lesson_of

if TYPE_CHECKING:
    from tercel.train.learner import Learner

ADVICE = "start again with a lower --lr, or in bfloat16 if this was float16"


class NotFiniteError(TercelError):
    """Raised before the weights are touched. failed: the step."""

    def __init__(self, failed: FailedStep) -> None:
        self.failed = failed
        super().__init__(f"{failed.told}; {ADVICE}")

    def kept(self, learner: Learner, file: Path) -> TercelError:
        """The same with the step written to `file` (`FailedStep.write`), or with why it could not be."""
        try:
            self.failed.write(learner, file)
        except (TercelError, *UNWRITTEN) as error:
            return TercelError(f"{self.failed.told} (the batch was not kept: {error}); {ADVICE}")
        return TercelError(f"{self.failed.told}; {file} and its .json have the batch and the head; {ADVICE}")


@dataclass(frozen=True)
class FailedStep:
    """Optimizer step `number` (from 0): loss and norm of its gradient; groups, losses: the micro-batches of all ranks
    and what each gave."""

    number: int
    loss: float
    norm: float
    groups: Sequence[Sequence[TokenizedChat]]
    losses: Sequence[float]

    @property
    def told(self) -> str:
        return f"the loss became {self.loss} and its gradient {self.norm} at step {self.number + 1}"

    def write(self, learner: Learner, file: Path) -> None:
        """Into `file`, as safetensors: of micro-batch `i` what `i.tokens`, `i.lengths`, `i.supervised`, `i.features`
        and `i.hidden` are in `Batch` and `Encoded` (`i.taught`: of how many rows the latter in each chat), `head.*` the
        float32 weights, `vocabulary` the draft tokens. Into the `.json` of that name: the step, the settings, the
        head's shape, the target, the conversations' ids.

        Raises `TercelError` and what safetensors does if it cannot be written.
        """
        master, supply = learner.weights.master, learner.supply
        tensors = {f"head.{name}": weights for name, weights in master.state_dict().items()}
        tensors["vocabulary"] = supply.vocabulary.ids
        for number, chats in enumerate(self.groups):
            encoded = supply.encode(chats)
            tensors |= {
                f"{number}.tokens": torch.cat([torch.from_numpy(chat.tokens).long() for chat in chats]),
                f"{number}.lengths": torch.tensor([len(chat) for chat in chats]),
                f"{number}.supervised": torch.cat([torch.from_numpy(chat.supervised) for chat in chats]),
                f"{number}.features": torch.cat([e.features for e in encoded]),
                f"{number}.hidden": torch.cat([e.hidden for e in encoded]),
                f"{number}.taught": torch.tensor([len(e.hidden) for e in encoded]),
            }
        with atomic_file(file, held=True) as partial:
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, partial)
        target = supply.target
        told = {
            "step": self.number + 1,
            **{"loss": _number(self.loss), "grad_norm": _number(self.norm)},
            "micro_batches": [
                {"loss": _number(loss), "chats": [chat.id for chat in chats]}
                for chats, loss in zip(self.groups, self.losses, strict=True)
            ],
            "settings": learner.config.values(),
            "head": master.config.to_dict(),
            "target": {"name": target.source.name, "fingerprint": target.fingerprint, "dtype": str(target.dtype)},
        }
        write_json(file.with_suffix(".json"), told, held=True)


def compute_again(file: Path, target: TargetModel) -> list[float]:
    """The loss of each micro-batch of a step that `FailedStep.write` has kept, each by itself, on its target."""
    tensors, told = load_file(file), read_json(file.with_suffix(".json"))
    head = new_head(config_of(told["head"]))
    head.load_state_dict({n.removeprefix("head."): t for n, t in tensors.items() if n.startswith("head.")})
    vocabulary = DraftVocabulary(tensors["vocabulary"], target.vocab_size)
    settings = told["settings"] | {"feature_layers": tuple(told["settings"]["feature_layers"])}
    config = TrainConfig(**settings)  # of those that it does not tell nothing was set
    lesson = lesson_of(config)
    lesson.begin(target, vocabulary)
    head = head.to(target.device, target.dtype)
    supply = FeatureSupply(
        target, head, vocabulary, keeps_hidden=lesson.keeps_hidden, prompt_weight=config.prompt_weight
    )
    losses = []
    for number, group in enumerate(told["micro_batches"]):
        kept = {k.partition(".")[2]: t.to(target.device) for k, t in tensors.items() if k.startswith(f"{number}.")}
        chats, encoded = _group(kept)
        assert len(chats) == len(group["chats"])
        with torch.no_grad():
            seed = seed_of(config.seed, told["step"] - 1, group["chats"])
            batch = replace(supply.batch(chats, encoded), seed=seed)
            result = lesson.learn(head, batch, supply.to_draft)
        losses.append(float(result.loss))
    return losses


def _group(kept: dict[str, Tensor]) -> tuple[list[TokenizedChat], list[Encoded]]:
    """The chats of a micro-batch, and what the target gave for each."""
    lengths = kept["lengths"].tolist()
    chats = [
        TokenizedChat.of(str(number), tokens.tolist(), supervised.tolist())
        for number, (tokens, supervised) in enumerate(
            zip(kept["tokens"].split(lengths), kept["supervised"].split(lengths), strict=True)
        )
    ]
    encoded = map(Encoded, kept["features"].split(lengths), kept["hidden"].split(kept["taught"].tolist()))
    return chats, list(encoded)


def _number(value: float) -> float | str:
    """What JSON has no number for as a word."""
    return value if math.isfinite(value) else json.dumps(value)
