"""Ferry: specs, the optimum with options, the bound without, and options beating the same agent without them."""

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.envs import TransformedEnv, check_env_specs
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs.toy import Ferry
from torchrl_perf.modules import (
    DeviceActor,
    EnsembleQ,
    OptionActor,
    OptionConditioned,
    OptionController,
    OptionPolicy,
    OptionSet,
    SquashedNormal,
    SquashedNormalHead,
)
from torchrl_perf.objectives import DeviceSACLoss, OptionLoss
from torchrl_perf.replay import OptionReplay, make_replay_buffer
from torchrl_perf.transforms import OptionSegments, OptionState

OPTIONS = OptionSet(Ferry.option_names, termination=Ferry.termination, action_range=Ferry.option_ranges)
GAMMA = 0.97


def returns(env, policy):
    """Return of each env's first episode, the policy deterministic unless it draws by itself."""
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        batch = env.rollout(50, policy, break_when_any_done=False)
    return batch["next", "reward"].sum((1, 2))


def test_specs(device):
    check_env_specs(Ferry(4, device=device))


def test_full_speed_with_a_direction_in_mind_is_the_optimum(device):
    env = Ferry(6, device=device)
    way = (env.state[:, 1:]).clone()

    def policy(td):
        bank = td["observation"][:, 0:1] - td["observation"][:, 2:3]
        way.copy_(torch.where(bank == 0, way, bank))
        return td.set("action", way.clone())

    torch.testing.assert_close(
        returns(env, policy), torch.full((6,), Ferry.optimal_return, device=device), rtol=0, atol=1e-3
    )


@pytest.mark.parametrize("east", [0.0, 0.3, 0.5, 1.0])
def test_return_without_memory(east):
    env = Ferry(4_000, device="cpu")

    def policy(td):
        left, water, right = td["observation"].split(1, -1)
        drawn = (torch.rand_like(water) < east).float() * 2 - 1
        return td.set("action", left - right + water * drawn)

    assert float(returns(env, policy).mean()) == pytest.approx(Ferry.memoryless_return(east), abs=0.4)


def test_even_chances_are_the_best_without_memory():
    values = [Ferry.memoryless_return(east / 20) for east in range(21)]
    assert max(values) == values[10] == pytest.approx(10.8, abs=0.01)
    assert values[0] == pytest.approx(3.0)
    assert max(values) < 0.22 * Ferry.optimal_return


def network(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, outputs))


def make_agent(env, with_options):
    """Policy, losses of soft actor-critic, and of the controller."""
    size = 3 + 1 + 2 * with_options
    q, keys = EnsembleQ(2, size, hidden_sizes=(32, 32)), ["observation", "action"]
    if not with_options:
        head = nn.Sequential(network(3, 2), SquashedNormalHead(-torch.ones(1), torch.ones(1)))
        parts = {"distribution_class": SquashedNormal, "param_keys": SquashedNormalHead.param_keys}
        actor = DeviceActor(head, spec=env.action_spec, **parts)
        critic = TensorDictModule(q, keys, ["state_action_value"])
        return actor, DeviceSACLoss(actor, critic, gamma=GAMMA, alpha=0.1), None
    controller = OptionController(network(3, 2), OPTIONS, example=env.fake_tensordict())
    actor = OptionActor(network(5, 2), OPTIONS, spec=env.action_spec)
    critic = TensorDictModule(OptionConditioned(q, 2), [*keys, "active_option"], ["state_action_value"])
    sac = DeviceSACLoss(actor, critic, gamma=GAMMA, alpha=0.1)
    return OptionPolicy(controller, actor), sac, OptionLoss(controller, network(3, 2))


def descend(optimizer, out):
    optimizer.zero_grad()
    sum(value for key, value in out.items() if key.startswith("loss_")).backward()
    optimizer.step()


def train(with_options, iterations=45, num_envs=16, steps=10):
    """Mean deterministic return after a short run of soft actor-critic."""
    env = Ferry(num_envs, device="cpu")
    env = TransformedEnv(env, OptionState(2)) if with_options else env
    policy, sac, option_loss = make_agent(env, with_options)
    optimizer = torch.optim.Adam(sac.parameters(), 3e-3)
    collector = DeviceCollector(env, policy, frames_per_batch=num_envs * steps, mode="eager")
    buffer = make_replay_buffer(50_000, batch_size=256, device="cpu")
    if with_options:
        segments = OptionSegments(collector.batch, gamma=GAMMA)
        choices = OptionReplay(segments(collector.batch), capacity=2_000)
        segments.restart()
        option_optimizer = torch.optim.Adam(option_loss.parameters(), 3e-3)
    for iteration in range(iterations):
        batch = collector.collect()
        buffer.extend(batch.exclude("collector", "done", "terminated", "truncated", "is_init", ("next", "is_init")))
        if with_options:
            choices.extend(segments(batch))
        for _ in range(4 if iteration > 1 else 0):
            sample = buffer.sample()
            if with_options:
                descend(option_optimizer, option_loss(choices.sample()))
                policy.controller.write_following(sample)
            descend(optimizer, sac(sample))
            sac.update_targets_(0.01)
    collector.shutdown()
    return float(returns(env, policy).mean())


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_options_beat_the_same_agent_without_them(seed):
    torch.manual_seed(seed)
    assert train(with_options=True) > 40
    torch.manual_seed(seed)
    assert train(with_options=False) < 11
