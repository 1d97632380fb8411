"""Conversations in many formats -> token ids and which predicted tokens are the assistant's."""

from tercel.chat.conversation import Conversation, Message, RawText, Record, TokenizedChat
from tercel.chat.load import LoadReport, load_chats
from tercel.chat.overlap import (
    EvalPrompt,
    Overlap,
    OverlapIndex,
    OverlapReport,
    find_overlaps,
    read_eval_prompts,
)
from tercel.chat.readers import read_conversations, read_records
from tercel.chat.regenerate import RegenerateReport, RegenerateSettings, regenerate
from tercel.chat.render import Rendered, Renderer, render_plain
from tercel.chat.responder import Answer, Question, Responder
from tercel.chat.template import ChatTemplate, learn_template, serving_prompt

__all__ = [
    "Answer",
    "ChatTemplate",
    "Conversation",
    "EvalPrompt",
    "LoadReport",
    "Message",
    "Overlap",
    "OverlapIndex",
    "OverlapReport",
    "Question",
    "RawText",
    "Record",
    "RegenerateReport",
    "RegenerateSettings",
    "Rendered",
    "Renderer",
    "Responder",
    "TokenizedChat",
    "find_overlaps",
    "learn_template",
    "load_chats",
    "read_conversations",
    "read_eval_prompts",
    "read_records",
    "regenerate",
    "render_plain",
    "serving_prompt",
]
