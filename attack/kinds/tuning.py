"""What `tune` is told: prompts, candidates, costs of an engine's steps, servers whose steps are timed."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from attack.child import Limits
from attack.hostile import NEVER, Answering, counters, honest, http, listen
from attack.inputs import Command, Kind, Must, Room, Trial
from attack.kinds.common import report_is_json
from attack.kinds.servers import PATIENCE, TIMEOUT
from attack.mutate import ESCAPE, ODD, change_json, spoil_text, to_json
from attack.world import ANSWER, DEPTH, EXACT

MINUTES = "0.001"
CHAINS = "chain:1,chain:2"
COSTS: dict[str, Any] = {"forward_ms": {"1": 10.0, "2": 11, "4": 12.5, "8": 20}, "draft_ms": 0.5}
CANDIDATES = ("", ",", "auto", "x", "chain:0", "chain:-1", "chain:9" + "9" * 40, "1x1", "0x0x0", "9x9x" + "9" * 5000)
CANDIDATES += (ESCAPE, "chain:2,chain:2", " chain:1 , auto ", "chain:1;chain:2", "chain:1," * 2000, "1.5x2x4")
PROMPTS: dict[str, tuple[bytes, Must]] = {
    "nothing": (b"", "refuse"),
    "an answer alone": (b'{"messages": [{"role": "assistant", "content": "a"}]}\n', "refuse"),
    "a prompt longer than the context": (to_json({"prompt": "the cat " * 500}) + b"\n", "refuse"),
    "one prompt many times": (b'{"prompt": "the cat"}\n' * 40, "run"),
    "an escape": (to_json({"prompt": ESCAPE}) + b"\n", "either"),
    "bytes that are no UTF-8": (b'{"prompt": "\xff"}\n', "refuse"),
    "a list 10,000 deep": (b"[" * 10_000, "refuse"),
    "10 MB without an end": (b'{"prompt": "' + b"a" * 10_000_000, "refuse"),
}


def tuning(room: Room, *more: str) -> Command:
    """With the honest prompts, unless others are named; what is found is written too."""
    data = () if "--data" in more else ("--data", str(room.world.asked))
    asked = ["tune", str(room.world.target), str(room.world.head), *data, "--json", "found.json", *EXACT, *more]
    check = report_is_json("found.json", "engine", "settings", "verdict")
    return Command(asked, out=("found.json",), check=check)


def here(title: str, *more: str, must: Must = "either", data: bytes | None = None) -> Trial:
    """Tried on this machine, for a moment."""

    def make(room: Room, chance: Random) -> Command:
        told = ["--minutes", MINUTES, "--max-new-tokens", "4", *more]
        told += ["--candidates", CHAINS] if "--candidates" not in more else []
        if data is not None:
            room.write("my.jsonl", data)
            told += ["--data", "my.jsonl"]
        return tuning(room, *told).but(must=must)

    return Trial(f"here: {title}", make)


def costing(title: str, costs: bytes, must: Must = "either") -> Trial:
    """For another engine, whose steps cost what a file says."""

    def make(room: Room, chance: Random) -> Command:
        room.write("costs.json", costs)
        told = ("--engine", "vllm", "--longest", "2", "--max-new-tokens", "6", "--cost-json", "costs.json")
        return tuning(room, *told).but(must=must)

    return Trial(f"costs: {title}", make)


def timed(title: str, answering: Callable[[Room], Answering], engine: str = "vllm", must: Must = "either") -> Trial:
    """For another engine, of which a server runs."""

    def make(room: Room, chance: Random) -> Command:
        told = ["--engine", engine, "--longest", "2", "--max-new-tokens", str(ANSWER), "--timeout", str(TIMEOUT)]
        command = tuning(room, *told, "--url", "http://127.0.0.1:{port}")
        return command.but(must=must, server=partial(listen, answering(room)), limits=Limits(wall=PATIENCE))

    return Trial(f"server: {title} ({engine})", make)


def _counting(page: bytes) -> Callable[[Room], Answering]:
    """An honest server but for its counters."""
    return lambda room: honest(
        room.world.facts["served"], lambda path, value: http(200, page) if path == "/metrics" else None
    )


def _listed() -> list[Trial]:
    trials = [here("as it should be", must="run"), costing("as they should be", to_json(COSTS), "run")]
    trials.append(timed("as it should be", lambda room: honest(room.world.facts["served"]), must="run"))
    trials += [here(f"--candidates {text[:20]!r}", "--candidates", text) for text in CANDIDATES]
    trials += [here(f"prompts: {title}", must=must, data=data) for title, (data, must) in PROMPTS.items()]
    for what in sorted(ODD):
        table = {**COSTS["forward_ms"], "4": ODD[what]}
        trials += [
            costing(f"a width = {what}", to_json({**COSTS, "forward_ms": table})),
            costing(f"the table = {what}", to_json({**COSTS, "forward_ms": ODD[what]})),
            costing(f"draft_ms = {what}", to_json({**COSTS, "draft_ms": ODD[what]})),
        ]
    whole = to_json(COSTS)
    odd = {
        "nothing": b"",
        "text": b"x",
        "a list": b"[1]",
        "deep": b"[" * 10_000,
        "UTF-16": whole.decode().encode("utf-16"),
    }
    odd |= {"cut off": whole[:-9], "two": whole + whole, "10^6 widths": to_json({str(i): i for i in range(1, 10**6)})}
    odd |= {
        "a width of 5,000 digits": to_json({"1": 1, "9" * 5000: 2}),
        "no width of 1": b'{"2": 1}',
        "an escape": ESCAPE.encode(),
    }
    trials += [costing(title, data) for title, data in odd.items()]
    trials += [
        timed(title, lambda room, answering=answering: answering, engine, "refuse")
        for engine in ("vllm", "sglang", "llamacpp")
        for title, answering in list(NEVER.items())[::4]
    ]
    pages = {
        "counters that never move": counters(7, [3] * DEPTH),
        "no counters": b"",
        "counters of NaN": counters("NaN", ["NaN"] * DEPTH),
        "counters below zero": counters(-5, [-5] * DEPTH),
        "more accepted than drafted": counters(1, [10**6] * DEPTH, 3),
    }
    return [*trials, *(timed(title, _counting(page)) for title, page in pages.items())]


def further(chance: Random) -> Trial:
    if chance.random() < 0.3:
        path, state = chance.choice(("/v1/models", "/v1/completions", "/metrics")), chance.random()

        def change(asked: str, value: Any) -> bytes | None:
            if asked != path:
                return None
            text = value if isinstance(value, bytes) else json.dumps(value).encode()
            return http(200, spoil_text(Random(state), text)[1])

        return timed(f"{path} changed", lambda room: honest(room.world.facts["served"], change))
    said, data = change_json(chance, COSTS) if chance.random() < 0.7 else spoil_text(chance, to_json(COSTS))
    return costing(said, data)


KIND = Kind("tuning", "what tune is told: prompts, costs, servers", tuple(_listed()), further, count=220, quick=(5, 2))
