"""AlignedLinear and aligned_affine: the values and gradients of nn.Linear at every size."""

import pytest
import torch
from torch import nn

from torchrl_perf.modules.aligned import AlignedLinear, aligned_affine
from torchrl_perf.runtime.compile import compiled


@pytest.mark.parametrize("inputs", [1, 3, 4, 7, 8])
@pytest.mark.parametrize("outputs", [1, 4, 6])
@pytest.mark.parametrize("members", [None, 3])
def test_values_and_gradients(inputs, outputs, members):
    lead = () if members is None else (members,)
    shapes = ((*lead, 5, inputs), (*lead, inputs, outputs), (*lead, 1, outputs))
    args = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    expected = args[0] @ args[1] + args[2]
    got = aligned_affine(*args)
    torch.testing.assert_close(got, expected)
    factor = torch.randn_like(expected)
    for one, two in zip(
        torch.autograd.grad(got, args, factor), torch.autograd.grad(expected, args, factor), strict=True
    ):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("inputs, outputs, bias", [(3, 6, True), (3, 4, False), (4, 6, True), (4, 4, True)])
def test_compiled_equals_linear(inputs, outputs, bias, fresh_dynamo):
    torch.manual_seed(0)
    layer = AlignedLinear(inputs, outputs, bias=bias)
    torch.manual_seed(0)
    linear = nn.Linear(inputs, outputs, bias=bias)
    x = torch.randn(5, inputs)
    fn = compiled(layer.forward, backend="aot_eager")
    assert torch.equal(layer(x), linear(x))
    assert layer.state_dict().keys() == linear.state_dict().keys()
    torch.testing.assert_close(fn(x), linear(x))
    torch.testing.assert_close(fn(x[0]), linear(x[0]))
    fn(x).square().sum().backward()
    linear(x).square().sum().backward()
    for one, two in zip(layer.parameters(), linear.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)
