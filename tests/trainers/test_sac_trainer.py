"""SACTrainer: learning, the parts of an update, host waits, guards, resume, given parts, bad settings."""

import dataclasses

import gymnasium
import pytest
import torch
from states import flatten, run
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Bounded, Unbounded

from torchrl_perf.collectors import HostCollector, device_collector
from torchrl_perf.envs import CartPole, MountainCarContinuous, Pendulum
from torchrl_perf.runtime import no_host_sync, precision
from torchrl_perf.runtime.compile import compiled
from torchrl_perf.trainers import SAC_PRESETS, SACConfig, SACTrainer, make_sac_actor
from torchrl_perf.trainers.run.checkpoint import load_checkpoint, save_checkpoint

TINY = SACConfig.without_task(
    num_envs=4,
    num_steps=2,
    total_steps=400,
    capacity=64,
    minibatch_size=16,
    updates_per_iteration=2,
    learning_starts=16,
    hidden_size=16,
    logger="none",
    device="cpu",
)
CONFIGS = {
    "default": {},
    "n-step": {"n_step": 3},
    "prioritized": {"sampler": "prioritized"},
    "prioritized n-step": {"sampler": "prioritized", "n_step": 2, "loss_function": "smooth_l1"},
    "compact": {"compact": True, "capacity": 128},
    "fixed temperature": {"learn_temperature": False, "initial_temperature": 0.2},
    "target interval": {"target_interval": 2, "tau": 1.0},
    "clipped, five critics": {"max_grad_norm": 0.5, "num_critics": 5, "activation": "tanh"},
    "target entropy": {"target_entropy": -0.5, "gamma": 0.9},
    "MountainCarContinuous": {"env": "MountainCarContinuous"},
}


def make(**options):
    parts = {name: options.pop(name) for name in ("env", "collector", "actor", "critic") if name in options}
    if isinstance(parts.get("env"), str):
        options["env"] = parts.pop("env")
    return SACTrainer(dataclasses.replace(TINY, **options), **parts)


def assert_same(one, other):
    one, other = flatten(one), flatten(other)
    assert one.keys() == other.keys()
    for key, value in one.items():
        same = torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key]
        nan = isinstance(value, torch.Tensor) and torch.equal(value.nan_to_num(1e9), other[key].nan_to_num(1e9))
        assert same or nan, key


@pytest.mark.parametrize("name", CONFIGS)
def test_iterations_change_all_networks_and_wait_for_nothing(name):
    trainer = run(make(**CONFIGS[name]), 3)
    before = {key: value.clone() for key, value in trainer.loss.state_dict().items()}
    with no_host_sync():
        trainer.step()
        trainer.step()
    after = trainer.loss.state_dict()
    kept = {key for key in before if torch.equal(before[key], after[key])}
    bounds = {key for key in before if key.endswith((".low", ".high"))}
    assert kept == bounds | (set() if trainer.config.learn_temperature else {"log_alpha"})
    row = trainer.metrics.flush(1)
    assert row["train/updates_applied"] == 2
    assert row["train/updates"] == 6
    assert row["train/first_bad_iteration"] == -1
    names = {f"train/{key}" for key in trainer.statistics}
    assert names <= set(row)
    assert all(row[key] == row[key] for key in names)
    trainer.close()


def test_the_first_iterations_only_fill_the_buffer():
    trainer = make()
    before = [param.clone() for param in trainer.loss.parameters()]
    run(trainer, 2)
    assert all(torch.equal(one, two) for one, two in zip(before, trainer.loss.parameters(), strict=True))
    assert int(trainer.updates) == 0
    assert len(trainer.buffer) == 16
    actions = trainer.buffer.storage.field("action")[:4].flatten()
    assert actions.abs().max() > 1.0  # uniform over the torques in +-2
    run(trainer, 1)
    assert int(trainer.updates) == 2


def test_only_what_is_learnt_from_is_stored():
    trainer = run(make(), 3)
    keys = {str(key) for key in trainer.buffer.sample().keys(True, True)}
    assert not keys & {"loc", "scale", "low", "high", "action_log_prob"}
    assert {"observation", "action", "('next', 'observation')", "('next', 'reward')"} <= keys


class TestOneUpdate:
    """An update against the same steps written out with torch's Adam."""

    @pytest.mark.parametrize("weights", [False, True])
    def test_order_and_values(self, weights):
        trainer = make(sampler="prioritized" if weights else "random")
        run(trainer, 3)
        sample = trainer.buffer.sample()
        if weights:
            sample["priority_weight"] = torch.rand(16) + 0.1
        reference = make()
        reference.loss.load_state_dict(trainer.loss.state_dict())
        for adam in ("critic_optimizer", "actor_optimizer"):
            getattr(reference, adam).load_state_dict(getattr(trainer, adam).state_dict())
        loss = reference.loss
        torch.manual_seed(5)
        trainer.update(sample.clone())

        torch.manual_seed(5)
        action, log_prob, next_action, next_log_prob = loss.sample(sample)
        total, _, _ = loss.critic_losses(sample, next_action, next_log_prob)
        params = list(loss.critic.parameters())
        targets = list(loss.target_critic.parameters())
        reference.critic_optimizer.apply_gradients(torch.autograd.grad(total, params), total, targets, 0.005)
        actor, temperature = loss.actor_losses(sample, action, log_prob)  # with the critics just updated
        params = [*loss.actor.parameters(), loss.log_alpha]
        reference.actor_optimizer.apply_gradients(torch.autograd.grad(actor + temperature, params), actor)
        for key, value in loss.state_dict().items():
            torch.testing.assert_close(trainer.loss.state_dict()[key], value, rtol=1e-5, atol=1e-7, msg=key)

    def test_targets_move_at_every_second_update(self):
        trainer = run(make(target_interval=2, tau=1.0, updates_per_iteration=1), 2)
        equal = []
        for _ in range(4):
            trainer.step()
            pairs = zip(trainer.loss.critic.parameters(), trainer.loss.target_critic.parameters(), strict=True)
            equal.append(all(torch.equal(one, two) for one, two in pairs))
        assert equal == [False, True, False, True]

    def test_priorities_are_the_largest_errors(self):
        trainer = run(make(sampler="prioritized", updates_per_iteration=1), 3)
        sample = trainer.buffer.sample()
        seen = []
        trainer.buffer.update_priority = lambda index, priority, generation=None: seen.append((index, priority))
        trainer.update(sample)
        ((index, priority),) = seen
        assert torch.equal(index, sample["index"])
        assert priority.shape == (16,)
        assert (priority > 0).all()


class TestBadNumbers:
    def bad(self, trainer):
        sample = trainer.buffer.sample().clone()
        sample["next", "reward"][3] = torch.nan
        return sample

    def test_a_bad_reward_changes_neither_critics_nor_counters(self):
        trainer = run(make(), 3)
        before = {key: value.clone() for key, value in trainer.loss.critic.state_dict().items()}
        states = [trainer.critic_optimizer.state[param]["exp_avg"] for param in trainer.critic_optimizer.params]
        moments = [value.clone() for value in states]
        updates = int(trainer.updates)
        trainer.update(self.bad(trainer))
        after = trainer.loss.critic.state_dict()
        assert all(torch.equal(before[key], after[key]) for key in before)
        assert all(torch.equal(*pair) for pair in zip(moments, states, strict=True))
        assert int(trainer.updates) == updates
        assert float(trainer.first_bad_iteration) == 3
        assert all(param.isfinite().all() for param in trainer.loss.parameters())

    def test_a_bad_observation_changes_nothing(self):
        trainer = run(make(), 3)
        sample = trainer.buffer.sample().clone()
        sample["observation"][0, 0] = torch.inf
        before = [param.clone() for param in trainer.loss.actor.parameters()]
        trainer.update(sample)
        assert all(torch.equal(*pair) for pair in zip(before, trainer.loss.actor.parameters(), strict=True))


class TestResume:
    @pytest.mark.parametrize("name", ["default", "prioritized n-step", "compact", "fixed temperature"])
    def test_three_save_two_is_load_two(self, name, tmp_path):
        trainer = run(make(**CONFIGS[name]), 5)
        trainer.save(tmp_path / "checkpoint.pt")
        expected = run(trainer, 2).state_dict()
        resumed = make(**CONFIGS[name], seed=9)
        run(resumed, 1)
        resumed.load(tmp_path / "checkpoint.pt")
        assert_same(expected, run(resumed, 2).state_dict())

    def test_a_checkpoint_while_filling(self, tmp_path):
        trainer = run(make(), 1)
        trainer.save(tmp_path / "checkpoint.pt")
        expected = run(trainer, 3).state_dict()
        resumed = make(seed=9)
        resumed.load(tmp_path / "checkpoint.pt")
        assert_same(expected, run(resumed, 3).state_dict())

    def test_other_networks_are_refused(self, tmp_path):
        path = save_checkpoint(run(make(), 1).state_dict(), tmp_path / "checkpoint.pt")
        with pytest.raises((ValueError, RuntimeError), match=r"size mismatch|expected"):
            make(hidden_size=8).load_state_dict(load_checkpoint(path))


class TestGivenParts:
    def test_an_actor_and_a_critic(self):
        env = Pendulum(4)
        actor = make_sac_actor(env.observation_spec["observation"], env.action_spec, TINY)
        critic = TensorDictModule(_OneCritic(), ["observation", "action"], ["state_action_value"])
        trainer = run(make(env=env, actor=actor, critic=critic, num_critics=1), 4)
        assert trainer.policy is actor
        assert trainer.loss.critic is critic
        assert int(trainer.updates) == 4

    @pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP"])
    def test_a_host_collector(self, mode):
        envs = gymnasium.make_vec(
            "Pendulum-v1",
            4,
            vectorization_mode="sync",
            vector_kwargs={"autoreset_mode": gymnasium.vector.AutoresetMode[mode]},
        )
        space = envs.single_action_space
        spec = Bounded(torch.as_tensor(space.low).expand(4, 1), torch.as_tensor(space.high).expand(4, 1))
        actor = make_sac_actor(Unbounded((4, 3)), spec, TINY)
        collector = HostCollector(envs, actor, frames_per_batch=8, init_random_frames=16, seed=0)
        trainer = run(make(collector=collector), 6)
        assert int(trainer.updates) == 8
        assert len(trainer.buffer) == 48
        assert trainer.policy is actor
        trainer.close()

    def test_a_collector_of_another_policy_is_refused(self):
        first = make()
        with pytest.raises(ValueError, match="collector: expected it to act with the trainer's policy"):
            make(collector=first.collector, env=first.env, actor=make().policy)


class _OneCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def forward(self, observation, action):
        return self.net(torch.cat([observation, action], -1))


class TestBadSettings:
    def test_discrete_actions(self):
        with pytest.raises(ValueError, match=r"action_spec: expected continuous actions with .*Remedy: DQN"):
            make(env=CartPole(4))

    def test_bounds_that_differ_between_rows(self):
        low = torch.tensor([[-1.0, -1.0], [-2.0, -1.0]])
        with pytest.raises(ValueError, match=r"the same for all rows"):
            make_sac_actor(Unbounded((2, 3)), Bounded(low, torch.ones(2, 2), shape=(2, 2)), TINY)

    def test_unbounded_actions(self):
        with pytest.raises(ValueError, match=r"received Unbounded\w* of torch.float32.*Remedy"):
            make_sac_actor(Unbounded((3,)), Unbounded((2,)), TINY)
        with pytest.raises(ValueError, match=r"expected finite bounds with low < high.*Remedy"):
            make_sac_actor(Unbounded((3,)), Bounded(-torch.inf, torch.inf, (2,)), TINY)

    @pytest.mark.parametrize(
        "field, value",
        [
            ("num_critics", 0),
            ("hidden_size", 0),
            ("target_interval", 0),
            ("tau", 1.5),
            ("actor_learning_rate", 0.0),
            ("critic_learning_rate", -1.0),
            ("temperature_learning_rate", 0.0),
            ("initial_temperature", 0.0),
            ("max_grad_norm", 0.0),
            ("loss_function", "l1"),
            ("activation", "swish"),
            ("precision", "fp8"),
            ("minibatch_size", 100),
        ],
    )
    def test_the_field_is_named(self, field, value):
        with pytest.raises(ValueError, match=rf"{field}: expected .*received {value!r}"):
            dataclasses.replace(TINY, **{field: value})


def test_bounds_of_the_action():
    for env in (Pendulum(4), MountainCarContinuous(4)):
        actor = make_sac_actor(env.observation_spec["observation"], env.action_spec, TINY)
        td = actor(
            TensorDict({"observation": torch.randn(200, env.observation_spec["observation"].shape[-1]) * 50}, [200])
        )
        low, high = env.action_spec.space.low[0], env.action_spec.space.high[0]
        assert ((td["action"] >= low) & (td["action"] <= high)).all()


@pytest.fixture(params=["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def backend(request, monkeypatch, fresh_dynamo):
    """What compiles: without Inductor the graphs are traced and run all the same, in a tenth of the time."""
    if request.param == "aot_eager":
        for module in (precision, device_collector):
            monkeypatch.setattr(module, "compiled", lambda fn, **_: compiled(fn, backend="aot_eager"))


@pytest.mark.parametrize("options", [{"sampler": "prioritized"}, {"n_step": 2, "target_interval": 2}])
@pytest.mark.slow
def test_compiled_iterations_equal_eager(backend, options):
    states = []
    for mode in ("eager", "compile"):
        trainer = run(make(mode=mode, updates_per_iteration=1, **options), 4)
        states.append(trainer.loss.state_dict())
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value, rtol=1e-3, atol=1e-5, msg=key)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["default", "prioritized n-step", "compact", "target interval"])
def test_graph_equals_compiled(name, fresh_dynamo):
    states = []
    for mode in ("compile", "graph"):
        trainer = run(make(mode=mode, device="cuda", **CONFIGS[name]), 8)
        states.append(trainer.loss.state_dict())
        trainer.close()
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value, rtol=1e-3, atol=1e-4, msg=key)


@pytest.mark.slow
def test_it_learns_pendulum():
    """The preset at twice the updates to data, for 1,600 updates: a random policy gets -1,200."""
    preset = SAC_PRESETS["Pendulum"]
    config = dataclasses.replace(preset, updates_per_iteration=8, minibatch_size=128, device="cpu", logger="none")
    trainer = run(SACTrainer(config), config.fill_iterations + 200)
    env = Pendulum(32)
    with torch.no_grad():
        returns = env.rollout(200, trainer.policy)["next", "reward"].sum(1)
    assert int(trainer.updates) == 1600
    assert returns.mean() > -300
