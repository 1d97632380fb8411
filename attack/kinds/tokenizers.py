"""Tokenizers and chat templates: patterns without an end, templates that loop, recurse or divide by zero."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, cast

from attack.inputs import Command, Kind, Room, Trial
from attack.kinds.common import read
from attack.kinds.targets import target_command
from attack.mutate import ESCAPE, ODD, change_json, spoil_text, to_json

Change = Callable[[dict[str, Any]], Any]
TURN = "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
TEMPLATES = {
    "a loop over everything": "{% for a in range(100000) %}{% for b in range(100000) %}x{% endfor %}{% endfor %}",
    "a loop that says nothing": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}" + TURN,
    "a macro that calls itself": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "two macros in a circle": "{% macro f() %}{{ g() }}{% endmacro %}{% macro g() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a division by zero": "{{ 1 // 0 }}",
    "a remainder of zero": TURN + "{{ 1 % 0 }}",
    "an overflow": "{{ 2.0 ** 100000 }}",
    "a huge power": "{{ 10 ** 10 ** 9 }}",
    "a huge product of text": "{{ 'a' * 10 ** 11 }}",
    "a huge product of lists": "{{ [0] * 10 ** 10 }}",
    "a huge field": "{{ '%01000000000d' % 1 }}",
    "a huge field of format": "{{ '{:>9999999999}'.format(1) }}",
    "text doubled forty times": "{% set ns = namespace(t='aaaaaaaa') %}{% for i in range(40) %}"
    "{% set ns.t = ns.t + ns.t %}{% endfor %}{{ ns.t }}",
    "a thing that is not there": "{{ nothing.at.all }}",
    "an index out of range": "{{ messages[99].content }}",
    "a key that is not there": "{{ messages[0]['x']['y'] }}",
    "text and number": "{{ 'a' + 1 }}",
    "a refusal": "{{ raise_exception('no') }}",
    "a refusal with an escape": "{{ raise_exception('" + ESCAPE + "') }}",
    "a refusal of several lines": "{{ raise_exception('a\nb\nc') }}",
    "a refusal of much text": "{{ raise_exception('a' * 99999) }}",
    "no end": "{% for m in messages %}",
    "no syntax": "{{ }",
    "an unknown filter": "{{ messages | nofilter }}",
    "an unknown test": "{{ messages is notest }}",
    "another file": "{% include '/etc/passwd' %}",
    "another template": "{% extends 'x' %}",
    "what lies beneath": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "the caller's own": "{{ cycler.__init__.__globals__.os.system('touch code-was-run') }}",
    "nothing": " ",
    "only white space": "\n\n\n",
    "no messages": "hello",
    "nine thousand brackets": "{{ " + "(" * 9000 + "1" + ")" * 9000 + " }}",
    "nine thousand additions": "{{ 1" + " + 1" * 9000 + " }}",
    "deep blocks": "{% if 1 %}" * 200 + "x" + "{% endif %}" * 200,
    "a list changed while it is read": "{% for m in messages %}{{ messages.append(m) }}{% endfor %}",
    "sorting what cannot be": "{{ [1, 'a'] | sort }}",
    "a date": "{{ strftime_now('%Y') }}" + TURN,
    "a wrong date": "{{ strftime_now(5) }}",
    "a long date": "{{ strftime_now('%99999999Y') }}",
    "a lone surrogate": TURN + "{{ '\\ud800' }}",
    "an escape in the text": TURN + ESCAPE,
    "a bottomless filter": "{{ 'a' | center(10 ** 10) }}",
    "a bottomless indentation": "{{ 'a\nb' | indent(10 ** 10) }}",
    "a word wrapped": "{{ ('a' * 100000) | wordwrap(1) }}",
    "JSON of itself": "{% set ns = namespace(x=1) %}{% set ns.x = ns %}{{ ns | tojson }}",
    "a loop of lipsum": "{% for i in range(99999) %}{{ lipsum(n=100) }}{% endfor %}",
    "another language": "${messages}",
    "long": "x" * 3_000_000,
    "an answer left out": "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}",
    "the last message only": "{{ messages[-1].content }}",
    "the answer twice": "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
    "messages backwards": "{% for m in messages | reverse %}{{ m.content }}<|im_end|>{% endfor %}",
}
PATTERNS = {
    "catastrophic": "(a+)+$",
    "worse": "(a|a)*b",
    "a back reference": r"(a*)*\1{9}",
    "no syntax": "(((",
    "empty": "",
    "a huge count": "a{999999999}",
    "nested counts": "((a{999}){999}){999}",
    "look behind": "(?<=a+)b",
    "a null loop": "(?:)*",
    "nothing": "(?!)",
    "the whole": r"[\s\S]*",
    "an absent group": r"\k<x>",
    "recursion": r"(?<x>a\g<x>?)",
    "endless recursion": r"(?<x>\g<x>)",
    "a class without end": "[a-",
    "deep groups": "(" * 3000 + ")" * 3000,
    "an odd property": r"\p{Zz9}",
}


def tokenized(title: str, change: Change, verb: str = "generate") -> Trial:
    """A change to tokenizer.json."""
    return laid(title, lambda t: _edit(t / "tokenizer.json", change), verb)


def laid(title: str, change: Callable[[Path], Any], verb: str = "generate") -> Trial:
    def make(room: Room, chance: Random) -> Command:
        target = room.copy(room.world.target, "target")
        change(target)
        return target_command(verb, room, target)

    return Trial(f"{title} ({verb})", make)


def template(title: str, text: str, verb: str) -> Trial:
    return laid(f"template: {title}", lambda t: (t / "chat_template.jinja").write_bytes(text.encode()), verb)


def _edit(file: Path, change: Change) -> None:
    whole = read(file)
    change(whole)
    file.write_bytes(to_json(whole))


def _split(pattern: str) -> Change:
    step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return lambda t: t.update(pre_tokenizer={"type": "Sequence", "pretokenizers": [step, t["pre_tokenizer"]]})


def _set(key: str, value: Any) -> Change:
    return lambda t: t.update({key: value})


def _in_config(key: str, value: Any) -> Callable[[Path], Any]:
    return lambda target: _edit(target / "tokenizer_config.json", _set(key, value))


def _model(key: str, value: Any) -> Change:
    return lambda t: t["model"].update({key: value})


def _added(**values: Any) -> Change:
    token = {
        "id": 200,
        "content": "<x>",
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
        **values,
    }
    return lambda t: t["added_tokens"].append(token)


def _vocab(change: Callable[[dict[str, int]], Any]) -> Change:
    return lambda t: change(t["model"]["vocab"])


def _listed() -> list[Trial]:
    verbs = ("generate", "show", "regenerate", "doctor")
    trials = [template(title, text, verbs[i % 3]) for i, (title, text) in enumerate(TEMPLATES.items())]
    trials += [template(title, text, verbs[(i + 1) % 4]) for i, (title, text) in enumerate(TEMPLATES.items())]
    trials += [
        tokenized(f"pattern: {title}", _split(p), v) for title, p in PATTERNS.items() for v in ("generate", "show")
    ]
    fixed = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 1, "pad_type_id": 0, "pad_token": "<pad>"}
    cut = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    replaced = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100_000}
    twice = {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 40}
    changes: dict[str, Change] = {
        "padding to 10^9": _set("padding", {"strategy": {"Fixed": 10**9}, **fixed}),
        "padding to 2^63": _set("padding", {"strategy": {"Fixed": 2**63}, **fixed}),
        "cut to one token": _set("truncation", cut),
        "cut to nothing": _set("truncation", {**cut, "max_length": 0, "stride": 5}),
        "each letter replaced by many": _set("normalizer", replaced),
        "letters doubled forty times": _set("normalizer", twice),
        "a precompiled map of nonsense": _set("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        "an empty precompiled map": _set("normalizer", {"type": "Precompiled", "precompiled_charsmap": ""}),
        "an unknown normaliser": _set("normalizer", {"type": "X"}),
        "an unknown splitter": _set("pre_tokenizer", {"type": "X"}),
        "an unknown decoder": _set("decoder", {"type": "X"}),
        "no decoder": _set("decoder", None),
        "no splitter": _set("pre_tokenizer", None),
        "no model": _set("model", None),
        "an unknown model": _model("type", "X"),
        "a word model without an unknown word": _set(
            "model", {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "b"}
        ),
        "an empty vocabulary": lambda t: t["model"].update(vocab={}, merges=[]),
        "a Unigram without pieces": _set("model", {"type": "Unigram", "unk_id": 5, "vocab": []}),
        "merges of what is not there": _model("merges", [["x1", "x2"]]),
        "merges of text": _model("merges", ["a"]),
        "ids of 2^32": _vocab(lambda v: v.update(a=2**32)),
        "ids of 2^32 - 1": _vocab(lambda v: v.update(a=2**32 - 1)),
        "ids below zero": _vocab(lambda v: v.update(a=-1)),
        "an id twice": _vocab(lambda v: v.update(a=v["b"])),
        "ids far apart": _vocab(lambda v: v.update(a=10**6)),
        "ids of text": _vocab(lambda v: v.__setitem__("a", cast("int", "1"))),
        "an escape in the vocabulary": _vocab(lambda v: v.__setitem__(ESCAPE, v.pop("a"))),
        "a NUL in the vocabulary": _vocab(lambda v: v.__setitem__("\0", v.pop("a"))),
        "an added token of 2^32 - 1": _added(id=2**32 - 1),
        "an added token beyond the model": _added(id=5000),
        "an added token without text": _added(content=""),
        "an added token of one letter": _added(content="a", special=False),
        "an added token that is an escape": _added(content=ESCAPE),
        "an added token below zero": _added(id=-1),
        "ten thousand added tokens": lambda t: [_added(id=200 + i, content=f"<{i}>")(t) for i in range(10_000)],
        "a template of ids that are not there": _set(
            "post_processor",
            {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "zz", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            },
        ),
        "a thousand tokens before every text": _set(
            "post_processor",
            {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<unk>", "type_id": 0}}] * 1000
                + [{"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [],
                "special_tokens": {"<unk>": {"id": "<unk>", "ids": [0], "tokens": ["<unk>"]}},
            },
        ),
        "version 9": _set("version", "9.0"),
        "a dropout": _model("dropout", 0.5),
        "a dropout of NaN": _model("dropout", float("nan")),
        "the unknown token unknown": _model("unk_token", "<nothing>"),
    }
    trials += [tokenized(title, change, verbs[i % 3]) for i, (title, change) in enumerate(changes.items())]
    for key in (
        "tokenizer_class",
        "eos_token",
        "bos_token",
        "pad_token",
        "model_max_length",
        "added_tokens_decoder",
        "chat_template",
        "extra_special_tokens",
        "auto_map",
        "backend",
        "clean_up_tokenization_spaces",
    ):
        for what in (
            "null",
            "text",
            "7",
            "[]",
            "an object",
            "[null]",
            "an escape",
            "a lone surrogate",
            "10^40",
            "deep lists",
        ):
            trials.append(
                laid(
                    f"tokenizer config: {key} = {what}",
                    _in_config(key, ODD[what]),
                )
            )
    return trials


def further(chance: Random) -> Trial:
    what = chance.choice(("tokenizer.json", "tokenizer.json", "tokenizer_config.json", "text", "template"))

    def make(room: Room, chance: Random) -> Command:
        target = room.copy(room.world.target, "target")
        if what.endswith(".json"):
            (target / what).write_bytes(change_json(chance, read(target / what))[1])
        else:
            names = ("chat_template.jinja",) if what == "template" else ("tokenizer.json", "tokenizer_config.json")
            file = target / chance.choice(names)
            file.write_bytes(spoil_text(chance, file.read_bytes())[1] if what == "text" else _patched(chance, file))
        return target_command(chance.choice(("generate", "show", "regenerate", "doctor")), room, target)

    return Trial(f"{what} changed", make)


def _patched(chance: Random, file: Path) -> bytes:
    """The usual template with pieces of others in it."""
    text = file.read_text("utf-8")
    for _ in range(chance.choice((1, 1, 2))):
        piece = (
            chance.choice(list(TEMPLATES.values()))[:400] if chance.random() < 0.6 else chance.choice("{}%'\"\\|[]()")
        )
        at = chance.randrange(len(text) + 1)
        text = text[:at] + piece + text[at:]
    return text.encode()


KIND = Kind("tokenizers", "tokenizers and chat templates", tuple(_listed()), further, count=380, quick=(12, 4))
