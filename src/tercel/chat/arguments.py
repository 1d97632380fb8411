"""Settings that a chat template takes beside the messages, such as `enable_thinking`: given once, seen by all."""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from typing import Any

from jinja2 import Environment
from jinja2.exceptions import TemplateError
from jinja2.meta import find_undeclared_variables
from transformers import PreTrainedTokenizerBase

from tercel.chat.template import name_of
from tercel.errors import TercelError

ALMOST_JSON = {"true": "true", "false": "false", "none": "null", "null": "null"}
# what `apply_chat_template` takes itself, or gives to every template
OURS = frozenset(
    [*signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "messages", "raise_exception", "strftime_now"]
)
# They stand at the template's beginning. The line's end after them is dropped (`trim_blocks`), and the template begins
# on a line of its own, as it does by itself.
_MARK = "{# template arguments, set by tercel #}\n"
_GIVEN = re.compile(r"\A(\{% set [^\n]* %\})*" + re.escape(_MARK))


def parse_arguments(pairs: Iterable[str]) -> dict[str, Any]:
    """`["enable_thinking=false", …]` to `{"enable_thinking": False}`: values are JSON, or else plain text.

    Raises `TercelError` for what is not NAME=VALUE, a name given twice, and a `True` that JSON would not take.
    """
    arguments: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.isidentifier():
            raise TercelError(f"--template-arg {pair!r} is not NAME=VALUE, such as enable_thinking=false")
        if name in arguments:
            raise TercelError(f"--template-arg {name} is given twice; give it once")
        try:
            arguments[name] = json.loads(text)
        except (ValueError, RecursionError) as error:
            if text.lower() in ALMOST_JSON:  # as text it would be true to a template
                raise TercelError(
                    f"--template-arg {pair!r}: write {ALMOST_JSON[text.lower()]}, as in JSON; for the mere word, "
                    f"""'{name}="{text}"'"""
                ) from error
            arguments[name] = text
    return arguments


def with_arguments(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """A copy of the tokenizer whose chat template is given `arguments` by whoever renders with it, and no others.

    arguments: JSON values by name.
    Raises `TercelError` if it has no template, or for an argument that the template does not read: it would change
    nothing, and a misspelt one is found out so.
    """
    plain = with_templates(tokenizer, without_arguments)
    if not arguments:
        return plain
    known = template_variables(plain)
    for name in arguments:
        if name in OURS or name in tokenizer.special_tokens_map:
            raise TercelError(f"{name} cannot be a template argument; tercel gives it to every template itself")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it reads {', '.join(sorted(known)) or 'none at all'}"
            raise TercelError(f"the chat template of {name_of(tokenizer)} reads no argument {name}; {hint}")
    given = "".join(f"{{% set {name} = {_literal(value)} %}}" for name, value in arguments.items())
    return with_templates(plain, lambda source: given + _MARK + source)


def without_arguments(source: str) -> str:
    """A template as its tokenizer has it, before it was given arguments."""
    return _GIVEN.sub("", source)


def template_variables(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """What the tokenizer's templates read that they may not have set themselves.

    Raises `TercelError` if it has no template, or one that is no Jinja.
    """
    found: set[str] = set()
    for source in templates_of(tokenizer).values():
        plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", source)  # a block of transformers' own
        try:
            found |= find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain))
        except (TemplateError, RecursionError) as error:
            raise TercelError(f"the chat template of {name_of(tokenizer)} cannot be read: {error}") from error
    if not templates_of(tokenizer):
        raise TercelError(f"{name_of(tokenizer)} has no chat template, so there is nothing to give arguments to")
    return frozenset(found - OURS - tokenizer.special_tokens_map.keys())


def templates_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """The tokenizer's templates by name; most have one, some have none."""
    given = tokenizer.chat_template
    if isinstance(given, dict):
        return dict(given)
    return {"default": given} if given else {}


def with_templates(tokenizer: PreTrainedTokenizerBase, change: Callable[[str], str]) -> PreTrainedTokenizerBase:
    """A copy of the tokenizer with other templates."""
    changed = {name: change(source) for name, source in templates_of(tokenizer).items()}
    other = copy.copy(tokenizer)
    other.chat_template = changed if isinstance(tokenizer.chat_template, dict) else changed.get("default")
    return other


def _literal(value: Any) -> str:
    """A JSON value as Jinja writes it. Its strings take the escapes of JSON, but not characters in two halves."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(str(name))}: {_literal(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
