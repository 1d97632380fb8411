"""What clients see of prompts that begin as earlier ones did."""

from __future__ import annotations

import re

from tercel.decode.eagle3 import Eagle3
from tercel.decode.vanilla import Vanilla
from tercel.draft.shape import TreeShape
from tests.overfit import TEXTS, World
from tests.serve.servers import Running, serving


def counted(server: Running) -> tuple[int, int]:
    """Prompt tokens looked for, and found."""
    with server.http() as http:
        page = http.get("/metrics").text
    pair = (re.search(rf"vllm:prefix_cache_{name}_total{{.*}} (\S+)", page) for name in ("queries", "hits"))
    return tuple(int(float(found[1])) for found in pair if found)  # type: ignore[return-value]


def turns(server: Running, **more: object) -> list[tuple[str, int, int]]:
    """Two turns of a chat: what was answered, tokens of the prompt, and how many of these were known."""
    messages, told = [{"role": "user", "content": TEXTS[0]}], []
    with server.openai() as client:
        for question in (TEXTS[1], None):
            answer = client.chat.completions.create(
                model="tiny", messages=messages, temperature=0, max_tokens=12, extra_body=more
            )
            text, usage = answer.choices[0].message.content, answer.usage
            told.append((text, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens))
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": question}]
    return told


def test_a_second_turn_runs_its_new_tokens_alone_and_says_so(world: World) -> None:
    proposer = Eagle3(world.head, world.target, TreeShape(3, 3, 8))
    with serving(world.target, proposer, slots=2) as server:
        (first, before, none), (second, after, known) = turns(server)
        assert none == 0
        assert before - 1 <= known < after
        assert counted(server) == (before + after, known)
        plain = turns(server, draft=False)
        assert [text for text, *_ in plain] == [first, second]
        assert plain[0][2] == 0  # what was kept without drafts is apart
        with server.openai() as client:
            several = client.completions.create(
                model="tiny", prompt=list(range(5, 60)), n=4, seed=1, max_tokens=6, extra_body={"ignore_eos": True}
            )
            assert several.usage.prompt_tokens_details.cached_tokens == 0  # its choices have each other's
    with serving(world.target, Vanilla(), prefix_cache=0) as server:
        assert turns(server) == [(first, before, 0), (second, after, 0)]
        assert counted(server) == (0, 0)
