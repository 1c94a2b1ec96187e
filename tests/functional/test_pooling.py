"""Pools over sets: loops over rows, order, padding, empty sets, gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_perf.functional.pooling import masked_attention, masked_max, masked_mean

F, E, H = 3, 4, 2


def pool(kind, values, mask, generator=None):
    if kind == "attention":
        query = torch.linspace(-1, 1, H * E, dtype=values.dtype).view(H, E).expand(*values.shape[:-2], H, E)
        keys = values.repeat_interleave(E, -1).view(*values.shape[:-1], F, E)[..., :H, :]
        return masked_attention(query, keys, values.unsqueeze(-2).expand(*values.shape[:-1], H, F), mask).flatten(-2)
    return {"mean": masked_mean, "max": masked_max}[kind](values, mask)


def oracle(kind, values, mask):
    """One set after the other, without the padding."""
    rows = []
    for row, real in zip(values.reshape(-1, *values.shape[-2:]), mask.reshape(-1, mask.shape[-1]), strict=True):
        kept = row[real]
        if not len(kept):
            rows.append(row.new_zeros(F * H if kind == "attention" else F))
        elif kind == "attention":
            query = torch.linspace(-1, 1, H * E, dtype=row.dtype).view(H, E)
            heads = []
            for head in range(H):
                scores = torch.stack([(query[head] * one[head]).sum() / E**0.5 for one in kept])
                heads.append((scores.softmax(0).unsqueeze(-1) * kept).sum(0))
            rows.append(torch.cat(heads))
        else:
            rows.append(kept.mean(0) if kind == "mean" else kept.amax(0))
    return torch.stack(rows).view(*values.shape[:-2], -1)


KINDS = ["mean", "max", "attention"]


@pytest.mark.parametrize("kind", KINDS)
@given(shape=st.sampled_from([(), (1,), (4,), (2, 3)]), m=st.integers(1, 5), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_equals_a_loop(kind, shape, m, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, m, F, dtype=torch.float64, generator=generator)
    mask = torch.rand(*shape, m, generator=generator) < 0.6
    torch.testing.assert_close(pool(kind, values, mask), oracle(kind, values, mask))


@pytest.mark.parametrize("kind", KINDS)
def test_padding_may_be_nan_and_gets_no_gradient(kind):
    values = torch.randn(3, 4, F, dtype=torch.float64)
    mask = torch.tensor([[True, True, False, False], [False, True, False, True], [False] * 4])
    values[~mask] = torch.nan
    values.requires_grad_()
    out = pool(kind, values, mask)
    assert (out[2] == 0).all()
    out.sum().backward()
    assert (values.grad[~mask] == 0).all()
    assert values.grad.isfinite().all()


def test_ties_share_the_gradient():
    values = torch.ones(2, 1, requires_grad=True)
    masked_max(values, torch.tensor([True, True])).sum().backward()
    assert values.grad.flatten().tolist() == [0.5, 0.5]
