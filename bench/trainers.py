"""One trainer's optimizer steps, asked for line by line: what `training.py` and `heads.py` start in each trainer's own
environment.

    {"trainer": "specforge", "dtype": "bfloat16", "threads": 2, "steps": 7, …}  → {"version": …, "settings": {…}}
    {}                                → {"seconds": 1.2, "loss": 9.1}   a step, always on the same made-up sequence
    {"batch": FILE}                  → the same on a micro-batch (`given.py`)
    {"save": FILE}, {"load": FILE}    → {}   weights, optimizer and schedule
    {"head": FOLDER}                  → {}   the head as its makers publish it

All have the same work: features, last hidden states, embeddings and output layer of the target are given; the teacher's
distributions, `steps` steps of training-time test with their losses and gradients, clipping, and the optimizer with
float32 weights are theirs to do. Each does it with its makers' code and settings, but for what needs a GPU; what that
is, `trainer_specforge.py` and `trainer_speculators.py` say.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from given import SIZES, Given, Job, Packed
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engines"))

from line_protocol import replying


class Trainer(Protocol):
    """settings: what a reader has to know beside the job."""

    settings: dict[str, Any]

    def step(self, batch: Packed) -> float:
        """An optimizer step; its loss."""
        ...

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
    def write_head(self, folder: Path) -> None: ...


class Tercel:
    """This package's step on one micro-batch, its features read and not computed. Heads are trained with `tercel
    train`."""

    def __init__(self, given: Given) -> None:
        from tercel.chat.conversation import TokenizedChat
        from tercel.draft import DraftVocabulary, Eagle3Head, HeadConfig
        from tercel.train.config import TrainConfig
        from tercel.train.encoding import Encoded
        from tercel.train.learner import Learner

        job, batch = given.job, given.batch()
        head = Eagle3Head(
            HeadConfig(
                **{name: job[name] for name in (*SIZES, "vocab_size", "draft_vocab_size", "rms_norm_eps")},
                target_hidden_size=job["hidden_size"],
                target_num_layers=job["num_layers"],
                feature_layers=given.layers,
                max_position_embeddings=job["max_position_embeddings"],
                rope_parameters=job["rope_parameters"],
            )
        )
        output = given.output
        target: Any = SimpleNamespace(
            device=torch.device("cpu"),
            dtype=given.dtype,
            embed=lambda tokens: nn.functional.embedding(tokens, output),
            logits=lambda hidden: nn.functional.linear(hidden, output),
        )
        encoded = Encoded(batch.features, batch.last[:-1])  # nothing is taught behind the last token
        store: Any = SimpleNamespace(read=lambda chat, dtype: encoded)
        rate = job["recipe"]["lr"]
        config = TrainConfig(ttt_steps=job["steps"], oov="keep", lr=rate, warmup=0.0, batch_tokens=job["length"])
        chat = TokenizedChat.of("given", batch.tokens.tolist(), batch.supervised.tolist())
        vocabulary = DraftVocabulary(given.ids, job["vocab_size"])
        self.rate = rate
        self.learner = Learner(head, vocabulary, target, [chat], config, [[[0]]], features=store)
        self.settings = {"optimizer": config.optimizer, "lr": rate}

    def step(self, batch: Packed) -> float:
        learned = self.learner.gradients(0)
        self.learner.update(self.rate)
        return learned.loss


def load(given: Given) -> Trainer | Tercel:
    if given.job["trainer"] == "tercel":
        return Tercel(given)
    if given.job["trainer"] == "specforge":
        from trainer_specforge import SpecForge

        return SpecForge(given)
    from trainer_speculators import Speculators

    return Speculators(given)


class Serving:
    """A trainer that is asked."""

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job["threads"])
        torch.manual_seed(0)
        given = Given.of(job)
        self.trainer: Any = load(given)
        self.made_up = given.batch() if "length" in job else None

    def answer(self, asked: dict[str, str]) -> dict[str, Any]:
        if "save" in asked:
            torch.save(self.trainer.state_dict(), asked["save"])
        elif "load" in asked:
            self.trainer.load_state_dict(torch.load(asked["load"]))
        elif "head" in asked:
            self.trainer.write_head(Path(asked["head"]))
        else:
            batch = Packed.read(asked["batch"]) if "batch" in asked else self.made_up
            began = time.perf_counter()
            loss = self.trainer.step(batch)
            return {"seconds": time.perf_counter() - began, "loss": loss}
        return {}


def main() -> None:
    say = replying()
    try:
        job = json.loads(sys.stdin.readline())
        serving = Serving(job)
        say({"version": importlib.metadata.version(job["trainer"]), "settings": serving.trainer.settings})
        for line in sys.stdin:
            say(serving.answer(json.loads(line)))
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        say({"error": " ".join(str(error).split())[:500] or type(error).__name__})
        sys.exit(1)


if __name__ == "__main__":
    main()
