"""A step of Adam in one launch, against the reference of each parameter: values, moments, targets, norms, guard."""

import math

import pytest
import torch

from tests.kernels.interpreted import kernel_device, tries_kernels
from torchrl_perf.functional.adam import AdamSettings, adam_step_, bias_corrections

SHAPES = [(2, 300, 7), (2, 1, 7), (5000,), (3,)]


class Case:
    """Parameters, gradients and moments at random, and the step by both means."""

    def __init__(self, seed, tail):
        generator = torch.Generator().manual_seed(seed)
        shapes = [*SHAPES, *[()] * tail]
        made = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(5)]
        self.params, self.grads, self.means, self.targets, spreads = made
        self.spreads = [value.abs() for value in spreads]
        self.steps, self.tail = torch.arange(len(shapes)).float(), tail
        self.rates = torch.tensor(1e-2), torch.tensor(1e-3)
        self.groups = [0] * len(SHAPES) + [1] * tail

    def kernel(self, loss, settings, limit, tau):
        from torchrl_perf.kernels.guarded_adam import Columns, Layout, launch_step

        device = kernel_device()
        squares, places = [], [0]
        for grad in self.grads[: len(SHAPES)]:
            parts = [part.square().sum() for part in grad.reshape(-1).chunk(3)]
            squares += parts
            places.append(places[-1] + len(parts))
        rows = [tuple(v.clone().to(device) for v in row)
                for row in (self.params, self.means, self.spreads, self.targets)]  # fmt: skip
        norms = torch.zeros(len(self.params), device=device)
        columns = Columns(*rows, self.steps.flip(0).to(device), norms)
        numbers = list(reversed(range(len(self.params))))  # the optimiser's order may be another
        tau = tau.to(device) if isinstance(tau, torch.Tensor) else tau
        norm, taken = launch_step(
            columns if tau is not None else columns._replace(targets=()), tuple(g.to(device) for g in self.grads),
            torch.stack(squares).to(device), torch.tensor(loss, device=device), tuple(r.to(device) for r in self.rates),
            0.0 if tau is None else tau, Layout(places, self.groups, numbers, settings, limit),
        )  # fmt: skip
        return columns, (norm.cpu(), taken.cpu()), norms.cpu().flip(0)

    def reference(self, loss, settings, limit, tau):
        norm = torch.linalg.vector_norm(torch.stack([grad.norm() for grad in self.grads]))
        skip = (~(norm.isfinite() & torch.tensor(loss).isfinite())).float()
        divisor = (norm / limit).clamp_min(1.0)
        rows = [[v.clone() for v in row] for row in (self.params, self.means, self.spreads, self.targets)]
        for n, (param, mean, spread, target) in enumerate(zip(*rows, strict=True)):
            corrections = bias_corrections(self.steps[n] + 1, settings[0].betas)
            adam_step_(param, self.grads[n], mean, spread, corrections, lr=self.rates[self.groups[n]],
                       settings=settings[self.groups[n]], grad_scale=divisor, skip=skip)  # fmt: skip
            if tau is not None:
                target.lerp_(param, float(tau))
        return rows, norm, skip


def check(case, loss=1.0, limit=math.inf, tau=0.005, decay=0.0, decoupled=False, betas=(0.9, 0.999)):
    settings = [AdamSettings(betas, 1e-8, decay, decoupled), AdamSettings(betas, 1e-8, 0.0, decoupled)]
    columns, told, norms = case.kernel(loss, settings, limit, tau)
    rows, norm, skip = case.reference(loss, settings, limit, tau)
    for found, expected in zip(columns[:4], rows, strict=True):
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got.cpu(), want, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(told[0], norm, equal_nan=True)
    assert bool(told[1]) == (float(skip) == 0)
    torch.testing.assert_close(norms, torch.stack([grad.norm() for grad in case.grads]), equal_nan=True)


@tries_kernels
class TestStep:
    @pytest.mark.parametrize("tail", [0, 1, 2])
    @pytest.mark.parametrize("limit", [math.inf, 1.0, 1e6])
    def test_values(self, tail, limit):
        check(Case(tail, tail), limit=limit)

    @pytest.mark.parametrize("decoupled", [False, True])
    def test_weight_decay_of_one_group(self, decoupled):
        check(Case(3, 1), decay=0.1, decoupled=decoupled)

    @pytest.mark.parametrize("betas", [(0.0, 0.999), (0.9, 0.0), (0.5, 0.9)])
    def test_betas(self, betas):
        check(Case(4, 1), betas=betas)

    @pytest.mark.parametrize("tau", [None, 0.0, 1.0, torch.tensor(0.3)])
    def test_targets(self, tau):
        check(Case(5, 0), tau=tau)

    @pytest.mark.filterwarnings("ignore:invalid value")  # NumPy's, where the interpreter runs
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    @pytest.mark.parametrize("number", range(5))
    def test_a_bad_gradient_is_skipped_and_found(self, bad, number):
        case = Case(6, 1)
        case.grads[number].view(-1)[-1] = bad
        check(case, limit=1.0)

    @pytest.mark.filterwarnings("ignore:invalid value")
    @pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
    def test_a_bad_loss_is_skipped(self, loss):
        check(Case(7, 0), loss=loss)
