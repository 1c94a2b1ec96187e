"""WindowEncoder: order of the steps, what passes through, batch shapes, no host wait, learning of what order tells."""

import pytest
import torch
from torch import nn

from torchrl_perf.modules import WindowEncoder
from torchrl_perf.runtime import no_host_sync

W, F, R = 5, 3, 2


def make(**options):
    torch.manual_seed(0)
    return WindowEncoder(W, F, R, **{"width": 16, "num_layers": 2, "num_heads": 2, **options})


def test_the_others_pass_through_beside_the_summary():
    net, observation = make(), torch.randn(4, 7, W * F + R)
    out = net(observation)
    assert out.shape == (4, 7, net.out_features) == (4, 7, 18)
    assert torch.equal(out[..., 16:], observation[..., W * F :])
    torch.testing.assert_close(net(observation[2, 3]), out[2, 3], rtol=1e-5, atol=1e-6)


def test_it_is_the_encoder_of_a_graph_of_steps_with_their_places():
    net, observation = make(), torch.randn(4, W * F + R)
    steps = torch.cat((observation[:, : W * F].view(4, W, F), torch.eye(W).expand(4, -1, -1)), -1)
    mask = torch.ones(4, W, dtype=torch.bool)
    _, expected = net.encoder(steps, mask, observation[:, W * F :])
    torch.testing.assert_close(net(observation)[:, :16], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_layers", [1, 3])
def test_the_order_of_the_steps_counts_and_all_parameters_learn(num_layers):
    net, observation = make(num_layers=num_layers), torch.randn(6, W * F + R)
    turned = torch.cat((observation[:, : W * F].view(6, W, F).flip(1).flatten(1), observation[:, W * F :]), -1)
    assert (net(observation) - net(turned)).abs().amax() > 1e-3
    net(observation)[:, :16].square().sum().backward()
    # a bias of keys adds the same to all scores of a query
    still = [name for name, value in net.named_parameters() if value.grad is None or not value.grad.abs().amax() > 0]
    assert all(name.endswith("key.bias") for name in still)


def test_nothing_waits_for_the_host():
    net, observation = make(), torch.randn(6, W * F + R)
    with no_host_sync():
        net(observation)


def test_it_learns_which_step_was_the_greatest():
    """What no sum over the steps tells: the place of the greatest of five numbers."""
    torch.manual_seed(1)
    net = nn.Sequential(WindowEncoder(W, 1, 1, width=16, num_layers=1, num_heads=2), nn.Linear(17, W))
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
    for _ in range(300):
        x = torch.randn(256, W + 1)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), x[:, :W].argmax(-1)).backward()
        optimizer.step()
    x = torch.randn(2_000, W + 1)
    assert (net(x).argmax(-1) == x[:, :W].argmax(-1)).float().mean() > 0.9


@pytest.mark.parametrize(
    ("options", "words"),
    [({"num_heads": 3}, "num_heads: expected a divisor of width 16"), ({"width": 0}, "sizes: expected at least 1")],
)
def test_refusals(options, words):
    with pytest.raises(ValueError, match=words):
        make(**options)
    with pytest.raises(ValueError, match="window: expected at least 1 step, received 0"):
        WindowEncoder(0, 1, 1)
