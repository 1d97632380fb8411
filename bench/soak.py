"""A running `tercel serve` under a bounded load of mixed requests, faulty clients among them, until it is stopped.

    python bench/soak.py --quick --json out/soak.json                    # under five minutes on two CPU cores
    python bench/soak.py ./my-model my-head --rounds 20 --serve --dtype float32

Every request is asked alone first, token by token; then rounds of all of them go by, each with many clients at a time,
by turns with and without drafts; then each alone again. An answer that differs from that alone is wrong, and so is a
refusal that says nothing, or a stream without its end. Clients read slowly, leave, and are killed in the middle of a
stream; bodies are broken and too large; a second server tries to take the port; at last the server is told to stop
while it answers. Exit code 1 if anything was wrong, was left over, or if memory grew.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
import psutil
import torch
from serving import Told, percentiles, served
from soak_load import CHAT, JSON_BODY, PATIENCE, Case, Outcome, Stream, ask, cases

from tercel.files import write_json
from tercel.measure.machine import describe
from tercel.measure.tasks import DEMO, parse_tasks

WAYS = ("eagle3", "vanilla")
GROWTH = 1.05  # of memory between two equal rounds, beside what an allocator may keep
SLACK = 24.0  # MB
TIMES = ("ttft_ms", "itl_ms")


async def told_alone(url: str, asked: Sequence[Case]) -> dict[bytes, tuple[str, ...]]:
    """The answers of requests asked one after another, by what was sent."""
    found: dict[bytes, tuple[str, ...]] = {}
    for case in asked:
        if case.answered and case.sent not in found:
            outcome = await ask(url, case)
            if outcome.texts is None:
                raise SystemExit(f"alone, a request of kind {case.kind} was not answered: {outcome.fault}")
            found[case.sent] = outcome.texts
    return found


async def round_of(url: str, asked: Sequence[Case], clients: int) -> list[Outcome]:
    """All requests, by so many clients at a time."""
    places = asyncio.Semaphore(clients)

    async def one(case: Case) -> Outcome:
        async with places:
            return await ask(url, case)

    return await asyncio.gather(*map(one, asked))


async def long_prompt(url: str, text: str) -> list[int]:
    """Token ids of a prompt that takes half of the context, of 1,500 tokens at most."""
    async with httpx2.AsyncClient(base_url=url, timeout=None) as client:
        most = (await client.get("/v1/models")).json()["data"][0]["max_model_len"]
        body = {"prompt": text, "max_tokens": 1, "return_token_ids": True}
        ids = (await client.post("/v1/completions", json=body)).json()["choices"][0]["prompt_token_ids"]
    length = min(1500, most // 2)
    return (ids * (length // len(ids) + 1))[:length]


async def settled(url: str) -> bool:
    """Whether nothing is decoded and nobody waits, a while after the last client has gone."""
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        for _ in range(300):
            page = (await client.get("/metrics")).text
            left = [line for line in page.splitlines() if line.startswith("vllm:num_requests_")]
            if left and all(line.endswith(" 0.0") for line in left):
                return True
            await asyncio.sleep(0.1)
    return False


def taken_port(target: str, url: str) -> dict[str, Any]:
    """What a second server says on the same port."""
    command = [sys.executable, "-m", "tercel", "serve", target, "--port", url.rpartition(":")[2]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = " ".join(done.stderr.split())
    fine = done.returncode == 2 and "cannot listen" in said and "Traceback" not in said and not done.stdout.strip()
    return {"code": done.returncode, "said": said, "fine": fine}


async def stopped(url: str, process: subprocess.Popen[bytes], texts: Sequence[str]) -> dict[str, Any]:
    """SIGTERM while streams are under way: how each of them ended, and the process."""
    begun = [asyncio.Event() for _ in texts]

    async def one(text: str, piece: asyncio.Event) -> tuple[str, float]:
        chat = {"messages": [{"role": "user", "content": text}], "temperature": 0, "ignore_eos": True, "stream": True}
        stream = Stream()
        async with (
            httpx2.AsyncClient(base_url=url, timeout=PATIENCE) as client,
            client.stream("POST", CHAT, content=json.dumps(chat), headers=JSON_BODY) as reply,
        ):
            async for _ in stream.read(reply.aiter_lines(), 0.0):
                piece.set()
        last = stream.error or next(iter(stream.reasons.values()), None)
        return (last if last and stream.ended else "without an end"), time.perf_counter()

    streams = [asyncio.create_task(one(*pair)) for pair in zip(texts, begun, strict=True)]
    for piece in begun:
        await asyncio.wait_for(piece.wait(), PATIENCE)
    process.send_signal(signal.SIGTERM)
    told = time.perf_counter()
    ends = await asyncio.gather(*streams)
    code = await asyncio.to_thread(process.wait, 120)
    lasted = max(end for _, end in ends) - told
    fine = code == 143 and all(end != "without an end" for end, _ in ends)
    return {"streams": dict(Counter(end for end, _ in ends)), "seconds": lasted, "code": code, "fine": fine}


def counted(outcomes: Sequence[Outcome], alone: dict[bytes, tuple[str, ...]]) -> tuple[dict[str, Any], list[str]]:
    """By kind of request how often it was sent, answered, refused, cancelled and wrong; and what was wrong."""
    kinds: dict[str, Counter[str]] = {}
    faults: list[str] = []
    for outcome in outcomes:
        case, counts = outcome.case, kinds.setdefault(outcome.case.kind, Counter())
        counts["sent"] += 1 + outcome.refused
        counts["refused"] += outcome.refused
        fault = outcome.fault
        if fault is None and case.answered and outcome.texts != alone[case.sent]:
            fault = f"{outcome.texts} instead of {alone[case.sent]}"
        if fault is not None:
            counts["wrong"] += 1
            faults.append(f"{case.kind}: {fault}")
        else:
            counts["refused" if case.status != 200 else "answered" if case.answered else "cancelled"] += 1
    names = ("sent", "answered", "refused", "cancelled", "wrong")
    return {kind: {name: counts[name] for name in names} for kind, counts in kinds.items()}, faults


def waits(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Times of the requests of kind "streamed": to the first token, waiting for a slot included, and between tokens."""
    told = [Told(outcome.times) for outcome in outcomes if outcome.case.kind == "streamed" and outcome.times]
    firsts = [one.times[0][0] for one in told]
    return {"ttft_ms": percentiles(firsts), "itl_ms": percentiles([gap for one in told for gap in one.between])}


async def rounds(given: argparse.Namespace, url: str, pid: int) -> tuple[dict[str, Any], list[str]]:
    texts = [question.turns[0] for question in parse_tasks(DEMO, [])[0].questions][: given.prompts]
    ids = await long_prompt(url, texts[0])
    asked = {way: cases(texts, ids, given.max_new_tokens, way != "vanilla") for way in WAYS}
    alone = await told_alone(url, asked["vanilla"])
    truth = dict(alone)
    for one, other in zip(asked["eagle3"], asked["vanilla"], strict=True):
        if one.answered:
            truth[one.sent] = alone[other.sent]
    server, memory = psutil.Process(pid), []
    outcomes: dict[str, list[list[Outcome]]] = {way: [] for way in WAYS}
    for turn in range(given.rounds + 1):  # the first warms up, and is counted all the same
        for way in WAYS if turn % 2 else WAYS[::-1]:
            outcomes[way].append(await round_of(url, asked[way], given.clients))
        quiet = await settled(url)
        memory.append(server.memory_info().rss / 1e6)
        print(f"round {turn}: {memory[-1]:.0f} MB", flush=True)
    timed = {way: [outcome for told in outcomes[way][1:] for outcome in told] for way in WAYS}
    again = await told_alone(url, asked["eagle3"])
    every = [outcome for way in WAYS for told in outcomes[way] for outcome in told]
    kinds, faults = counted(every, truth)
    faults += [f"asked alone afterwards: {text!r}" for sent, text in again.items() if text != truth[sent]]
    total = {name: sum(counts[name] for counts in kinds.values()) for name in next(iter(kinds.values()))}
    total["wrong"] = len(faults)
    grown = memory[-1] > memory[1] * GROWTH + SLACK
    return {
        **total,
        "rss_mb": [memory[1], memory[-1]],
        "rss_mb_by_round": memory,
        "grown": grown,
        **waits(timed["eagle3"]),
        "without_head": waits(timed["vanilla"]),
        "kinds": kinds,
        "settled": quiet and await settled(url),
    }, faults


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", default="smollm2-135m")
    parser.add_argument("head", nargs="?")
    parser.add_argument("--quick", action="store_true", help="two rounds of few requests")
    parser.add_argument("--rounds", type=int, help="turns of each way after the first")
    parser.add_argument("--clients", type=int, default=16, help="at a time")
    parser.add_argument("--prompts", type=int, help="how many of the demo prompts are asked")
    parser.add_argument("--max-new-tokens", type=int, help="of the longest answers")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="all that follows goes to `tercel serve`")
    given = parser.parse_args(arguments)
    quick = {"rounds": 2, "prompts": 3, "max_new_tokens": 32}
    for name, full in (("rounds", 12), ("prompts", 6), ("max_new_tokens", 96)):
        if getattr(given, name) is None:
            setattr(given, name, quick[name] if given.quick else full)
    began = time.perf_counter()
    few = ["--slots", "4", "--queue", "6", "--grace", "1"]  # so that some are told to come again, and some are cut
    names = [given.target, *([given.head] if given.head else []), *few, *given.serve]
    with tempfile.TemporaryFile() as log:
        with served(names, log) as (url, process):
            found, faults = asyncio.run(rounds(given, url, process.pid))
            found["taken_port"] = taken_port(given.target, url)
            texts = [question.turns[0] for question in parse_tasks(DEMO, [])[0].questions]
            found["sigterm"] = asyncio.run(stopped(url, process, texts[:4]))
        log.seek(0)
        said = log.read().decode(errors="replace")
    if "Traceback" in said or "ERROR" in said:
        faults.append(f"the server's log: {said[-2000:]}")
        found["wrong"] += 1
    found |= {"seconds": time.perf_counter() - began, "faults": faults[:20]}
    report(found)
    if given.json is not None:
        machine = {"machine": describe(torch.device("cpu")), "target": given.target, "serve": given.serve}
        write_json(given.json, {**found, **machine})
    fine = not found["wrong"] and found["settled"] and not found["grown"]
    return 0 if fine and found["taken_port"]["fine"] and found["sigterm"]["fine"] else 1


def report(found: dict[str, Any]) -> None:
    names = ("sent", "answered", "refused", "cancelled", "wrong")
    print(f"{'kind':>10} {' '.join(f'{name:>9}' for name in names)}")
    for kind, counts in {**found["kinds"], "all": found}.items():
        print(f"{kind:>10} {' '.join(f'{counts[name]:9}' for name in names)}")
    before, after = found["rss_mb"]
    left = "nothing was left over" if found["settled"] else "requests were LEFT OVER"
    print(f"memory {before:.0f} MB before, {after:.0f} MB after equal rounds; {left}")
    for way, times in (("with the head", found), ("without", found["without_head"])):
        told = (f"{name} p50 {times[name].get('p50', 0):.0f}, p95 {times[name].get('p95', 0):.0f} ms" for name in TIMES)
        print(f"{way}: {'; '.join(told)}")
    print(f"a second server on the port: code {found['taken_port']['code']}: {found['taken_port']['said']}")
    stop = found["sigterm"]
    print(f"SIGTERM: streams ended {stop['streams']} within {stop['seconds']:.1f} s, code {stop['code']}")
    print(f"{found['seconds']:.0f} s in all")
    for fault in found["faults"]:
        print(f"wrong: {fault[:500]}")


if __name__ == "__main__":
    raise SystemExit(main())
