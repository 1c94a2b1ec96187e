"""Reward columns: sums, telescoping, weights on the device, places, one advantage for each column, PPO on them."""

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer, Unbounded
from torchrl.envs import TransformedEnv, check_env_specs
from torchrl.modules import ProbabilisticActor
from torchrl.objectives import ClipPPOLoss

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import Pendulum
from torchrl_perf.modules import ComponentValues, GumbelCategorical
from torchrl_perf.objectives import DeviceClipPPOLoss
from torchrl_perf.runtime import no_host_sync
from torchrl_perf.transforms import ComponentAdvantage, GAETransform, RewardComponents

NAMES = ("move", "alive", "end")
KEYS = {"reward": "reward_components", "advantage": "advantage_components"}


def batch(n=3, t=7, c=3, device="cpu"):
    done = torch.rand(n, t, 1) < 0.25
    following = {
        "observation": torch.randn(n, t, 4),
        "reward_components": torch.randn(n, t, c),
        "done": done,
        "terminated": done & (torch.rand(n, t, 1) < 0.5),
    }
    td = TensorDict({"observation": torch.randn(n, t, 4), "next": following}, [n, t], names=[None, "time"])
    return td.to(device)


def critic(shared=True, names=NAMES, device="cpu"):
    return TensorDictModule(ComponentValues(4, names, shared=shared, device=device), ["observation"], ["state_value"])


class TestReward:
    def test_the_columns_add_up(self, device):
        td = batch(device=device)
        got = RewardComponents(NAMES)(td)["next", "reward"]
        torch.testing.assert_close(got, td["next", "reward_components"].sum(-1, keepdim=True))

    def test_weights_by_name_and_in_place(self):
        components, td = RewardComponents(NAMES, {"move": 5.0, "end": -1.0}), batch()
        columns = td["next", "reward_components"]
        assert components.column("end") == 2
        torch.testing.assert_close(components(td)["next", "reward"], 5 * columns[..., :1] - columns[..., 2:])
        components.set_weights([0.0, 2.0, 0.0])
        torch.testing.assert_close(components(td)["next", "reward"], 2 * columns[..., 1:2])
        other = RewardComponents(NAMES)
        other.load_state_dict(components.state_dict())
        assert torch.equal(other.weights, components.weights)

    def test_a_column_that_is_a_difference_telescopes(self):
        """5 (x_t - x_(t-1)) / goal over an episode is 5 (x_T - x_0) / goal, whatever the way."""
        x, goal = torch.randn(2, 9, dtype=torch.float64).cumsum(-1), 400.0
        columns = torch.zeros(2, 8, 2, dtype=torch.float64)
        columns[..., 0], columns[:, -1, 1] = x.diff(dim=-1) / goal, -100.0
        td = TensorDict({"next": {"reward_components": columns}}, [2, 8])
        reward = RewardComponents(("centroid", "termination"), (5.0, 1.0))(td)["next", "reward"]
        torch.testing.assert_close(reward.sum(1).squeeze(-1), 5 * (x[:, -1] - x[:, 0]) / goal - 100.0)
        # and so does the advantage of each column with lambda = gamma = 1 and no values
        flags = {key: torch.zeros(2, 8, 1, dtype=torch.bool) for key in ("done", "terminated")}
        td["state_value"], td["next", "state_value"] = torch.zeros_like(columns), torch.zeros_like(columns)
        td["next"].update(flags)
        gae = GAETransform(gamma=1.0, lmbda=1.0, value_network=None, keys=KEYS)
        first = gae(td)["advantage_components"][:, 0]
        expected = torch.stack([(x[:, -1] - x[:, 0]) / goal, torch.full((2,), -100.0).double()], -1)
        torch.testing.assert_close(first, expected)

    def test_several_sources_are_joined(self):
        td = batch()
        td["next", "intrinsic_reward"] = torch.rand(3, 7, 1)
        both = RewardComponents(
            (*NAMES, "curiosity"), in_keys=("reward_components", "intrinsic_reward"), components_key="all_components"
        )
        both.set_weights({"curiosity": 1.0})
        out = both(td)
        assert out["next", "all_components"].shape == (3, 7, 4)
        torch.testing.assert_close(out["next", "reward"], td["next", "intrinsic_reward"])

    def test_joined_twice_is_refused(self):
        with pytest.raises(ValueError, match="components_key: expected a key of its own"):
            RewardComponents(NAMES, in_keys=("reward_components", "more"))

    def test_samples_get_the_weights_of_now(self):
        components = RewardComponents(NAMES)
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20), batch_size=8, transform=components)
        buffer.extend(batch().reshape(-1))
        components.set_weights({"alive": 3.0})
        sample = buffer.sample()
        torch.testing.assert_close(sample["next", "reward"], 3 * sample["next", "reward_components"][..., 1:2])

    def test_no_host_wait(self, device):
        td, components = batch(device=device), RewardComponents(NAMES, device=device)
        advantage = ComponentAdvantage(components, standardize=True)
        gae = GAETransform(gamma=0.99, lmbda=0.95, value_network=critic(device=device), keys=KEYS)
        with no_host_sync(device):
            advantage(gae(components(td)))

    def test_bad_arguments(self):
        with pytest.raises(ValueError, match="names: expected a name for each component, each once"):
            RewardComponents(("a", "a"))
        with pytest.raises(ValueError, match=r"weights: expected 3 of them.*received \[2\]"):
            RewardComponents(NAMES, (1.0, 2.0))
        with pytest.raises(ValueError, match=r"weights: expected names among.*received \['mvoe'\]"):
            RewardComponents(NAMES, {"mvoe": 1.0})
        with pytest.raises(KeyError, match="expected a name among"):
            RewardComponents(NAMES).column("x")
        with pytest.raises(ValueError, match="expected 3 columns"):
            RewardComponents(NAMES)(batch(c=2))
        with pytest.raises(KeyError, match="expected 'other', received"):
            RewardComponents(NAMES, in_keys=("other",), components_key="other")(batch())


class ColumnsPendulum(Pendulum):
    """Pendulum that says what its reward is made of: angle, speed, effort."""

    def _make_specs(self):
        super()._make_specs()
        shape = (*self.batch_size, 2)
        self.observation_spec["reward_components"] = Unbounded(shape, device=self.device, dtype=self.dtype)

    def _step(self, td):
        out = super()._step(td)
        effort = -0.001 * td["action"].clamp(-2, 2).square().sum(-1, keepdim=True)
        return out.set("reward_components", torch.cat([out["reward"] - effort, effort], -1))

    def _reset(self, td=None, **kwargs):
        out = super()._reset(td, **kwargs)
        return out.set("reward_components", torch.zeros(*self.batch_size, 2, device=self.device, dtype=self.dtype))


class TestInAnEnv:
    def test_columns_of_an_env_are_its_reward(self):
        env = TransformedEnv(ColumnsPendulum(3), RewardComponents(("state", "effort"), {"state": 1.0, "effort": 10.0}))
        check_env_specs(env)
        td = env.rollout(5)
        columns = td["next", "reward_components"]
        torch.testing.assert_close(td["next", "reward"], columns[..., :1] + 10 * columns[..., 1:])

    def test_is_collected(self):
        env = TransformedEnv(ColumnsPendulum(3), RewardComponents(("state", "effort")))
        batch = DeviceCollector(env, frames_per_batch=12, mode="eager").collect()
        torch.testing.assert_close(batch["next", "reward"], batch["next", "reward_components"].sum(-1, keepdim=True))


class TestAdvantage:
    @pytest.mark.parametrize("shared", [True, False])
    @pytest.mark.parametrize("t", [1, 6])
    @pytest.mark.parametrize("gammas", [(0.9,), (0.9, 0.5, 0.99)])
    @pytest.mark.parametrize("time_major", [False, True])
    def test_each_column_is_a_run_of_its_own(self, shared, t, gammas, time_major, device):
        td = batch(t=t, device=device)
        if time_major:
            td = td.apply(lambda x: x.transpose(0, 1).contiguous().transpose(0, 1))
        gamma = gammas[0] if len(gammas) == 1 else torch.tensor(gammas)
        out = GAETransform(gamma=gamma, lmbda=0.8, value_network=critic(shared, device=device), keys=KEYS)(td)
        assert out["advantage_components"].shape == (3, t, 3)
        for c in range(3):
            one = td.select("next").copy()
            one["next", "reward"] = td["next", "reward_components"][..., c : c + 1]
            one["state_value"] = out["state_value"][..., c : c + 1]
            one["next", "state_value"] = out["next", "state_value"][..., c : c + 1]
            single = GAETransform(gamma=gammas[c % len(gammas)], lmbda=0.8, value_network=None)(one)
            torch.testing.assert_close(single["advantage"], out["advantage_components"][..., c : c + 1])
            torch.testing.assert_close(single["value_target"], out["value_target"][..., c : c + 1])

    def test_the_weighted_advantage_is_that_of_the_weighted_reward(self):
        """Advantages are linear in rewards and values."""
        weights = torch.tensor([2.0, -0.5, 1.0])
        td = batch()
        out = GAETransform(gamma=0.9, lmbda=0.8, value_network=critic(), keys=KEYS)(td)
        got = ComponentAdvantage(weights)(out)["advantage"]
        one = RewardComponents(NAMES, weights)(td.copy())
        one["state_value"] = (out["state_value"] * weights).sum(-1, keepdim=True)
        one["next", "state_value"] = (out["next", "state_value"] * weights).sum(-1, keepdim=True)
        single = GAETransform(gamma=0.9, lmbda=0.8, value_network=None)(one)["advantage"]
        torch.testing.assert_close(got, single, rtol=1e-4, atol=1e-5)

    def test_with_n_step_rewards(self):
        td = batch()
        td["steps_to_next_obs"] = torch.full((3, 7, 1), 2)
        out = GAETransform(gamma=0.9, lmbda=0.0, value_network=critic(), keys=KEYS)(td)
        bootstrap = out["next", "state_value"].masked_fill(td["next", "terminated"], 0.0)
        delta = td["next", "reward_components"] + 0.81 * bootstrap - out["state_value"]
        torch.testing.assert_close(out["advantage_components"], delta)

    def test_standardized_columns(self):
        td = TensorDict({"advantage_components": torch.randn(50, 3) * torch.tensor([1.0, 1e3, 0.0])}, [50])
        got = ComponentAdvantage([1.0, 1.0, 1.0], standardize=True)(td)["advantage"].squeeze(-1)
        columns = td["advantage_components"][:, :2]
        expected = ((columns - columns.mean(0)) / columns.std(0, correction=0)).sum(-1)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)

    def test_weights_are_those_of_the_reward(self):
        components = RewardComponents(NAMES)
        advantage = ComponentAdvantage(components)
        assert not advantage.state_dict()
        components.set_weights({"end": 2.0})
        td = TensorDict({"advantage_components": torch.ones(4, 3)}, [4])
        assert (advantage(td)["advantage"] == 2).all()

    @pytest.mark.parametrize("loss_class", [DeviceClipPPOLoss, ClipPPOLoss])
    def test_ppo_learns_from_it(self, loss_class):
        actor = ProbabilisticActor(
            TensorDictModule(nn.Linear(4, 2), ["observation"], ["logits"]),
            in_keys=["logits"],
            distribution_class=GumbelCategorical,
            return_log_prob=True,
        )
        assert isinstance(actor, ProbabilisticTensorDictSequential)
        network = critic()
        td = batch()
        with torch.no_grad():
            actor(td)
        gae = GAETransform(gamma=0.9, lmbda=0.8, value_network=network, keys=KEYS)
        ComponentAdvantage(RewardComponents(NAMES))(gae(td))
        out = loss_class(actor, network)(td.reshape(-1))
        target = (network(td.copy())["state_value"] - td["value_target"]).abs()
        assert target.shape == (3, 7, 3)
        sum(value for name, value in out.items() if name.startswith("loss")).backward()
        assert all((param.grad != 0).any() for param in [*actor.parameters(), *network.parameters()])

    def test_bad_arguments(self):
        with pytest.raises(ValueError, match="names: expected them with weights of type dict, received none"):
            ComponentAdvantage({"a": 1.0})
        td = TensorDict({"advantage_components": torch.ones(4, 3)}, [4])
        with pytest.raises(ValueError, match=r"expected 2 components, received \[4, 3\]"):
            ComponentAdvantage((1.0, 1.0))(td)
        with pytest.raises(KeyError, match="expected 'advantage_components', received"):
            ComponentAdvantage((1.0, 1.0))(TensorDict({}, [4]))


def test_changed_weights_are_honoured(variant):
    components = RewardComponents(NAMES, device=variant.device)
    td = batch(device=variant.device)
    run = variant(lambda td: components(td.copy())["next", "reward"])
    first = run(td).clone()
    components.set_weights({"move": 1.0})
    torch.testing.assert_close(first, td["next", "reward_components"].sum(-1, keepdim=True))
    torch.testing.assert_close(run(td), td["next", "reward_components"][..., :1])


def test_an_advantage_with_the_weights_of_a_reward_has_none_of_its_own():
    assert ComponentAdvantage(RewardComponents(NAMES)).weights is None
    assert ComponentAdvantage((1.0, 2.0)).weights.tolist() == [1.0, 2.0]
