"""GAETransform: its three uses, agreement with TorchRL's GAE, one network call, recurrent critics, errors."""

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.envs import Compose, GymEnv, InitTracker, TransformedEnv
from torchrl.modules import LSTMModule, OneHotCategorical, ProbabilisticActor, set_recurrent_mode
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE
from torchrl.trainers.algorithms import PPOTrainer

from torchrl_perf.functional import generalized_advantage_estimate
from torchrl_perf.runtime import no_host_sync
from torchrl_perf.transforms import GAETransform


class CountingNet(nn.Module):
    """A small critic that records the number of rows of each call."""

    def __init__(self, size=4):
        super().__init__()
        self.layer = nn.Linear(size, 1)
        self.rows = []

    def forward(self, x):
        self.rows.append(tuple(x.shape[:-1]))
        return torch.tanh(self.layer(x))


def critic(device="cpu", key="observation", size=4):
    return TensorDictModule(CountingNet(size), in_keys=[key], out_keys=["state_value"]).to(device)


def batch(n=3, t=7, *, device="cpu", layout="env-major", size=4):
    done = torch.rand(n, t, 1) < 0.25
    td = TensorDict(
        {
            "observation": torch.randn(n, t, size),
            "next": {
                "observation": torch.randn(n, t, size),
                "reward": torch.randn(n, t, 1),
                "done": done,
                "terminated": done & (torch.rand(n, t, 1) < 0.5),
            },
        },
        batch_size=[n, t],
        names=[None, "time"],
    )
    td["next", "truncated"] = td["next", "done"] & ~td["next", "terminated"]
    if layout == "time-major":
        td = td.apply(lambda x: x.transpose(0, 1).contiguous().transpose(0, 1))
    return td.to(device)


class TestOnABatch:
    @pytest.mark.parametrize("layout", ["env-major", "time-major"])
    @pytest.mark.parametrize(("n", "t"), [(1, 1), (1, 9), (5, 1), (3, 7)])
    def test_equals_torchrl(self, n, t, layout, device):
        net, data = critic(device), batch(n, t, device=device, layout=layout)
        theirs = GAE(gamma=0.99, lmbda=0.95, value_network=net)(data.clone())
        ours = GAETransform(gamma=0.99, lmbda=0.95, value_network=net)(data)
        assert ours is data
        for key in ("state_value", ("next", "state_value"), "advantage", "value_target"):
            torch.testing.assert_close(ours[key], theirs[key], rtol=1e-4, atol=1e-5)
        if layout == "time-major" and n > 1 and t > 1:
            strides = [ours[key].stride()[:2] for key in ("state_value", "advantage", ("next", "reward"))]
            assert strides[0] == strides[1] == strides[2]

    def test_the_network_runs_once_without_gradient(self):
        net, data = critic(), batch()
        gae = GAETransform(gamma=0.99, lmbda=0.95, value_network=net)
        assert not gae(data)["advantage"].requires_grad
        assert not data["state_value"].requires_grad
        assert net.module.rows == [(2 * 3 * 7,)]
        assert not list(gae.parameters())

    @pytest.mark.parametrize("chunk_size", [1, 5, 21, 40, 100])
    def test_chunks_give_the_same(self, chunk_size):
        net, data = critic(), batch()
        want = GAETransform(gamma=0.99, lmbda=0.95, value_network=net)(data.clone())
        net.module.rows.clear()
        ours = GAETransform(gamma=0.99, lmbda=0.95, value_network=net, chunk_size=chunk_size)(data)
        torch.testing.assert_close(ours, want)
        assert max(rows for (rows,) in net.module.rows) <= chunk_size

    def test_truncation_bootstraps_from_the_true_final_observation(self):
        # The value of an observation is its number; the root of t=1 is a reset observation, worth 100.
        net = TensorDictModule(nn.Identity(), in_keys=["observation"], out_keys=["state_value"])
        root, following = torch.tensor([[[1.0], [100.0]]]), torch.tensor([[[2.0], [101.0]]])
        flags = {"done": torch.tensor([[[True], [False]]]), "truncated": torch.tensor([[[True], [False]]])}
        after = {"observation": following, "reward": root * 0, **flags}
        data = TensorDict({"observation": root, "next": after}, batch_size=[1, 2])
        gae = GAETransform(gamma=0.5, lmbda=1.0, value_network=net)
        # Only done and truncated are present: terminated is what is done and not truncated.
        assert gae(data)["advantage"].flatten().tolist() == [0.5 * 2 - 1, 0.5 * 101 - 100]
        data["next", "terminated"] = flags["done"]
        assert gae(data)["advantage"].flatten().tolist() == [-1.0, 0.5 * 101 - 100]

    def test_a_terminated_steps_bad_observation_reaches_nothing(self):
        net, data = critic(), batch()
        gae = GAETransform(gamma=0.99, lmbda=0.95, value_network=net)
        want = gae(data.clone())
        data["next", "observation"] = torch.where(data["next", "terminated"], float("nan"), data["next", "observation"])
        ours = gae(data)
        for key in ("state_value", "advantage", "value_target"):
            torch.testing.assert_close(ours[key], want[key])

    def test_agents_share_reward_and_flags(self):
        net, data = critic(key=("agents", "observation")), batch()
        data["agents", "observation"] = torch.randn(3, 7, 2, 4)
        data["next", "agents", "observation"] = torch.randn(3, 7, 2, 4)
        ours = GAETransform(gamma=0.9, lmbda=0.8, value_network=net)(data)
        nxt = data["next"]
        want, _ = generalized_advantage_estimate(
            0.9, 0.8, data["state_value"], nxt["state_value"],
            *(nxt[key].unsqueeze(2).expand(3, 7, 2, 1) for key in ("reward", "done", "terminated")), time_dim=1,
        )  # fmt: skip
        assert ours["advantage"].shape == (3, 7, 2, 1)
        torch.testing.assert_close(ours["advantage"], want)

    def test_time_is_where_it_is_named(self):
        net, data = critic(), batch()
        gae = GAETransform(gamma=0.9, lmbda=0.8, value_network=net)
        want = gae(data.clone())["advantage"]
        torch.testing.assert_close(gae(data.clone().transpose(0, 1))["advantage"].transpose(0, 1), want)
        unnamed = TensorDict(data.to_dict(), batch_size=[3, 7])
        torch.testing.assert_close(gae(unnamed)["advantage"], want)
        flipped = GAETransform(gamma=0.9, lmbda=0.8, value_network=net, time_dim=0)
        unnamed = TensorDict(data.transpose(0, 1).to_dict(), batch_size=[7, 3])
        torch.testing.assert_close(flipped(unnamed)["advantage"].transpose(0, 1), want)
        one = TensorDict(data[0].to_dict(), batch_size=[7], names=["time"])
        torch.testing.assert_close(gae(one)["advantage"], want[0])
        three = data.clone().unsqueeze(0).expand(2, 3, 7).clone()
        torch.testing.assert_close(gae(three)["advantage"][1], want)

    def test_discount_of_several_steps(self):
        net, data = critic(), batch()
        data["steps_to_next_obs"] = torch.randint(1, 4, (3, 7, 1))
        theirs = GAE(gamma=0.9, lmbda=0.8, value_network=net)(data.clone())
        ours = GAETransform(gamma=0.9, lmbda=0.8, value_network=net)(data)
        torch.testing.assert_close(ours["advantage"], theirs["advantage"], rtol=1e-4, atol=1e-5)

    def test_without_a_network_values_are_read(self):
        data = batch()
        data["state_value"], data["next", "state_value"] = torch.randn(2, 3, 7, 1).unbind(0)
        theirs = GAE(gamma=0.9, lmbda=0.8, value_network=None)(data.clone())
        ours = GAETransform(gamma=0.9, lmbda=0.8, value_network=None)(data)
        torch.testing.assert_close(ours["advantage"], theirs["advantage"], rtol=1e-4, atol=1e-5)

    def test_no_host_reads_and_compiles(self):
        net, data = critic(), batch()
        gae = GAETransform(gamma=0.9, lmbda=0.8, value_network=net, average_gae=True)
        with no_host_sync():
            want = gae(data.clone(False))["advantage"]
        net.module.forward = lambda x: torch.tanh(net.module.layer(x))
        compiled = torch.compile(lambda td: gae(td)["advantage"], fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(data.clone(False)), want, rtol=1e-4, atol=1e-5)

    def test_a_locked_batch_is_written_in_place(self):
        gae, data = GAETransform(gamma=0.9, lmbda=0.8, value_network=critic()), batch()
        want = gae(data)["advantage"].clone()
        storage = data["advantage"].data_ptr()
        data["advantage"].zero_()
        gae(data.lock_())
        torch.testing.assert_close(data["advantage"], want)
        assert data["advantage"].data_ptr() == storage
        with pytest.raises(RuntimeError, match="locked"):
            gae(batch().lock_())


class TestAverage:
    def test_equals_torchrl(self):
        net, data = critic(), batch()
        theirs = GAE(gamma=0.99, lmbda=0.95, value_network=net, average_gae=True)(data.clone())
        ours = GAETransform(gamma=0.99, lmbda=0.95, value_network=net, average_gae=True)(data)
        torch.testing.assert_close(ours["advantage"], theirs["advantage"], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours["value_target"], theirs["value_target"], rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize(("n", "t"), [(1, 1), (7, 1), (100, 1)])
    def test_equal_advantages_become_zero(self, n, t):
        data = batch(n, t)
        data["state_value"] = data["next", "state_value"] = torch.zeros(n, t, 1)
        data["next", "reward"] = torch.full((n, t, 1), 0.1)
        ours = GAETransform(gamma=0.9, lmbda=0.8, value_network=None, average_gae=True)(data)
        assert torch.equal(ours["advantage"], torch.zeros(n, t, 1))


class TestInAReplayBuffer:
    @pytest.mark.parametrize("buffer_class", [ReplayBuffer, TensorDictReplayBuffer])
    def test_runs_when_extended_and_not_when_sampled(self, buffer_class):
        net, data = critic(), batch(4, 6)
        want = GAETransform(gamma=0.99, lmbda=0.95, value_network=net)(data.clone())
        gae = GAETransform(gamma=0.99, lmbda=0.95, value_network=net)
        buffer = buffer_class(storage=LazyTensorStorage(24, ndim=2), transform=gae, batch_size=8)
        net.module.rows.clear()
        buffer.extend(data)
        assert net.module.rows == [(2 * 4 * 6,)]
        assert "advantage" not in data.keys()
        torch.testing.assert_close(buffer[:]["advantage"], want["advantage"])
        sample = buffer.sample()
        assert "advantage" in sample.keys()
        assert len(net.module.rows) == 1

    def test_appended_to_a_chain(self):
        net = critic()
        buffer = ReplayBuffer(storage=LazyTensorStorage(24, ndim=2), batch_size=8)
        buffer.append_transform(GAETransform(gamma=0.99, lmbda=0.95, value_network=net))
        buffer.extend(batch(4, 6))
        assert buffer.sample()["advantage"].shape == (8, 1)
        assert len(net.module.rows) == 1

    def test_in_a_chain_of_a_script_it_still_runs(self):
        chain = Compose(GAETransform(gamma=0.99, lmbda=0.95, value_network=critic()))
        assert "advantage" in chain(batch()).keys()


class TestRecurrent:
    @pytest.mark.parametrize("chunk_size", [None, 7, 14, 1000])
    def test_equals_torchrl_without_vmap(self, chunk_size):
        lstm = LSTMModule(4, 5, in_key="observation", out_key="embedding")
        head = TensorDictModule(nn.Linear(5, 1), in_keys=["embedding"], out_keys=["state_value"])
        net, data = TensorDictSequential(lstm, head), batch()
        done = data["next", "done"]
        data["is_init"] = torch.cat([torch.ones_like(done[:, :1]), done[:, :-1]], 1)
        data["next", "is_init"] = torch.zeros_like(done)
        for key in ("recurrent_state_h", "recurrent_state_c"):
            data[key] = data["next", key] = torch.zeros(3, 7, 1, 5)
        with set_recurrent_mode(True):
            theirs = GAE(gamma=0.9, lmbda=0.8, value_network=net, deactivate_vmap=True)(data.clone())
        ours = GAETransform(gamma=0.9, lmbda=0.8, value_network=net, chunk_size=chunk_size)(data)
        for key in ("state_value", ("next", "state_value"), "advantage"):
            torch.testing.assert_close(ours[key], theirs[key], rtol=1e-4, atol=1e-5)
        with pytest.raises(ValueError, match="last batch dimension"):
            GAETransform(gamma=0.9, lmbda=0.8, value_network=net)(data.transpose(0, 1))


class TestKeysAndState:
    def test_keys_are_renamed(self):
        net = TensorDictModule(CountingNet(), in_keys=["observation"], out_keys=["v"])
        data = batch()
        data["next", "r"] = data["next"].pop("reward")
        keys = {"advantage": "a", "value_target": "target", "value": "v", "reward": "r"}
        by_constructor = GAETransform(gamma=0.9, lmbda=0.8, value_network=net, keys=keys)(data.clone())
        gae = GAETransform(gamma=0.9, lmbda=0.8, value_network=net)
        gae.set_keys(**keys)
        torch.testing.assert_close(gae(data)["a"], by_constructor["a"])
        assert {"a", "target", "v"} <= set(data.keys())
        with pytest.raises(KeyError, match="rewrad"):
            gae.set_keys(rewrad="r")

    def test_state_dict(self):
        first = GAETransform(gamma=0.9, lmbda=0.8, value_network=critic())
        second = GAETransform(gamma=0.5, lmbda=0.5, value_network=critic())
        assert set(first.state_dict()) == {"gamma", "lmbda"}
        second.load_state_dict(first.state_dict())
        assert second.gamma.tolist() == 0.9
        assert second.lmbda.tolist() == 0.8


class TestErrors:
    def test_a_flattened_batch_is_refused(self):
        gae = GAETransform(gamma=0.9, lmbda=0.8, value_network=critic())
        with pytest.raises(ValueError, match="flattened batch mixes trajectories"):
            gae(batch().reshape(-1))

    def test_missing_keys_are_named(self):
        gae = GAETransform(gamma=0.9, lmbda=0.8, value_network=critic())
        data = batch()
        with pytest.raises(KeyError, match=r"truncated.*done alone"):
            gae(data.exclude(("next", "terminated"), ("next", "truncated")))
        with pytest.raises(KeyError, match="reward"):
            gae(data.exclude(("next", "reward")))
        with pytest.raises(KeyError, match="'observation' for the value network"):
            gae(data.exclude("observation"))
        with pytest.raises(KeyError, match="pass a value_network"):
            GAETransform(gamma=0.9, lmbda=0.8, value_network=None)(data)
        with pytest.raises(KeyError, match=r"'other'.*state_value"):
            GAETransform(gamma=0.9, lmbda=0.8, value_network=critic(), keys={"value": "other"})(data)

    def test_bad_arguments(self):
        with pytest.raises(ValueError, match="chunk_size"):
            GAETransform(gamma=0.9, lmbda=0.8, value_network=None, chunk_size=0)
        with pytest.raises(ValueError, match="gamma"):
            GAETransform(gamma=1.9, lmbda=0.8, value_network=None)

    def test_an_environment_is_told(self):
        env = TransformedEnv(GymEnv("CartPole-v1"), Compose(GAETransform(gamma=0.9, lmbda=0.8, value_network=None)))
        with pytest.raises(RuntimeError, match="received one step from an environment"):
            env.rollout(2)
        env.close()


@pytest.mark.filterwarnings("ignore:PPOTrainer is an experimental:UserWarning")
@pytest.mark.filterwarnings("ignore:The 'optimizer' hook stage:FutureWarning")
def test_as_gae_of_torchrls_trainer():
    env = TransformedEnv(GymEnv("CartPole-v1"), InitTracker())
    layers = TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["logits"])
    actor = ProbabilisticActor(
        layers, in_keys=["logits"], distribution_class=OneHotCategorical, return_log_prob=True, spec=env.action_spec
    )
    net = critic()
    loss = ClipPPOLoss(actor, net)
    gae = GAETransform(gamma=0.99, lmbda=0.95, value_network=loss.critic_network)
    collector = Collector(env, actor, frames_per_batch=32, total_frames=64)
    trainer = PPOTrainer(
        collector=collector, total_frames=64, frame_skip=1, optim_steps_per_batch=1, num_epochs=1, loss_module=loss,
        optimizer=torch.optim.SGD(loss.parameters(), 0.1), gae=gae, progress_bar=False, enable_logging=False,
    )  # fmt: skip
    before = [parameter.detach().clone() for parameter in loss.parameters()]
    net.module.rows.clear()
    trainer.train()
    assert net.module.rows.count((64,)) == 2  # one call a batch, root and next rows together
    assert any(not torch.equal(x, y) for x, y in zip(before, loss.parameters(), strict=True))
