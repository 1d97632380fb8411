"""EAGLE, EAGLE-2 and HASS: objectives beside plain autograd, runs, and what the heads draft."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tercel.decode.engine import Engine
from tercel.decode.proposers import EAGLE, EAGLE2, HASS, make_proposer
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import Request
from tercel.draft import DraftModel, DraftVocabulary, Eagle1Head, Eagle3Head, HeadInfo, load_head
from tercel.draft.alignment import imitated
from tercel.draft.binding import bind
from tercel.draft.checkpoint import save_head
from tercel.draft.graph import HeadGraphs
from tercel.draft.kinds import new_head
from tercel.draft.shape import TreeShape
from tercel.errors import TercelError
from tercel.interop.card import head_card
from tercel.interop.engines import ENGINES
from tercel.interop.engines.limits import check_expressible
from tercel.interop.formats.read import read_head
from tercel.measure.acceptance import count_alpha
from tercel.measure.expected_tau import expected_tau
from tercel.methods import eagle
from tercel.methods.eagle import EagleLesson
from tercel.methods.static_tree import node_count
from tercel.target_model.model import Target
from tercel.train.acceptance import chains_of, simulate
from tercel.train.config import TrainConfig
from tercel.train.features import FeatureSupply
from tercel.train.goals import row_goals
from tercel.train.lesson import lesson_of
from tercel.train.loop import train
from tercel.train.ttt import roll_out
from tests.decode.drafts import Watched
from tests.draft.heads_for_tests import some_vocabulary
from tests.methods.heads import random_eagle
from tests.tiny import VOCAB
from tests.train.test_acceptance import LENGTHS, talk
from tests.train.test_loop import CHATS as RUN_CHATS
from tests.train.test_loop import same
from tests.train.worlds import chat, random_chat, target_of

CHATS = [
    random_chat(11, 1),
    chat([5, 6, 7, 8], [False, False, False, True]),  # one row only
    chat([9, 10, 11, 12, 13], [True] * 5),  # supervised from the start
]
EVERY_ID = DraftVocabulary(torch.arange(4, VOCAB), VOCAB)


def new_eagle(target: Target, lesson: EagleLesson, vocabulary: DraftVocabulary) -> Eagle1Head:
    """A head as a run begins with, that will draft beside the target."""
    torch.manual_seed(0)
    head = new_head(lesson.new_config(target, len(vocabulary)))
    assert isinstance(head, Eagle1Head)
    lesson.begin(target, vocabulary)
    return head


def lesson_for(method: str, **settings: object) -> EagleLesson:
    lesson = lesson_of(TrainConfig(method=method, **settings))  # type: ignore[arg-type]
    assert isinstance(lesson, EagleLesson)
    return lesson


def plain_loss(head: Eagle1Head, target: Target, ids: Tensor, steps: int, hass: bool) -> Tensor:
    """Row by row and token by token in float64: a mean over the rows of a conversation, then over conversations."""
    known = set(ids.tolist())
    rows_of_output = target.output_rows(ids).double()
    total = torch.zeros((), dtype=torch.float64)
    for one in CHATS:
        tokens, flags = one.tokens.tolist(), one.supervised.tolist()
        features = target.encode(torch.tensor([tokens])).hidden[0]
        p = torch.softmax(target.logits(features)[:, ids].double(), -1)
        best = target.logits(features).argmax(-1)
        features = features.double()
        embedded = target.embed(torch.tensor(tokens)).double()
        entries = [
            head.project(embedded[t + 1], features[t], torch.tensor(t)) for t in range(len(tokens) - 1)
        ]
        for step in range(steps):
            found = []
            for t in range(len(tokens) - 2 - step):
                if all(flags[t + 2 : t + 3 + step]) and int(best[t + 1 + step]) in known:
                    output = chained(head, entries, embedded, t, step)
                    truth, log_q = p[t + 1 + step], torch.log_softmax(rows_of_output @ output, 0)
                    loss = F.smooth_l1_loss(output, features[t + 1 + step]) - 0.1 * (truth * log_q).sum()
                    if hass:
                        likeliest = truth.topk(10).indices
                        loss = loss - (truth[likeliest] * log_q[likeliest]).sum()
                    found.append(loss)
            if found:
                total = total + torch.stack(found).mean() / len(CHATS)
    return total


def chained(head: Eagle1Head, entries: list, embedded: Tensor, t: int, step: int) -> Tensor:
    """What the row `t` says at `step`, every feature of its own cut from what made it."""
    keys, values = [e.key for e in entries[: t + 1]], [e.value for e in entries[: t + 1]]
    query, residual = entries[t].query, entries[t].residual
    for s in range(step + 1):
        if s:
            own = head.project(embedded[t + 1 + s], output.detach(), torch.tensor(t + s))  # noqa: F821
            query, residual = own.query, own.residual
            keys, values = [*keys, own.key], [*values, own.value]
        group = query.shape[0] // keys[0].shape[0]
        k = torch.stack(keys).repeat_interleave(group, 1)
        v = torch.stack(values).repeat_interleave(group, 1)
        weights = torch.softmax(torch.einsum("qd,sqd->qs", query, k) / query.shape[1] ** 0.5, -1)
        output = head.finish(residual, torch.einsum("qs,sqd->qd", weights, v).flatten())
    return output


@pytest.mark.parametrize(("method", "steps"), [(EAGLE, 1), (HASS, 3)])
def test_loss_and_gradients_are_those_of_plain_autograd(method: str, steps: int, monkeypatch) -> None:
    monkeypatch.setattr(eagle, "NOISE", 0.0)
    target, vocabulary = target_of("llama"), some_vocabulary(70, 3)
    lesson = lesson_for(method)
    head = new_eagle(target, lesson, vocabulary)
    supply = FeatureSupply(target, head, vocabulary)
    exact = deepcopy(head).double()
    result = lesson.learn(head, supply.batch(CHATS), supply.to_draft)
    result.loss.backward()
    wanted = plain_loss(exact, target, vocabulary.ids, steps, method == HASS)
    wanted.backward()
    torch.testing.assert_close(result.loss.double(), wanted, rtol=1e-5, atol=1e-6)
    for (name, mine), plain in zip(head.named_parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.double(), plain.grad, rtol=1e-4, atol=1e-6, msg=name)
    assert len(result.steps) == steps
    torch.testing.assert_close(sum(step.loss for step in result.steps), result.loss.detach())


def test_noise_is_small_and_belongs_to_the_batch_of_the_run() -> None:
    target, lesson = target_of("llama"), lesson_for(EAGLE)
    head = new_eagle(target, lesson, EVERY_ID)
    batch = FeatureSupply(target, head, EVERY_ID).batch(CHATS)
    one, again = eagle._noised(batch).features, eagle._noised(batch).features
    assert torch.equal(one, again)
    moved = (one - batch.features).abs()
    assert 0.04 < float(moved.mean()) < 0.06
    assert float(moved.max()) <= 0.1
    other = FeatureSupply(target, head, EVERY_ID).batch(CHATS)
    object.__setattr__(other, "seed", 5)
    assert not torch.equal(eagle._noised(other).features, one)


RUN = {"epochs": 4, "batch_tokens": 60, "lr": 4e-3, "ttt_steps": 2, "draft_vocab": 64, "eval_share": 0.2}


@pytest.mark.parametrize(("method", "dtype"), [(EAGLE, torch.float32), (HASS, torch.bfloat16)])
def test_a_run_learns_and_goes_on_bit_for_bit(method: str, dtype: torch.dtype, tmp_path: Path) -> None:
    target = target_of("llama", dtype)
    config = TrainConfig(method=method, eval_every=3, save_every=2, **RUN)
    whole = train(target, RUN_CHATS, config, tmp_path / "whole")
    losses = [entry["loss"] for entry in whole.history if "loss" in entry]
    third = len(losses) // 3
    assert sum(losses[-third:]) < 0.95 * sum(losses[:third])
    train(target, RUN_CHATS, config, tmp_path / "stopped", stop_after=3)
    train(target, RUN_CHATS, config, tmp_path / "stopped")
    same(tmp_path / "whole", tmp_path / "stopped")
    head = load_head(tmp_path / "whole")
    assert isinstance(head.head, Eagle1Head)
    assert len(whole.best.alpha) == (2 if method == EAGLE else 3)
    assert f"`{method}`" in (tmp_path / "whole" / "README.md").read_text()


def test_the_walk_makes_the_steps_of_decoding() -> None:
    """A head that has half learned these very answers drafts some of their tokens right."""
    target, depth = target_of("llama"), 4
    lesson = lesson_for(HASS, ttt_steps=depth, loss="soft")
    head = new_eagle(target, lesson, EVERY_ID)
    model = bind(DraftModel(head, EVERY_ID, HeadInfo(None)), target)
    supply = FeatureSupply(target, head, EVERY_ID)
    params = [SamplingParams(max_new_tokens=n, temperature=0.0, ignore_eos=True) for n in LENGTHS]
    chats, _ = talk(target, make_proposer(EAGLE2, target, head=model, shape=TreeShape.chain(1)), params)
    optimizer, batch = torch.optim.AdamW(head.parameters(), lr=5e-3), supply.batch(chats)
    for _ in range(40):
        optimizer.zero_grad()
        lesson.learn(head, batch, supply.to_draft).loss.backward()
        optimizer.step()
    for name in (EAGLE, EAGLE2):
        _, results = talk(target, make_proposer(name, target, head=model, shape=TreeShape.chain(depth)), params)
        with torch.no_grad():
            chains = chains_of(lesson.rehearse(head, batch, supply.to_draft), batch, supply.to_draft)
        walked = [chain.walk().runs.tolist() for chain in chains]
        assert walked == [list(r.accepted) for r in results if r.steps]
        assert {0, 1, 2} < {accepted for steps in walked for accepted in steps}  # or the test would say little
        got = simulate(lesson, head, [batch], supply.to_draft)
        assert got.alpha == count_alpha(results, depth).alpha


def test_eagles_tree_is_static_and_eagle2s_is_not() -> None:
    target, shape = target_of("llama"), TreeShape(3, 3, 8)
    trees = {}
    for name in (EAGLE, EAGLE2):
        proposer = make_proposer(name, target, head=random_eagle(target), shape=shape)
        watched = Watched(proposer)
        Engine(target, watched).generate([Request((5, 17, 33), SamplingParams(max_new_tokens=12, ignore_eos=True))])
        trees[name] = {tuple(proposal.tree.parent_list) for _, proposal in watched.seen[:-4]}
        assert proposer.max_nodes == 8
    assert len(trees[EAGLE]) == 1
    assert len(trees[EAGLE2]) > 1
    assert node_count(eagle.PUBLISHED) == 26


@pytest.mark.parametrize("pruned", [False, True])
def test_a_head_is_written_read_back_and_read_by_others(pruned: bool, tmp_path: Path) -> None:
    target = target_of("llama")
    model = random_eagle(target, pruned=pruned)
    save_head(model, tmp_path / "head", dtype=torch.float32)
    again = bind(load_head(tmp_path / "head"), target)
    output = torch.randn(3, target.hidden_size)
    logits = target.logits(output)
    assert torch.equal(again.head_as(Eagle1Head).logits(output), model.head_as(Eagle1Head).logits(output))
    torch.testing.assert_close(model.head_as(Eagle1Head).logits(output), logits[:, model.vocabulary.ids])
    (tmp_path / "head" / "tercel.json").unlink()  # as EAGLE's own files are
    public = read_head(tmp_path / "head", num_layers=target.num_layers)
    assert public.format == "eagle1"
    assert torch.equal(bind(public, target).head_as(Eagle1Head).logits(output), logits)
    for name, tensor in public.head.named_parameters():
        assert torch.equal(tensor, model.head.get_parameter(name)), name


def test_openvino_computes_a_part_of_the_vocabulary() -> None:
    model = random_eagle(target_of("llama"))
    head, output = model.head_as(Eagle1Head), torch.randn(2, 3, 32)
    torch.testing.assert_close(HeadGraphs(head).logits(output), head.logits(output), rtol=1e-4, atol=1e-4)


def test_a_copy_copies_no_target() -> None:
    head = random_eagle(target_of("llama"), pruned=False).head_as(Eagle1Head)
    copied = deepcopy(head)
    assert copied._output_layer is head._output_layer
    assert copied.fc.weight is not head.fc.weight


def test_no_tau_is_foretold_from_another_methods_runs() -> None:
    told = expected_tau(TrainConfig(method=HASS), 10_000, 10_000.0)
    assert told.tau is None
    assert told.told == "the runs that were measured are of eagle3, not of hass"


def test_settings_of_another_method_are_refused() -> None:
    with pytest.raises(TercelError, match="hass learns the target's distribution; leave out loss: lk"):
        lesson_for(HASS, loss="lk")
    with pytest.raises(TercelError, match="method must be one of eagle3, eagle, hass"):
        TrainConfig(method="eagle9")


@pytest.mark.parametrize("steps", [1, 3])
def test_the_papers_ablations_of_eagle3(steps: int, tmp_path: Path) -> None:
    """Top layer only, with a feature loss beside, with and without training-time test."""
    target, vocabulary = target_of("llama"), some_vocabulary(70, 3)
    config = TrainConfig(feature_layers=(target.num_layers,), feature_loss=0.5, ttt_steps=steps)
    lesson, plain = lesson_of(config), lesson_of(TrainConfig(feature_layers=(target.num_layers,), ttt_steps=steps))
    torch.manual_seed(0)
    head = new_head(lesson.new_config(target, len(vocabulary)))
    assert isinstance(head, Eagle3Head)
    supply = FeatureSupply(target, head, vocabulary, keeps_hidden=lesson.keeps_hidden)
    batch = supply.batch(CHATS)
    together = torch.cat([target.encode(torch.from_numpy(c.tokens[None]).long()).hidden[0] for c in CHATS])
    assert torch.equal(batch.features, together)
    result, without = lesson.learn(head, batch, supply.to_draft), plain.learn(head, batch, supply.to_draft)
    said = list(roll_out(head, batch, result.plan))
    more = torch.zeros(())
    for step, output in enumerate(said):
        goal = row_goals(batch, supply.to_draft, lesson.objective, result.plan, step)
        truth = together[imitated(result.plan.rows[step], step)]
        far = torch.stack([F.smooth_l1_loss(*pair) for pair in zip(head.norm(output), truth, strict=True)])
        more = more + 0.5 * (far * goal.weights).sum()
    torch.testing.assert_close(result.loss, without.loss + more)
    torch.testing.assert_close(sum(step.loss for step in result.steps), result.loss.detach())
    learned, wanted = (
        torch.autograd.grad(loss, list(head.parameters())) for loss in (result.loss, without.loss + more)
    )
    for (name, _), mine, theirs in zip(head.named_parameters(), learned, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-7, msg=name)
    save_head(DraftModel(head, vocabulary, HeadInfo(None)), tmp_path / "head")
    again = bind(load_head(tmp_path / "head"), target)
    asked = Request((5, 17, 33), SamplingParams(max_new_tokens=8, ignore_eos=True))
    drafted = Engine(target, make_proposer("eagle3", target, head=again, shape=TreeShape(3, 3, 8)))
    vanilla = Engine(target, make_proposer("vanilla", target))
    assert drafted.generate([asked])[0].tokens == vanilla.generate([asked])[0].tokens
    assert "Features: the last hidden state, after the final norm." in head_card(again)
    with pytest.raises(TercelError, match=r"reads the last hidden state, after the final norm"):
        check_expressible(ENGINES["vllm"], again.head.config, vocabulary)


def test_a_run_with_a_feature_loss_has_another_key() -> None:
    assert TrainConfig(feature_loss=0.0).digest("d", "t") == TrainConfig().digest("d", "t")
    assert TrainConfig(feature_loss=1.0).digest("d", "t") != TrainConfig().digest("d", "t")
