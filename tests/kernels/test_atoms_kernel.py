"""The means of categorical values: by hand, the fused kernel against the reference, the network that calls it."""

import pytest
import torch

from torchrl_perf.functional.atoms import atom_means, duel, fusable, fused_atom_means
from torchrl_perf.modules import CategoricalMLP
from torchrl_perf.runtime import capture

SHAPES = [(1, 1, 1), (3, 2, 51), (257, 8, 51), (64, 18, 51), (5, 3, 200), (1000, 1, 11)]


def make(rows, actions, atoms, dueling, device):
    generator = torch.Generator().manual_seed(rows)
    logits = 3 * torch.randn(rows, (actions + dueling) * atoms, generator=generator)
    return logits.to(device), torch.linspace(-10, 10, atoms, device=device)


def test_hand_computed():
    support = torch.tensor([-1.0, 0.0, 1.0])
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, 2.0**0.5 * 40]])
    torch.testing.assert_close(atom_means(logits, support, 2), torch.tensor([[0.0, 1.0]]))
    # value [1, 2, 3], advantages [1, 0, 0] and [3, 0, 0]: [0, 2, 3] and [2, 2, 3]
    streams = torch.tensor([[1.0, 2.0, 3.0, 1.0, 0.0, 0.0, 3.0, 0.0, 0.0]])
    assert duel(streams, 2).tolist() == [[[0.0, 2.0, 3.0], [2.0, 2.0, 3.0]]]
    expected = (torch.tensor([[0.0, 2.0, 3.0], [2.0, 2.0, 3.0]]).softmax(-1) * support).sum(-1)
    torch.testing.assert_close(atom_means(streams, support, 2, dueling=True), expected.unsqueeze(0))


@pytest.mark.parametrize("dueling", [False, True])
def test_values_are_the_means_of_the_probabilities(dueling):
    network = CategoricalMLP(4, 3, num_atoms=7, dueling=dueling)
    x = torch.randn(2, 5, 4)
    expected = (network.log_probs(x).exp() * network.support).sum(-1)
    torch.testing.assert_close(network(x), expected, rtol=1e-5, atol=1e-5)


def test_nothing_is_fused_on_a_cpu():
    assert not fusable(torch.zeros(3, 51), 1, 51)


@pytest.mark.gpu
@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_is_the_reference(shape, dueling):
    logits, support = make(*shape, dueling, "cuda")
    assert fusable(logits, *shape[1:])
    got = fused_atom_means(logits, support, shape[1], dueling)
    expected = atom_means(logits.double(), support.double(), shape[1], dueling)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-4)


@pytest.mark.gpu
def test_bad_logits_stay_in_their_row():
    logits, support = make(4, 2, 51, False, "cuda")
    logits[1, 60] = torch.nan
    logits[2, 3] = torch.inf
    got = fused_atom_means(logits, support, 2)
    assert got.isnan().tolist() == [[False, False], [False, True], [True, False], [False, False]]


@pytest.mark.gpu
def test_strides_batch_shapes_and_graphs():
    logits, support = make(12, 2, 51, False, "cuda")
    wide = torch.cat([logits, logits], -1)[:, :102].unflatten(0, (3, 4))
    step = capture(lambda x: fused_atom_means(x, support, 2))
    for _ in range(4):
        got = step(wide)
    torch.testing.assert_close(got, atom_means(wide, support, 2), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_gradients_take_the_plain_way():
    network = CategoricalMLP(4, 3, dueling=True, device="cuda")
    x = torch.randn(5, 4, device="cuda")
    values = network(x)
    assert values.requires_grad
    with torch.no_grad():
        torch.testing.assert_close(network(x), values, rtol=1e-3, atol=1e-3)
