"""P-EAGLE: the objective beside plain autograd, runs that go on, and what its heads draft."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tercel.decode.engine import Engine
from tercel.decode.pieces import Context
from tercel.decode.proposers import EAGLE3, P_EAGLE, make_proposer
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import Request
from tercel.draft import DraftModel, DraftVocabulary, HeadInfo, load_head
from tercel.draft.checkpoint import save_head
from tercel.draft.kinds import new_head
from tercel.draft.shape import TreeShape
from tercel.errors import TercelError
from tercel.interop.formats.read import read_head
from tercel.measure.acceptance import count_alpha
from tercel.measure.profile_cases import head_cases
from tercel.methods.p_eagle.module import PEagleConfig, PEagleHead
from tercel.methods.p_eagle.proposer import PEagle
from tercel.methods.p_eagle.state import AheadState, GraphAheadState, TorchAheadState
from tercel.target_model.backend_names import OPENVINO, TORCH
from tercel.target_model.backends import with_backend
from tercel.target_model.model import Target
from tercel.train.acceptance import chains_of, simulate
from tercel.train.config import TrainConfig
from tercel.train.features import FeatureSupply
from tercel.train.goals import Extent
from tercel.train.lesson import Lesson, lesson_of
from tercel.train.loop import train
from tests.decode.drafts import Watched
from tests.draft.heads_for_tests import some_vocabulary
from tests.methods.heads import random_p_eagle
from tests.methods.test_eagle import CHATS, EVERY_ID
from tests.train.test_acceptance import LENGTHS, talk
from tests.train.test_loop import CHATS as RUN_CHATS
from tests.train.test_loop import same
from tests.train.worlds import target_of

STEPS = 3


def lesson_for(**settings: object) -> Lesson:
    return lesson_of(TrainConfig(method=P_EAGLE, **{"ttt_steps": STEPS, "tie_size": 6, **settings}))  # type: ignore[arg-type]


def head_for(target: Target, lesson: Lesson, vocabulary: DraftVocabulary, std: float = 0.2) -> PEagleHead:
    """One that says something at every position, and whose tie moves scores."""
    head = new_head(lesson.new_config(target, len(vocabulary)))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
    assert isinstance(head, PEagleHead)
    return head


def plain_log_q(head: PEagleHead, features: Tensor, embedded: Tensor, t: int, drafted: Tensor) -> Tensor:
    """What position after position says behind row `t` `[1 + drafts, W]`, token by token: features, embedded `[T, ..]`
    of a text; drafted `[drafts, H]`, embeddings of what is drafted."""
    fused = head.fuse(features)
    entries = [head.project(embedded[s + 1], fused[s], torch.tensor(s)) for s in range(t + 1)]
    path, found = torch.zeros(head.config.tie_size, dtype=features.dtype), []
    for step in range(1 + len(drafted)):
        if step:
            token, hidden = embedded[t + 1] + head.mask_embedding, fused[t] + head.mask_hidden[step - 1]
            entries.append(head.project(token, hidden, torch.tensor(t + step)))
        own = entries[-1]
        group = own.query.shape[0] // own.key.shape[0]
        k = torch.stack([e.key for e in entries]).repeat_interleave(group, 1)
        v = torch.stack([e.value for e in entries]).repeat_interleave(group, 1)
        weights = torch.softmax(torch.einsum("qd,sqd->qs", own.query, k) / own.query.shape[1] ** 0.5, -1)
        said = head.norm(head.finish(own.residual, torch.einsum("qs,sqd->qd", weights, v).flatten()))
        scores = head.lm_head(said)
        if step and head.config.tie_size:
            before = head.midlayer.input_layernorm(drafted[step - 1])
            path = F.silu(head.tie_row(said) + head.tie_token(before) + (head.tie_path(path) if step > 1 else 0))
            scores = scores + head.lm_tie(path)
        found.append(torch.log_softmax(scores, -1))
    return torch.stack(found)


def plain_loss(head: PEagleHead, target: Target, ids: Tensor, decay: float) -> Tensor:
    """Row by row in float64: of each step a mean over the rows of a conversation, then over conversations."""
    known, total = set(ids.tolist()), torch.zeros((), dtype=torch.float64)
    for one in CHATS:
        tokens, flags = torch.from_numpy(one.tokens).long(), one.supervised.tolist()
        output = target.encode(tokens[None], capture=head.config.feature_layers)
        features = torch.cat([layer[0] for layer in output.layers], -1).double()
        logits, embedded = target.logits(output.hidden[0]), target.embed(tokens).double()
        p, best = torch.softmax(logits[:, ids].double(), -1), logits.argmax(-1)
        lost: list[list[Tensor]] = [[] for _ in range(STEPS)]
        for t in range(len(tokens) - 2):
            steps = 0
            while steps < STEPS and t + 2 + steps < len(tokens) and flags[t + 2 + steps]:
                steps += 1
            if not steps:
                continue
            log_q = plain_log_q(head, features, embedded, t, embedded[t + 2 : t + 1 + steps])
            for step in range(steps):
                if int(best[t + 1 + step]) in known:
                    lost[step].append(-(p[t + 1 + step] * log_q[step]).sum())
        for step, rows in enumerate(lost):
            if rows:
                total = total + decay**step * torch.stack(rows).mean() / len(CHATS)
    return total


@pytest.mark.parametrize("tie_size", [0, 6])
def test_loss_and_gradients_are_those_of_plain_autograd(tie_size: int) -> None:
    target, vocabulary = target_of("llama"), some_vocabulary(70, 3)
    lesson = lesson_for(tie_size=tie_size)
    head = head_for(target, lesson, vocabulary)
    exact, supply = deepcopy(head).double(), FeatureSupply(target, head, vocabulary)
    result = lesson.learn(head, supply.batch(CHATS), supply.to_draft)
    result.loss.backward()
    wanted = plain_loss(exact, target, vocabulary.ids, 0.8)
    wanted.backward()
    torch.testing.assert_close(result.loss.double(), wanted, rtol=1e-5, atol=1e-6)
    for (name, mine), plain in zip(head.named_parameters(), exact.parameters(), strict=True):
        assert bool(plain.grad.any()), name
        torch.testing.assert_close(mine.grad.double(), plain.grad, rtol=1e-4, atol=1e-6, msg=name)
    assert ("lm_tie.weight" in dict(head.named_parameters())) == bool(tie_size)
    whole = Extent.of(supply.batch(CHATS), supply.to_draft, lesson.objective)  # cut in two, it teaches the same
    with torch.no_grad():
        parts = [
            lesson.learn(head, supply.batch(own), supply.to_draft, whole=whole).loss for own in (CHATS[:1], CHATS[1:])
        ]
    torch.testing.assert_close(sum(parts), result.loss.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_learns_and_goes_on_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    target = target_of("llama", dtype)
    run = {"epochs": 4, "batch_tokens": 60, "lr": 4e-3, "draft_vocab": 64, "eval_share": 0.2, "optimizer": "muon"}
    config = TrainConfig(method=P_EAGLE, ttt_steps=3, tie_size=8, eval_every=3, save_every=2, **run)
    whole = train(target, RUN_CHATS, config, tmp_path / "whole")
    losses = [entry["loss"] for entry in whole.history if "loss" in entry]
    third = len(losses) // 3
    assert sum(losses[-third:]) < 0.95 * sum(losses[:third])
    train(target, RUN_CHATS, config, tmp_path / "stopped", stop_after=3)
    train(target, RUN_CHATS, config, tmp_path / "stopped")
    same(tmp_path / "whole", tmp_path / "stopped")
    head = load_head(tmp_path / "whole").head_as(PEagleHead)
    assert (head.config.num_parts, head.config.tie_size, len(whole.best.alpha)) == (3, 8, 3)
    assert bool(head.lm_tie.weight.any())
    card = (tmp_path / "whole" / "README.md").read_text()
    assert "P-EAGLE (3 positions in one forward, tied by a state of 8)" in card
    assert "--draft p-eagle" in card


@pytest.mark.parametrize("tie_size", [0, 16])
def test_the_walk_makes_the_steps_of_decoding(tie_size: int) -> None:
    """A head that has half learned these very answers drafts some of their tokens right."""
    target, depth = target_of("llama"), 4
    lesson = lesson_for(ttt_steps=depth, tie_size=tie_size, decay=1.0)
    torch.manual_seed(0)
    head = new_head(lesson.new_config(target, len(EVERY_ID)))
    model, supply = DraftModel(head, EVERY_ID, HeadInfo(None)), FeatureSupply(target, head, EVERY_ID)
    params = [SamplingParams(max_new_tokens=n, temperature=0.0, ignore_eos=True) for n in LENGTHS]
    chats, _ = talk(target, make_proposer(P_EAGLE, target, head=model, shape=TreeShape.chain(1)), params)
    optimizer, batch = torch.optim.AdamW(head.parameters(), lr=1e-2), supply.batch(chats)
    for _ in range(60):
        optimizer.zero_grad()
        lesson.learn(head, batch, supply.to_draft).loss.backward()
        optimizer.step()
    _, results = talk(target, make_proposer(P_EAGLE, target, head=model, shape=TreeShape.chain(depth)), params)
    with torch.no_grad():
        chains = chains_of(lesson.rehearse(head, batch, supply.to_draft), batch, supply.to_draft)
    walked = [chain.walk().runs.tolist() for chain in chains]
    assert walked == [list(r.accepted) for r in results if r.steps]
    assert {0, 1, 2} <= {accepted for steps in walked for accepted in steps}  # or the test would say little
    assert simulate(lesson, head, [batch], supply.to_draft).alpha == count_alpha(results, depth).alpha


@pytest.mark.parametrize(
    ("tie_size", "candidates", "backend"), [(0, 128, TORCH), (8, 128, TORCH), (8, 6, TORCH), (8, 128, OPENVINO)]
)
def test_nodes_have_the_chances_that_the_head_gives_them(
    tie_size: int, candidates: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows of unlike lengths, decoded together. With few candidates the others keep their mass."""
    monkeypatch.setattr("tercel.methods.p_eagle.state.CANDIDATES", candidates)
    if backend == OPENVINO:
        pytest.importorskip("openvino", reason="openvino is not installed: pip install 'tercel[openvino]'")
    target = with_backend(target_of("llama"), backend, keep=False)
    model = random_p_eagle(target, tie_size=tie_size)
    head, draft_id = model.head_as(PEagleHead), model.vocabulary.to_draft().tolist()
    proposer = make_proposer(P_EAGLE, target, head=model, shape=TreeShape(3, 4, 12))
    assert isinstance(proposer, PEagle)
    assert isinstance(proposer.state, TorchAheadState if backend == TORCH else GraphAheadState)
    watched = Watched(proposer)
    asked = [Request(p, SamplingParams(max_new_tokens=9, ignore_eos=True)) for p in ((5, 17, 33), tuple(range(4, 20)))]
    Engine(target, watched, slots=2).generate(asked)
    checked = 0
    for tokens, proposal in watched.seen[::3]:
        text = torch.tensor(tokens)
        layers = target.encode(text[None], capture=head.config.feature_layers).layers
        features, embedded = torch.cat([layer[0] for layer in layers], -1), target.embed(text)
        tree = proposal.tree
        assert proposal.log_q is not None
        for node in range(1, len(tree)):
            path = [node]
            while tree.parent_list[path[0]]:
                path.insert(0, tree.parent_list[path[0]])
            drafted = target.embed(torch.tensor([tree.tokens[n] for n in path[:-1]], dtype=torch.long))
            said = plain_log_q(head, features, embedded, len(tokens) - 2, drafted)
            chance = float(said[-1, draft_id[tree.tokens[node]]])
            if candidates > len(model.vocabulary) or len(path) == 1:
                assert float(proposal.log_q[node]) == pytest.approx(chance, abs=1e-4)
            else:
                assert float(proposal.log_q[node]) < 0
            checked += 1
    assert checked > 30


def test_a_draft_takes_one_forward_of_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    target, forwards = target_of("llama"), []
    write = AheadState.extend
    monkeypatch.setattr(AheadState, "extend", lambda self, *rest: forwards.append(1) or write(self, *rest))
    finish = PEagleHead.finish
    monkeypatch.setattr(PEagleHead, "finish", lambda self, *rest: forwards.append(2) or finish(self, *rest))
    proposer = make_proposer(P_EAGLE, target, head=random_p_eagle(target), shape=TreeShape(3, 4, 12))
    result = Engine(target, proposer).generate([Request((5, 6, 7), SamplingParams(max_new_tokens=9, ignore_eos=True))])
    assert forwards == [1, 2] * result[0].steps


@pytest.mark.parametrize("tie_size", [0, 8])
def test_every_level_can_be_run_alone(tie_size: int) -> None:
    """As it is timed: a level below the first takes what the one above gave."""
    target = target_of("llama")
    proposer = make_proposer(P_EAGLE, target, head=random_p_eagle(target, tie_size=tie_size), shape=TreeShape(3, 4, 12))
    assert isinstance(proposer, PEagle)
    cases = dict(head_cases(proposer, Context(target, 12, 4, capture=proposer.feature_layers)))
    drafted = [cases[name].run()[0].shape for name in ("1", "2", "3", "4")]  # type: ignore[index]
    assert [shape[:-1] for shape in drafted] == [(1,), (1, 3), (1, 3), (1, 3)]


def test_no_tree_is_deeper_than_the_head_has_positions() -> None:
    target = target_of("llama")
    assert make_proposer(P_EAGLE, target, head=random_p_eagle(target), shape=TreeShape(3, 9, 20)).shape.depth == 4


def test_a_head_is_written_and_read_back_and_no_engine_takes_it(tmp_path: Path) -> None:
    target = target_of("llama")
    model = random_p_eagle(target)
    save_head(model, tmp_path / "head", dtype=torch.float32)
    again = read_head(tmp_path / "head", num_layers=target.num_layers)
    assert again.head.config == model.head.config
    for name, tensor in again.head.named_parameters():
        assert torch.equal(tensor, model.head.get_parameter(name)), name
    with pytest.raises(TercelError, match=r"is a head of P-EAGLE, and this takes one of EAGLE-3 only"):
        _ = again.eagle3  # as every export begins
    with pytest.raises(TercelError, match="is a head of P-EAGLE, and this takes one of EAGLE only"):
        make_proposer(EAGLE3, target, head=model, shape=TreeShape(3, 3, 8))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_parts": 1}, "num_parts of a head must be a whole number from 2 to"),
        ({"tie_size": -1}, "tie_size of a head must be a whole number from 0 to"),
        ({"norm_output": True}, "feeds nothing back"),
    ],
)
def test_settings_that_no_such_head_has(settings: dict[str, object], words: str) -> None:
    config = random_p_eagle(target_of("llama")).head.config
    assert isinstance(config, PEagleConfig)
    with pytest.raises(TercelError, match=words):
        replace(config, **settings)  # type: ignore[arg-type]
