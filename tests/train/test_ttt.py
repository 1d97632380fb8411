"""Training-time test: loss and every gradient against the naive reference, and what it keeps in memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tercel.draft import DraftModel, DraftVocabulary, Eagle3Head, HeadInfo, TrainingRecord, save_head
from tercel.draft.alignment import plan_rows
from tercel.target_model.model import Target
from tercel.train.batches import supervised_counts
from tercel.train.config import Objective, TrainConfig
from tercel.train.features import FeatureSupply
from tercel.train.goals import Batch, Extent
from tercel.train.initial import first_head
from tercel.train.ttt import roll_out, training_time_test
from tests.draft.heads_for_tests import some_vocabulary
from tests.tiny import VOCAB
from tests.train.naive import NaiveHead, naive_ttt
from tests.train.worlds import chat, decode_with_cache, head_for, random_chat, target_of


def batch_of(target, head, vocabulary, chats) -> tuple[Batch, torch.Tensor]:
    supply = FeatureSupply(target, head, vocabulary)
    return supply.batch(chats), supply.to_draft


CHATS = [
    random_chat(11, 1),
    chat([5, 6, 7, 8], [False, False, False, True]),  # one row only
    random_chat(8, 2),
    chat([9, 10, 11, 12, 13], [True] * 5),  # supervised from the start
]


@pytest.mark.parametrize(
    ("arch", "flags", "objective"),
    [
        ("llama", {}, Objective(steps=4)),
        ("llama", {}, Objective(steps=3, oov="keep")),
        ("llama", {}, Objective(steps=3, kind="hard", decay=None)),
        ("qwen3", {}, Objective(steps=3, kind="lk", average="token")),
        ("gemma3", {"fc_norm": True, "norm_output": True}, Objective(steps=3)),
        ("granite", {"feature_layers": (0, 2, 4, 6, 7)}, Objective(steps=2)),
        ("llama", {"feature_layers": (7,)}, Objective(steps=1)),
        # what heads of other makers bring along
        ("llama", {"norm_before_residual": True, "attention_bias": True}, Objective(steps=3)),
        ("qwen2", {"norm_before_fc": True, "own_embeddings": True}, Objective(steps=3)),
        ("llama", {"hidden_size": 24, "fc_norm": True, "norm_before_residual": True}, Objective(steps=3)),
        ("llama", {"num_decoder_layers": 2}, Objective(steps=4)),
        ("qwen2", {"num_decoder_layers": 3, "attention_bias": True, "norm_output": True}, Objective(steps=3)),
    ],
)
def test_loss_and_gradients_equal_the_naive_ones(arch, flags, objective):
    target = target_of(arch)
    vocabulary = some_vocabulary(70, 3)
    head = head_for(target, vocabulary, **flags)
    equals_the_naive_form(target, head, vocabulary, objective)


def equals_the_naive_form(target: Target, head: Eagle3Head, vocabulary: DraftVocabulary, objective: Objective) -> None:
    batch, to_draft = batch_of(target, head, vocabulary, CHATS)
    result = training_time_test(head, batch, to_draft, objective)
    result.loss.backward()
    naive = NaiveHead(head)
    wanted = naive_ttt(
        naive,
        target.model,
        CHATS,
        vocabulary.ids,
        objective.steps,
        objective.decay,
        objective.kind,
        objective.oov,
        objective.average,
    )
    wanted.backward()
    torch.testing.assert_close(result.loss.double(), wanted, rtol=1e-5, atol=0)
    for name, parameter in head.named_parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None, name
            continue
        truth = naive.w[name].grad
        assert truth.abs().max() > 0, name
        error = (parameter.grad.double() - truth).abs().max() / truth.abs().max()
        assert error < 1e-4, (name, float(error))


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
STARTS: list[dict[str, Any]] = [
    {"norm_before_residual": True},
    {"norm_before_fc": True},
    {"attention_bias": True},
    {"own_embeddings": True},
    {"own_output": False},
    {"hidden_size": 24, "own_embeddings": True, "norm_before_residual": True, "norm_output": True},
    {"norm_before_fc": True, "attention_bias": True, "own_output": False},
    {"rope_parameters": LLAMA3},
]


@pytest.mark.parametrize("flags", STARTS, ids=lambda flags: " ".join(flags))
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_a_head_to_start_from_is_trained_as_the_naive_form_says(tmp_path, flags, frozen):
    """Whatever a head of another maker brings along, and with its output layer and embeddings left as they are."""
    target, vocabulary = target_of("llama"), some_vocabulary(70, 3)
    start = head_for(target, vocabulary, **flags)
    record = TrainingRecord(embeddings="frozen" if frozen else None)
    save_head(DraftModel(start, vocabulary, HeadInfo(None, record)), tmp_path, dtype=torch.float32)
    config = TrainConfig(start_from=str(tmp_path), freeze_lm_head=frozen)
    head, theirs, _ = first_head(config, target, CHATS, supervised_counts(CHATS, target.vocab_size))
    assert torch.equal(theirs.ids, vocabulary.ids)
    learning = {name for name, parameter in head.named_parameters() if parameter.requires_grad}
    assert {"lm_head.weight", "embed_tokens.weight"}.isdisjoint(learning) == frozen
    of_target = {"lm_head.weight": target.output_layer.rows(vocabulary.ids)}  # lent to a head without
    for name, weights in head.state_dict().items():
        assert torch.equal(weights, {**of_target, **start.state_dict()}[name]), name
    equals_the_naive_form(target, head, vocabulary, Objective(steps=3))


def test_packing_changes_nothing():
    target, vocabulary = target_of("qwen2"), some_vocabulary(70, 3)
    head = head_for(target, vocabulary)
    objective = Objective(steps=3)
    batch, to_draft = batch_of(target, head, vocabulary, CHATS)
    together = training_time_test(head, batch, to_draft, objective).loss
    alone = sum(
        training_time_test(head, batch_of(target, head, vocabulary, [one])[0], to_draft, objective).loss
        for one in CHATS
    )
    torch.testing.assert_close(together, alone / len(CHATS), rtol=1e-5, atol=0)


@given(
    split=st.lists(st.integers(0, 3), min_size=7, max_size=7),
    kind=st.sampled_from(["soft", "hard", "lk"]),
    oov=st.sampled_from(["drop", "keep"]),
    average=st.sampled_from(["token", "sequence"]),
    steps=st.integers(1, 6),
    seed=st.integers(0, 9),
)
@settings(max_examples=40, deadline=None)
def test_micro_batches_add_up_to_one_batch(split, kind, oov, average, steps, seed):
    """Loss and gradient of chats dealt out at random are those of all of them together: also where a part has no row
    left at a step, or none that counts."""
    target, vocabulary = target_of(), some_vocabulary(30, 3)  # most rows are dropped
    head = head_for(target, vocabulary, seed)
    chats = [*CHATS, random_chat(15, seed), random_chat(6, seed + 10), chat([5, 6, 7, 8], [False, False, True, False])]
    objective = Objective(steps=steps, kind=kind, oov=oov, average=average)
    supply = FeatureSupply(target, head, vocabulary)
    groups = [[one for one, part in zip(chats, split, strict=True) if part == number] for number in sorted(set(split))]
    batches = [supply.batch(group) for group in groups]
    extents = [Extent.of(batch, supply.to_draft, objective) for batch in batches]
    whole = sum(extents[1:], extents[0])
    assert whole == Extent.of(supply.batch(chats), supply.to_draft, objective)

    def learned(parts: list[Batch], extent: Extent | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        head.zero_grad()
        losses = [training_time_test(head, part, supply.to_draft, objective, whole=extent).loss for part in parts]
        sum(losses).backward()
        return sum(losses).detach(), [p.grad.clone() for p in head.parameters()]

    (loss, gradients), (wanted, truth) = learned(batches, whole), learned([supply.batch(chats)], None)
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(gradients, truth, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


def test_the_prompt_of_a_turn_is_context_but_no_row():
    """A change in a prompt token moves the loss; its own prediction never enters it."""
    target, vocabulary = target_of(), DraftVocabulary.full(VOCAB)
    head = head_for(target, vocabulary)
    one = random_chat(14, 5)
    batch, to_draft = batch_of(target, head, vocabulary, [one])
    rows = training_time_test(head, batch, to_draft, Objective(steps=3)).plan.rows
    for step, counted in enumerate(rows):
        assert all(one.supervised[int(row) + 2 + step] for row in counted)
    features = batch.features.clone().requires_grad_()
    loss = training_time_test(head, dataclasses.replace(batch, features=features), to_draft, Objective(steps=3)).loss
    loss.backward()
    used = features.grad.abs().sum(-1) > 0
    assert used[:-2].all()
    assert not used[-2:].any()  # the last row that predicts anything is the last but two


def test_a_batch_without_rows_has_no_loss():
    target, vocabulary = target_of(), DraftVocabulary.full(VOCAB)
    head = head_for(target, vocabulary)
    for average in ("sequence", "token"):
        batch, to_draft = batch_of(target, head, vocabulary, [chat([4, 5, 6, 7], [False] * 4)])
        result = training_time_test(head, batch, to_draft, Objective(average=average))
        assert float(result.loss) == 0
        assert result.steps == ()


def test_what_is_kept_for_the_backward_grows_linearly_with_length():
    target, vocabulary = target_of(), some_vocabulary(16)
    head = head_for(target, vocabulary)

    def kept(length: int) -> tuple[int, int]:
        sizes: list[int] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        one = chat([4 + i % 100 for i in range(length)], [True] * length)
        batch, to_draft = batch_of(target, head, vocabulary, [one])
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            training_time_test(head, batch, to_draft, Objective(steps=3)).loss.backward()
        return sum(sizes), max(sizes)

    (short, _), (double, largest) = kept(400), kept(800)
    assert double < 2.1 * short
    assert largest < 800 * 800


@pytest.mark.parametrize("layers", [1, 2])
def test_head_outputs_are_those_of_decoding_with_a_cache(layers):
    """Training alignment == decoding alignment: row `t` at step `s` is the head's entry for the token at
    position `t + 1 + s` when the tokens up to `t + 1` are committed and the rest drafted."""
    target, vocabulary = target_of("gemma3"), some_vocabulary(30)
    head = head_for(target, vocabulary, num_decoder_layers=layers)
    one = chat(random_chat(10, 8).tokens.tolist(), [False] * 3 + [True] * 7)
    batch, _ = batch_of(target, head, vocabulary, [one])
    plan = plan_rows(batch.supervised, batch.lengths, 4)
    trained = list(roll_out(head, batch, plan))
    features = target.encode(batch.tokens[None], head.config.feature_layers).features[0]
    for row in plan.rows[0].tolist():
        decoded = decode_with_cache(head, target, features[: row + 1], one.tokens.tolist(), drafts=4)
        for step, rows in enumerate(plan.rows):
            if row in rows:
                index = rows.tolist().index(row)
                torch.testing.assert_close(trained[step][index], decoded[step], rtol=1e-4, atol=1e-5)
