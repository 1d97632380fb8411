"""Acceptance, speed and memory against the length of the context, greedily.

    python bench/long_context.py [TARGET] [HEAD] [--data-dir DIR] [--quick] [--window FIRST:LAST] [--json FILE]

A prompt of a given length is a document with its instruction (the task `long_context`, or the questions of a task one
after another until they are long enough), cut to that length. Every document is answered with and without drafts in
turn. τ and the ratio of decoding speeds (prompts are not counted) have bootstrap intervals over documents. Memory: what
the caches hold at the end of an answer, and the largest resident size beyond that before the prompt.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tercel import Eagle3, Request, SamplingParams, Target, TreeShape, Vanilla, load_draft
from tercel.chat import Message, serving_prompt
from tercel.chat.tokenizing import detokenize, tokenize
from tercel.decode.head_state import HeadWindow
from tercel.decode.loop import DecodingLoop
from tercel.decode.proposer import Proposer
from tercel.decode.types import GenerationResult
from tercel.draft.acceptance import tokens_of_steps
from tercel.draft.shape import parse_shape
from tercel.files import write_json
from tercel.measure.intervals import ratio_of_totals, speedup
from tercel.measure.machine import describe, versions
from tercel.measure.tasks import parse_tasks
from tercel.target_model.backend_names import AUTO, BACKENDS
from tercel.target_model.backends import with_backend
from tercel.target_model.prefill import CHUNK
from tercel.target_model.protocol import TargetModel

LENGTHS = (256, 512, 1024, 2048, 4096, 8064)
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Answer:
    """caches: bytes that they held before the last step; resident: the largest resident size beyond the one before,
    None where the system does not tell."""

    result: GenerationResult
    caches: int
    resident: int | None


def answer(target: TargetModel, proposer: Proposer, prompt: tuple[int, ...], new: int) -> Answer:
    """Exactly `new` tokens, greedily, the prompt in chunks."""
    before = _resident("VmRSS", clear=True)
    loop = DecodingLoop(target, proposer, prefill_chunk=CHUNK)
    loop.submit(Request(prompt, SamplingParams(max_new_tokens=new, ignore_eos=True)))
    caches = 0
    while True:
        for event in loop.step():
            if event.result is not None:
                peak = _resident("VmHWM")
                grown = None if before is None or peak is None else max(0, peak - before)
                return Answer(event.result.require(), caches, grown)
        caches = loop.memory.held


def _resident(name: str, clear: bool = False) -> int | None:
    """Bytes that the kernel tells of this process; clear: the largest begins anew."""
    try:
        if clear:
            CLEAR.write_text("5")
        line = next(line for line in STATUS.read_text("utf-8").splitlines() if line.startswith(name))
    except OSError:
        return None
    return int(line.split()[1]) << 10


def prompts(target: Target, texts: Sequence[str], length: int, count: int) -> list[tuple[int, ...]]:
    """`count` prompts of nearly `length` tokens, each from another of the texts on, which follow one another until they
    are long enough."""
    tokenizer = target.tokenizer
    frame = len(serving_prompt(tokenizer, [Message("user", "")]))
    made = []
    for first in range(count):
        ids: list[int] = []
        for place in range(first, first + 10 * length):
            ids += tokenize(tokenizer, texts[place % len(texts)] + "\n\n")["input_ids"]
            if len(ids) >= length - frame:
                break
        text = detokenize(tokenizer, ids[: length - frame], clean_up=False)
        made.append(tuple(serving_prompt(tokenizer, [Message("user", text)])[:length]))
    return made


def summary(pairs: Sequence[tuple[Answer, Answer]]) -> dict[str, Any]:
    """Of answers without and with drafts to the same prompts."""
    plain, drafted = zip(*((a.result, b.result) for a, b in pairs), strict=True)
    tokens, steps = [tokens_of_steps(r.tokens) for r in drafted], [r.steps for r in drafted]
    tau = ratio_of_totals(tokens, steps)
    ratio = speedup(
        tokens,
        [r.decode_seconds for r in drafted],
        [tokens_of_steps(r.tokens) for r in plain],
        [r.decode_seconds for r in plain],
    )
    grown = [b.resident for _, b in pairs if b.resident is not None]
    return {
        "tau": tau.value,
        "tau_ci95": tau.ci95,
        "ratio": ratio.value,
        "ci95": ratio.ci95,
        "vanilla_prefill_s": sum(r.prefill_seconds for r in plain) / len(plain),
        "eagle3_prefill_s": sum(r.prefill_seconds for r in drafted) / len(drafted),
        "same_texts": sum(a.tokens == b.tokens for a, b in zip(plain, drafted, strict=True)),
        "documents": len(pairs),
        "cache_bytes": {"vanilla": max(a.caches for a, _ in pairs), "eagle3": max(b.caches for _, b in pairs)},
        "peak_rss_bytes": max(grown) if grown else None,
    }


def main() -> None:
    asked = _arguments()
    lengths = asked.lengths or (LENGTHS[::2] if asked.quick else LENGTHS)
    documents, new = (3, 32) if asked.quick else (10, 128)
    target = with_backend(Target.load(asked.target, dtype=torch.bfloat16), asked.backend, say=print)
    target.expect_many()
    head = load_draft(asked.head, target)
    spec = asked.tasks or ("long_context" if asked.data_dir else "demo")
    tasks = parse_tasks(spec, [asked.data_dir] if asked.data_dir else [])
    texts = ["\n\n".join(question.turns) for task in tasks for question in task.questions]
    found: dict[str, Any] = {}
    print("tokens      τ                    ratio                prefill s  caches MB  peak MB")
    for length in lengths:
        if length + new > target.context_length:
            print(f"{length:>6}  is left out: {target.source.name} takes {target.context_length} with the answer")
            continue
        pairs = []
        for number, prompt in enumerate(prompts(target, texts, length, asked.documents or documents)):
            runs: list[Answer] = []
            proposers = [Vanilla(), Eagle3(head, target, asked.tree, asked.window)]
            for proposer in proposers[:: 1 if number % 2 else -1]:
                runs.append(answer(target, proposer, prompt, new))
            first, second = runs[:: 1 if number % 2 else -1]
            pairs.append((first, second))
        row = found[str(length)] = summary(pairs)
        peak = "–" if row["peak_rss_bytes"] is None else f"{row['peak_rss_bytes'] / 1e6:.0f}"
        print(
            f"{length:>6}  {_told(row, 'tau', 'tau_ci95'):<20} {_told(row, 'ratio', 'ci95'):<20} "
            f"{row['eagle3_prefill_s']:>9.1f}  {row['cache_bytes']['eagle3'] / 1e6:>9.1f}  {peak:>7}",
            flush=True,
        )
    if asked.json:
        about: dict[str, Any] = {"target": asked.target, "backend": target.backend, "tasks": spec}
        about |= {"window": asked.window and vars(asked.window)}
        about |= {"threads": torch.get_num_threads(), "machine": describe(target.device), "versions": versions()}
        write_json(asked.json, {**about, "long_context": found})


def _told(row: dict[str, Any], value: str, interval: str) -> str:
    low, high = row[interval] or (float("nan"), float("nan"))
    return f"{row[value]:.2f} [{low:.2f}, {high:.2f}]"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", default="smollm2-135m")
    parser.add_argument("head", nargs="?", help="by default the one that is shipped for the target")
    parser.add_argument("--lengths", type=int, nargs="+", help=f"by default {' '.join(map(str, LENGTHS))}")
    parser.add_argument("--data-dir", type=Path, help="with the task long_context; without, demo questions are joined")
    parser.add_argument("--tasks", help="whose questions are the documents")
    parser.add_argument("--documents", type=int, help="how many at each length")
    parser.add_argument("--tree", type=parse_shape, default=TreeShape(6, 3, 10), help="TOPKxDEPTHxNODES, as 10x8x60")
    parser.add_argument("--window", type=_window, help="FIRST:LAST entries that the head keeps; by default all")
    parser.add_argument("--backend", choices=BACKENDS, default=AUTO, help="what computes the target")
    parser.add_argument("--quick", action="store_true", help="three documents at every other length")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _window(text: str) -> HeadWindow:
    return HeadWindow(*map(int, text.split(":")))


if __name__ == "__main__":
    main()
