"""Servers that `doctor --url` is pointed at: without an end, slow, elsewhere, with counters that lie."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from attack.child import Limits
from attack.hostile import (
    INFO,
    META,
    NEVER,
    SAID,
    TIMINGS,
    Answering,
    Reply,
    counters,
    elsewhere,
    honest,
    http,
    listen,
    llama,
    sglang,
)
from attack.inputs import Command, Kind, Room, Trial
from attack.mutate import ESCAPE, ODD, change_json, spoil_text, to_json
from attack.world import ANSWER, DEPTH

TIMEOUT = 2  # seconds that the command is told to wait for an answer
PATIENCE = 40.0  # seconds after which a command that should have given up counts as hanging


def against(
    title: str,
    answering: Callable[[Room], Answering],
    engine: str = "auto",
    must: str = "refuse",
    codes: frozenset[int] = frozenset(),
) -> Trial:
    def make(room: Room, chance: Random) -> Command:
        asked = ["doctor", str(room.world.target), str(room.world.head), "--url", "http://127.0.0.1:{port}"]
        asked += ["--engine", engine, "--timeout", str(TIMEOUT), "--tasks", str(room.world.asked)]
        command = Command(
            [*asked, "--max-new-tokens", str(ANSWER)], server=partial(listen, answering(room)), codes=codes
        )
        return command.but(must=must, limits=Limits(wall=PATIENCE))

    return Trial(f"{title} ({engine})", make)


def _always(answering: Answering) -> Callable[[Room], Answering]:
    return lambda room: answering


def _page(text: bytes) -> Callable[[Any], bytes]:
    return lambda value: http(200, text)


def changed(title: str, path: str, change: Callable[[Any], Any]) -> Trial:
    """An honest server but for its answer at `path`: bytes are a whole reply, anything else its JSON."""

    def answering(room: Room) -> Answering:
        def other(asked: str, value: Any) -> Reply | None:
            if asked != path:
                return None
            new = change(value)
            return (
                new
                if isinstance(new, bytes)
                else http(200, new.encode() if isinstance(new, str) else json.dumps(new).encode())
            )

        return honest(room.world.facts["served"], other)

    return against(f"{path}: {title}", answering, "vllm", "either", frozenset({0, 1}))


def deep(path: tuple[Any, ...], value: Any) -> Callable[[Any], Any]:
    def change(answer: Any) -> Any:
        whole = json.loads(json.dumps(answer))
        place = whole
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        return http(200, to_json(whole))

    return change


def _listed() -> list[Trial]:
    trials = [against(title, _always(a)) for title, a in NEVER.items()]
    trials += [
        against(title, _always(a), engine)
        for title, a in list(NEVER.items())[::3]
        for engine in ("vllm", "sglang", "llamacpp")
    ]
    trials.append(
        against("as it should be", lambda room: honest(room.world.facts["served"]), "auto", "run", frozenset({0}))
    )
    trials.append(
        against("a redirect to another host that answers", lambda room: elsewhere(room.world.facts["served"]), "vllm")
    )
    lies: dict[str, Any] = {
        "10^9 drafts": counters(10**9, [10**9] * DEPTH),
        "a depth of 10,000": counters(5, [1] * 10_000),
        "a place of 10^9": counters(5, [1])
        + b'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="1000000000"} 1\n',
        "a place of 5,000 digits": counters(5, [1])
        + b'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="'
        + b"9" * 5000
        + b'"} 1\n',
        "NaN": counters("NaN", ["NaN"] * DEPTH),
        "infinity": counters("+Inf", ["+Inf"] * DEPTH),
        "below zero": counters(-5, [-5] * DEPTH),
        "letters": b"vllm:spec_decode_num_drafts_total xyz\n",
        "1e999": counters("1e999", [1]),
        "1e308 drafted": counters(1, [1] * DEPTH, 1e308),
        "fractions": counters(0.5, [0.3] * DEPTH),
        "hexadecimal": b"vllm:spec_decode_num_drafts_total 0x10\n",
        "underscores": b"vllm:spec_decode_num_drafts_total 1_0\n",
        "only drafts": b"vllm:spec_decode_num_drafts_total 5\n",
        "nothing": b"",
        "an escape": ESCAPE.encode(),
        "a label with an escape": b'vllm:spec_decode_num_drafts_total{a="' + ESCAPE.encode() + b'"} 5\n',
        "a million lines": counters(5, [1] * DEPTH) + b"# x\n" * 1_000_000,
        "a line of 5 MB": b"x" * 5_000_000,
        "more accepted than drafted": counters(1, [10**6] * DEPTH, 3),
        "always the same": counters(7, [3] * DEPTH),
    }
    trials += [changed(title, "/metrics", _page(page)) for title, page in lies.items()]
    odd = (
        "null",
        "7",
        "text",
        "[]",
        "{}",
        "[null]",
        "-1",
        "10^40",
        "NaN",
        "an escape",
        "deep lists",
        "5,000 digits",
        "a lone surrogate",
        "1.5",
        "long text",
    )
    for what in odd:
        value = ODD[what]
        trials += [
            changed(f"{'/'.join(map(str, place))} = {what}", path, deep(place, value))
            for path, place in (
                ("/v1/models", ("data",)),
                ("/v1/models", ("data", 0)),
                ("/v1/models", ("data", 0, "id")),
                ("/v1/completions", ("choices",)),
                ("/v1/completions", ("choices", 0)),
                ("/v1/completions", ("choices", 0, "text")),
                ("/v1/completions", ("choices", 0, "token_ids")),
                ("/v1/completions", ("usage",)),
                ("/v1/completions", ("usage", "completion_tokens")),
                ("/v1/chat/completions", ("prompt_token_ids",)),
                ("/v1/chat/completions", ("usage",)),
            )
        ]
        codes = frozenset({0, 1})
        trials += [
            against(
                f"{key} = {what}",
                _always(sglang({**INFO, key: value}, SAID)),
                "sglang",
                "either",
                codes,
            )
            for key in INFO
        ]
        trials += [
            against(
                f"meta {key} = {what}",
                _always(sglang(INFO, {**SAID, "meta_info": {**META, key: value}})),
                "sglang",
                "either",
                codes,
            )
            for key in META
        ]
        trials += [
            against(
                f"timings {key} = {what}",
                _always(llama({"content": "a", "tokens": [5, 6, 7, 8, 9], "timings": {**TIMINGS, key: value}})),
                "llamacpp",
                "either",
                codes,
            )
            for key in TIMINGS
        ]
    many = {
        "ids beyond the vocabulary": [10**6] * 5,
        "a million ids": [5] * 1_000_000,
        "no ids": [],
        "flags": [True, False],
        "ids below zero": [-1, -2],
        "ids of 2^70": [2**70],
    }
    trials += [changed(title, "/v1/completions", deep(("choices", 0, "token_ids"), ids)) for title, ids in many.items()]
    return trials


def further(chance: Random) -> Trial:
    path = chance.choice(("/v1/models", "/v1/completions", "/v1/chat/completions", "/metrics"))
    state = chance.random()

    def change(value: Any) -> Any:
        inner = Random(state)
        if isinstance(value, bytes):
            return http(200, spoil_text(inner, value)[1])
        return (
            http(200, change_json(inner, value)[1])
            if inner.random() < 0.8
            else http(200, spoil_text(inner, json.dumps(value).encode())[1])
        )

    return changed("changed", path, change)


KIND = Kind("servers", "servers behind doctor --url", tuple(_listed()), further, count=440, quick=(10, 3))
