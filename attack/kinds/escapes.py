"""Control sequences and markup in every place whose text reaches the screen, on a terminal and in a pipe.

A sequence counts as passed where it arrives as it was; on a terminal the colours and the cursor's moves that the
command line itself makes are told apart by what they can be (see `verdicts.OWN`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from safetensors.torch import load_file, save_file

from attack.hostile import fixed, honest, http
from attack.inputs import Command, Kind, Room, Trial
from attack.kinds.common import ASK, head_command, read
from attack.kinds.conversations import CHAT, cleaning, line_of, regenerating, showing
from attack.kinds.servers import against
from attack.kinds.targets import target_command
from attack.kinds.tokenizers import TURN
from attack.mutate import to_json

PAYLOADS = {
    "title": "\x1b]0;PWNED\x07",
    "clipboard": "\x1b]52;c;cHduZWQ=\x1b\\",
    "clear screen": "\x1b[2J\x1b[H",
    "hidden": "\x1b[8mhidden",
    "one-byte CSI": "\x9b2J",
    "bell": "\x07\x07",
    "backspace": "right\b\b\b\b\bwrong",
    "line back": "right\x1b[1000D\x1b[Kwrong",
    "answer back": "\x1b[6n\x1b[c\x05",
    "another buffer": "\x1b[?1049h",
    "a link": "\x1b]8;;http://x\x07y\x1b]8;;\x07",
    "shift out": "\x0e\x7f",
    "markup": "[/red]x[bold]",
    "a markup link": "[link=http://x]y[/link]",
    "an unopened tag": "[/]",
    "a style": "[blink reverse]",
}
Lay = Callable[[Room, str], Command]


def head_json(file: str, *path: Any) -> Lay:
    def lay(room: Room, text: str) -> Command:
        head = room.copy(room.world.head if file == "tercel.json" else room.world.foreign("specforge"), "head")
        whole = read(head / file)
        place = whole
        for key in path[:-1]:
            place = place.setdefault(key, {}) if isinstance(place, dict) else place[key]
        place[path[-1]] = text if not isinstance(place.get(path[-1]), list) else [text]
        (head / file).write_bytes(to_json(whole))
        return head_command("inspect", room, "head", str(room.world.target))

    return lay


def tensor_name(room: Room, text: str) -> Command:
    head = room.copy(room.world.head, "head")
    tensors = load_file(head / "model.safetensors")
    tensors[text] = tensors["fc.weight"].clone()
    save_file(tensors, head / "model.safetensors")
    return head_command("inspect", room, "head", str(room.world.target))


def folder_name(verb: str) -> Lay:
    def lay(room: Room, text: str) -> Command:
        head = room.copy(room.world.head, f"h{text.replace('/', '-')}")
        return head_command(verb, room, head.name, str(room.world.target))

    return lay


def target_name(room: Room, text: str) -> Command:
    return target_command("doctor", room, room.copy(room.world.target, f"t{text.replace('/', '-')}"))


def wrong_name(*before: str) -> Lay:
    return lambda room, text: Command([*before, text], must="refuse")


def row(change: Callable[[dict[str, Any], str], Any], verb: Callable[[Room, str], Command] = showing) -> Lay:
    def lay(room: Room, text: str) -> Command:
        whole = json.loads(json.dumps(CHAT))
        change(whole, text)
        room.write("chats.jsonl", line_of(to_json(whole)))
        return verb(room, "chats.jsonl")

    return lay


def vocabulary(room: Room, text: str) -> Command:
    """A model whose every letter is the sequence: what it says is nothing else."""
    target = room.copy(room.world.target, "target")
    whole = read(target / "tokenizer.json")
    spelt = "".join(_byte_level(byte) for byte in text.encode())
    vocab, other = whole["model"]["vocab"], {}
    for token, number in vocab.items():
        other[token if number < 70 else f"{spelt}{token}"] = number
    whole["model"].update(vocab=other, merges=[])
    (target / "tokenizer.json").write_bytes(to_json(whole))
    return Command(["generate", str(target), "--draft", "none", *ASK, "--show"], answer=True)


def _byte_level(byte: int) -> str:
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(byte) if byte in plain else chr(256 + [b for b in range(256) if b not in plain].index(byte))


def template(text_of: Callable[[str], str], verb: str) -> Lay:
    def lay(room: Room, text: str) -> Command:
        target = room.copy(room.world.target, "target")
        (target / "chat_template.jinja").write_bytes(text_of(json.dumps(text)).encode("utf-8", "surrogatepass"))
        return target_command(verb, room, target)

    return lay


def target_config(key: str) -> Lay:
    def lay(room: Room, text: str) -> Command:
        target = room.copy(room.world.target, "target")
        (target / "config.json").write_bytes(to_json({**read(target / "config.json"), key: text}))
        return target_command("generate", room, target)

    return lay


def settings(text_of: Callable[[str], str]) -> Lay:
    def lay(room: Room, text: str) -> Command:
        room.write("recipe.yaml", text_of(json.dumps(text)))
        asked = ["train", str(room.world.target), "--data", "none.jsonl", "--out", "head", "--config", "recipe.yaml"]
        return Command(asked, must="refuse")

    return lay


def task(change: Callable[[str], dict[str, Any]]) -> Lay:
    def lay(room: Room, text: str) -> Command:
        room.write("task.jsonl", line_of(to_json(change(text))))
        asked = ["verify", str(room.world.target), str(room.world.head), "--tasks", "task.jsonl", "--check", "greedy"]
        return Command([*asked, "--max-new-tokens", "2"], codes=frozenset({0, 1}))

    return lay


def server(change: Callable[[str, Any, str], Any]) -> Lay:
    def lay(room: Room, text: str) -> Command:
        def answering(inner: Room) -> Any:
            return honest(room.world.facts["served"], lambda path, value: change(path, value, text))

        return against("", answering, "vllm", "either", frozenset({0, 1})).make(room, Random(0))

    return lay


def _model_name(path: str, value: Any, text: str) -> Any:
    return http(200, to_json({"data": [{"id": text}]})) if path == "/v1/models" else None


def _said(path: str, value: Any, text: str) -> Any:
    if path != "/v1/completions":
        return None
    return http(200, to_json({**value, "choices": [{**value["choices"][0], "text": text, "token_ids": None}]}))


def _refused(path: str, value: Any, text: str) -> Any:
    return http(500, text.encode()) if path == "/v1/chat/completions" else None


def error_body(room: Room, text: str) -> Command:
    return against("", lambda inner: fixed(http(503, text.encode())), "vllm").make(room, Random(0))


def _put(key: str) -> Callable[[dict[str, Any], str], Any]:
    return lambda whole, text: whole.update({key: text})


def _nothing_but(whole: dict[str, Any], text: str) -> None:
    whole.clear()
    whole[text] = 1


def _said_in(index: int, key: str) -> Callable[[dict[str, Any], str], Any]:
    return lambda whole, text: whole["messages"][index].update({key: text})


PLACES: dict[str, Lay] = {
    "a head's target name": head_json("tercel.json", "target", "name"),
    "a head's data": head_json("tercel.json", "training", "data"),
    "a head's recipe": head_json("tercel.json", "training", "recipe", "loss"),
    "a head's recipe's key": lambda room, text: head_json("tercel.json", "training", "recipe", text)(room, "x"),
    "a head's RoPE": head_json("tercel.json", "head", "rope_parameters", "rope_type"),
    "a head's format": head_json("tercel.json", "format"),
    "a foreign head's class": head_json("config.json", "architectures"),
    "a foreign head's model type": head_json("config.json", "model_type"),
    "a foreign head's RoPE": head_json("config.json", "rope_scaling"),
    "a foreign head's layers": head_json("config.json", "eagle_config", "eagle_aux_hidden_state_layer_ids"),
    "a foreign head's size": head_json("config.json", "hidden_size"),
    "a tensor's name": tensor_name,
    "a head's folder (inspect)": folder_name("inspect"),
    "a head's folder (doctor)": folder_name("doctor"),
    "a head's folder (export)": folder_name("export"),
    "a head's folder (serve-command)": folder_name("serve-command"),
    "a target's folder": target_name,
    "a head that is not there": wrong_name("inspect"),
    "a target that is not there": wrong_name("generate"),
    "a command that is not there": wrong_name(),
    "an option that is not there": lambda room, text: Command(["inspect", f"--{text}", "x"], must="refuse"),
    "a conversation's id": row(_put("id")),
    "a conversation's source": row(_put("source")),
    "a conversation's unknown key": row(_nothing_but),
    "a question": row(_said_in(0, "content")),
    "an answer": row(_said_in(1, "content")),
    "a role": row(_said_in(0, "role")),
    "a content that is no text": row(lambda whole, text: whole["messages"][0].update(content={text: text})),
    "a question that is answered": row(_said_in(0, "content"), regenerating),
    "an id that is answered": row(_put("id"), regenerating),
    "an id that overlaps": row(
        lambda whole, text: [whole.update(id=text), whole["messages"][0].update(content="the cat sat")], cleaning
    ),
    "a model's text": vocabulary,
    "a template's text (show)": template(lambda t: f"{TURN}{{{{ {t} }}}}", "show"),
    "a template's refusal (generate)": template(lambda t: f"{{{{ raise_exception({t}) }}}}", "generate"),
    "a template's refusal (regenerate)": template(lambda t: f"{{{{ raise_exception({t}) }}}}", "regenerate"),
    "a template's refusal (doctor)": template(lambda t: f"{{{{ raise_exception({t}) }}}}", "doctor"),
    "a template's unknown filter": template(lambda t: f"{{{{ 1 | {json.loads(t)} }}}}", "generate"),
    "a target's model type": target_config("model_type"),
    "a target's class": target_config("architectures"),
    "a target's activation": target_config("hidden_act"),
    "a target's data type": target_config("dtype"),
    "a key of settings": settings(lambda t: f"{t}: 1"),
    "a value of settings": settings(lambda t: f"loss: {t}"),
    "a wrong number of settings": settings(lambda t: f"epochs: {t}"),
    "a question's id": task(lambda text: {"id": text, "turns": ["the cat"]}),
    "a task's unknown key": task(lambda text: {text: 1}),
    "a server's model": server(_model_name),
    "a server's text": server(_said),
    "a server's refusal to chat": server(_refused),
    "a server's error": error_body,
}


def escape(place: str, what: str, terminal: bool) -> Trial:
    def make(room: Room, chance: Random) -> Command:
        command = PLACES[place](room, PAYLOADS[what])
        return command.but(terminal=terminal, check=None)

    return Trial(f"{what} in {place}, {'on a terminal' if terminal else 'in a pipe'}", make)


def _listed() -> list[Trial]:
    whats = list(PAYLOADS)
    trials = []
    for number, place in enumerate(PLACES):
        for at in range(6):
            trials.append(escape(place, whats[(number + at * 5) % len(whats)], terminal=at % 2 == 0))
    return trials


def further(chance: Random) -> Trial:
    return escape(chance.choice(sorted(PLACES)), chance.choice(sorted(PAYLOADS)), chance.random() < 0.5)


KIND = Kind(
    "escapes",
    "control sequences and markup, on terminals and in pipes",
    tuple(_listed()),
    further,
    count=340,
    quick=(12, 3),
)
