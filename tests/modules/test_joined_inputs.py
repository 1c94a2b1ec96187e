"""Several observations as one vector, in the order given."""

import torch
from torch import nn

from torchrl_perf.modules import JoinedInputs


def test_along_the_last_dim_in_the_order_given():
    one, other = torch.randn(4, 2, 3), torch.randn(4, 2, 5)
    assert torch.equal(JoinedInputs(nn.Identity())(one, other), torch.cat([one, other], -1))
    assert torch.equal(JoinedInputs(nn.Identity())(other), other)


def test_the_networks_parameters_are_its_own():
    net = nn.Linear(5, 1)
    joined = JoinedInputs(net)
    assert list(joined.state_dict()) == ["network.weight", "network.bias"]
    assert torch.equal(joined(torch.ones(2, 3), torch.zeros(2, 2)), net(torch.tensor([[1.0, 1, 1, 0, 0]] * 2)))
