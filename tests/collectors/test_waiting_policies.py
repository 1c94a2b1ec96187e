"""Policies that wait for the host only where no graph is recorded, such as TorchRL's TanhNormal: recorded as well."""

import warnings

import pytest
import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import ProbabilisticActor, TanhNormal

from torchrl_perf.collectors import DeviceCollector, validation
from torchrl_perf.envs import Pendulum
from torchrl_perf.runtime import host_syncs


def squashed_policy(env, *, numbers=False):
    space = env.full_action_spec_unbatched["action"].space
    low, high = (float(space.low.min()), float(space.high.max())) if numbers else (space.low, space.high)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 2, device=env.device), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictModule(layers, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": low, "high": high},
        return_log_prob=True,
    )


class Asking(nn.Module):
    """Reads a number on the host at each call, whoever records."""

    def forward(self, observation):
        return observation[:, :1] * observation.sum().item()


def asking_policy():
    return TensorDictModule(Asking(), ["observation"], ["action"])


class WaitingPendulum(Pendulum):
    def _step(self, tensordict):
        tensordict["action"].sum().item()
        return super()._step(tensordict)


class TestReports:
    def test_less_as_many_at_the_same_lines(self):
        value = torch.ones(3)

        def once():
            value.sum().item()

        with host_syncs() as both:
            once()
            once()
            value.nonzero()
        with host_syncs() as other:
            once()
        left = both.without(other)
        assert (left.total, both.total) == (2, 3)
        assert {row.op: row.count for row in left.rows} == {"_local_scalar_dense": 1, "nonzero": 1}
        assert both.without(both).total == 0

    def test_on_a_cpu_nothing_is_left_out(self):
        env = Pendulum(2)
        policy = squashed_policy(env)
        with host_syncs() as report:
            policy(env.reset())
        assert report.total > 0
        assert validation.waits_in_graphs(report, policy, env) is report


@pytest.mark.gpu
class TestOnCuda:
    # torch 2.11 warns inside of the compiler of the autograd function that TorchRL squashes with
    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    @pytest.mark.parametrize("mode", ["auto", "graph"])
    def test_tanh_normal_is_recorded(self, mode):
        env = Pendulum(4, device="cuda")
        policy = squashed_policy(env)
        collector = DeviceCollector(env, policy, frames_per_batch=32, mode=mode)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*is (collected in eager mode|not compiled)")
            for _ in range(5):
                batch = collector.collect().clone()
        assert collector.mode == "graph"
        with torch.no_grad():
            expected = policy.get_dist(batch).log_prob(batch["action"])
        inside = batch["action"].abs().squeeze(-1) < 1.9  # beyond, too little is left of the number that was squashed
        assert inside.any()
        torch.testing.assert_close(batch["action_log_prob"][inside], expected[inside], rtol=1e-3, atol=1e-3)
        assert batch["action"].abs().max() <= 2.0
        assert batch["action"].unique().numel() > 16  # fresh random numbers in each step and replay
        with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
            greedy = policy(collector.env.reset())["action"]
        assert not torch.equal(greedy, batch["action"][:, 0])
        collector.shutdown()

    def test_waits_in_a_graph_as_well(self):
        with pytest.raises(ValueError, match=r"policy: expected no host wait under mode 'graph'.*item"):
            DeviceCollector(Pendulum(4, device="cuda"), asking_policy(), frames_per_batch=32, mode="graph")
        collector = DeviceCollector(Pendulum(4, device="cuda"), asking_policy(), frames_per_batch=32)
        with pytest.warns(UserWarning, match=r"collected in eager mode: a step waits for the host 1 times"):
            collector.collect()
        assert collector.mode == "eager"

    def test_an_env_that_waits_is_named_and_the_policy_is_not(self):
        env = WaitingPendulum(4, device="cuda")
        collector = DeviceCollector(env, squashed_policy(env), frames_per_batch=32)
        with pytest.warns(UserWarning, match=r"a step waits for the host 1 times, first in .*test_waiting_policies"):
            collector.collect()
        assert collector.mode == "eager"
        collector.collect()

    def test_random_state_is_left_as_it_was(self):
        env = Pendulum(4, device="cuda")
        policy = squashed_policy(env)
        torch.manual_seed(3)
        before = torch.cuda.get_rng_state()
        assert validation.waits_outside_graphs_alone(policy, env)
        assert torch.equal(torch.cuda.get_rng_state(), before)
        assert not validation.waits_outside_graphs_alone(asking_policy(), env)
        torch.ones(3, device="cuda").sum().item()  # CUDA goes on
