"""`tercel serve` under 1, 4, 16 and 32 clients at a time, with drafts and without: tokens a second, time to the first
token and between tokens.

    python bench/serving.py smollm2-135m --json out/serving.json
    python bench/serving.py ./my-model my-head --clients 1,8 --rounds 2 --max-new-tokens 64

One server answers both ways (`"draft": false` in a request), in turns. Each client asks the demo prompts one after the
other, greedily, streamed. Nothing else may run on the machine meanwhile.
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


async def ask(client: httpx2.AsyncClient, text: str, draft: bool, most: int) -> Told:
    body = {
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": most,
        "stream": True,
        "return_token_ids": True,
        "draft": draft,
    }
    began, times = time.perf_counter(), []
    async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                tokens = [token for choice in json.loads(line[6:])["choices"] for token in choice.get("token_ids", ())]
                if tokens:
                    times.append((time.perf_counter() - began, len(tokens)))
    return Told(tuple(times))


async def loaded(url: str, texts: Sequence[str], clients: int, draft: bool, most: int) -> tuple[float, list[Told]]:
    """Seconds until all clients have all their answers, and those. Clients begin at different prompts."""

    async def one(first: int) -> list[Told]:
        async with httpx2.AsyncClient(base_url=url, timeout=None) as client:
            asked = [texts[(first + number) % len(texts)] for number in range(len(texts))]
            return [await ask(client, text, draft, most) for text in asked]

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
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="all that follows goes to `tercel serve`")
    given = parser.parse_args()
    texts = [question.turns[0] for question in parse_tasks(DEMO, [])[0].questions][: given.prompts]
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
    if given.json is not None:
        write_json(given.json, {"machine": describe(torch.device("cpu")), "target": given.target, "rows": rows})


if __name__ == "__main__":
    main()
