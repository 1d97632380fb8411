"""What the head drafts from its cache, level by level and step by step, is what it says when everything is run anew.

The reference counts positions by hand, so that a number that training and decoding share cannot be wrong in both.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tercel.decode.draft_tree import DraftTree
from tercel.decode.eagle3 import Eagle3
from tercel.decode.engine import Engine
from tercel.decode.head_state import AttendedState, HeadState, HeadWindow, TorchHeadState
from tercel.decode.loop import DecodingLoop
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import Request
from tercel.draft import DraftModel
from tercel.draft.layers import Projected
from tercel.draft.shape import TreeShape
from tercel.target_model.backend_names import OPENVINO, TORCH
from tercel.target_model.backends import with_backend
from tercel.target_model.model import Target
from tests.decode.drafts import Watched, random_draft, tiny_target

Path = tuple[int, ...]
PROMPTS = [tuple(range(5, 5 + n)) for n in (5, 12, 3)]
STEPS_CHECKED = 25


def anew(draft: DraftModel, target: Target, tokens: Path, path: Path) -> Tensor:
    """log q `[W]` behind the last of `tokens`, which are committed, and the drafted `path`.

    The entry at position `i` reads the token at `i + 1`; its hidden is the target's feature of position `i`, or, where
    the token before is no committed one, what the head itself gave there.
    """
    head = draft.head
    features = target.encode(torch.tensor([tokens[:-1]]), capture=head.config.feature_layers).features
    hidden = list(head.fuse(features[0]))
    while True:
        entries = len(hidden)
        read = target.embed(torch.tensor([*tokens, *path][1 : entries + 1]))
        positions = torch.arange(entries)
        output = head.step(head.project(read, torch.stack(hidden), positions), positions, _causal)[-1]
        if entries == len(tokens) + len(path) - 1:
            return head.logits(output).log_softmax(-1)
        hidden.append(head.feedback(output))


def _causal(layer: int, now: Projected) -> tuple[Tensor, Tensor]:
    group = now.query.shape[1] // now.key.shape[1]
    key, value = now.key.repeat_interleave(group, 1), now.value.repeat_interleave(group, 1)  # [S, q, D]
    scores = torch.einsum("tqd,sqd->qts", now.query, key) / key.shape[-1] ** 0.5
    scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), float("-inf"))
    return now.residual, torch.einsum("qts,sqd->tqd", scores.softmax(-1), value).flatten(1)


def best_tree(draft: DraftModel, target: Target, tokens: Path, shape: TreeShape) -> set[Path]:
    """The paths to the nodes of EAGLE-2's tree (spec section 8), by whole passes over every path."""
    scores: dict[Path, float] = {}
    frontier: dict[Path, float] = {(): 0.0}
    for _ in range(shape.depth):
        found = {}
        for path, score in frontier.items():
            best = anew(draft, target, tokens, path).topk(shape.top_k)
            for value, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                found[(*path, int(draft.vocabulary.ids[index]))] = score + value
        scores |= found
        frontier = dict(sorted(found.items(), key=lambda item: -item[1])[: shape.top_k])
    return set(sorted(scores, key=lambda path: -scores[path])[: shape.nodes - 1])


def paths_of(tree: DraftTree) -> set[Path]:
    paths: list[Path] = [()]
    for token, parent in zip(tree.token_list[1:], tree.parent_list[1:], strict=True):
        paths.append((*paths[parent], token))
    return set(paths[1:])


@pytest.mark.parametrize("shape", [TreeShape(6, 4, 24), TreeShape.chain(4)], ids=["tree", "chain"])
@pytest.mark.parametrize(
    "flags",
    [{}, {"fc_norm": True, "norm_output": True}, {"num_decoder_layers": 2}],
    ids=["eagle3", "eagle3.1", "two layers"],
)
@pytest.mark.parametrize("backend", [TORCH, OPENVINO])
@torch.no_grad()
def test_what_is_drafted_is_what_whole_passes_say(shape: TreeShape, flags: dict[str, Any], backend: str) -> None:
    if backend == OPENVINO:
        pytest.importorskip("openvino", reason="openvino is not installed: pip install 'tercel[openvino]'")
    target = with_backend(tiny_target("llama"), backend, keep=False)
    assert target.backend == backend
    draft = random_draft(target, **flags)
    proposer = Eagle3(draft, target, shape)
    assert isinstance(proposer.state, TorchHeadState) == (backend == TORCH)
    watched = Watched(proposer)
    asked = [Request(prompt, SamplingParams(max_new_tokens=24, ignore_eos=True)) for prompt in PROMPTS]
    results = Engine(target, watched, slots=3).generate(asked)
    if shape.top_k > 1:
        assert sum(sum(result.accepted) for result in results) >= 3  # so that paths were committed, and others dropped
    every = len(watched.seen) // STEPS_CHECKED
    for tokens, proposal in watched.seen[:: max(1, every)]:
        assert paths_of(proposal.tree) == best_tree(draft, target, tokens, shape)


@pytest.mark.parametrize("backend", [TORCH, OPENVINO])
@torch.no_grad()
def test_what_is_drafted_behind_a_long_context_is_what_whole_passes_say(backend: str) -> None:
    if backend == OPENVINO:
        pytest.importorskip("openvino", reason="openvino is not installed: pip install 'tercel[openvino]'")
    target = with_backend(tiny_target("llama", max_position_embeddings=1024), backend, keep=False)
    draft = random_draft(target, max_position_embeddings=1024)
    shape = TreeShape(3, 3, 8)
    watched = Watched(Eagle3(draft, target, shape))
    generator = torch.Generator().manual_seed(0)
    prompts = [tuple(torch.randint(4, target.vocab_size, (n,), generator=generator).tolist()) for n in (379, 700)]
    asked = [Request(prompt, SamplingParams(max_new_tokens=12, ignore_eos=True)) for prompt in prompts]
    Engine(target, watched, slots=2).generate(asked)
    lengths = [len(tokens) for tokens, _ in watched.seen]
    assert min(lengths) < 384 < max(length for length in lengths if length < 500)  # where a further chunk begins
    for tokens, proposal in watched.seen[::4]:
        assert paths_of(proposal.tree) == best_tree(draft, target, tokens, shape)


def test_a_head_drafts_up_to_its_last_position() -> None:
    """The entry of the root, the `n`-th token, has position `n - 2`; a level is drafted from each up to the last."""
    target, last = tiny_target("llama"), 19
    draft = random_draft(target, max_position_embeddings=last + 1)
    watched = Watched(Eagle3(draft, target, TreeShape.chain(4)))
    asked = [Request(prompt, SamplingParams(max_new_tokens=24, ignore_eos=True)) for prompt in PROMPTS]
    Engine(target, watched, slots=3).generate(asked)
    levels = [(len(tokens) - 2, len(proposal.tree) - 1) for tokens, proposal in watched.seen]
    assert all(drafted == max(0, min(4, last - root + 1)) for root, drafted in levels)
    assert {0, 1, 4} <= {drafted for _, drafted in levels}


def test_prompts_are_written_in_chunks_of_like_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama", max_position_embeddings=4096)
    draft = random_draft(target, max_position_embeddings=4096)
    lengths = (1100, 500, 6, 8, 9, 40)
    tokens = [[5 + (i * 7) % 90 for i in range(length + 1)] for length in lengths]
    layers = draft.head.config.feature_layers
    features = [[torch.randn(length, target.hidden_size) for _ in layers] for length in lengths]
    state, shapes, extend = TorchHeadState(draft.head, target), [], AttendedState.extend

    def watched(self: HeadState, features: Any, entries: Any, rows: Any) -> Tensor:
        shapes.append([len(row) for row in entries])
        return extend(self, features, entries, rows)

    monkeypatch.setattr(AttendedState, "extend", watched)
    state.cache.add_rows(len(lengths))
    outputs = state.fill(features, [row[1:] for row in tokens], range(len(lengths)))
    assert shapes == [[512], [512], [76], [500], [6, 8, 9], [40]]
    assert state.cache.lengths == list(lengths)
    for row in range(len(lengths)):
        alone = TorchHeadState(draft.head, target)
        alone.cache.add_rows(1)
        whole = extend(alone, [features[row]], [tokens[row][1:]])
        torch.testing.assert_close(outputs[row], whole[0], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_window_keeps_the_first_and_the_newest_entries_at_their_positions() -> None:
    """Against whole passes in which every entry but those is left out; what is held stays as large as it is."""
    target = tiny_target("llama", max_position_embeddings=4096)
    draft = random_draft(target, max_position_embeddings=4096)
    window, texts, held = HeadWindow(3, 10), ([5, 9, 40, 7] * 40, [8, 50, 6] * 9, [30, 31]), []
    state = TorchHeadState(draft.head, target, window)
    state.cache.add_rows(3)
    features = [
        list(target.encode(torch.tensor([text]), capture=draft.head.config.feature_layers).features[0].split(32, -1))
        for text in texts
    ]
    done = [0, 0, 0]
    for step in (9, 1, 4, 7, 2, 1, 9, 9, 9, 9, 9, 9):
        ends = [min(n + step, len(text) - 1) for n, text in zip(done, texts, strict=True)]
        rows = [row for row in range(3) if ends[row] > done[row]]
        output = state.extend(
            [[layer[done[row] : ends[row]] for layer in features[row]] for row in rows],
            [texts[row][done[row] + 1 : ends[row] + 1] for row in rows],
            rows,
        )
        done = ends
        held.append(list(state.cache.lengths))
        assert [n + gone for n, gone in zip(state.cache.lengths, state.cache.forgotten, strict=True)] == done
    assert max(max(lengths) for lengths in held) <= 3 + 2 * 10
    assert state.cache.forgotten[0] > 0 < state.cache.forgotten[1]
    # once more, without a window: entries that were forgotten before the last block are hidden from it
    whole = TorchHeadState(draft.head, target)
    whole.cache.add_rows(1)
    kept = [*range(3), *range(done[0] - (held[-2][0] + step - 3), done[0])]
    whole.extend([[layer[: done[0] - 1] for layer in features[0]]], [texts[0][1 : done[0]]])
    gone = [place for place in range(done[0] - 1) if place not in kept]
    for start in reversed(gone):
        whole.cache.forget(0, start, 1)
    last = whole.extend([[layer[done[0] - 1 : done[0]] for layer in features[0]]], [texts[0][done[0] : done[0] + 1]])
    torch.testing.assert_close(output[rows.index(0)], last[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", [TORCH, OPENVINO])
def test_texts_are_the_same_with_a_window_and_what_the_head_holds_stays_bounded(backend: str) -> None:
    target = tiny_target("llama", max_position_embeddings=4096)
    if backend == OPENVINO:
        pytest.importorskip("openvino", reason="openvino is not installed: pip install 'tercel[openvino]'")
    target = with_backend(target, backend, keep=False)
    assert target.backend == backend
    draft = random_draft(target, max_position_embeddings=4096)
    proposers = [Eagle3(draft, target, TreeShape(3, 3, 8), window) for window in (None, HeadWindow(2, 12))]
    asked = [Request(tuple(range(5, 5 + n)), SamplingParams(max_new_tokens=60, ignore_eos=True)) for n in (90, 6, 40)]
    truth, windowed = ([r.tokens for r in Engine(target, p, slots=2).generate(asked)] for p in proposers)
    assert truth == windowed
    loop, most = DecodingLoop(target, proposers[1]), 0
    loop.submit(Request(tuple(range(5, 105)) * 20, SamplingParams(max_new_tokens=60, ignore_eos=True)))
    while loop.pending:
        loop.step()
        most = max([most, *proposers[1].state.cache.lengths])
    assert most <= 2 + 2 * 12
