"""Norms of all gradients, and Adam's step of all parameters, as one kernel each, against torch's."""

import ast
import math
import random
from pathlib import Path

import pytest
import torch

import torchrl_perf.kernels
from tests.kernels.interpreted import kernel_device, tries_kernels
from torchrl_perf.functional.adam import AdamSettings, fused_adam_steps_, gradient_norms
from torchrl_perf.trainers import GuardedAdam

SHAPES = ((40, 64), (5,), (3, 2), (), (1,), (1024,), (1025,), (50, 100))


def kernels():
    from torchrl_perf.kernels import flat_adam

    return flat_adam


def number(value, device):
    return torch.tensor(float(value), device=device)


def numbers(lr, scale, skip, device):
    return number(lr, device), number(scale, device), number(skip, device)


def made(device, shapes=SHAPES):
    torch.manual_seed(0)
    params = [torch.randn(shape).to(device) for shape in shapes]
    return params, [torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params]


@tries_kernels
class TestNorms:
    def test_they_are_torchs(self):
        grads, *_ = made(kernel_device())
        space = kernels().workspace(grads)
        for _ in range(2):  # what the first call left does not count in the second
            torch.testing.assert_close(kernels().norms(grads, *space), torch.stack([g.norm() for g in grads]))

    def test_fewer_and_other_gradients_than_the_room_was_made_for(self):
        grads, *_ = made(kernel_device())
        space = kernels().workspace(grads)
        for some in (grads, grads[1:], grads[:3], grads[2:4], grads[::-1]):
            torch.testing.assert_close(kernels().norms(some, *space), torch.stack([g.norm() for g in some]))

    def test_more_than_one_launch_takes(self):
        draw = random.Random(0)
        grads, *_ = made(kernel_device(), [(draw.randint(1, 3000),) for _ in range(100)])
        space = kernels().workspace(grads)
        torch.testing.assert_close(kernels().norms(grads, *space), torch.stack([g.norm() for g in grads]))

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_what_is_not_finite_shows_at_its_parameter(self, bad):
        grads, *_ = made(kernel_device())
        grads[0][3, 5] = bad
        found = kernels().norms(grads, *kernels().workspace(grads))
        assert not found[0].isfinite() and found[1:].isfinite().all()


@tries_kernels
class TestSteps:
    @pytest.mark.parametrize("decoupled", [False, True])
    @pytest.mark.parametrize("weight_decay", [0.0, 0.1])
    @pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5)])
    def test_they_are_torchs(self, betas, weight_decay, decoupled):
        device = kernel_device()
        params, means, squares = made(device)
        reference = [p.clone().requires_grad_() for p in params]
        targets = [torch.zeros_like(p) for p in params]
        following = [t.clone() for t in targets]
        settings = AdamSettings(betas, 1e-5, weight_decay, decoupled)
        kind = torch.optim.AdamW if decoupled else torch.optim.Adam
        torchs = kind(reference, lr=0.01, betas=betas, eps=1e-5, weight_decay=weight_decay)
        steps = torch.zeros(len(params), device=device)
        for _ in range(4):
            grads = [torch.randn_like(p) for p in params]
            steps += 1
            kernels().adam_(
                (params, grads, means, squares), steps, numbers(0.01, 2, 0, device), settings, targets,
                number(0.1, device),
            )  # fmt: skip
            for param, grad in zip(reference, grads, strict=True):
                param.grad = grad / 2
            torchs.step()
            torch._foreach_lerp_(following, [p.detach() for p in reference], 0.1)
        torch.testing.assert_close(params, [p.detach() for p in reference], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(targets, following, rtol=1e-5, atol=1e-7)

    def test_a_skipped_one_changes_targets_alone(self):
        device = kernel_device()
        params, means, squares = made(device)
        before = [[each.clone() for each in part] for part in (params, means, squares)]
        targets = [torch.zeros_like(p) for p in params]
        grads = [torch.full_like(p, math.nan) for p in params]
        kernels().adam_(
            (params, grads, means, squares), torch.zeros(len(params), device=device),
            numbers(0.01, math.nan, 1, device), AdamSettings(), targets, number(0.5, device),
        )  # fmt: skip
        for part, kept in zip((params, means, squares), before, strict=True):
            assert all(map(torch.equal, part, kept))
        torch.testing.assert_close(targets, [0.5 * p for p in params])

    def test_more_parameters_than_one_launch_takes(self):
        device = kernel_device()
        params, means, squares = made(device, [(n + 1,) for n in range(100)])
        expected = [p - 0.01 for p in params]
        kernels().adam_(
            (params, [torch.ones_like(p) for p in params], means, squares), torch.ones(100, device=device),
            numbers(0.01, 1, 0, device), AdamSettings(),
        )  # fmt: skip
        torch.testing.assert_close(params, expected, rtol=1e-5, atol=1e-5)


def test_no_kernel_has_an_argument_by_a_name_of_the_launcher():
    """Triton 3.6 binds arguments in a function whose own variables have these names, and takes its own for them."""
    folder = Path(torchrl_perf.kernels.__file__).parent
    found = []
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
                names = {argument.arg for argument in node.args.args}
                found += [(path.name, node.name)] if names & {"params", "specialization", "options"} else []
    assert found == []


def test_functions_take_any_device(device):
    """Kernels on CUDA, torch's own on a CPU."""
    params, means, squares = made(device)
    grads = [torch.ones_like(p) for p in params]
    torch.testing.assert_close(gradient_norms(grads), torch.stack([g.norm() for g in grads]))
    expected, targets = [p - 0.01 for p in params], [torch.zeros_like(p) for p in params]
    fused_adam_steps_(
        params, grads, means, squares, torch.ones(len(params), device=device), lr=number(0.01, device),
        settings=AdamSettings(), grad_scale=number(1, device), skip=number(0, device), targets=targets,
        tau=number(0.5, device),
    )  # fmt: skip
    torch.testing.assert_close(params, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(targets, [0.5 * p for p in expected], rtol=1e-5, atol=1e-5)


def test_norms_of_an_optimiser_whose_parameters_have_not_all_a_gradient(device):
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)).to(device)
    optimizer = GuardedAdam(net.parameters(), learning_rate=0.1)
    net[0](torch.ones(2, 3, device=device)).sum().backward()
    norms = optimizer.parameter_norms()
    expected = [0.0 if p.grad is None else float(p.grad.norm()) for p in net.parameters()]
    torch.testing.assert_close(norms.cpu(), torch.tensor(expected))
    assert expected[2] == 0.0
