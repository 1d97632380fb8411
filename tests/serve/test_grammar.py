"""The mask of a grammar on every path of a tree, also behind its end."""

from __future__ import annotations

import pytest
from torch import Tensor

from tercel.serve.grammar import GrammarConstraint, Grammars
from tests.decode.drafts import tiny_target

CLOSED = {"type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"], "additionalProperties": False}


@pytest.mark.parametrize(("schema", "text"), [(CLOSED, '{"n":true}'), ({"type": "integer"}, "10")])
def test_behind_an_end_that_was_drafted_only_ends_are_allowed(schema: dict, text: str) -> None:
    target = tiny_target("llama")
    (end,) = target.eos_token_ids
    tokens = target.tokenizer.encode(text, add_special_tokens=False)
    path: GrammarConstraint = Grammars(target).of_schema(schema)()
    masks: list[Tensor] = []
    for token in tokens:
        masks.append(path.allowed())
        assert masks[-1][token]
        path.push(token)
    behind = path.allowed()
    assert behind[end]
    path.push(end)  # a draft that the target took
    for _ in range(2):
        assert path.allowed().nonzero().flatten().tolist() == [end]
        path.push(end)
    path.pop(3)
    assert path.allowed().equal(behind)
    path.pop(1)
    assert path.allowed().equal(masks[-1])
