"""Losses and their closed-form gradients against autograd in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tercel.draft import DraftVocabulary
from tercel.train import losses
from tercel.train.losses import Teacher, draft_loss

R, U, H, W = 11, 7, 6, 9


def case(seed: int = 0):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    probs = torch.softmax(2 * random(U, W), -1)
    teacher = Teacher(probs, probs.argmax(-1))
    rows = torch.randint(U, (R,), generator=generator)
    labels = torch.randint(W, (R,), generator=generator)
    weights = torch.rand(R, generator=generator)
    weights[3] = 0.0
    return random(R, H), random(W, H), teacher, rows, labels, weights


def by_autograd(kind, hidden, weight, teacher, rows, labels, weights):
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    q = torch.softmax(hidden @ weight.T, -1)
    p = teacher.probs[rows].double()
    value = {
        "soft": lambda: -(p * q.log()).sum(-1),
        "hard": lambda: -q.gather(-1, labels[:, None])[:, 0].log(),
        "lk": lambda: -torch.minimum(p, q).sum(-1).log(),
    }[kind]()
    loss = (value * weights.double()).sum()
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight)), q


@pytest.mark.parametrize("chunk", [4, 512])
@pytest.mark.parametrize("kind", ["soft", "hard", "lk"])
def test_values_and_gradients(monkeypatch, kind, chunk):
    monkeypatch.setattr(losses, "CHUNK_ROWS", chunk)
    hidden, weight, teacher, rows, labels, weights = case()
    wanted, grad_hidden, grad_weight, q = by_autograd(kind, hidden, weight, teacher, rows, labels, weights)
    hidden.requires_grad_()
    weight.requires_grad_()
    result = draft_loss(hidden, weight, teacher, rows, labels, weights, kind)
    (3 * result.loss).backward()
    torch.testing.assert_close(result.loss.double(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(hidden.grad.double(), 3 * grad_hidden, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weight.grad.double(), 3 * grad_weight, rtol=1e-4, atol=1e-5)
    assert torch.equal(result.drafts, q.argmax(-1))
    assert torch.equal(result.loss, result.parts.sum())
    assert (hidden.grad[3] == 0).all()  # its weight is 0


def test_a_row_without_a_label_does_not_spoil_hard_labels():
    hidden, weight, teacher, rows, labels, weights = case(1)
    labels[2], weights[2] = -1, 0.0
    hidden.requires_grad_()
    result = draft_loss(hidden, weight, teacher, rows, labels, weights, "hard")
    result.loss.backward()
    assert torch.isfinite(result.loss)
    assert (hidden.grad[2] == 0).all()


def test_of_a_tie_the_first_is_drafted():
    hidden, weight = torch.ones(2, 1), torch.tensor([[1.0], [2.0], [2.0]])
    teacher = Teacher(torch.full((1, 3), 1 / 3), torch.tensor([0]))
    rows, weights = torch.zeros(2, dtype=torch.long), torch.ones(2)
    assert draft_loss(hidden, weight, teacher, rows, torch.tensor([1, 2]), weights).drafts.tolist() == [1, 1]


def test_only_the_drafts_asked_for_are_made(monkeypatch):
    monkeypatch.setattr(losses, "CHUNK_ROWS", 4)
    every = draft_loss(*case()).drafts
    some = draft_loss(*case(), drafted=6).drafts
    assert some.tolist() == [*every[:6].tolist(), *[-1] * (R - 6)]


@pytest.mark.parametrize("kind", ["soft", "hard", "lk"])
def test_bfloat16_is_as_near_as_its_own_logits_allow(kind):
    """Gradients within 3 % of the exact ones of the same rounded inputs, in the mean square."""
    generator = torch.Generator().manual_seed(2)
    hidden, weight = torch.randn(64, 32, generator=generator), torch.randn(300, 32, generator=generator)
    probs = torch.softmax(2 * torch.randn(40, 300, generator=generator), -1)
    hidden, weight, probs = (x.bfloat16() for x in (hidden, 0.5 * weight, probs))
    teacher = Teacher(probs, probs.argmax(-1))
    rows, labels = (torch.randint(n, (64,), generator=generator) for n in (40, 300))
    weights = torch.rand(64, generator=generator)
    wanted, grad_hidden, grad_weight, _ = by_autograd(kind, hidden, weight, teacher, rows, labels, weights)
    hidden.requires_grad_()
    weight.requires_grad_()
    result = draft_loss(hidden, weight, teacher, rows, labels, weights, kind)
    result.loss.backward()
    assert abs(float(result.loss.detach()) / float(wanted) - 1) < 2e-3
    for mine, exact in ((hidden.grad, grad_hidden), (weight.grad, grad_weight)):
        assert (mine.double() - exact).norm() < 0.03 * exact.norm()


def test_no_gradient_is_made_where_none_is_wanted():
    hidden, weight, teacher, rows, labels, weights = case()
    weight.requires_grad_()
    with torch.no_grad():
        result = draft_loss(hidden, weight, teacher, rows, labels, weights)
    assert not result.loss.requires_grad


@pytest.mark.parametrize("pruned", [True, False])
def test_the_teacher_is_the_target_restricted_and_renormalised(monkeypatch, pruned):
    monkeypatch.setattr(losses, "CHUNK_ROWS", 3)
    generator = torch.Generator().manual_seed(0)
    hidden, output = torch.randn(8, 5, generator=generator), torch.randn(12, 5, generator=generator)
    target = SimpleNamespace(logits=lambda h: h @ output.T)
    ids = torch.tensor([1, 2, 5, 7, 11]) if pruned else torch.arange(12)
    vocabulary = DraftVocabulary(ids, 12)
    teacher = Teacher.of(target, hidden, vocabulary, vocabulary.to_draft())
    p = torch.softmax((hidden @ output.T).double(), -1)
    kept = p[:, ids] / p[:, ids].sum(-1, keepdim=True)
    torch.testing.assert_close(teacher.probs.double(), kept, rtol=1e-5, atol=1e-7)
    best = p.argmax(-1).tolist()
    assert teacher.best.tolist() == [ids.tolist().index(b) if b in ids.tolist() else -1 for b in best]
    assert (teacher.best < 0).any() == pruned
