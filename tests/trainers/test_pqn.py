"""PQN beside what holds for every trainer: its returns by hand, its exploration, and what it refuses."""

import dataclasses

import pytest
import torch
from config_runs import make
from states import run
from tensordict import TensorDict
from torch import nn
from walkers import Walkers

from torchrl_perf.envs import AgentStreams, CartPole, Pendulum
from torchrl_perf.modules import EpsilonGreedy
from torchrl_perf.trainers import PQNConfig, PQNTrainer, train
from torchrl_perf.trainers.pqn import make_pqn_policy

# rows: envs; the first ends truly at its second step, the second is cut off there by a time limit
REWARD = [[1.0, 2.0, -1.0, 0.5], [0.25, 1.0, 3.0, -2.0]]
GREATEST = [[4.0, 8.0, -2.0, 1.5], [0.5, 6.0, 2.5, 7.0]]
DONE = [[False, True, False, False], [False, True, False, False]]
TERMINATED = [[False, True, False, False], [False, False, False, False]]


def by_hand(gamma, lmbda):
    """The recursion of the lambda returns, one env and step at a time."""
    targets = [[0.0] * 4, [0.0] * 4]
    for env in range(2):
        for step in reversed(range(4)):
            best = GREATEST[env][step]
            ends = DONE[env][step] or step == 3
            following = best if ends else lmbda * targets[env][step + 1] + (1 - lmbda) * best
            targets[env][step] = REWARD[env][step] + gamma * following * (not TERMINATED[env][step])
    return torch.tensor(targets, dtype=torch.float64).unsqueeze(-1)


def batch_of(native):
    """``[2, 4]`` whose observations number the states: those of "next" are 10 and more."""
    number = torch.arange(8.0, dtype=torch.float64).view(2, 4, 1)
    done = torch.tensor(DONE).unsqueeze(-1)
    following = {
        "observation": (number + 10).masked_fill(done, torch.nan) if native else number + 10,
        "reward": torch.tensor(REWARD, dtype=torch.float64).unsqueeze(-1),
        "done": done,
        "terminated": torch.tensor(TERMINATED).unsqueeze(-1),
    }
    return TensorDict({"observation": number, "next": TensorDict(following, [2, 4])}, [2, 4])


@pytest.mark.parametrize("lmbda", [0.0, 0.65, 1.0])
def test_targets_by_hand(lmbda):
    algorithm = make("pqn", {"gamma": 0.9, "lmbda": lmbda}).algorithm
    greatest = torch.tensor(GREATEST, dtype=torch.float64).view(8, 1)

    def values(observation):
        best = greatest[(observation - 10).long().flatten()].view(2, 4, 1)
        return torch.cat([best - 3.0, best], -1)

    algorithm.network = values
    targets = algorithm.estimate(batch_of(native=False))["value_target"]
    assert targets.dtype == torch.float64
    torch.testing.assert_close(targets, by_hand(0.9, lmbda), rtol=1e-12, atol=1e-12)


def test_an_env_that_keeps_no_final_observation_bootstraps_from_the_state_before():
    algorithm = make("pqn", {"gamma": 0.9, "lmbda": 0.5}).algorithm
    seen = []

    def values(observation):
        seen.append(observation)
        return observation.new_zeros(2, 4, 2)

    algorithm.network, algorithm.fills = values, True
    assert algorithm.estimate(batch_of(native=True))["value_target"].isfinite().all()
    assert seen[0].isfinite().all()
    assert seen[0][:, 0].eq(torch.tensor([[10.0], [14.0]])).all()  # the others stay


def test_one_network_learns_the_value_of_the_action_taken():
    algorithm = make("pqn", {}).algorithm
    observation, target = torch.randn(3, 4), torch.tensor([[1.0], [2.0], [-1.0]])
    rows = TensorDict({"observation": observation, "action": torch.tensor([0, 1, 1]), "value_target": target}, [3])
    total, statistics = algorithm.minibatch_loss(rows)
    values = algorithm.network(observation)
    errors = torch.stack([values[0, 0], values[1, 1], values[2, 1]]) - target.squeeze(-1)
    torch.testing.assert_close(total, 0.5 * errors.square().mean())
    torch.testing.assert_close(statistics["error"], errors.abs().mean())
    (gradient,) = torch.autograd.grad(total, algorithm.network[-1].bias)
    torch.testing.assert_close(gradient, torch.stack([errors[0], errors[1] + errors[2]]) / 3)


def test_every_hidden_layer_is_normalised_before_its_activation():
    network = make("pqn", {}).policy.network
    kinds = [nn.Linear, nn.LayerNorm, nn.ReLU]
    assert [type(layer) for layer in network] == [*kinds, *kinds, nn.Linear]


def test_epsilon_falls_by_env_steps_and_is_a_metric():
    trainer = make("pqn", {"eps_start": 0.9, "eps_end": 0.1, "eps_frames": 64, "total_steps": 160})
    for steps in (0, 16, 32, 48, 64, 80):
        run(trainer, 1)
        expected = 0.9 - 0.8 * min(steps / 64, 1.0)
        assert trainer.metrics.flush(steps)["train/epsilon"] == pytest.approx(expected, abs=1e-6)
        assert float(trainer.policy.epsilon) == pytest.approx(expected, abs=1e-6)


def test_a_resumed_run_may_change_the_end_of_epsilon(tmp_path):
    options = {"run_dir": str(tmp_path), "checkpoint_interval": 1, "eps_frames": 32}
    run_dir = train(make("pqn", {**options, "total_steps": 64}), progress=False).run_dir
    trainer = make("pqn", {**options, "total_steps": 128, "eps_end": 0.5})
    train(trainer, run_dir, progress=False)
    assert float(trainer.policy.epsilon) == pytest.approx(0.5)


def test_what_does_not_fit_is_refused():
    config = PQNConfig.without_task(num_envs=2, num_steps=2, total_steps=8, device="cpu", mode="eager")
    with pytest.raises(ValueError, match=r"expected discrete actions .* Remedy: SAC or PPO"):
        PQNTrainer(config, env=Pendulum(2))
    with pytest.raises(ValueError, match=r"env: expected one whose rows all count, received 'valid' flags\. Remedy"):
        PQNTrainer(dataclasses.replace(config, num_envs=6), env=AgentStreams(Walkers(2, 3, discrete=True)))
    with pytest.raises(ValueError, match=r"policy: expected EpsilonGreedy, received Linear\. Remedy"):
        PQNTrainer(config, policy=nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"minibatches: expected a divisor of num_envs \* num_steps = 4, received 3"):
        dataclasses.replace(config, minibatches=3)


def test_a_policy_of_ones_own_is_trained():
    env = CartPole(4, device="cpu")
    policy = EpsilonGreedy(nn.Linear(4, 2), spec=env.action_spec, write_values=False)
    trainer = make("pqn", {}, env=env, policy=policy)
    before = policy.network.weight.detach().clone()
    run(trainer, 2)
    assert trainer.policy is policy
    assert not torch.equal(policy.network.weight, before)
    assert isinstance(make_pqn_policy(env, trainer.config), EpsilonGreedy)
