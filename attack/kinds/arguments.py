"""What stands on the command line: prompts, numbers, addresses, names, odd options of every verb."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from attack.inputs import Command, Kind, Must, Room, Trial
from attack.kinds.common import ASK
from attack.kinds.prompts import prompts
from attack.mutate import ESCAPE, SURROGATE
from attack.world import EXACT

LONG = "a" * 300  # longer than a name may be
TEXTS = (
    "",
    " ",
    "x",
    "-1",
    "0",
    "1e400",
    "nan",
    "inf",
    "-inf",
    "9" * 400,
    "9" * 5000,
    "1.5",
    "0x10",
    "1_000",
    "١٢",
    LONG,
    "a" * 5000,
    ESCAPE,
    "[/red]x",
    "a\nb",
    SURROGATE,
    "é",
    "~",
    "~nobody/x",
    "/",
    ".",
    "..",
    "//",
    "\\",
    "%s",
    "{}",
    "$HOME",
    "-",
    "--",
    "a/b/c/d",
    "x" * 70 + "/" + "y" * 70,
    "owner/name@",
    "@",
    ":",
    "demo:",
    "demo:0",
    "demo:9" + "9" * 400,
    ",",
    ",,,",
    "demo,demo",
    "/dev/zero",
    "/proc/self/mem",
    "/etc",
    "/nonexistent/x",
)
URLS = (
    "",
    "http://",
    "http:///",
    "http://[",
    "http://[::1",
    "http://[::1]:x",
    "http://localhost:99999",
    "http://localhost:-1",
    "http://localhost:x",
    "http://a b",
    "http://bücher.example",
    "http://" + "a" * 70 + ".de",
    "http://xn--a.example",
    "http://localhost:9/ä",
    "http://\u202ex",
    "http://" + ESCAPE,
    "http://user:pass@127.0.0.1:9",
    "ftp://127.0.0.1/x",
    "file:///etc/passwd",
    "HTTP://127.0.0.1:9",
    "http://127.0.0.1:9/v1/",
    "http://127.0.0.1:9?x=1",
    "http://127.0.0.1:9#x",
    "http://.",
    "http://..",
    "http://a..b",
    "http://0x7f.1:9",
    "http://\x00",
    "http:\\\\x",
    "//127.0.0.1:9",
    "127.0.0.1:9",
    "http://" + "a" * 5000,
    SURROGATE,
    "http://" + SURROGATE,
    "unix:///x",
    "http://127.0.0.1:9 ",
    " http://127.0.0.1:9",
    "http://127.0.0.1:9\n",
    "http://%00",
    "http://[fe80::1%25eth0]:9",
)
NUMBERS = (
    "--temperature",
    "--top-k",
    "--top-p",
    "--min-p",
    "--repetition-penalty",
    "--presence-penalty",
    "--frequency-penalty",
    "--seed",
    "--max-new-tokens",
    "--tree",
    "--logit-bias",
    "--stop",
    "--device",
    "--dtype",
    "--layer-ids",
    "--system",
)
VALUES = (
    "",
    "x",
    "-1",
    "0",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "1e-400",
    "9" * 30,
    "9" * 5000,
    "1.5",
    ESCAPE,
    SURROGATE,
    "18446744073709551616",
    "-9223372036854775809",
    "1=nan",
    "1=inf",
    "-1=2",
    "999=1",
    "1=1e400",
    "9" * 30 + "=1",
    "1e3",
    "2147483648",
    "100000000",
)


SIZES = ("1000000000000", "18446744073709551616", "1" + "0" * 40)
SIZED: dict[str, tuple[str, ...]] = {
    "generate TARGET HEAD": (
        "--max-new-tokens",
        "--tree",
        "--temperature 1 --top-k",
    ),
    "verify TARGET HEAD --tasks demo:1": (
        "--check sampled --samples",
        "--check greedy --slots",
        "--check sampled --samples 2 --sampled-prompts",
        "--check sampled --samples 2 --sampled-tokens",
        "--check greedy --max-new-tokens",
    ),
    "bench TARGET HEAD --tasks demo:1 --max-new-tokens 4": ("--repeats", "--n-alpha", "--seed"),
    "doctor TARGET HEAD": ("--max-new-tokens", "--timeout"),
    "serve-command HEAD --target TARGET --engine sglang": ("--depth", "--top-k", "--nodes"),
    "export HEAD --target TARGET --to sglang --out made": ("--depth",),
    "data show ANSWERS --target TARGET": ("--samples", "--max-length", "--limit"),
    "data clean ANSWERS --against ASKED --out made.jsonl": ("--ngram", "--samples"),
    "data regenerate ASKED --target TARGET --out made.jsonl --max-new-tokens 4": (
        "--max-new-tokens",
        "--in-flight",
        "--limit",
        "--seed",
    ),
    "tune TARGET HEAD --data ASKED --minutes 0.001 --candidates chain:1": ("--max-new-tokens", "--slots", "--seed"),
    "tune TARGET HEAD --data ASKED --engine vllm --max-new-tokens 4": ("--longest", "--timeout"),
}


def given(title: str, *arguments: str, must: Must = "either", **more: object) -> Trial:
    """Honest things are named by TARGET, HEAD, ANSWERS and ASKED."""

    def make(room: Room, chance: Random) -> Command:
        return Command(meant(room, arguments), must=must).but(**more)

    return Trial(title, make)


def meant(room: Room, arguments: Sequence[str]) -> list[str]:
    world = room.world
    names = {"TARGET": world.target, "HEAD": world.head, "ANSWERS": world.answers, "ASKED": world.asked}
    return [str(names.get(argument, argument)) for argument in arguments]


def _listed() -> list[Trial]:
    trials = prompts()
    trials += [
        given(f"--url {url[:40]!r}", "doctor", "TARGET", "HEAD", "--url", url, "--timeout", "2", must="refuse")
        for url in URLS
    ]
    plain = ("generate", "TARGET", "--draft", "none")
    trials += [
        given(f"{flag} {value[:20]!r}", *plain, *ASK, flag, value, answer=True)
        for number, flag in enumerate(NUMBERS)
        for at, value in enumerate(VALUES)
        if (number + at) % 3 == 0 or flag in ("--seed", "--logit-bias")
    ]
    checked = ("verify", "TARGET", "HEAD", "--max-new-tokens", "2", "--check", "greedy", "--tasks")
    for text in TEXTS:
        name = repr(text[:30])
        trials += [
            given(f"TARGET {name}", "generate", text, "--draft", "none", *ASK, answer=True),
            given(f"HEAD {name}", "inspect", text),
            given(f"HEAD beside a target {name}", "generate", "TARGET", text, *ASK, answer=True),
            given(f"a file of conversations {name}", "data", "show", text, "--target", "TARGET"),
            given(f"--tasks {name}", *checked, text, codes=frozenset({0, 1})),
            given(f"--prompt-file {name}", *plain, "--prompt-file", text, *ASK[2:], answer=True),
        ]
    return [*trials, *_enormous()]


def _enormous() -> list[Trial]:
    """Every number of every verb that could size something."""
    trials = []
    for command, options in SIZED.items():
        verb, *rest = command.split()
        loads = verb in ("verify", "bench", "doctor", "tune") or "regenerate" in rest
        more = ASK if verb == "generate" else EXACT if loads else ()
        for option in options:
            for size in SIZES:
                arguments = (verb, *rest, *more, *option.split(), size)
                codes = frozenset({0, 1} if verb in ("verify", "doctor") else {0})
                out = ("made", "made.jsonl", "made.jsonl.part", "made.jsonl.settings.json")
                trials.append(given(f"{command} {option} {size}", *arguments, codes=codes, out=out, answer=True))
    return trials


# What a random command is made of: a verb with a right beginning, then one or two options with an odd value.
def further(chance: Random) -> Trial:
    verbs = {
        "generate": (["--draft", "none", *ASK], NUMBERS),
        "verify": (
            ["--check", "greedy", "--tasks", "demo:1", "--max-new-tokens", "2"],
            ("--temperature", "--samples", "--slots", "--seed", "--tasks", "--data-dir", "--max-new-tokens", "--check"),
        ),
        "doctor": (
            [],
            ("--url", "--engine", "--tasks", "--timeout", "--max-new-tokens", "--layer-ids", "--json", "--device"),
        ),
        "tune": (
            ["--data", "ASKED", "--minutes", "0.001", "--candidates", "chain:1", "--max-new-tokens", "4", *EXACT],
            ("--data", "--data-dir", "--candidates", "--engine", "--slots", "--longest", "--url", "--cost-json"),
        ),
        "inspect": ([], ("--target", "--layer-ids", "--tasks", "--data-dir", "--json", "--dtype")),
        "serve-command": (
            ["--engine", "vllm"],
            ("--target", "--depth", "--top-k", "--nodes", "--dtype", "--engine", "--json"),
        ),
        "export": (["--to", "vllm", "--out", "made"], ("--target", "--to", "--depth", "--layer-ids", "--out")),
        "show": ([], ("--target", "--samples", "--limit", "--max-length", "--check-overlap")),
    }
    verb = chance.choice(sorted(verbs))
    start, options = verbs[verb]
    pairs = [(chance.choice(options), chance.choice((*VALUES, *TEXTS))) for _ in range(chance.choice((1, 1, 2)))]
    pairs = [(flag, value) for flag, value in pairs if "/dev" not in value or flag not in ("--json", "--out")]

    def make(room: Room, chance: Random) -> Command:
        first = {
            "generate": ["generate", "TARGET"],
            "verify": ["verify", "TARGET", "HEAD"],
            "doctor": ["doctor", "TARGET", "HEAD"],
            "tune": ["tune", "TARGET", "HEAD"],
            "inspect": ["inspect", "HEAD"],
            "serve-command": ["serve-command", "HEAD", "--target", "TARGET"],
            "export": ["export", "HEAD", "--target", "TARGET"],
            "show": ["data", "show", "ANSWERS", "--target", "TARGET"],
        }[verb]
        chosen = [part for pair in pairs for part in pair]
        places = [value for flag, value in pairs if flag in ("--json", "--out") and value.strip("./")]
        codes = frozenset({0, 1}) if verb in ("doctor", "verify") else frozenset({0})
        out = ("made", *places, *(place.split("/")[0] for place in places))
        return Command(meant(room, [*first, *start, *chosen]), codes=codes, answer=verb == "generate", out=out)

    said = " ".join(f"{flag} {value[:15]!r}" for flag, value in pairs)
    return Trial(f"{verb} {said}", make)


KIND = Kind("arguments", "prompts and command-line arguments", tuple(_listed()), further, count=710, quick=(12, 5))
