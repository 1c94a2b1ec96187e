"""NoisyLinear: means, moments, when there is noise, fresh draws, sigmas that learn, draws of actions."""

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Categorical
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import NoisyLinear as TheirNoisyLinear
from torchrl.modules import QValueActor
from torchrl.objectives import DDPGLoss, DQNLoss, SoftUpdate

from torchrl_perf.functional.exploration import factor_noise
from torchrl_perf.modules import EpsilonGreedy, NoisyLinear
from torchrl_perf.runtime import no_host_sync

NOISES = ["shared", "per_row"]
DETERMINISTIC = [ExplorationType.DETERMINISTIC, ExplorationType.MODE, ExplorationType.MEAN]


def replayed(layer, x):
    """The layer's output for the noise that the next pass draws, with the weights of each row written out."""
    state = torch.get_rng_state()
    rows = () if layer.noise == "shared" else x.shape[:-1]
    draws = factor_noise(torch.randn(*rows, layer.in_features + layer.out_features, dtype=x.dtype))
    torch.set_rng_state(state)
    draws = draws.expand(*x.shape[:-1], -1).reshape(-1, draws.shape[-1])
    out = []
    for row, draw in zip(x.reshape(-1, x.shape[-1]), draws, strict=True):
        into, outof = draw[: layer.in_features], draw[layer.in_features :]
        weight = layer.weight_mu + layer.weight_sigma * outof[:, None] * into[None, :]
        out.append(weight @ row + layer.bias_mu + layer.bias_sigma * outof)
    return torch.stack(out).view(*x.shape[:-1], layer.out_features)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("shape", [(), (1,), (6,), (2, 3)])
@pytest.mark.parametrize(("rows", "columns"), [(5, 3), (4, 8), (1, 1)])
def test_equals_weights_written_out(noise, shape, rows, columns):
    layer = NoisyLinear(rows, columns, noise=noise, dtype=torch.float64)
    x = torch.randn(*shape, rows, dtype=torch.float64)
    expected = replayed(layer, x)
    torch.testing.assert_close(layer(x), expected)


def test_initialisation_is_the_papers():
    layer = NoisyLinear(100, 50, sigma=0.5)
    assert torch.equal(layer.weight_sigma, torch.full((50, 100), 0.05))
    assert torch.equal(layer.bias_sigma, torch.full((50,), 0.05))
    assert layer.weight_mu.abs().max() <= 0.1
    assert layer.weight_mu.std().item() == pytest.approx(0.1 / 3**0.5, rel=0.05)
    names = {name for name, _ in layer.named_parameters()}
    assert names == {name for name, _ in TheirNoisyLinear(3, 2).named_parameters()}


@pytest.mark.parametrize("noise", NOISES)
def test_mean_and_variance_of_the_output(noise):
    """Var y_j = E f(e)^2 (E f(e)^2 |sigma_w x|^2 + sigma_b^2), with E f(e)^2 = sqrt(2 / pi)."""
    layer = NoisyLinear(4, 2, sigma=1.0, noise=noise)
    x = torch.tensor([1.0, -2.0, 0.5, 0.0])
    if noise == "shared":
        y = torch.stack([layer(x) for _ in range(4000)]).detach()
    else:
        y = layer(x.expand(4000, 4)).detach()
    moment = (2 / torch.pi) ** 0.5
    variance = moment * (moment * 0.25 * float(x.square().sum()) + 0.25)
    mean = nn.functional.linear(x, layer.weight_mu, layer.bias_mu).detach()
    torch.testing.assert_close(y.mean(0), mean, atol=0.06, rtol=0)
    torch.testing.assert_close(y.var(0), torch.full((2,), variance), rtol=0.12, atol=0)


def test_shared_noise_is_the_same_for_all_rows_and_per_row_noise_is_not():
    x = torch.ones(5, 4)
    shared, own = NoisyLinear(4, 3)(x), NoisyLinear(4, 3, noise="per_row")(x)
    torch.testing.assert_close(shared, shared[:1].expand_as(shared))
    assert (own[1:] != own[:1]).all()


class TestWhenThereIsNoise:
    @staticmethod
    def is_noisy(layer):
        x = torch.ones(2, 3)
        return not torch.equal(layer(x), layer(x))

    @pytest.mark.parametrize("training", [True, False])
    @pytest.mark.parametrize("grad", [True, False])
    def test_exploring_always(self, training, grad):
        with set_exploration_type(ExplorationType.RANDOM), torch.set_grad_enabled(grad):
            assert self.is_noisy(NoisyLinear(3, 2).train(training))

    @pytest.mark.parametrize("kind", DETERMINISTIC)
    def test_deterministic_only_in_a_loss(self, kind):
        layer = NoisyLinear(3, 2)
        with set_exploration_type(kind):
            assert self.is_noisy(layer)
            assert not self.is_noisy(layer.eval())
            with torch.no_grad():
                assert not self.is_noisy(layer.train())

    def test_without_a_type_in_training_mode(self):
        layer = NoisyLinear(3, 2)
        with torch.no_grad():
            assert self.is_noisy(layer)
        assert not self.is_noisy(layer.eval())

    def test_the_mean_is_the_plain_layer(self):
        layer, x = NoisyLinear(3, 2).eval(), torch.randn(4, 3)
        torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight_mu, layer.bias_mu), rtol=0, atol=0)


def sigma_grads(module):
    return [param.grad for name, param in module.named_parameters() if "sigma" in name]


def gradients(loss, td):
    """Backward of all losses, with the updater of the targets that TorchRL asks for."""
    SoftUpdate(loss, tau=0.1)
    out = loss(td)
    sum(value for name, value in out.items() if name.startswith("loss")).backward()


def batch(n=8, **more):
    following = {
        "observation": torch.randn(n, 3),
        "reward": torch.randn(n, 1),
        "done": torch.zeros(n, 1, dtype=torch.bool),
        "terminated": torch.zeros(n, 1, dtype=torch.bool),
    }
    return TensorDict({"observation": torch.randn(n, 3), "next": following, **more}, [n])


class TestLearns:
    @pytest.mark.parametrize("noise", NOISES)
    def test_in_torchrl_dqn_loss(self, noise):
        net = nn.Sequential(NoisyLinear(3, 8, noise=noise), nn.ReLU(), NoisyLinear(8, 2, noise=noise))
        actor = QValueActor(net, spec=Categorical(2), in_keys=["observation"])
        loss = DQNLoss(actor, action_space="categorical", delay_value=True)
        gradients(loss, batch(action=torch.randint(0, 2, (8,))))
        assert all(grad is not None and (grad != 0).any() for grad in sigma_grads(loss.value_network_params))

    def test_torchrls_own_layer_does_not(self):
        """The fault that the rule is for: if it is mended upstream, the rule can go."""
        net = nn.Sequential(TheirNoisyLinear(3, 8), nn.ReLU(), TheirNoisyLinear(8, 2))
        actor = QValueActor(net, spec=Categorical(2), in_keys=["observation"])
        loss = DQNLoss(actor, action_space="categorical", delay_value=True)
        gradients(loss, batch(action=torch.randint(0, 2, (8,))))
        assert all(grad is None or not (grad != 0).any() for grad in sigma_grads(loss.value_network_params))

    def test_in_torchrl_ddpg_loss(self):
        actor = TensorDictModule(nn.Sequential(NoisyLinear(3, 2), nn.Tanh()), ["observation"], ["action"])

        class Critic(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = NoisyLinear(5, 1)

            def forward(self, x, a):
                return self.layer(torch.cat([x, a], -1))

        value = TensorDictModule(Critic(), ["observation", "action"], ["state_action_value"])
        gradients(DDPGLoss(actor, value), batch(action=torch.randn(8, 2)))
        assert all((grad != 0).any() for grad in sigma_grads(actor) + sigma_grads(value))


def test_draws_of_actions_are_uniform_where_actions_are_alike():
    """Chi-square of the greedy actions of 4,000 rows among 5 actions with one mean."""
    layer = NoisyLinear(2, 5, sigma=1.0, noise="per_row")
    with torch.no_grad():
        layer.weight_mu.zero_()
        layer.bias_mu.zero_()
    policy = EpsilonGreedy(layer, spec=Categorical(5), eps_start=0.0, eps_end=0.0)
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        action = policy(TensorDict({"observation": torch.ones(4000, 2)}, [4000]))["action"]
    counts = action.bincount(minlength=5).double()
    assert float(((counts - 800) ** 2 / 800).sum()) < 18.5  # 0.1 % of chi-square with 4 degrees of freedom


@pytest.mark.parametrize("noise", NOISES)
def test_fresh_noise_in_each_call_and_the_same_values(noise, variant):
    net = nn.Sequential(NoisyLinear(5, 8, noise=noise), nn.ReLU(), NoisyLinear(8, 3, noise=noise)).to(variant.device)
    x = torch.randn(16, 5, device=variant.device)

    def step(x):
        with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
            return net(x)

    run = variant(step)
    first, second, third = (run(x).clone() for _ in range(3))
    assert (first != second).any()
    assert (second != third).any()
    with torch.no_grad():
        for layer in (net[0], net[2]):
            layer.weight_sigma.zero_()
            layer.bias_sigma.zero_()
    got = run(x).clone()
    torch.testing.assert_close(got, net.eval()(x).detach(), rtol=1e-4, atol=1e-5)


def test_no_host_wait(device):
    layer = NoisyLinear(5, 8, noise="per_row", device=device)
    with no_host_sync(device):
        layer(torch.ones(4, 5, device=device)).sum().backward()


def test_bad_arguments():
    with pytest.raises(ValueError, match="sizes: expected at least 1, received 0 and 2"):
        NoisyLinear(0, 2)
    with pytest.raises(ValueError, match="sigma: expected a number of at least 0, received -1"):
        NoisyLinear(1, 2, sigma=-1)
    with pytest.raises(ValueError, match="noise: expected 'shared' or 'per_row', received 'row'"):
        NoisyLinear(1, 2, noise="row")
