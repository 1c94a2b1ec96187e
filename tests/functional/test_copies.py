"""Copies of many tensors equal copies one by one, whatever their dtypes, sizes and memory orders."""

import pytest
import torch

from torchrl_perf.functional.rows.copies import SMALL, _copy_by_dtype, copy_all_


def pairs(device):
    """Targets of zeros and sources: small and large, of several dtypes, transposed, expanded, converted, empty."""
    kinds = [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64, torch.bool]
    sources = [(10 * torch.randn(3 + i, 2, device=device)).to(dtype) for i, dtype in enumerate(kinds * 3)]
    targets = [torch.zeros_like(source) for source in sources]
    for target, source in (
        (torch.zeros(SMALL + 1, device=device), torch.randn(SMALL + 1, device=device)),
        (torch.zeros(4, 6, device=device), torch.randn(6, 4, device=device).t()),
        (torch.zeros(6, 4, device=device).t(), torch.randn(6, 4, device=device).t()),
        (torch.zeros(4, 3, device=device)[:, 1], torch.randn(4, device=device)),
        (torch.zeros(4, 3, device=device), torch.randn(1, 3, device=device).expand(4, 3)),
        (torch.zeros(4, 3, device=device), torch.randn(3, device=device)),
        (torch.zeros(5, dtype=torch.int64, device=device), 10 * torch.randn(5, device=device)),
        (torch.zeros(0, 3, device=device), torch.zeros(0, 3, device=device)),
        (torch.zeros((), device=device), torch.ones((), device=device)),
    ):
        targets.append(target)
        sources.append(source)
    return targets, sources


def test_they_equal_copies_one_by_one(variant):
    targets, sources = pairs(variant.device)
    expected = [torch.zeros_like(target).copy_(source) for target, source in zip(targets, sources, strict=True)]

    def copy():
        copy_all_(targets, sources)
        return targets[0]

    fn = variant(copy)
    fn()
    for target, value in zip(targets, expected, strict=True):
        assert torch.equal(target, value)


@pytest.mark.parametrize("copy_all", [copy_all_, _copy_by_dtype])  # the second is what runs on CUDA
def test_between_devices(copy_all, device):
    targets, sources = pairs(device)
    copy_all(targets, [source.cpu() for source in sources])
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source.to(target.dtype).expand_as(target))


def test_nothing_to_copy():
    copy_all_([], [])
