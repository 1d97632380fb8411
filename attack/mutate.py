"""Seeded changes to honest things: JSON, text, bytes, tensors. Each gives a few words on what it did."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from random import Random
from typing import Any

import torch
from torch import Tensor

ESCAPE = "\x1b]0;PWNED\x07\x1b[2J"
SURROGATE = os.fsdecode(b"a\xffb")  # how Python hands on an argument that is no UTF-8
# What a value is replaced by; a string that begins with RAW is put into the JSON text as it stands.
RAW = "\ue000"
DEEP = 10_000
ODD: dict[str, Any] = {
    "null": None,
    "true": True,
    "false": False,
    "0": 0,
    "-1": -1,
    "1": 1,
    "7": 7,
    "3e9": 3_000_000_000,
    "2^31": 2**31,
    "2^63": 2**63,
    "10^40": 10**40,
    "1.5": 1.5,
    "1e-320": 1e-320,
    "NaN": float("nan"),
    "Infinity": float("inf"),
    "empty text": "",
    "text": "x",
    "a number as text": "8",
    "long text": "a" * 20_000,
    "an escape": ESCAPE,
    "markup": "[/red]x[link=x]",
    "line ends": "a\nb\r\nc\u2028d",
    "NUL": "\x00",
    "[]": [],
    "{}": {},
    "[null]": [None],
    "a list of texts": ["x", "y"],
    "an object": {"a": {"b": [1]}},
    "5,000 digits": RAW + "9" * 5000,
    "1e99999": RAW + "1e99999",
    "deep lists": RAW + "[" * DEEP + "]" * DEEP,
    "deep objects": RAW + '{"a":' * DEEP + "1" + "}" * DEEP,
    "a lone surrogate": RAW + '"\\ud800"',
    "a key twice": RAW + '{"a": 1, "a": 2}',
}


def to_json(value: Any) -> bytes:
    """As JSON, with what begins with `RAW` unquoted."""
    held: list[str] = []

    def hold(item: Any) -> Any:
        if isinstance(item, str) and item.startswith(RAW):
            held.append(item[1:])
            return f"{RAW}{len(held) - 1}{RAW}"
        if isinstance(item, dict):
            return {key: hold(inner) for key, inner in item.items()}
        return [hold(inner) for inner in item] if isinstance(item, list) else item

    text = json.dumps(hold(value), ensure_ascii=False)
    for number, raw in enumerate(held):
        text = text.replace(f'"{RAW}{number}{RAW}"', raw)
    return text.encode("utf-8", "surrogatepass")


def change_json(chance: Random, value: Any) -> tuple[str, bytes]:
    """One to three changes at random places of a JSON value."""
    changed = copy.deepcopy(value)
    said = [_change_once(chance, changed) for _ in range(chance.choice((1, 1, 1, 2, 3)))]
    return ", ".join(said), to_json(changed)


def _change_once(chance: Random, value: Any) -> str:
    places = [place for place in _places(value) if place[0]] or [((), None)]
    path, _ = chance.choice(places)
    if not path:
        return "nothing to change"
    holder, key = value, path[-1]
    for part in path[:-1]:
        holder = holder[part]
    name = "/".join(map(str, path))
    deed = chance.choice(("replace", "replace", "replace", "replace", "remove", "rename", "wrap", "number", "twice"))
    if deed == "remove":
        del holder[key]
        return f"without {name}"
    if deed == "rename" and isinstance(holder, dict):
        holder[f"{key}_"] = holder.pop(key)
        return f"{name} renamed"
    if deed == "wrap":
        holder[key] = [holder[key]]
        return f"{name} in a list"
    if deed == "number" and isinstance(holder[key], int | float):
        factor = chance.choice((-1, 0.5, 2, 3, 1000, 10**9))
        holder[key] = type(holder[key])(holder[key] * factor)
        return f"{name} × {factor}"
    if deed == "twice" and isinstance(holder[key], list | str):
        holder[key] = holder[key] * 2
        return f"{name} twice over"
    what = chance.choice(sorted(ODD))
    holder[key] = ODD[what]
    return f"{name} = {what}"


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Any]]:
    found = [(path, value)]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items)[:200]:
        found += _places(inner, (*path, key))
    return found


def spoil_text(chance: Random, data: bytes) -> tuple[str, bytes]:
    """Text that is no longer what it was: another encoding, cut, bytes that are no UTF-8, garbage."""
    at = chance.randrange(len(data) + 1)
    ways = {
        "cut off": data[:at],
        "empty": b"",
        "blank": b" \n" * 50,
        "bytes that are no UTF-8": data[:at] + b"\xff\xfe\x80" + data[at:],
        "a NUL": data[:at] + b"\0" + data[at:],
        "UTF-16": data.decode("utf-8", "replace").encode("utf-16"),
        "a BOM": b"\xef\xbb\xbf" + data,
        "two BOMs": b"\xef\xbb\xbf\xef\xbb\xbf" + data,
        "twice": data + data,
        "garbage": bytes(chance.randrange(256) for _ in range(300)),
        "a surrogate in UTF-8": data[:at] + b"\xed\xa0\x80" + data[at:],
        "only an escape": ESCAPE.encode(),
        "one long line": b"x" * 300_000,
    }
    name = chance.choice(sorted(ways))
    return name, ways[name]


def spoil_bytes(chance: Random, data: bytes, head: int | None = None) -> tuple[str, bytes]:
    """Binary data with bits flipped, numbers enlarged, pieces lost or doubled; near the front, within `head`."""
    whole = bytearray(data)
    limit = min(len(data), head or len(data))
    at = chance.randrange(max(1, limit))
    way = chance.choice(("flip", "flip", "flips", "huge", "huge", "ones", "zero", "cut", "insert", "twice", "swap"))
    if way == "flip":
        whole[at] ^= 1 << chance.randrange(8)
    elif way == "flips":
        for _ in range(20):
            whole[chance.randrange(limit)] ^= 1 << chance.randrange(8)
    elif way == "huge":
        size = chance.choice((4, 8))
        value = chance.choice((2**31 - 1, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1)) % 2 ** (8 * size)
        whole[at : at + size] = value.to_bytes(size, "little")
    elif way == "ones":
        whole[at : at + 8] = b"\xff" * 8
    elif way == "zero":
        whole[at : at + 64] = bytes(len(whole[at : at + 64]))
    elif way == "cut":
        del whole[at:]
    elif way == "insert":
        whole[at:at] = bytes(chance.randrange(256) for _ in range(chance.choice((1, 7, 100))))
    elif way == "twice":
        whole[at:at] = whole[at : at + 200]
    else:
        other = chance.randrange(max(1, limit))
        whole[at], whole[other] = whole[other], whole[at]
    return f"{way} at byte {at}", bytes(whole)


TENSOR_CHANGES = (
    "drop",
    "rename",
    "turn",
    "cut",
    "flat",
    "empty",
    "scalar",
    "type",
    "nan",
    "inf",
    "huge",
    "grow",
    "extra",
)


def change_tensors(chance: Random, tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Tensor]]:
    """One tensor lost, renamed, of another shape, type or content."""
    changed = dict(tensors)
    name = chance.choice(sorted(changed))
    tensor, way = changed[name].clone(), chance.choice(TENSOR_CHANGES)
    if way == "drop":
        del changed[name]
    elif way == "rename":
        new = chance.choice((f"{name}.x", f"module.{name}", ESCAPE, "[/red]x", "", name.upper(), "../" * 3 + name))
        changed[new] = changed.pop(name)
    elif way == "extra":
        changed[chance.choice(("extra.weight", ESCAPE, "[bold]b", "x" * 5000))] = torch.zeros(3)
    elif way == "type":
        kinds = (
            torch.int8,
            torch.float64,
            torch.float16,
            torch.bool,
            torch.complex64,
            torch.float8_e4m3fn,
            torch.int64,
        )
        kind = chance.choice(kinds)
        changed[name] = tensor.to(kind)
        way = f"as {str(kind).removeprefix('torch.')}"
    else:
        changed[name] = _reshaped(chance, way, tensor)
    return f"{name}: {way}", changed


def _reshaped(chance: Random, way: str, tensor: Tensor) -> Tensor:
    if way == "turn":
        return tensor.t().contiguous() if tensor.ndim == 2 else tensor.flip(0).contiguous()
    if way == "cut":
        return tensor[:-1].contiguous()
    if way == "flat":
        return tensor.flatten()
    if way == "empty":
        return tensor.new_zeros(0)
    if way == "scalar":
        return tensor.new_zeros(())
    if way == "grow":
        return torch.cat([tensor, tensor])
    values = tensor if tensor.is_floating_point() else tensor.long()
    spoilt = {"nan": float("nan"), "inf": float("inf"), "huge": 1e38} if values.is_floating_point() else {}
    values.view(-1)[chance.randrange(values.numel())] = spoilt.get(way, chance.choice((-1, 2**40, 10**6)))
    return values
