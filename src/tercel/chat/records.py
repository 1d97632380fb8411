"""One row of somebody's data set -> a `Conversation`, a `RawText` or a `TokenizedChat`."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, NoReturn

from tercel.chat.conversation import REASONING, Conversation, Message, RawText, Record, TokenizedChat
from tercel.errors import TercelError
from tercel.reading import UnreadableError, parse_json

ROLES = {
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
    "function_call": "function_call",
}
SHAPES = (
    '"messages", "conversations", "turns", "prompt" with "completion" or "response", "instruction" with '
    '"output", "text", or "p" with "g"'
)


def parse_record(row: Any, *, where: str, default_id: str, default_source: str) -> Record:
    """Read one row, whatever its schema.

    `where` names the row in errors ("chats.jsonl, line 3"). Raises `TercelError` for a row of no known shape.
    """
    if not isinstance(row, dict):
        _refuse(where, f"expected a JSON object, got {_short(row)}")
    id = str(_first(row, "id", "question_id", "prompt_id", default=default_id))
    source = str(_first(row, "source", default=default_source))
    if "p" in row and "g" in row:
        return _tokenized(row, id, where)
    if isinstance(row.get("messages"), list):
        return _conversation(row, row["messages"], id, source, where)
    if isinstance(row.get("conversations"), list):
        return _conversation(row, row["conversations"], id, source, where)
    if isinstance(row.get("turns"), list):
        return _conversation(row, [_as_user(turn, where) for turn in row["turns"]], id, source, where)
    if "prompt" in row and ("completion" in row or "response" in row):
        return _pair(row, id, source, where)
    if "instruction" in row and "output" in row:
        asked = str(row["instruction"]) + (f"\n\n{row['input']}" if row.get("input") else "")
        answered = [{"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]
        return _conversation(row, answered, id, source, where)
    if isinstance(row.get("text"), str):
        return RawText(id, row["text"], source)
    known = ", ".join(sorted(map(str, row))) or "none"
    _refuse(where, f"no conversation found; its keys are: {known}; expected one of {SHAPES}")


def _tokenized(row: dict[str, Any], id: str, where: str) -> TokenizedChat:
    prompt, answer = row["p"], row["g"]
    for name, ids in (("p", prompt), ("g", answer)):
        if not isinstance(ids, list) or any(type(i) is not int or not 0 <= i < 2**31 for i in ids):
            _refuse(where, f'"{name}" must be a list of token ids (whole numbers from 0)')
    supervised = [False] * len(prompt) + [True] * len(answer)
    if supervised:
        supervised[0] = False  # nothing comes before the first token, so nothing can predict it
    return TokenizedChat.of(id, prompt + answer, supervised)


def _pair(row: dict[str, Any], id: str, source: str, where: str) -> Conversation:
    asked, answered = row["prompt"], row.get("completion", row.get("response"))
    head = asked if isinstance(asked, list) else [{"role": "user", "content": asked}]
    tail = answered if isinstance(answered, list) else [{"role": "assistant", "content": answered}]
    return _conversation(row, head + tail, id, source, where)


def _conversation(row: dict[str, Any], turns: list[Any], id: str, source: str, where: str) -> Conversation:
    messages = tuple(message_of(turn, f"{where}, message {i + 1}") for i, turn in enumerate(turns))
    system = row.get("system")
    if isinstance(system, str) and system and [message.role for message in messages[:1]] != ["system"]:
        messages = (Message("system", system), *messages)
    if row.get("answer_ids") is not None:
        messages = _with_ids(messages, row["answer_ids"], where)
    return Conversation(id, messages, source, _tools(row.get("tools"), where))


def message_of(turn: Any, where: str) -> Message:
    """Read one message, in any of the forms that rows have. Raises `TercelError`, naming `where`, if it is none."""
    if not isinstance(turn, dict):
        _refuse(where, f"expected an object with a role and a content, got {_short(turn)}")
    called = turn.get("role", turn.get("from"))
    if not isinstance(called, str):
        _refuse(where, 'it has no role (key "role" or "from")')
    role = ROLES.get(called.lower())
    if role is None:
        _refuse(where, f"unknown role {called!r}; known are {', '.join(ROLES)}")
    text = _text(turn["content"] if "content" in turn else turn.get("value"), where)
    calls = _json_list(turn.get("tool_calls"), "tool_calls", where)
    if role == "function_call":
        role, text, calls = "assistant", "", _written_call(text, where)
    if text is None and not calls:
        _refuse(where, 'it has no text (key "content" or "value")')
    return Message(
        role,
        text or "",
        calls or None,
        _reasoning(turn, where),
        name=_word(turn, "name", where),
        tool_call_id=_word(turn, "tool_call_id", where),
    )


def _reasoning(turn: dict[str, Any], where: str) -> str | None:
    """The thoughts before an answer; a blank thought is none."""
    for key in REASONING:
        thought = turn.get(key)
        if thought is not None and not isinstance(thought, str):
            _refuse(where, f"{key} must be text, got {_short(thought)}")
        if thought and thought.strip():
            return thought
    return None


def _word(turn: dict[str, Any], key: str, where: str) -> str | None:
    value = turn.get(key)
    if value is not None and not isinstance(value, str | int):
        _refuse(where, f"{key} must be text, got {_short(value)}")
    return None if value is None else str(value)


def _text(content: Any, where: str) -> str | None:
    """The text of a content, which may be a list of parts (`{"type": "text", "text": …}`)."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        _refuse(where, f"the content must be text, got {_short(content)}")
    parts = []
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            _refuse(where, f"the content holds something other than text: {_short(part)}; remove this row")
        parts.append(part["text"])
    return "".join(parts)


def _written_call(text: str | None, where: str) -> tuple[dict[str, Any], ...]:
    """A ShareGPT-style `function_call` turn: its text is the JSON of one call or of a list of calls."""
    try:
        calls = parse_json(text or "")
    except UnreadableError as error:
        _refuse(where, f"a function_call must be JSON, got {_short(text)}: {error}")
    calls = calls if isinstance(calls, list) else [calls]
    for call in calls:
        if not isinstance(call, dict) or "name" not in call:
            _refuse(where, f'a function_call must have a "name", got {_short(call)}')
    return tuple({"type": "function", "function": call} for call in calls)


def _tools(value: Any, where: str) -> tuple[dict[str, Any], ...] | None:
    """Tool schemas, wrapped as templates expect them: `{"type": "function", "function": {…}}`."""
    tools = _json_list(value, "tools", where)
    if tools is None:
        return None
    wrapped = tuple(t if "function" in t else {"type": "function", "function": t} for t in tools)
    return wrapped or None


def _json_list(value: Any, name: str, where: str) -> tuple[dict[str, Any], ...] | None:
    if isinstance(value, str) and value.strip():
        try:
            value = parse_json(value)
        except UnreadableError as error:
            _refuse(where, f"{name} is {error}: {_short(value)}")
    if not value:
        return None
    if not isinstance(value, list) or any(not isinstance(item, dict) for item in value):
        _refuse(where, f"{name} must be a list of objects, got {_short(value)}")
    return tuple(value)


def _with_ids(messages: tuple[Message, ...], ids: Any, where: str) -> tuple[Message, ...]:
    answers = sum(message.role == "assistant" for message in messages)
    if not isinstance(ids, list) or len(ids) != answers:
        _refuse(where, f'"answer_ids" must list the token ids of each of the {answers} assistant messages')
    rest = iter(ids)
    result = []
    for message in messages:
        own = next(rest) if message.role == "assistant" else None
        if own is not None and (not isinstance(own, list) or any(type(i) is not int or i < 0 for i in own)):
            _refuse(where, '"answer_ids" must hold lists of token ids (whole numbers from 0)')
        token_ids = None if own is None else tuple(own)
        result.append(replace(message, token_ids=token_ids))
    return tuple(result)


def _as_user(turn: Any, where: str) -> dict[str, str]:
    if not isinstance(turn, str):
        _refuse(where, f'"turns" must be a list of texts, got {_short(turn)}')
    return {"role": "user", "content": turn}


def _first(row: dict[str, Any], *keys: str, default: str) -> Any:
    return next((row[key] for key in keys if row.get(key) is not None), default)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _refuse(where: str, problem: str) -> NoReturn:
    raise TercelError(f"{where}: {problem}")
