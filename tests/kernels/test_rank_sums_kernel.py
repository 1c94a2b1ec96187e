"""The kernel of sums over GPUs, as one rank among others whose numbers and flags are there already."""

import pytest
import torch

from tests.kernels.interpreted import kernel_device, tries_kernels

SHAPES = ((5,), (64, 64), (1500,), (), (7,))
NORMED = 3


def rows(seed):
    """Tensors of a rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


@tries_kernels
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("rank", [0, 1])
def test_sums_in_the_order_of_ranks_and_norms(world, rank):
    from torchrl_perf.kernels import rank_sums

    device = kernel_device()
    of_ranks = [[one.to(device) for one in rows(number)] for number in range(world)]
    places = [0]
    for one in of_ranks[0]:
        places.append(places[-1] + -(-one.numel() // 4) * 4)
    parts, room = rank_sums.parts_of(of_ranks[0])
    assert parts == 9
    whole = {"dtype": torch.int32, "device": device}
    exchange = rank_sums.Exchange(
        tuple(places),
        tuple(torch.zeros(2 * places[-1], device=device) for _ in range(world)),
        tuple(torch.zeros(parts * world, **whole) for _ in range(world)),
        rank,
        torch.full((parts,), 2**31 - 3, **whole),  # the counts pass the largest number
        torch.zeros((), **whole),
        torch.empty(room, device=device),
    )
    for number in range(1, 5):
        epoch = torch.tensor(2**31 - 3 + number).to(torch.int32).item()
        scale = float(number)
        for other in set(range(world)) - {rank}:
            half = (epoch & 1) * places[-1]
            for one, place in zip(of_ranks[other], places, strict=False):
                exchange.buffers[other][half + place : half + place + one.numel()] = scale * one.flatten()
            exchange.flags[rank].view(parts, world)[:, other] = epoch
        flat, norms = rank_sums.summed([scale * one for one in of_ranks[rank]], exchange, NORMED)
        for column, place in zip(zip(*of_ranks, strict=True), places, strict=False):
            expected = scale * column[0]
            for one in column[1:]:
                expected = expected + scale * one
            end = place + expected.numel()
            assert torch.equal(flat[place:end], expected.flatten())
            assert not flat[end : -(-end // 4) * 4].any(), "what pads a tensor is 0"
        sums = [scale * sum(column) for column in zip(*of_ranks, strict=True)]
        torch.testing.assert_close(norms, torch.stack([one.norm() for one in sums[:NORMED]]))
        assert (exchange.epochs == epoch).all()
        assert not exchange.count
        for other in set(range(world)) - {rank}:
            told = exchange.flags[other].view(parts, world)
            assert (told[:, rank] == epoch).all()
            assert not told[:, other].any()
