"""YAML files of settings."""

from __future__ import annotations

from random import Random
from typing import Any

import yaml

from attack.inputs import Command, Kind, Must, Room, Trial
from attack.mutate import ESCAPE, spoil_text

RECIPE: dict[str, Any] = {
    "epochs": 1,
    "max-steps": 2,
    "batch-tokens": 256,
    "accumulate": 1,
    "lr": 0.005,
    "final-lr": 0.1,
    "warmup": 0.1,
    "weight-decay": 0.0,
    "clip": 0.5,
    "max-length": 64,
    "ttt-steps": 2,
    "decay": 0.8,
    "loss": "soft",
    "oov": "drop",
    "average": "sequence",
    "draft-vocab": 40,
    "feature-layers": [1, 3, 5],
    "freeze-lm-head": False,
    "fc-norm": False,
    "norm-output": False,
    "start-from": "",
    "seed": 0,
    "eval-share": 0.2,
    "eval-every": 2,
    "patience": 3,
    "save-every": 2,
    "dtype": "float32",
}
VALUES: dict[str, Any] = {
    "null": None,
    "true": True,
    "0": 0,
    "-1": -1,
    "1.5": 1.5,
    "10^12": 10**12,
    "2^64": 2**64,
    "10^40": 10**40,
    "1e-320": 1e-320,
    "nan": float("nan"),
    "inf": float("inf"),
    "text": "x",
    "empty": "",
    "a list": [1, 2],
    "a list of lists": [[1], [2]],
    "an object": {"a": 1},
    "an escape": ESCAPE,
    "a tilde": "~/x",
    "long": "a" * 5000,
    "a list of texts": ["x"] * 3,
}
TEXTS: dict[str, str] = {
    "nothing": "",
    "only a comment": "# nothing",
    "a list": "[1, 2]",
    "a number": "5",
    "a text": "epochs",
    "null": "~",
    "a tab": "epochs:\t1\n\tlr: 2",
    "a colon too many": "a: b: c",
    "a tag of Python": "epochs: !!python/object/apply:os.system ['touch code-was-run']",
    "a tag of nothing": "epochs: !!x 1",
    "a wrong timestamp": "seed: 2024-99-99",
    "a date": "seed: 2024-01-01",
    "a binary": "seed: !!binary AAAA",
    "sexagesimal": "epochs: 1:30:00",
    "octal": "epochs: 0o17",
    "underscores": "epochs: 1_000_000_000_000",
    "a key twice": "epochs: 1\nepochs: 2",
    "a key in both ways": "max-steps: 1\nmax_steps: 2",
    "a list as key": "? [a, b]\n: 1",
    "an object as key": "? {a: b}\n: 1",
    "null as key": "~: 1",
    "a number as key": "5: 1",
    "true as key": "true: 1",
    "two documents": "epochs: 1\n---\nepochs: 2",
    "an anchor of itself": "a: &a [*a]",
    "an unknown anchor": "a: *b",
    "a merge of text": "<<: x",
    "a merge of itself": "&a\n<<: *a",
    "a config in a config": "config: x.yaml",
    "help": "help: true",
    "a bomb": "a: &a [x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)),
    "a bomb as a value": "z: &a [1,1,1,1,1,1,1,1,1]\n"
    + "".join(f"y{i}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(8))
    + "feature-layers: *i",
    "a thousand lists": "[" * 1000 + "]" * 1000,
    "fifty thousand lists": "[" * 50_000,
    "nested maps": "".join(" " * i + "a:\n" for i in range(1500)),
    "5,000 digits": "epochs: " + "9" * 5000,
    "a hexadecimal of 5,000 digits": "epochs: 0x" + "f" * 5000,
    "an escape": '"\\e[2J": 1',
    "an escape as it is": f"epochs: {ESCAPE}",
    "an unknown key of much text": "k" * 50_000 + ": 1",
    "a NUL": "epochs: 1\0",
    "a directive": "%YAML 9.9\n---\nepochs: 1",
}


def config(title: str, data: bytes, must: Must = "either", trains: bool = False) -> Trial:
    """Without `trains` the data are missing, so that a file that is fine is refused for that alone."""

    def make(room: Room, chance: Random) -> Command:
        room.write("recipe.yaml", data)
        data_file = str(room.world.answers) if trains else "no-data.jsonl"
        asked = ["train", str(room.world.target), "--data", data_file, "--out", "head", "--config", "recipe.yaml"]
        return Command(asked, out=("head",), must=must, leaves=trains)

    return Trial(title, make)


def of(values: dict[str, Any]) -> bytes:
    return yaml.safe_dump(values, allow_unicode=True).encode("utf-8", "surrogatepass")


def _listed() -> list[Trial]:
    trials = [config(title, text.encode(), "refuse") for title, text in TEXTS.items()]
    trials += [config(f"trained with {title}", text.encode()) for title, text in list(TEXTS.items())[:12]]
    trials += [
        config("as it should be", of(RECIPE), "run", trains=True),
        config("bytes that are no UTF-8", b"epochs: \xff", "refuse"),
        config("UTF-16", "epochs: 1".encode("utf-16"), "refuse"),
        config("a BOM", b"\xef\xbb\xbf" + of(RECIPE), "run", trains=True),
        config("ten megabytes of blanks", b" " * 10_000_000 + b"\n", "refuse"),
    ]
    for number, key in enumerate(RECIPE):
        for at, (what, value) in enumerate(VALUES.items()):
            if (number + at) % 4 == 0:
                trials.append(config(f"{key} = {what}", of({**RECIPE, key: value}), trains=True))
    for key in (
        "device",
        "data",
        "out",
        "limit",
        "plain",
        "last-turn",
        "check-overlap",
        "data-licence",
        "features",
        "overwrite",
    ):
        for what in ("text", "true", "an object", "a list of lists", "null", "an escape", "2^64"):
            trials.append(config(f"{key} = {what}", of({**RECIPE, key: VALUES[what]})))
    return trials


def further(chance: Random) -> Trial:
    way = chance.choice(("values", "values", "text"))

    def make(room: Room, chance: Random) -> Command:
        if way == "values":
            changed = {
                **RECIPE,
                **{chance.choice(sorted(RECIPE)): VALUES[chance.choice(sorted(VALUES))] for _ in range(2)},
            }
            return config("", of(changed), trains=chance.random() < 0.3).make(room, chance)
        return config("", spoil_text(chance, of(RECIPE))[1]).make(room, chance)

    return Trial(f"{way} changed", make)


KIND = Kind("settings", "YAML files of settings", tuple(_listed()), further, count=270, quick=(8, 3))
