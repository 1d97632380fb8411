"""Folders of targets: configuration, generation settings, weights, shards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from attack.inputs import Command, Kind, Room, Trial
from attack.kinds.common import Change, a_folder, asking, gone, in_turn, put_file, read, safetensors
from attack.mutate import ODD, change_json, change_tensors, spoil_bytes, spoil_text, to_json

WRONG = ("null", "text", "0", "-1", "3e9", "2^63", "1.5", "[]", "{}", "[null]", "NaN", "true", "5,000 digits")


def spoilt(title: str, change: Change, verb: str = "generate", must: str = "either", head: bool = False) -> Trial:
    def make(room: Room, chance: Random) -> Command:
        target = room.copy(room.world.target, "target")
        change(target)
        return target_command(verb, room, target, head).but(must=must)

    return Trial(title, make)


def target_command(verb: str, room: Room, target: Path, head: bool = False) -> Command:
    if verb == "generate":
        return asking(room, target, room.world.head if head else None, *(["--force-head"] if head else []))
    if verb == "show":
        return Command(["data", "show", str(room.world.answers), "--target", str(target)])
    if verb == "regenerate":
        asked = ["data", "regenerate", str(room.world.asked), "--target", str(target), "--out", "out.jsonl"]
        places = ("out.jsonl", "out.jsonl.settings.json", "out.jsonl.part")
        return Command([*asked, "--max-new-tokens", "4", "--dtype", "float32"], out=places)
    if verb == "export":
        asked = ["export", str(room.world.head), "--to", "vllm", "--target", str(target), "--out", "made"]
        return Command(asked, out=("made",))
    return Command(["doctor", str(target), str(room.world.head)], codes=frozenset({0, 1}))


def put(file: str, key: str, value: Any) -> Change:
    def change(target: Path) -> None:
        whole = read(target / file) if (target / file).is_file() else {}
        (target / file).write_bytes(to_json({**whole, key: value}))

    return change


def _weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Change:
    def apply(target: Path) -> None:
        tensors = load_file(target / "model.safetensors")
        change(tensors)
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})

    return apply


def _sharded(place: str) -> Change:
    """An index whose one shard is at `place`."""

    def change(target: Path) -> None:
        weights = target / "model.safetensors"
        names = sorted(load_file(weights))
        (target.parent / "outside.safetensors").write_bytes(weights.read_bytes())
        weights.unlink()
        index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, place)}
        (target / "model.safetensors.index.json").write_bytes(to_json(index))

    return change


def _own_code(target: Path) -> None:
    (target / "modeling_x.py").write_text("from pathlib import Path\nPath('code-was-run').touch()\n")
    whole = {**read(target / "config.json"), "model_type": "x"}
    whole["auto_map"] = {"AutoConfig": "modeling_x.C", "AutoModelForCausalLM": "modeling_x.M"}
    (target / "config.json").write_bytes(to_json(whole))


def _listed() -> list[Trial]:
    scaling = (
        {"rope_type": "x"},
        {"rope_type": "yarn"},
        {"rope_type": "longrope", "short_factor": [1]},
        {"factor": "x"},
        {"rope_type": "dynamic", "factor": 0},
        {"rope_type": "linear", "factor": -1},
        {"type": None},
        "linear",
        [1],
        3,
    )
    trials = [
        spoilt("a shard outside of the folder", _sharded("../outside.safetensors"), must="refuse"),
        spoilt("a shard by its whole path", _sharded("/etc/passwd"), must="refuse"),
        spoilt("a shard that is a folder", _sharded("."), must="refuse"),
        spoilt("a shard without a name", _sharded(""), must="refuse"),
        spoilt("code of its own", _own_code, must="refuse"),
        spoilt("no weights", gone("model.safetensors"), must="refuse"),
        spoilt(
            "a pickle for weights",
            in_turn(gone("model.safetensors"), lambda t: torch.save({"a": torch.zeros(1)}, t / "pytorch_model.bin")),
            must="refuse",
        ),
        spoilt("NaN in a weight", _weights(lambda w: w["model.norm.weight"].fill_(float("nan"))), must="refuse"),
        spoilt("a weight less", _weights(lambda w: w.pop("model.norm.weight")), must="refuse"),
        spoilt(
            "a weight turned",
            _weights(lambda w: w.update({"model.embed_tokens.weight": torch.zeros(32, 128)})),
            must="refuse",
        ),
        spoilt(
            "eight-bit weights",
            _weights(lambda w: w.update({k: v.to(torch.float8_e4m3fn) for k, v in w.items() if v.ndim == 2})),
        ),
        spoilt("weights of bytes", _weights(lambda w: w.update({k: v.to(torch.int8) for k, v in w.items()}))),
        spoilt("complex weights", _weights(lambda w: w.update({k: v.to(torch.complex64) for k, v in w.items()}))),
        spoilt(
            "a weight that claims 2^40 numbers",
            lambda t: (t / "model.safetensors").write_bytes(
                safetensors({"model.norm.weight": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}})
            ),
            must="refuse",
        ),
        spoilt(
            "an unreadable folder for a config",
            a_folder("config.json"),
            must="refuse",
        ),
        spoilt("a config without an end", put_file("config.json", b'{"a":' * 10_000), must="refuse"),
        spoilt("an end beyond the vocabulary", put("generation_config.json", "eos_token_id", 10**6)),
        spoilt("an end below zero", put("generation_config.json", "eos_token_id", -5)),
        spoilt("a vocabulary one larger", put("config.json", "vocab_size", 129), must="refuse"),
        spoilt("more layers than weights", put("config.json", "num_hidden_layers", 9), must="refuse"),
        spoilt("a million layers", put("config.json", "num_hidden_layers", 10**6), must="refuse"),
        spoilt("as wide as 2^40", put("config.json", "hidden_size", 2**40), must="refuse"),
        spoilt("an encoder", put("config.json", "model_type", "bert"), must="refuse"),
        spoilt("an encoder and decoder", put("config.json", "is_encoder_decoder", True), must="refuse"),
        spoilt(
            "a class of another task",
            put("config.json", "architectures", ["LlamaForSequenceClassification"]),
            must="refuse",
        ),
        spoilt("quantised as nothing known", put("config.json", "quantization_config", {"quant_method": "x"})),
        spoilt("quantised to FP8", put("config.json", "quantization_config", {"quant_method": "fp8"})),
        spoilt("quantised as GPTQ", put("config.json", "quantization_config", {"quant_method": "gptq", "bits": 4})),
        spoilt("quantised as text", put("config.json", "quantization_config", "4 bits")),
        *(spoilt(f"rope_scaling = {s!r}", put("config.json", "rope_scaling", s)) for s in scaling),
        *(spoilt(f"rope_parameters = {s!r}", put("config.json", "rope_parameters", s)) for s in scaling),
    ]
    keys = (
        "architectures",
        "attention_bias",
        "attention_dropout",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "head_dim",
        "hidden_act",
        "hidden_size",
        "initializer_range",
        "intermediate_size",
        "max_position_embeddings",
        "mlp_bias",
        "model_type",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "pad_token_id",
        "rms_norm_eps",
        "rope_parameters",
        "tie_word_embeddings",
        "transformers_version",
        "use_cache",
        "vocab_size",
        "layer_types",
        "sliding_window",
        "text_config",
        "auto_map",
        "id2label",
        "quantization_config",
        "torch_dtype",
        "attn_implementation",
        "is_encoder_decoder",
        "base_model_tp_plan",
    )
    for number, key in enumerate(keys):
        for at, what in enumerate(WRONG):
            if (number + at) % 2 == 0 or key in ("vocab_size", "eos_token_id", "hidden_size", "architectures"):
                trials.append(spoilt(f"config: {key} = {what}", put("config.json", key, ODD[what])))
    for key in (
        "eos_token_id",
        "bos_token_id",
        "temperature",
        "do_sample",
        "max_new_tokens",
        "repetition_penalty",
        "suppress_tokens",
        "bad_words_ids",
        "no_repeat_ngram_size",
        "min_length",
        "top_k",
        "stop_strings",
    ):
        for what in ("text", "-1", "2^63", "[null]", "an object", "NaN", "10^40"):
            trials.append(spoilt(f"generation: {key} = {what}", put("generation_config.json", key, ODD[what])))
    return trials


def further(chance: Random) -> Trial:
    what = chance.choice(("config.json", "config.json", "generation_config.json", "text", "tensors", "bytes"))

    def make(room: Room, chance: Random) -> Command:
        target = room.copy(room.world.target, "target")
        weights = target / "model.safetensors"
        if what.endswith(".json"):
            (target / what).write_bytes(change_json(chance, read(target / what))[1])
        elif what == "text":
            file = chance.choice(sorted(target.glob("*.json*")))
            file.write_bytes(spoil_text(chance, file.read_bytes())[1])
        elif what == "tensors":
            save_file(change_tensors(chance, load_file(weights))[1], weights, metadata={"format": "pt"})
        else:
            weights.write_bytes(spoil_bytes(chance, weights.read_bytes(), head=4000)[1])
        verb = chance.choice(("generate", "generate", "generate", "doctor", "show", "regenerate", "export"))
        return target_command(verb, room, target, head=chance.random() < 0.3).but(check=None)

    return Trial(f"{what} changed", make)


KIND = Kind("targets", "folders of target models", tuple(_listed()), further, count=440, quick=(10, 5))
