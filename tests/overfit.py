"""A tiny target with a head overfit on its answers, so that whatever is read wrong shows; and its damaged copies."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tercel.chat import TokenizedChat
from tercel.decode.eagle3 import Eagle3
from tercel.decode.engine import Engine
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import GenerationResult, Request
from tercel.draft import DraftModel, DraftVocabulary, HeadInfo, TargetIdentity, save_head
from tercel.draft.shape import TreeShape
from tercel.measure.probe import greedy_answers
from tercel.measure.tasks import Prompt, Question, prompt_ids
from tercel.target_model.model import Target
from tercel.train.config import Objective
from tercel.train.features import FeatureSupply
from tercel.train.ttt import training_time_test
from tests.tiny import VOCAB, save_tiny
from tests.train.worlds import head_for

ANSWER = 16
STEPS = 3
TEXTS = ("the cat sat", "on a red mat", "in the rain", "ten days here", "was he there", "is it on")
QUESTIONS = tuple(Question(f"q{i}", (text,)) for i, text in enumerate(TEXTS))
PARAMS = SamplingParams(max_new_tokens=ANSWER)


@dataclass(frozen=True)
class World:
    """`head` was overfit on the target's answers to `QUESTIONS`; both lie in folders as well."""

    target: Target
    head: DraftModel
    folder: Path
    head_folder: Path

    @property
    def prompts(self) -> list[Prompt]:
        return [Prompt(q.id, prompt_ids(self.target.tokenizer, q)) for q in QUESTIONS]

    def decoded(self, head: DraftModel, depth: int = STEPS) -> dict[tuple[int, ...], GenerationResult]:
        """By prompt, what decoding with a chain of `head` gives."""
        engine = Engine(self.target, Eagle3(head, self.target, TreeShape.chain(depth)), slots=8)
        results = engine.generate([Request(prompt.tokens, PARAMS) for prompt in self.prompts])
        return {prompt.tokens: result for prompt, result in zip(self.prompts, results, strict=True)}

    def copy_head(self, out: Path) -> Path:
        save_head(self.head, out, dtype=torch.float32)
        return out


def make_world(folder: Path) -> World:
    path = save_tiny(folder, "llama", initializer_range=0.25)
    target = Target.load(str(path))
    vocabulary = DraftVocabulary(torch.arange(3, VOCAB), VOCAB)
    head = head_for(target, vocabulary)
    model = DraftModel(head, vocabulary, HeadInfo(TargetIdentity("tiny", target.fingerprint, target.tokenizer_digest)))
    prompts = [Prompt(q.id, prompt_ids(target.tokenizer, q)) for q in QUESTIONS]
    overfit(model, target, greedy_answers(target, prompts, ANSWER))
    out = folder / "head"
    save_head(model, out, dtype=torch.float32)
    return World(target, replace(model, path=out), path, out)


def overfit(model: DraftModel, target: Target, answers: list[TokenizedChat], updates: int = 100) -> None:
    supply = FeatureSupply(target, model.head, model.vocabulary)
    batch, objective = supply.batch(answers), Objective(steps=STEPS, kind="hard", decay=None)
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=4e-3)
    for _ in range(updates):
        optimizer.zero_grad()
        training_time_test(model.head, batch, supply.to_draft, objective).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.head.parameters(), 1.0)
        optimizer.step()
    model.head.eval().requires_grad_(False)


def edit_json(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    values = json.loads(file.read_text("utf-8"))
    change(values)
    file.write_text(json.dumps(values), encoding="utf-8")


def edit_tensors(file: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
