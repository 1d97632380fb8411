"""GGUF files: lengths that lie, counts, types, offsets, bits flipped, files cut off."""

from __future__ import annotations

import struct
from collections.abc import Callable
from random import Random

from attack.inputs import Command, Kind, Room, Trial
from attack.kinds.common import asking
from attack.mutate import ESCAPE, spoil_bytes

U8, I32, F32, BOOL, STRING, ARRAY, U64 = 0, 5, 6, 7, 8, 9, 10
Change = Callable[[bytes], bytes]


def text(value: str | bytes, length: int | None = None) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data) if length is None else length) + data


def head(tensors: int, values: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values)


def entry(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, dims: list[int], kind: int, offset: int) -> bytes:
    return (
        text(name)
        + struct.pack("<I", len(dims))
        + struct.pack(f"<{len(dims)}Q", *dims)
        + struct.pack("<IQ", kind, offset)
    )


ARCH = entry("general.architecture", STRING, text("llama"))
SMALL = {
    "nothing": b"",
    "four letters": b"GGUF",
    "another format": b"PK\x03\x04" + bytes(60),
    "version 0": head(0, 0, 0),
    "version 99": head(0, 0, 99),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "2^40 values": head(0, 2**40),
    "2^40 tensors": head(2**40, 0),
    "2^64 - 1 of both": head(2**64 - 1, 2**64 - 1),
    "a name of 2^40": head(0, 1) + text("x", 2**40) + bytes(30),
    "a name of 2^63": head(0, 1) + text("x", 2**63) + bytes(30),
    "a name of 2^64 - 1": head(0, 1) + text("x", 2**64 - 1) + bytes(30),
    "a text of 2^40": head(0, 1) + entry("general.name", STRING, text("x", 2**40)),
    "a list of 2^40 bytes": head(0, 1) + entry("x", ARRAY, struct.pack("<IQ", U8, 2**40)),
    "a list of 2^40 texts": head(0, 1) + entry("x", ARRAY, struct.pack("<IQ", STRING, 2**40)),
    "a list of 10^7 empty lists": head(0, 1) + entry("x", ARRAY, struct.pack("<IQ", ARRAY, 10**7)),
    "lists in lists": head(0, 1) + entry("x", ARRAY, struct.pack("<IQ", ARRAY, 1) * 5000),
    "a value of unknown type": head(0, 1) + entry("x", 77, bytes(20)),
    "a flag of 7": head(0, 1) + entry("x", BOOL, b"\x07"),
    "a text that is no UTF-8": head(0, 1) + entry("general.architecture", STRING, text(b"\xff\xfe\x80")),
    "a name that is no UTF-8": head(0, 1) + text(b"\xff\xfe") + struct.pack("<IB", U8, 1),
    "an architecture of numbers": head(0, 1) + entry("general.architecture", I32, struct.pack("<i", 3)),
    "an unknown architecture": head(0, 1) + entry("general.architecture", STRING, text("nothing")),
    "an escape as architecture": head(0, 1) + entry("general.architecture", STRING, text(ESCAPE)),
    "only an architecture": head(0, 1) + ARCH,
    "the same key twice": head(0, 2) + ARCH + ARCH,
    "an alignment of zero": head(0, 2) + ARCH + entry("general.alignment", 4, struct.pack("<I", 0)),
    "an alignment of 2^31": head(1, 2)
    + ARCH
    + entry("general.alignment", 4, struct.pack("<I", 2**31))
    + tensor("token_embd.weight", [4], 0, 0),
    "an alignment of text": head(0, 2) + ARCH + entry("general.alignment", STRING, text("x")),
    "a tensor of 2^40 × 2^40": head(1, 1) + ARCH + tensor("token_embd.weight", [2**40, 2**40], 0, 0) + bytes(64),
    "a tensor of no size": head(1, 1) + ARCH + tensor("token_embd.weight", [0], 0, 0) + bytes(64),
    "a tensor of 99 dimensions": head(1, 1) + ARCH + tensor("token_embd.weight", [1] * 99, 0, 0) + bytes(64),
    "a tensor of 2^32 - 1 dimensions": head(1, 1) + ARCH + text("x") + b"\xff" * 4 + bytes(64),
    "a tensor of unknown type": head(1, 1) + ARCH + tensor("token_embd.weight", [4], 99, 0) + bytes(64),
    "a tensor beyond the file": head(1, 1) + ARCH + tensor("token_embd.weight", [4], 0, 2**40) + bytes(64),
    "a tensor before the file": head(1, 1) + ARCH + tensor("token_embd.weight", [4], 0, 2**64 - 64) + bytes(64),
    "a quantised tensor of odd width": head(1, 1) + ARCH + tensor("token_embd.weight", [3], 8, 0) + bytes(64),
    "the same tensor twice": head(2, 1) + ARCH + tensor("a", [4], 0, 0) * 2 + bytes(64),
}


def _replaced(old: bytes, new: bytes) -> Change:
    def change(data: bytes) -> bytes:
        if old not in data:
            raise ValueError(f"the honest file has no {old!r}")
        return data.replace(old, new, 1)

    return change


def _value(name: str, kind: str, value: float) -> Change:
    """The number of a key, in place."""

    def change(data: bytes) -> bytes:
        at = data.index(text(name)) + 8 + len(name) + 4
        packed = struct.pack(kind, value)
        return data[:at] + packed + data[at + len(packed) :]

    return change


def _offset(name: str, offset: int) -> Change:
    def change(data: bytes) -> bytes:
        at = data.index(text(name)) + 8 + len(name)
        dims = struct.unpack("<I", data[at : at + 4])[0]
        place = at + 4 + 8 * dims + 4
        return data[:place] + struct.pack("<Q", offset) + data[place + 8 :]

    return change


WHOLE: dict[str, Change] = {
    "3e9 layers": _value("llama.block_count", "<I", 3 * 10**9),
    "no layers": _value("llama.block_count", "<I", 0),
    "no width": _value("llama.embedding_length", "<I", 0),
    "3e9 wide": _value("llama.embedding_length", "<I", 3 * 10**9),
    "3e9 inner width": _value("llama.feed_forward_length", "<I", 3 * 10**9),
    "no heads": _value("llama.attention.head_count", "<I", 0),
    "3e9 heads": _value("llama.attention.head_count", "<I", 3 * 10**9),
    "five key heads": _value("llama.attention.head_count_kv", "<I", 5),
    "no key heads": _value("llama.attention.head_count_kv", "<I", 0),
    "an epsilon of NaN": _value("llama.attention.layer_norm_rms_epsilon", "<f", float("nan")),
    "a RoPE base of NaN": _value("llama.rope.freq_base", "<f", float("nan")),
    "a RoPE base of zero": _value("llama.rope.freq_base", "<f", 0.0),
    "a vocabulary of 4e9": _value("llama.vocab_size", "<I", 4 * 10**9),
    "no vocabulary": _value("llama.vocab_size", "<I", 0),
    "no context": _value("llama.context_length", "<I", 0),
    "an end of 4e9": _value("tokenizer.ggml.eos_token_id", "<I", 4 * 10**9),
    "a padding beyond the vocabulary": _value("tokenizer.ggml.padding_token_id", "<I", 1000),
    "an unknown splitting": _replaced(text("smollm"), text("smollx")),
    "an unknown tokenizer": _replaced(text("gpt2"), text("gpt9")),
    "another architecture": _replaced(
        text("general.architecture") + struct.pack("<I", STRING) + text("llama"),
        text("general.architecture") + struct.pack("<I", STRING) + text("bloom"),
    ),
    "an escape for a token": _replaced(text("Ġthe"), text(ESCAPE[:5])),
    "a broken template": _replaced(b"{% endfor %}", b"{% endxxx %}"),
    "a template that divides by zero": _replaced(b"{% endfor %}", b"{{ 1//0 }}  "),
    "weights of the same place": _offset("blk.0.attn_q.weight", 0),
    "weights at an odd place": _offset("blk.0.attn_q.weight", 7),
    "weights beyond the end": _offset("blk.7.ffn_up.weight", 2**62),
    "a weight less": _replaced(text("output_norm.weight"), text("output_norm.weighx")),
    "the last half lost": lambda data: data[: len(data) // 2],
    "the last byte lost": lambda data: data[:-1],
    "the weights lost": lambda data: data[: data.index(text("token_embd.weight"))],
    "zeros for weights": lambda data: data[:12_000] + bytes(len(data) - 12_000),
    "weights of NaN": lambda data: data[:-40_000] + b"\xff" * 40_000,
}


def file_of(title: str, make_data: Callable[[Room, Random], bytes], name: str = "m.gguf") -> Trial:
    def make(room: Room, chance: Random) -> Command:
        return asking(room, room.write(name, make_data(room, chance)), None)

    return Trial(title, make)


def _always(data: bytes) -> Callable[[Room, Random], bytes]:
    return lambda room, chance: data


def _honest_but(change: Change) -> Callable[[Room, Random], bytes]:
    return lambda room, chance: change(room.world.gguf.read_bytes())


def _listed() -> list[Trial]:
    trials = [file_of(title, _always(data)) for title, data in SMALL.items()]
    trials += [file_of(title, _honest_but(change)) for title, change in WHOLE.items()]
    trials.append(file_of("an honest file under another name", _honest_but(bytes), "a b.gguf"))
    trials.append(file_of("an honest file under a name with escapes", _honest_but(bytes), "\x1b[2Ja.gguf"))
    return trials


def further(chance: Random) -> Trial:
    head = chance.choice((300, 3000, 13_000, None))
    return file_of("bytes changed", lambda room, c: spoil_bytes(c, room.world.gguf.read_bytes(), head)[1])


KIND = Kind("gguf", "GGUF files", tuple(_listed()), further, count=240, quick=(8, 3))
