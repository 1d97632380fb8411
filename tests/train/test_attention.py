"""Attention of training-time test against a dense mask over everything, and its gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tercel.train import attention
from tercel.train.attention import segments, ttt_attention

HEADS, KV, SIZE = 4, 2, 3


def dense(query, key, value, extra_keys, extra_values, rows, lengths):
    """Row by row, the keys a row sees put in one list and given one softmax."""
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    out = []
    for i, row in enumerate(rows.tolist()):
        seen = [t for t in range(row + 1) if sequence[t] == sequence[row]]
        heads = []
        for head in range(query.shape[1]):
            kv = head // (query.shape[1] // key.shape[1])
            keys = torch.cat([key[seen, kv], extra_keys[:, i, kv]])
            values = torch.cat([value[seen, kv], extra_values[:, i, kv]])
            weights = torch.softmax(keys @ query[i, head] / query.shape[2] ** 0.5, 0)
            heads.append(weights @ values)
        out.append(torch.cat(heads))
    return torch.stack(out)


def inputs(lengths, rows, steps, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()

    total = sum(lengths)
    return (
        random(len(rows), HEADS, SIZE),
        random(total, KV, SIZE),
        random(total, KV, SIZE),
        random(steps, len(rows), KV, SIZE),
        random(steps, len(rows), KV, SIZE),
    )


@pytest.mark.parametrize("chunk", [1, 2, 256])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_equals_dense_attention_and_so_do_its_gradients(monkeypatch, chunk, steps):
    monkeypatch.setattr(attention, "CHUNK_ROWS", chunk)
    lengths, rows = [5, 3, 4], torch.tensor([0, 2, 3, 6, 8, 10])  # 8 is a sequence's first token
    tensors = inputs(lengths, rows, steps)
    out = ttt_attention(*tensors, rows, segments(rows, lengths))
    wanted = dense(*tensors, rows, lengths)
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(out.shape, dtype=torch.float64)
    ours = torch.autograd.grad(out, tensors, upstream)
    theirs = torch.autograd.grad(wanted, tensors, upstream, allow_unused=True)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, torch.zeros_like(mine) if other is None else other)


def test_gradcheck():
    lengths, rows = [3, 2], torch.tensor([0, 2, 4])
    cut = segments(rows, lengths)
    assert torch.autograd.gradcheck(lambda *t: ttt_attention(*t, rows, cut), inputs(lengths, rows, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precisions_are_near(dtype):
    lengths, rows = [9], torch.arange(9)
    exact = inputs(lengths, rows, 2)
    low = [t.detach().to(dtype) for t in exact]
    out = ttt_attention(*low, rows, segments(rows, lengths))
    assert out.dtype == dtype
    wanted = dense(*exact, rows, lengths)
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=1e-6 if dtype == torch.float32 else 0.05)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 8), min_size=1, max_size=4), data=st.data())
def test_segments_cover_the_rows_and_stay_in_their_sequence(lengths, data):
    total = sum(lengths)
    rows = sorted(data.draw(st.sets(st.integers(0, total - 1))))
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    covered = []
    for piece in segments(torch.tensor(rows, dtype=torch.long), lengths):
        covered += range(piece.row_start, piece.row_end)
        mine = rows[piece.row_start : piece.row_end]
        assert piece.token_start in starts
        length = lengths[starts.index(piece.token_start)]
        assert all(piece.token_start <= row < piece.token_start + length for row in mine)
        assert piece.token_end == mine[-1] + 1
    assert covered == list(range(len(rows)))
