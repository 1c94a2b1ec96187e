"""DQNTrainer: configurations, learning, targets, schedules, host waits, divergence."""

import dataclasses

import gymnasium
import pytest
import torch
from states import run
from torch import nn
from torchrl.data import Categorical

from torchrl_perf.collectors import DeviceCollector, HostCollector
from torchrl_perf.envs import CartPole, Pendulum
from torchrl_perf.modules import DuelingMLP, EpsilonGreedy, FusedMLP
from torchrl_perf.runtime import host_syncs
from torchrl_perf.trainers import DQN_PRESETS, DQNConfig, DQNTrainer, TrainingDivergedError, train
from torchrl_perf.trainers.dqn import DQN
from torchrl_perf.trainers.off_policy.trainer import OffPolicyTrainer
from torchrl_perf.trainers.run.checkpoint import CheckpointFolder

TINY = DQNConfig.without_task(
    num_envs=4,
    num_steps=8,
    total_steps=640,
    capacity=200,
    minibatch_size=16,
    updates_per_iteration=2,
    learning_starts=64,
    eps_frames=320,
    target_interval=3,
    hidden_size=32,
    logger="none",
    device="cpu",
)
VARIANTS = {
    "plain": {"double": False},
    "double": {},
    "duelling": {"dueling": True},
    "prioritized": {"sampler": "prioritized", "beta_final": 1.0},
    "three steps": {"n_step": 3},
    "compact": {"compact": True},
    "polyak": {"tau": 0.05, "target_interval": 1},
    "l2, annealed": {"loss": "l2", "anneal_learning_rate": True, "activation": "tanh"},
    "everything": {"dueling": True, "sampler": "prioritized", "n_step": 3, "compact": True, "beta_final": 1.0},
    "no warm-up": {"learning_starts": 0},
}


def make(**options):
    return DQNTrainer(dataclasses.replace(TINY, **options))


def weights(module):
    return [param.detach().clone() for param in module.parameters()]


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_every_configuration_learns_something(options):
    trainer = make(**options)
    before = weights(trainer.q_network)
    run(trainer, 4)
    assert all((one != two).any() for one, two in zip(before, weights(trainer.q_network), strict=True))
    row = trainer.metrics.flush(128)
    updates = 2 * (4 - trainer.config.fill_iterations)
    assert (row["train/updates"], row["train/updates_applied"]) == (updates, 2)
    assert row["buffer/rows"] == 128
    assert row["train/first_bad_iteration"] == -1
    names = {"train/loss", "train/td_error", "train/q_value", "train/grad_norm", "train/epsilon", "episode/count"}
    assert names <= set(row)
    assert all(value == value for name, value in row.items() if name.startswith("train/"))
    trainer.close()


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_no_host_read_in_an_iteration(options):
    trainer = run(make(**options), 4)
    with host_syncs() as report:
        run(trainer, 2)
    assert report.total == 0, report.rows


@pytest.mark.slow
def test_compiled_equals_eager(fresh_dynamo):
    eager, compiled = (run(make(mode=mode, **VARIANTS["everything"]), 5) for mode in ("eager", "compile"))
    for one, two in zip(weights(eager.q_network), weights(compiled.q_network), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-5)
    assert torch.equal(eager.buffer[:]["action"], compiled.buffer[:]["action"])
    assert int(compiled.updates) == 6


@pytest.mark.gpu
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_a_captured_iteration_goes_on_as_an_uncaptured_one(options, fresh_dynamo):
    # made one after the other: each begins by setting the seed that both draw from
    trainers = [run(make(mode=mode, device="cuda", **options), 12) for mode in ("compile", "graph")]
    compiled, graph = trainers
    assert graph._captures.iterate.captured
    for one, two in zip(weights(compiled.q_network), weights(graph.q_network), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-2, atol=1e-3)
    rows = [trainer.metrics.flush(384) for trainer in (compiled, graph)]
    for name in ("train/updates", "train/epsilon", "train/learning_rate", "buffer/rows"):
        assert rows[0][name] == pytest.approx(rows[1][name]), name
    graph.optimizer.learning_rate.zero_()
    if not graph.config.anneal_learning_rate:
        before = weights(graph.q_network)
        run(graph, 2)  # a replay honours what is written between replays
        assert all(torch.equal(one, two) for one, two in zip(before, weights(graph.q_network), strict=True))
    graph.close()


@pytest.mark.gpu
def test_a_captured_run_resumes_bitwise(fresh_dynamo, tmp_path):
    options = {"mode": "graph", "device": "cuda", **VARIANTS["everything"]}
    trainer = run(make(**options), 8)
    path = trainer.save(tmp_path / "checkpoint.pt")
    expected = weights(run(trainer, 2).q_network)
    trainer.load(path)
    for one, two in zip(expected, weights(run(trainer, 2).q_network), strict=True):
        assert torch.equal(one, two)


def test_cartpole_improves_within_a_few_seconds():
    config = dataclasses.replace(DQN_PRESETS["CartPole"], eps_frames=5_000, device="cpu", logger="none")
    trainer = DQNTrainer(config)
    # 12,800 frames at most; a random policy gets 22
    assert any(float(run(trainer, 5).episodes.mean_return) >= 50 for _ in range(10))


class TestFill:
    def test_no_update_before_learning_starts(self):
        trainer = make(learning_starts=65)  # rounded up to 3 iterations of 32 frames
        before = weights(trainer.q_network)
        run(trainer, 3)
        assert int(trainer.updates) == 0
        assert all(torch.equal(one, two) for one, two in zip(before, weights(trainer.q_network), strict=True))
        run(trainer, 1)
        assert int(trainer.updates) == 2

    def test_its_actions_are_random(self):
        trainer = make(eps_start=0.0, eps_end=0.0, learning_starts=320, capacity=400)
        for param in trainer.q_network.parameters():
            nn.init.zeros_(param)  # greedy is action 0
        run(trainer, 10)
        share = trainer.buffer[:]["action"].float().mean()
        assert 0.35 < float(share) < 0.65

    def test_ends_greedily_at_epsilon_zero(self):
        trainer = make(eps_start=0.0, eps_end=0.0, learning_starts=32)
        for param in trainer.q_network.parameters():
            nn.init.zeros_(param)
        trainer.step()
        trainer.step()
        assert (trainer.collector.batch["action"] == 0).all()


class TestTargets:
    def test_copied_every_third_update(self):
        trainer = make(updates_per_iteration=1, learning_starts=32)
        run(trainer, 1)
        first = weights(trainer.target_network)
        for update in range(1, 7):
            run(trainer, 1)
            target, online = weights(trainer.target_network), weights(trainer.q_network)
            if update % 3 == 0:
                assert all(torch.equal(one, two) for one, two in zip(target, online, strict=True))
                first = target
            else:
                assert all(torch.equal(one, two) for one, two in zip(target, first, strict=True))

    def test_polyak_moves_by_tau(self):
        trainer = make(updates_per_iteration=1, learning_starts=32, tau=0.25, target_interval=1)
        run(trainer, 1)
        before = weights(trainer.target_network)
        run(trainer, 1)
        online = weights(trainer.q_network)
        for old, new, param in zip(before, weights(trainer.target_network), online, strict=True):
            torch.testing.assert_close(new, 0.75 * old + 0.25 * param)

    def test_target_has_no_gradient(self):
        trainer = run(make(), 4)
        assert all(p.grad is None and not p.requires_grad for p in trainer.target_network.parameters())


class TestSchedules:
    def test_epsilon_counts_frames(self):
        trainer = make(eps_start=1.0, eps_end=0.1, eps_frames=320)
        for iteration in range(1, 12):
            trainer.step()
            share = min(iteration * 32 / 320, 1.0)
            assert float(trainer.policy.epsilon) == pytest.approx(1.0 - 0.9 * share, rel=1e-5)

    def test_learning_rate_falls_to_zero(self):
        trainer = make(anneal_learning_rate=True, learning_rate=0.01)
        for iteration in range(trainer.config.iterations):
            trainer.step()
            expected = 0.01 * (1 - iteration / 20)
            assert float(trainer.optimizer.learning_rate) == pytest.approx(expected, rel=1e-4)

    def test_beta_reaches_its_end(self):
        trainer = run(make(sampler="prioritized", beta=0.4, beta_final=1.0), 10)
        assert float(trainer.buffer.sampler.beta) == pytest.approx(0.7, rel=1e-4)
        run(trainer, 10)
        assert float(trainer.buffer.sampler.beta) == pytest.approx(1.0, rel=1e-4)


class TestParts:
    def test_own_network_and_env(self):
        env = CartPole(4, device="cpu")
        policy = EpsilonGreedy(DuelingMLP(4, 2, hidden_size=16), spec=env.action_spec)
        trainer = DQNTrainer(TINY, env=env, policy=policy)
        assert trainer.q_network is policy.network
        run(trainer, 4)

    def test_own_collector_and_its_policy(self):
        env = CartPole(4, device="cpu")
        policy = EpsilonGreedy(FusedMLP(4, 2, hidden_size=16), spec=env.action_spec)
        collector = DeviceCollector(env, policy, frames_per_batch=32)
        trainer = run(DQNTrainer(TINY, collector=collector), 4)
        assert trainer.policy is policy
        assert int(trainer.updates) == 4

    def test_envs_on_the_cpu(self):
        options = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
        envs = gymnasium.make_vec("CartPole-v1", num_envs=4, vectorization_mode="sync", vector_kwargs=options)
        policy = EpsilonGreedy(FusedMLP(4, 2, hidden_size=16), spec=Categorical(2))
        collector = HostCollector(envs, policy, frames_per_batch=32, init_random_frames=64)
        config = dataclasses.replace(TINY, env="CartPole-v1", n_step=3, sampler="prioritized")
        trainer = run(DQNTrainer(config, collector=collector), 4)
        assert (int(trainer.updates), int(trainer.rows), int(trainer.frames)) == (4, 128, 128)
        assert not trainer.collects_on_device
        trainer.load_state_dict(trainer.state_dict())
        run(trainer, 1)
        trainer.close()

    def test_pieces_that_do_not_fit_are_named(self):
        env = CartPole(4, device="cpu")
        policy = EpsilonGreedy(FusedMLP(4, 2), spec=env.action_spec)
        with pytest.raises(ValueError, match=r"action_spec: expected discrete actions .* SAC or PPO"):
            make(env="Pendulum")
        with pytest.raises(ValueError, match=r"env: expected one of CartPole, .*, received 'Antelope'. Remedy"):
            make(env="Antelope")
        with pytest.raises(ValueError, match=r"env: expected batch_size \[4\]"):
            DQNTrainer(TINY, env=CartPole(8, device="cpu"))
        with pytest.raises(ValueError, match="collector: expected 4 envs and frames_per_batch=32"):
            DQNTrainer(TINY, collector=DeviceCollector(env, policy, frames_per_batch=64))
        with pytest.raises(ValueError, match="the same object to the collector and to the trainer"):
            other = EpsilonGreedy(FusedMLP(4, 2), spec=env.action_spec)
            DQNTrainer(TINY, collector=DeviceCollector(env, other, frames_per_batch=32), policy=policy)
        with pytest.raises(ValueError, match="policy: expected an EpsilonGreedy"):
            DQNTrainer(TINY, collector=DeviceCollector(env, frames_per_batch=32))
        with pytest.raises(ValueError, match="mode='graph': expected a CUDA device"):
            make(mode="graph")

    def test_continuous_env_given(self):
        with pytest.raises(ValueError, match="received BoundedContinuous in Pendulum"):
            DQNTrainer(TINY, env=Pendulum(4, device="cpu"))


class TestDivergence:
    def test_a_bad_update_is_skipped_and_the_run_ends(self, tmp_path):
        config = dataclasses.replace(TINY, log_interval=1, checkpoint_interval=1)
        trainer = DQNTrainer(config)
        update = trainer.update

        def poisoned(sample):
            bad = trainer._iteration >= 4
            sample["next", "reward"] = torch.where(bad, torch.nan, sample["next", "reward"])
            update(sample)

        trainer.update = poisoned
        with pytest.raises(TrainingDivergedError, match=r"iteration 4 \(env step 128\)") as error:
            train(trainer, tmp_path, progress=False)
        assert str(tmp_path) in str(error.value)
        assert all(param.isfinite().all() for param in trainer.q_network.parameters())
        assert int(trainer.updates) == 2
        assert CheckpointFolder(tmp_path / "checkpoints").files()[0].name == "000000003.pt"


def test_networks_are_not_taken_twice():
    config = make().config
    with pytest.raises(TypeError, match="policy: expected none beside an algorithm"):
        DQNTrainer(config, DQN(config), policy=nn.Identity())


def test_a_trainer_without_an_algorithm_says_so():
    with pytest.raises(TypeError, match="algorithm: expected what is learnt, received None, and OffPolicyTrainer"):
        OffPolicyTrainer(make().config)
