"""Whether prompts are rendered for serving as they were for training: the commonest cause of low acceptance."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from tercel.chat import Conversation, serving_prompt
from tercel.chat.arguments import with_arguments
from tercel.chat.dates import as_of, parse_moment, writes_date
from tercel.chat.identity import ANSWER, QUESTION, TemplateIdentity
from tercel.chat.render import Renderer
from tercel.chat.template import encode, render_text, rendering
from tercel.doctor.findings import Finding
from tercel.draft.history import TemplateRecord, TrainingRecord
from tercel.errors import TercelError
from tercel.target_model.sources import load_tokenizer

_THINKING = ("enable_thinking", "thinking")  # what templates call the switch
_SHOWN = 60


def template_findings(
    tokenizer: PreTrainedTokenizerBase, training: TrainingRecord, folder: Path | None
) -> Iterator[Finding]:
    """What is to be known of the target's template, of the one the head was trained with (`training`: the head's
    record), and of the one in the head's own folder, if there is one."""
    if not tokenizer.chat_template:
        yield Finding(
            "template",
            "note",
            "the target has no chat template, so text is continued as it stands",
            "send the server plain prompts (/v1/completions), as the head was trained on",
        )
        return
    try:
        yield _rendered(tokenizer)
    except TercelError as error:  # nothing more is to be found with it, and each try may last as long as it is let
        yield Finding("template", "problem", f"the template cannot be used: {error}", "repair the target's template")
        return
    yield _recorded(tokenizer, training.chat_template)
    yield from _default_system(tokenizer)
    yield from _switches(tokenizer, _told(training.chat_template))
    yield from _date(tokenizer, training)
    if folder is not None and (folder / "tokenizer_config.json").is_file():
        yield _beside_head(tokenizer, folder)


def _rendered(tokenizer: PreTrainedTokenizerBase) -> Finding:
    """Training sees, before an answer, the very tokens of the serving prompt. Raises `TercelError` for a template that
    cannot be used."""
    renderer = Renderer(tokenizer)
    rendered = renderer.render(Conversation("check", (QUESTION, ANSWER), ""))
    prompt = serving_prompt(tokenizer, [QUESTION])
    # an answer without thoughts stands, in training too, after the empty thought of a model told not to think
    before = encode(tokenizer, render_text(tokenizer, [QUESTION], prompt=True) + renderer.template.empty_thought)
    if rendered.dropped_turns or not rendered.chats:
        why = next(iter(rendered.dropped_turns), "no row")
        return Finding(
            "template",
            "problem",
            f"a question and its answer cannot be rendered for training as they are for serving ({why})",
            "give the target the template that its server uses, and train on text rendered with it",
        )
    chat = rendered.chats[0]
    start = int(chat.supervised.argmax())
    if chat.tokens[:start].tolist() != before:
        return Finding(
            "template",
            "problem",
            f"training puts {start} tokens before an answer, the generation prompt of serving {len(prompt)} others",
            "render training text with the generation prompt that the server adds",
        )
    return Finding("template", "ok", f"training and serving render the same {len(prompt)} tokens before an answer")


def _recorded(tokenizer: PreTrainedTokenizerBase, recorded: TemplateRecord | None) -> Finding:
    """The template of the training run, if the head knows it, and the target's."""
    name = "training template"
    if recorded is None:
        return Finding(
            name,
            "note",
            "the head does not record which template it was trained with",
            "make sure that its training text was rendered with the target's own template",
        )
    now = TemplateIdentity.of(tokenizer)
    if (other := _other_arguments(tokenizer, recorded, now)) is not None:
        return other
    if recorded.source == now.source:
        return Finding(name, "ok", "the head was trained with exactly this template")
    if recorded.rendered == now.rendered:
        return Finding(
            name,
            "note",
            "the target's template was edited since training, but a plain conversation is rendered alike",
            "compare conversations with tools or thoughts, if you serve such",
        )
    return Finding(
        name,
        "problem",
        "the head was trained with another chat template than the target has now",
        "serve with the template of training, or train the head on text rendered with the new one",
    )


def _other_arguments(
    tokenizer: PreTrainedTokenizerBase, recorded: TemplateRecord, now: TemplateIdentity
) -> Finding | None:
    """If the template is now given something else than in training, and renders something else for it."""
    told = _told(recorded)
    if recorded.source != now.source:
        return None
    try:
        then = TemplateIdentity.of(with_arguments(tokenizer, told))
    except TercelError:  # a record that was tampered with: the template is the one of training, and has no such
        return None
    if then.rendered == now.rendered:
        return None
    given = json.dumps(told, ensure_ascii=False)
    if not told:
        return Finding(
            "training template",
            "problem",
            "the head was trained without the template arguments that are given now",
            "leave them out, here and in requests, or train the head with them",
        )
    return Finding(
        "training template",
        "problem",
        f"the head was trained with template arguments {given}, and here prompts are rendered otherwise",
        f"let requests send chat_template_kwargs {given}; for tercel's own verbs, --template-arg",
    )


def _told(recorded: TemplateRecord | None) -> dict[str, Any]:
    """The template arguments of a record."""
    return (recorded.arguments if recorded is not None else None) or {}


def _default_system(tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    """Text that the template puts before the first question only."""
    text = render_text(tokenizer, [QUESTION, ANSWER, QUESTION])
    first, _, rest = text.partition(QUESTION.content)
    header = rest.partition(ANSWER.content)[2].partition(QUESTION.content)[0]
    extra = first[: len(first) - _common_suffix(first, header)]
    words = " ".join(re.sub(r"<[^<>]*>|[^\w\s.,:'-]", " ", extra).split()).removeprefix("system ")
    if len(words.split()) > 2:
        shown = words if len(words) <= _SHOWN else f"{words[:_SHOWN]}…"
        yield Finding(
            "system prompt",
            "note",
            f"without a system message the template writes one of its own ({shown})",
            "requests with another system message look unlike training; train on such too if you serve them",
        )


def _switches(tokenizer: PreTrainedTokenizerBase, told: Mapping[str, Any]) -> Iterator[Finding]:
    """Settings outside the messages that change the prompt, such as thinking; `told`: those that training made."""
    source = tokenizer.get_chat_template()
    for switch in _THINKING:
        if switch not in source or switch in told:
            continue
        on, off = (_with_switch(tokenizer, switch, value) for value in (True, False))
        if on != off:
            default = render_text(tokenizer, [QUESTION], prompt=True)
            state = "on" if default == on else "off"
            yield Finding(
                "thinking",
                "warning",
                f"the template has a switch {switch}, {state} unless a request sets it, and so it is in training",
                f'let requests leave it alone, or send chat_template_kwargs {{"{switch}": …}} as in training',
            )


def _date(tokenizer: PreTrainedTokenizerBase, training: TrainingRecord) -> Iterator[Finding]:
    """The day's date in prompts, and the one that training saw."""
    if not writes_date(tokenizer):
        return
    found, moment = "the template writes the day's date into prompts", parse_moment(training.to_json())
    pin = "to pin it, serve a template that has a date in the place of strftime_now"
    if moment is None:
        yield Finding("date", "note", found, f"a few tokens differ from training's, which costs little; {pin}")
    elif render_text(as_of(tokenizer, moment), [QUESTION]) == render_text(tokenizer, [QUESTION]):
        yield Finding("date", "ok", f"{found}, and training saw today's ({moment:%Y-%m-%d})")
    else:
        found += f"; training saw {moment:%Y-%m-%d}, serving shows today's"
        yield Finding("date", "note", found, f"acceptance may differ slightly; {pin}, such as training's")


def _with_switch(tokenizer: PreTrainedTokenizerBase, switch: str, value: bool) -> str:
    more: dict[str, Any] = {switch: value}
    messages = [QUESTION.to_json()]
    with rendering(tokenizer):
        return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **more))


def _beside_head(tokenizer: PreTrainedTokenizerBase, folder: Path) -> Finding:
    name = "head's tokenizer"
    try:
        own = load_tokenizer(str(folder))
    except TercelError as error:
        return Finding(name, "warning", f"the tokenizer in the head's folder cannot be read: {error}", "remove it")
    if own.get_vocab() != tokenizer.get_vocab():
        return Finding(
            name,
            "problem",
            "the tokenizer in the head's folder has other tokens than the target's",
            "give the target that the head was trained for, or remove the stray tokenizer if you know better",
        )
    if own.chat_template and own.chat_template != with_arguments(tokenizer, {}).chat_template:
        return Finding(
            name,
            "warning",
            "the tokenizer in the head's folder has another chat template than the target's",
            "find out with which of the two the training text was rendered, and serve with that one",
        )
    return Finding(name, "ok", "the tokenizer in the head's folder is the target's")


def _common_suffix(a: str, b: str) -> int:
    length = 0
    while length < min(len(a), len(b)) and a[-1 - length] == b[-1 - length]:
        length += 1
    return length
