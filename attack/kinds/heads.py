"""Heads of all formats: their JSON, their tensors, the files around those."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from attack.inputs import Command, Kind, Room, Trial
from attack.kinds.common import (
    Change,
    a_circle,
    a_folder,
    a_pipe,
    about_head,
    gone,
    head_command,
    in_turn,
    put_file,
    read,
    safetensors,
)
from attack.mutate import ODD, change_json, change_tensors, spoil_bytes, spoil_text, to_json
from attack.world import FORMATS

ALL = ("own", *FORMATS, "eagle1", "pickled", "sharded")


def laid(room: Room, format: str) -> Path:
    source = room.world.head if format == "own" else room.world.foreign(format)
    return room.copy(source, "head")


def weights(folder: Path) -> Path:
    return next(folder / name for name in ("model.safetensors", "pytorch_model.bin") if (folder / name).is_file())


def put_json(name: str, *path: Any, value: Any) -> Change:
    """A change that sets one place of a JSON file."""

    def change(folder: Path) -> None:
        whole = read(folder / name)
        place: Any = whole
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        (folder / name).write_bytes(to_json(whole))

    return change


def put_tensor(name: str, tensor: Any) -> Change:
    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        save_file({**load_file(file), name: tensor}, file)

    return change


def put_pickle(value: Any) -> Change:
    return lambda folder: torch.save(value, folder / "pytorch_model.bin")


def by_hand(title: str, format: str, change: Change, verb: str = "inspect", must: str = "refuse") -> Trial:
    def make(room: Room, chance: Random) -> Command:
        head = laid(room, format)
        change(head)
        return head_command(verb, room, str(head), str(room.world.target)).but(must=must)

    return Trial(f"{format}: {title}", make)


class _Code:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path("code-was-run").touch, ()


def _expanded(folder: Path) -> None:
    """A tensor of one stored number that claims 2^40."""
    put_pickle({"fc.weight": torch.zeros(1).expand(1 << 20, 1 << 20)})(folder)


def _bare_pickle(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Code()))


def _zip_bomb(folder: Path) -> None:
    """A state dict whose storage is stored packed, a thousand times smaller than it is."""
    whole = io.BytesIO()
    torch.save({"fc.weight": torch.zeros(1 << 24)}, whole)
    with (
        zipfile.ZipFile(whole) as stored,
        zipfile.ZipFile(folder / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in stored.namelist():
            packed.writestr(name, stored.read(name))


def _link_outside(folder: Path) -> None:
    index = read(folder / "model.safetensors.index.json")
    name = next(iter(index["weight_map"]))
    index["weight_map"][name] = "../../../../etc/passwd"
    (folder / "model.safetensors.index.json").write_bytes(to_json(index))


def _prefixed(prefix: str) -> Change:
    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        save_file({f"{prefix}{name}": tensor for name, tensor in load_file(file).items()}, file)

    return change


def _header(dtype: str, shape: list[int], offsets: list[int], data: bytes = b"") -> Change:
    return put_file(
        "model.safetensors", safetensors({"fc.weight": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}, data)
    )


def _nested(folder: Path) -> None:
    put_pickle({"state_dict": torch.load(folder / "pytorch_model.bin", weights_only=True)})(folder)


def _listed() -> list[Trial]:
    huge = 3_000_000_000
    trials = [
        by_hand("vocabulary of 3e9", "sglang", put_json("config.json", "vocab_size", value=huge)),
        by_hand(
            "both vocabularies of 3e9",
            "sglang",
            in_turn(*(put_json("config.json", key, value=huge) for key in ("vocab_size", "draft_vocab_size"))),
        ),
        by_hand("vocabulary of 3e9", "own", put_json("tercel.json", "head", "vocab_size", value=huge)),
        by_hand("draft vocabulary of 3e9", "own", put_json("tercel.json", "head", "draft_vocab_size", value=huge)),
        by_hand(
            "3e9 positions",
            "own",
            put_json("tercel.json", "head", "max_position_embeddings", value=huge),
            "generate",
            "either",
        ),
        by_hand("a tensor expanded to 2^40 numbers", "pickled", _expanded),
        by_hand("a pickle that runs code", "pickled", _bare_pickle),
        by_hand("code within torch's own format", "pickled", put_pickle({"fc.weight": _Code()})),
        by_hand("a packed pickle", "pickled", _zip_bomb),
        by_hand("a list in a pickle", "pickled", put_pickle([torch.zeros(3)])),
        by_hand("numbers as names in a pickle", "pickled", put_pickle({1: torch.zeros(3)})),
        by_hand("a sparse tensor", "pickled", put_pickle({"fc.weight": torch.eye(4).to_sparse()})),
        by_hand("tensors under state_dict", "pickled", _nested, "inspect", "run"),
        by_hand("a shard outside of the folder", "sharded", _link_outside),
        by_hand(
            "a weight map of numbers", "sharded", put_json("model.safetensors.index.json", "weight_map", value={"a": 1})
        ),
        by_hand("no weight map", "sharded", put_json("model.safetensors.index.json", "weight_map", value=None)),
        by_hand("names of a compiled module", "sglang", _prefixed("_orig_mod."), "inspect", "run"),
        by_hand("names of a sharded module", "sglang", _prefixed("_fsdp_wrapped_module."), "generate", "run"),
        by_hand("names of a parallel module", "sglang", _prefixed("module."), "inspect", "run"),
        by_hand("a header of 2^63 bytes", "own", put_file("model.safetensors", safetensors({}, length=2**63))),
        by_hand("a header of 100 MB", "own", put_file("model.safetensors", safetensors({}, length=10**8))),
        by_hand("a header that is no JSON", "own", put_file("model.safetensors", safetensors(b"{nonsense"))),
        by_hand("a header that is a list", "own", put_file("model.safetensors", safetensors([]))),
        by_hand("an empty header", "own", put_file("model.safetensors", safetensors({}))),
        by_hand("a shape of 2^40", "own", _header("F32", [2**40], [0, 4], b"\0" * 4)),
        by_hand("offsets that go back", "own", _header("F32", [1], [4, 0], b"\0" * 4)),
        by_hand("offsets beyond the file", "own", _header("F32", [2**30], [0, 2**32])),
        by_hand("an unknown type", "own", _header("F3", [1], [0, 4], b"\0" * 4)),
        by_hand("four-bit numbers", "own", _header("F4", [2], [0, 1], b"\0")),
        by_hand("sub-byte sizes", "own", _header("F6_E2M3", [4], [0, 3], b"\0" * 3)),
        by_hand("numbers of 8 bits", "sglang", put_tensor("fc.weight", torch.zeros(32, 96).to(torch.float8_e4m3fn))),
        by_hand("d2t beyond the vocabulary", "own", put_tensor("d2t", torch.full((64,), 10**6))),
        by_hand("d2t below zero", "own", put_tensor("d2t", torch.full((64,), -5))),
        by_hand("d2t of 64 bits' end", "own", put_tensor("d2t", torch.full((64,), 2**63 - 1))),
        by_hand("d2t of fractions", "own", put_tensor("d2t", torch.full((64,), 0.5))),
        by_hand("d2t of NaN", "sglang", put_tensor("d2t", torch.full((64,), float("nan")))),
        by_hand("t2d of text length", "own", put_tensor("t2d", torch.ones(3, dtype=torch.bool))),
        by_hand(
            "an empty folder",
            "own",
            in_turn(*map(gone, ("config.json", "model.safetensors", "tercel.json", "README.md"))),
        ),
        by_hand("no config", "sglang", gone("config.json")),
        by_hand("a folder as config", "sglang", a_folder("config.json")),
        by_hand(
            "a folder as weights",
            "own",
            a_folder("model.safetensors"),
        ),
        by_hand("a pipe as weights", "own", a_pipe("model.safetensors")),
        by_hand(
            "a link that goes round",
            "own",
            a_circle("model.safetensors"),
        ),
        by_hand(
            "an inner width of EAGLE-1 of 2^40", "eagle1", put_json("config.json", "intermediate_size", value=2**40)
        ),
        by_hand("no output layer", "sglang", _without("lm_head.weight"), "inspect", "either"),
        by_hand(
            "RoPE of an unknown type",
            "own",
            put_json("tercel.json", "head", "rope_parameters", value={"rope_type": "x", "rope_theta": 1e4}),
        ),
        by_hand(
            "a RoPE base of zero",
            "own",
            put_json("tercel.json", "head", "rope_parameters", value={"rope_type": "default", "rope_theta": 0.0}),
        ),
        by_hand(
            "yarn without its numbers",
            "own",
            put_json("tercel.json", "head", "rope_parameters", value={"rope_type": "yarn", "rope_theta": 1e4}),
        ),
        by_hand(
            "longrope with factors of text",
            "own",
            put_json(
                "tercel.json",
                "head",
                "rope_parameters",
                value={"rope_type": "longrope", "rope_theta": 1e4, "short_factor": "x", "long_factor": ["y"]},
            ),
        ),
    ]
    for key in (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "draft_vocab_size",
        "target_hidden_size",
    ):
        for what in ("0", "-1", "2^63", "10^40", "text", "null", "NaN", "[]", "5,000 digits"):
            trials.append(by_hand(f"{key} = {what}", "own", put_json("tercel.json", "head", key, value=ODD[what])))
        for what in ("3e9", "2^63", "-1", "text", "1.5"):
            for format in ("sglang", "speculators", "eagle1"):
                path = ("transformer_layer_config", key) if format == "speculators" else (key,)
                trials.append(
                    by_hand(
                        f"{key} = {what}", format, put_json("config.json", *path, value=ODD[what]), "inspect", "either"
                    )
                )
    for key in ("training", "measured", "target", "format", "head", "layer_ids_mean"):
        for what in ("null", "7", "text", "[]", "{}", "a list of texts", "an escape", "deep lists", "5,000 digits"):
            for verb in ("inspect", "generate"):
                trials.append(
                    by_hand(f"{key} = {what}", "own", put_json("tercel.json", key, value=ODD[what]), verb, "either")
                )
    for inner in (
        "recipe",
        "data",
        "conversations",
        "tokens",
        "supervised_tokens",
        "draft_vocabulary_coverage",
        "template",
        "target_name",
    ):
        for what in ("null", "text", "7", "[null]", "an object", "NaN", "-1", "10^40"):
            trials.append(
                by_hand(
                    f"training/{inner} = {what}",
                    "own",
                    put_json("tercel.json", "training", inner, value=ODD[what]),
                    "inspect",
                    "either",
                )
            )
    for what in ("null", "text", "[]", "{}", "7"):
        trials.append(
            by_hand(
                f"held_out = {what}",
                "own",
                put_json("tercel.json", "measured", "held_out", value=ODD[what]),
                "inspect",
                "either",
            )
        )
    return trials


def _without(name: str) -> Change:
    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        save_file({key: tensor for key, tensor in load_file(file).items() if key != name}, file)

    return change


def further(chance: Random) -> Trial:
    format = chance.choice(ALL)
    what = chance.choice(("json", "json", "json", "text", "tensors", "tensors", "bytes", "header"))

    def make(room: Room, chance: Random) -> Command:
        head = laid(room, format)
        file = chance.choice(sorted(head.glob("*.json")))
        if what == "json":
            file.write_bytes(change_json(chance, read(file))[1])
        elif what == "text":
            file.write_bytes(spoil_text(chance, file.read_bytes())[1])
        else:
            _spoil_weights(chance, head, what)
        return about_head(chance, room, head)

    return Trial(f"{format}: {what} changed", make)


def _spoil_weights(chance: Random, head: Path, what: str) -> None:
    file = chance.choice(sorted([*head.glob("*.safetensors"), *head.glob("*.bin")]))
    if what == "bytes" or file.suffix == ".bin":
        file.write_bytes(spoil_bytes(chance, file.read_bytes())[1])
    elif what == "tensors":
        save_file(change_tensors(chance, load_file(file))[1], file)
    else:
        data = file.read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + size])
        file.write_bytes(safetensors(change_json(chance, header)[1], data[8 + size :]))


KIND = Kind("heads", "draft heads of all formats", tuple(_listed()), further, count=500, quick=(10, 6))
