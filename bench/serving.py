"""`tercel serve` under 1, 4, 16 and 32 clients at a time, with drafts and without: tokens a second, time to the first
token and between tokens.

    python bench/serving.py smollm2-135m --json out/serving.json
    python bench/serving.py ./my-model my-head --clients 1,8 --rounds 2 --max-new-tokens 64

One server answers both ways (`"draft": false` in a request), in turns. Each client asks the demo prompts one after the
other, greedily, streamed. Nothing else may run on the machine meanwhile.

    python bench/serving.py smollm2-135m --turns 6 --json out/turns.json

instead has one client go through conversations of so many turns, with drafts, at a server with a prefix cache and at
one without, in turns; the demo prompts are their questions, one after the other, each conversation beginning with
another. It tells the time to the first token of every turn, with how many tokens its prompt had and how many of them
were known.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import httpx2
import torch

from tercel.files import write_json
from tercel.measure.machine import describe
from tercel.measure.tasks import DEMO, parse_tasks

WAYS = ("eagle3", "vanilla")


@dataclass(frozen=True)
class Told:
    """One answer. times: of its pieces, each with its number of tokens, in seconds from when it was asked for."""

    times: tuple[tuple[float, int], ...]
    text: str = ""
    prompt: int = 0  # tokens
    cached: int = 0  # of these

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.times)

    @property
    def between(self) -> list[float]:
        """Seconds a token after the first, those of a piece alike."""
        gaps = ((after - before, tokens) for (before, _), (after, tokens) in pairwise(self.times))
        return [gap / tokens for gap, tokens in gaps for _ in range(tokens)]


@contextmanager
def served(
    arguments: Sequence[str], errors: BinaryIO | None = None
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server of its own; the address, and its process, which may end before the block does. errors: where its
    standard error goes, if not to this program's."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready.json"
        command = [sys.executable, "-m", "tercel", "serve", *arguments, "--port", "0", "--json-ready", str(ready)]
        process = subprocess.Popen(command, stderr=errors)
        try:
            while not ready.is_file():
                if process.poll() is not None:
                    raise SystemExit(f"the server ended with code {process.returncode} before it was ready")
                time.sleep(0.1)
            told = json.loads(ready.read_text("utf-8"))
            assert told["pid"] == process.pid
            yield told["url"], process
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait()


async def ask(client: httpx2.AsyncClient, messages: Sequence[dict[str, str]], draft: bool, most: int) -> Told:
    body = {
        "messages": messages,
        "temperature": 0,
        "max_tokens": most,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "draft": draft,
    }
    began, times, text, usage = time.perf_counter(), [], "", {}
    async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                usage = chunk.get("usage") or usage
                tokens = [token for choice in chunk["choices"] for token in choice.get("token_ids", ())]
                text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
                if tokens:
                    times.append((time.perf_counter() - began, len(tokens)))
    return Told(tuple(times), text, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])


def said(text: str, who: str = "user") -> dict[str, str]:
    return {"role": who, "content": text}


async def conversed(url: str, questions: Sequence[str], most: int) -> list[Told]:
    """A conversation, a turn a question."""
    messages, answers = list[dict[str, str]](), list[Told]()
    async with httpx2.AsyncClient(base_url=url, timeout=None) as client:
        for question in questions:
            messages.append(said(question))
            answers.append(await ask(client, messages, True, most))
            messages.append(said(answers[-1].text, "assistant"))
    return answers


def turn_by_turn(given: argparse.Namespace, texts: Sequence[str]) -> list[dict[str, Any]]:
    """A row a turn: time to its first token with the cache and without, and what was known."""
    names = [given.target, *([given.head] if given.head else []), "--slots", "1", *given.serve]
    ways = {"cached": [], "whole": ["--prefix-cache", "0"]}
    told: dict[str, list[list[Told]]] = {way: [] for way in ways}
    with served([*names, *ways["cached"]]) as (cached, _), served([*names, *ways["whole"]]) as (whole, _):
        urls = {"cached": cached, "whole": whole}
        for number in range(-1, given.rounds):  # the first warms up, with other texts
            asked = [texts[(number + turn) % len(texts)] for turn in range(given.turns)]
            asked[0] = f"({number + 2}) {asked[0]}"  # so that no conversation begins as another
            for way in ways if number % 2 else list(ways)[::-1]:
                answers = asyncio.run(conversed(urls[way], asked, given.max_new_tokens))
                if number >= 0:
                    told[way].append(answers)
    rows = []
    for turn in range(given.turns):
        of = {way: [answers[turn] for answers in told[way]] for way in ways}
        rows.append({"turn": turn + 1, "same": all(a.text == b.text for a, b in zip(*of.values(), strict=True))})
        for way, answers in of.items():
            rows[-1][way] = {
                "ttft_ms": 1000 * statistics.median(answer.times[0][0] for answer in answers),
                "prompt_tokens": statistics.mean(answer.prompt for answer in answers),
                "cached_tokens": statistics.mean(answer.cached for answer in answers),
            }
        shown = "; ".join(
            f"{way} {rows[-1][way]['ttft_ms']:.0f} ms, {rows[-1][way]['cached_tokens']:.0f} of "
            f"{rows[-1][way]['prompt_tokens']:.0f} tokens known"
            for way in ways
        )
        print(f"turn {turn + 1}: {shown}; {'the same text' if rows[-1]['same'] else 'other texts'}", flush=True)
    return rows


async def loaded(url: str, texts: Sequence[str], clients: int, draft: bool, most: int) -> tuple[float, list[Told]]:
    """Seconds until all clients have all their answers, and those. Clients begin at different prompts."""

    async def one(first: int) -> list[Told]:
        async with httpx2.AsyncClient(base_url=url, timeout=None) as client:
            asked = [texts[(first + number) % len(texts)] for number in range(len(texts))]
            return [await ask(client, [said(text)], draft, most) for text in asked]

    began = time.perf_counter()
    answers = await asyncio.gather(*(one(first) for first in range(clients)))
    return time.perf_counter() - began, [answer for own in answers for answer in own]


def summary(rounds: Sequence[tuple[float, list[Told]]]) -> dict[str, Any]:
    answers = [answer for _, told in rounds for answer in told]
    between = [gap for answer in answers for gap in answer.between]
    return {
        "answers": len(answers),
        "tokens": sum(answer.tokens for answer in answers),
        "tokens_per_second": sum(answer.tokens for answer in answers) / sum(seconds for seconds, _ in rounds),
        "ttft_ms": percentiles([answer.times[0][0] for answer in answers if answer.times]),
        "itl_ms": percentiles(between),
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    values = [*seconds, *seconds] if len(seconds) == 1 else seconds  # one is every percentile of itself
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": 1000 * cuts[49], "p95": 1000 * cuts[94]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("head", nargs="?")
    parser.add_argument("--clients", default="1,4,16,32", help="how many at a time, one after the other")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each way")
    parser.add_argument("--prompts", type=int, default=4, help="how many of the demo prompts a client asks")
    parser.add_argument("--turns", type=int, default=0, help="measure a conversation's turns instead, so many")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="all that follows goes to `tercel serve`")
    given = parser.parse_args()
    texts = [question.turns[0] for question in parse_tasks(DEMO, [])[0].questions][: given.prompts]
    rows = turn_by_turn(given, texts) if given.turns else under_load(given, texts)
    if given.json is not None:
        write_json(given.json, {"machine": describe(torch.device("cpu")), "target": given.target, "rows": rows})


def under_load(given: argparse.Namespace, texts: Sequence[str]) -> list[dict[str, Any]]:
    """A row a number of clients: both ways."""
    names = [given.target, *([given.head] if given.head else []), "--slots", str(given.slots), *given.serve]
    rows = []
    with served(names) as (url, _):
        for clients in map(int, given.clients.split(",")):
            rounds: dict[str, list[tuple[float, list[Told]]]] = {way: [] for way in WAYS}
            for turn in range(-1, given.rounds):  # the first warms up
                for way in WAYS if turn % 2 else WAYS[::-1]:
                    told = asyncio.run(loaded(url, texts, clients, way != "vanilla", given.max_new_tokens))
                    if turn >= 0:
                        rounds[way].append(told)
            found = {way: summary(rounds[way]) for way in WAYS}
            rows.append({"clients": clients, **found})
            shown = "; ".join(f"{way} {found[way]['tokens_per_second']:.1f} tokens/s" for way in WAYS)
            print(f"{clients:3} clients: {shown}", flush=True)
    return rows


if __name__ == "__main__":
    main()
