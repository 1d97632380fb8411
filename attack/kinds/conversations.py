"""Files of conversations: JSON lines, JSON lists, gzip; rows of every schema with odd values."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from attack.forks import Ended
from attack.inputs import Command, Kind, Must, Room, Trial
from attack.mutate import DEEP, ESCAPE, ODD, change_json, spoil_text, to_json

CHAT: dict[str, Any] = {
    "id": "c1",
    "messages": [{"role": "user", "content": "the cat sat"}, {"role": "assistant", "content": "on a red mat"}],
}
ROWS: dict[str, dict[str, Any]] = {
    "messages": CHAT,
    "conversations": {
        "id": "s1",
        "conversations": [{"from": "human", "value": "the cat"}, {"from": "gpt", "value": "on a mat"}],
    },
    "turns": {"id": "t1", "turns": ["the cat", "and it"]},
    "pair": {"prompt": "the cat", "completion": "on a mat"},
    "instruction": {"instruction": "sit", "input": "on it", "output": "the cat sat"},
    "text": {"text": "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\non a mat<|im_end|>\n"},
    "ids": {"id": "i1", "p": [5, 6, 7], "g": [8, 9]},
    "tools": {
        "id": "u1",
        "tools": [{"name": "f", "parameters": {"type": "object"}}],
        "messages": [
            {"role": "user", "content": "ten days"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
            },
            {"role": "tool", "content": "10", "tool_call_id": "1", "name": "f"},
            {"role": "assistant", "content": "ten", "reasoning_content": "it is ten"},
        ],
    },
    "called": {
        "conversations": [
            {"from": "human", "value": "ten"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {}}'},
            {"from": "observation", "value": "10"},
            {"from": "gpt", "value": "ten"},
        ]
    },
    "answered": {"id": "r1", **CHAT, "answer_ids": [[5, 6, 3]], "finish": ["stop"]},
}
GOOD = to_json(CHAT)


def line_of(*rows: bytes) -> bytes:
    return b"\n".join(rows) + b"\n"


def blanks(mebibytes: int) -> bytes:
    """White space, packed: many members of 16 MiB each, as `cat` of several gzip files gives."""
    return gzip.compress(b" " * (16 << 20), 6) * (mebibytes // 16)


def showing(room: Room, file: str) -> Command:
    return Command(
        ["data", "show", file, "--target", str(room.world.target), "--json", "counts.json"], out=("counts.json",)
    )


def cleaning(room: Room, file: str) -> Command:
    return Command(
        ["data", "clean", file, "--against", str(room.world.asked), "--out", "kept.jsonl"], out=("kept.jsonl",)
    )


def regenerating(room: Room, file: str) -> Command:
    asked = ["data", "regenerate", file, "--target", str(room.world.target), "--out", "out.jsonl"]
    places = ("out.jsonl", "out.jsonl.settings.json", "out.jsonl.part")
    return Command([*asked, "--max-new-tokens", "4", "--dtype", "float32"], out=places)


def training(room: Room, file: str) -> Command:
    return Command(
        [
            "train",
            str(room.world.target),
            "--data",
            file,
            "--out",
            "head",
            "--epochs",
            "1",
            "--max-steps",
            "1",
            "--draft-vocab",
            "40",
            "--config",
            str(Path(__file__).with_name("recipe.yaml")),
            "--dtype",
            "float32",
        ],
        out=("head",),
    )


VERBS = {"show": showing, "clean": cleaning, "regenerate": regenerating, "train": training}


def content(
    title: str,
    data: bytes | Callable[[], bytes],
    must: Must = "refuse",
    verb: str = "show",
    name: str = "chats.jsonl",
    rows: int | None = None,
) -> Trial:
    """rows: how many conversations have to be read, where the file is fine."""

    def make(room: Room, chance: Random) -> Command:
        room.write(name, data() if callable(data) else data)
        command = VERBS[verb](room, name)
        return command.but(must=must, check=None if rows is None else reads(rows))

    return Trial(f"{title} ({verb})", make)


def reads(rows: int) -> Callable[[Room, Ended], str | None]:
    def check(room: Room, ended: Ended) -> str | None:
        counts = json.loads((room.path / "counts.json").read_text("utf-8"))
        return None if counts["read"] == rows else f"{counts['read']} conversations were read, {rows} are in the file"

    return check


def turn(role: Any, said: Any, **more: Any) -> bytes:
    return to_json(
        {"messages": [{"role": role, "content": said, **more}, {"role": "assistant", "content": "on a mat"}]}
    )


def _listed() -> list[Trial]:
    pair = b"[" + GOOD + b"," + GOOD + b"]"
    bad: dict[str, bytes | Callable[[], bytes]] = {
        "10,000 lists deep": line_of(GOOD, b"[" * DEEP + b"]" * DEEP),
        "10,000 objects deep": line_of(GOOD, b'{"a":' * DEEP + b"1" + b"}" * DEEP),
        "deep within a row": line_of(to_json({**CHAT, "x": ODD["deep lists"]}), b"{"),
        "deep within a call": line_of(
            to_json(
                {
                    "messages": [
                        {"role": "user", "content": "a"},
                        {"role": "assistant", "content": "", "tool_calls": "[" * DEEP + "]" * DEEP},
                    ]
                }
            )
        ),
        "a list 10,000 deep": b"[" * DEEP + b"]" * DEEP,
        "a number of 5,000 digits": line_of(b'{"p": [' + b"9" * 5000 + b'], "g": [1]}'),
        "a number of 5,000 digits as content": line_of(
            to_json({"messages": [{"role": "user", "content": ODD["5,000 digits"]}]})
        ),
        "a lone surrogate": line_of(turn("user", ODD["a lone surrogate"])),
        "a lone surrogate as a role": line_of(turn(ODD["a lone surrogate"], "a")),
        "bytes that are no UTF-8": line_of(GOOD, b'{"turns": ["\xff\xfe"]}'),
        "UTF-16": GOOD.decode().encode("utf-16"),
        "UTF-32": GOOD.decode().encode("utf-32"),
        "nothing but a BOM": b"\xef\xbb\xbf",
        "NULs": bytes(5000),
        "only blanks": b" \n" * 5000,
        "a second list": pair + b"\n" + pair,
        "a second list beside the first": pair + pair,
        "text behind the list": pair + b" and more",
        "an object behind the list": pair + GOOD,
        "an empty list": b"[]",
        "a list of lists": b"[[],[]]",
        "a list of nothing": b"[null]",
        "a list without its commas": b"[" + GOOD + b" " + GOOD + b"]",
        "commas alone": b"[,,,]",
        "an object over several lines": json.dumps(CHAT, indent=1).encode(),
        "a number": b"5",
        "a text": b'"x"',
        "true": b"true",
        "NaN": b"NaN",
        "a line of ten million letters that is no JSON": b"x" * 10_000_000,
        "a line of 50 MB": lambda: to_json({"turns": ["ab " * (50 << 20)][:1]})[: 50 << 20],
        "one string of 10 MB without an end": b'{"turns": ["' + b"a" * 10_000_000,
        "a list with one string of 10 MB without an end": b'[{"turns": ["' + b"a" * 10_000_000,
        "a million brackets": b"[" * 1_000_000,
        "gzip that is cut off": gzip.compress(GOOD * 100)[:-20],
        "gzip with a wrong sum": gzip.compress(GOOD)[:-8] + bytes(8),
        "gzip with a bit flipped": (lambda z: z[:20] + bytes([z[20] ^ 255]) + z[21:])(
            gzip.compress(line_of(GOOD) * 50)
        ),
        "gzip of gzip": gzip.compress(gzip.compress(line_of(GOOD))),
        "zip": b"PK\x03\x04" + bytes(100),
        "bzip2": b"BZh91AY&SY" + bytes(50),
        "an unknown role": line_of(turn("king", "a")),
        "a role that is a number": line_of(turn(5, "a")),
        "no role": line_of(to_json({"messages": [{"content": "a"}]})),
        "messages of text": line_of(to_json({"messages": ["a", "b"]})),
        "messages in an object": line_of(to_json({"messages": {"role": "user"}})),
        "an image": line_of(turn("user", [{"type": "image_url", "image_url": "x"}])),
        "ids of fractions": line_of(to_json({"p": [1.5], "g": [2]})),
        "ids of text": line_of(to_json({"p": "abc", "g": [2]})),
        "ids below zero": line_of(to_json({"p": [-1], "g": [2]})),
        "ids beyond the vocabulary": line_of(to_json({"p": [5], "g": [10**6]})),
        "ids of 2^40": line_of(to_json({"p": [2**40], "g": [5]})),
        "a call that is no JSON": line_of(
            to_json({"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "{"}]})
        ),
        "escapes in an unknown key": line_of(to_json({ESCAPE: 1})),
        "escapes in an unknown role": line_of(turn(ESCAPE, "a")),
        "a key of a megabyte": line_of(to_json({"k" * 1_000_000: 1})),
        "ten thousand keys": line_of(to_json({f"key{i}": i for i in range(10_000)})),
    }
    fine: dict[str, tuple[bytes, int]] = {
        "a BOM": (b"\xef\xbb\xbf" + line_of(GOOD, GOOD), 2),
        "line ends of Windows": (GOOD + b"\r\n" + GOOD + b"\r\n", 2),
        "no last line end": (GOOD + b"\n" + GOOD, 2),
        "empty lines": (b"\n\n" + GOOD + b"\n\n\n" + GOOD + b"\n\n", 2),
        "white space before a list": (b"\n \t" + pair, 2),
        "a BOM before a list": (b"\xef\xbb\xbf" + pair, 2),
        "gzip": (gzip.compress(line_of(GOOD, GOOD)), 2),
        "several gzip members": (gzip.compress(line_of(GOOD)) * 3, 3),
        "an escape in the content": (line_of(turn("user", ESCAPE)), 1),
        "markup in the content": (line_of(turn("user", "[/red]x [link=x] :smile:")), 1),
        "unusual line ends in the content": (line_of(turn("user", "a\u2028b\u2029c\x0bd\x85e")), 1),
        "emoji and right to left": (line_of(turn("user", "👩‍👩‍👧 שלום \u202eevil\u202c e\u0301")), 1),
        "roles in capitals": (line_of(turn("USER", "a")), 1),
        "content in parts": (line_of(turn("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])), 1),
        "a long line": (line_of(GOOD, to_json({"turns": ["ab " * 100_000]})), 2),
        "calls with text for arguments": (
            line_of(
                to_json(
                    {
                        "messages": [
                            {"role": "user", "content": "a"},
                            {
                                "role": "assistant",
                                "content": None,
                                "tool_calls": [
                                    {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
                                ],
                            },
                            {"role": "tool", "content": "1"},
                            {"role": "assistant", "content": "b"},
                        ]
                    }
                )
            ),
            1,
        ),
    }
    trials = [content(title, data, verb=verb) for title, data in bad.items() for verb in ("show", "clean")]
    trials += [content(title, data, verb="regenerate") for title, data in list(bad.items())[::3]]
    trials += [content(title, data, "run", rows=count) for title, (data, count) in fine.items()]
    trials += [
        content(title, data, "either", verb=v) for title, (data, _) in fine.items() for v in ("clean", "regenerate")
    ]
    trials += [
        content("a gigabyte of blanks in a megabyte", lambda: blanks(1024), name="chats.jsonl.gz"),
        content(
            "a gigabyte of blanks before a list",
            lambda: blanks(1024) + gzip.compress(pair),
            "either",
            name="chats.json.gz",
        ),
        content("gzip without its ending", gzip.compress(line_of(GOOD)), "run", name="chats.jsonl", rows=1),
        content("plain text named gzip", line_of(GOOD), "run", name="chats.jsonl.gz", rows=1),
        content("a file named like a data set", line_of(GOOD), "run", name="ultrachat", rows=1),
    ]
    for schema, row in ROWS.items():
        for key in row:
            for what in ("null", "7", "text", "[]", "{}", "[null]", "an object", "a lone surrogate", "an escape"):
                changed = line_of(GOOD, to_json({**row, key: ODD[what]}))
                trials.append(content(f"{schema}: {key} = {what}", changed, "either"))
    for key in ("tool_calls", "reasoning_content", "name", "tool_call_id", "content", "role"):
        for what in ("null", "7", "text", "[null]", "an object", "a list of texts", "deep lists", "5,000 digits"):
            row = {
                "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", key: ODD[what]}]
            }
            trials.append(content(f"answer: {key} = {what}", line_of(to_json(row)), "either"))
    for what in ("null", "7", "text", "[null]", "an object", "deep objects", "a lone surrogate", "long text"):
        call = {"type": "function", "function": {"name": ODD[what], "arguments": ODD[what]}}
        row = {
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}],
            "tools": [{"name": ODD[what]}],
        }
        trials.append(content(f"call: {what}", line_of(to_json(row)), "either"))
        trials.append(content(f"call: {what}", line_of(to_json(row)), "either", verb="train"))
    return trials


def further(chance: Random) -> Trial:
    schema = chance.choice(sorted(ROWS))
    what = chance.choice(("row", "row", "row", "text", "gzip", "list"))

    def make(room: Room, chance: Random) -> Command:
        row = change_json(chance, ROWS[schema])[1]
        data = b"[" + GOOD + b", " + row + b"]" if what == "list" else line_of(GOOD, row, to_json(ROWS[schema]))
        name = "chats.jsonl"
        if what == "text":
            data = spoil_text(chance, data)[1]
        elif what == "gzip":
            packed = bytearray(gzip.compress(data))
            packed[chance.randrange(len(packed))] ^= 1 << chance.randrange(8)
            data, name = bytes(packed), "chats.jsonl.gz"
        room.write(name, data)
        return VERBS[chance.choice(("show", "show", "show", "clean", "regenerate", "train"))](room, name)

    return Trial(f"{schema}: {what} changed", make)


KIND = Kind("conversations", "files of conversations", tuple(_listed()), further, count=540, quick=(14, 6))
