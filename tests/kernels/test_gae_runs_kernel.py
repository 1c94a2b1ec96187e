"""GAE whose threads own runs of steps, against the functional reference."""

import pytest
import torch

from tests.kernels.interpreted import gluon_kernels, kernel_device, tries_kernels
from torchrl_perf.functional import generalized_advantage_estimate


def rows_of(steps, envs, dtype=torch.float32):
    generator = torch.Generator().manual_seed(steps * envs)

    def draw(*shape):
        return torch.rand(shape, generator=generator)

    numbers = [(draw(steps, envs) - 0.5).to(dtype) for _ in range(3)]
    done = draw(steps, envs) < 0.1
    flags = [done, done & (draw(steps, envs) < 0.5)]
    return [each.to(kernel_device()) for each in (*numbers, *flags)]


def reference(gamma, lmbda, rows):
    rows = [each.cpu().t().unsqueeze(-1) for each in rows]
    rows = [each if each.dtype == torch.bool else each.float() for each in rows]
    found = generalized_advantage_estimate(gamma, lmbda, *rows)
    return [each.squeeze(-1).t().to(kernel_device()) for each in found]


@tries_kernels
@pytest.mark.parametrize(
    ("steps", "envs", "shape"),
    [(37, 11, (8, 4, 4)), (64, 8, (8, 8, 1)), (1, 3, (4, 2, 1)), (200, 5, (4, 4, 4)), (32, 16, (8, 2, 4))],
)
def test_it_equals_the_reference(steps, envs, shape):
    kernels = gluon_kernels("gae_runs")
    rows = rows_of(steps, envs)
    found = kernels.gae_in_runs(0.99, 0.95, *rows, kernels.Runs(*shape))
    for got, want in zip(found, reference(0.99, 0.95, rows), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@tries_kernels
def test_strides_half_precision_and_numbers_in_memory():
    kernels = gluon_kernels("gae_runs")
    rows = rows_of(50, 9, torch.float16)
    wide = [torch.stack([each, each], -1)[..., 1] for each in rows]
    numbers = [torch.tensor(number, device=kernel_device()) for number in (0.9, 0.8)]
    found = kernels.gae_in_runs(*numbers, *wide, kernels.Runs(8, 4, 1))
    assert [each.dtype for each in found] == [torch.float32] * 2
    for got, want in zip(found, reference(0.9, 0.8, rows), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@tries_kernels
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, where the interpreter runs
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_bad_numbers_stay_in_their_episode(bad):
    kernels = gluon_kernels("gae_runs")
    rows = rows_of(40, 8)
    rows[3][:], rows[4][:] = False, False
    rows[3][10], rows[4][10] = True, True
    rows[2][30, 2] = bad
    found, _ = kernels.gae_in_runs(0.99, 0.95, *rows, kernels.Runs(8, 4, 1))
    assert not found[11:31, 2].isfinite().any()
    assert found[:11].isfinite().all() and found[31:].isfinite().all()


@tries_kernels
def test_places_that_do_not_fit_in_32_bits_are_refused():
    kernels = gluon_kernels("gae_runs")
    assert kernels.takes((torch.empty(1).expand(4, 4), torch.empty(3, 5)))
    assert not kernels.takes((torch.empty(3, 5), torch.empty_strided((2, 1), (2**30, 1), device="meta")))
