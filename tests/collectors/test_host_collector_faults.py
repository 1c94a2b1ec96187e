"""Envs that raise, hang up or die under a HostCollector, and what it refuses at construction."""

import multiprocessing
import os
import signal

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from host_oracle import MODES, PATHS, Maze, check_against_loop, collector, gather, maze_policy, vector
from tensordict.nn import TensorDictModule
from torch import nn

from torchrl_perf.collectors import HostCollector, HostEnvError, ignore_interrupts
from torchrl_perf.modules import GumbelCategorical


class Failing(Maze):
    """Fails at its ``fails_at``-th step if its seed is ``unlucky``."""

    def __init__(self, fails_at=10, unlucky=421, error=ZeroDivisionError):
        super().__init__()
        self.fails_at, self.unlucky, self.error, self.total, self.closed = fails_at, unlucky, error, 0, False

    def step(self, action):
        self.total += 1
        if self.total == self.fails_at and self.identity == self.unlucky:
            if self.error == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise self.error("a wheel came off")
        return super().step(action)

    def close(self):
        self.closed = True


def failing(num_envs, mode, kind="sync", **options):
    fns = [lambda: Failing(**options)] * num_envs
    if kind == "async":
        return AsyncVectorEnv(fns, autoreset_mode=AutoresetMode(mode), context="fork")
    return SyncVectorEnv(fns, autoreset_mode=AutoresetMode(mode))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("sizes", [(3,), (1, 2), (2, 1)])
def test_an_env_that_raises_is_named_and_nothing_is_lost(mode, path, sizes):
    envs = [failing(n, mode, unlucky=421) for n in sizes]
    collecting = collector(path, envs, frames_per_batch=3 * 4, seed=20)
    first = collecting.collect().clone().cpu()
    with pytest.raises(HostEnvError, match=r"env 1 \(number \d.*seed 421, raised ZeroDivisionError") as caught:
        for _ in range(3):
            batch = collecting.collect().clone().cpu()
            first = torch.cat([first, batch], 1)
    error = caught.value
    assert (error.env_index, error.seed) == (1, 421)
    assert sizes[: error.group + 1] in ((3,), (1, 2), (2,))
    assert isinstance(error.__cause__, ZeroDivisionError)
    data = torch.cat([first, error.batch.cpu()], 1)
    assert data.shape[1] == 9  # the tenth step of env 1 failed; where it resets, others have done as many by then
    check_against_loop(data, Maze, 20)
    assert all(env.closed for vector_env in envs for env in vector_env.envs)
    with pytest.raises(RuntimeError, match="shut down"):
        collecting.collect()


@pytest.mark.filterwarnings("ignore::UserWarning")  # gymnasium logs the worker's traceback as warnings
@pytest.mark.parametrize("error", [ZeroDivisionError, "kill"])
def test_a_worker_process_that_raises_or_dies(error):
    envs = [
        failing(2, "SameStep", "async", error=error, unlucky=345),
        failing(2, "SameStep", "async", error=error, unlucky=345),
    ]
    processes = [process for each in envs for process in each.processes]
    collecting = HostCollector(envs, frames_per_batch=4 * 20, seed=18)
    with pytest.raises(HostEnvError, match=r"env 3 .*group 1, a AsyncVectorEnv, seed 345") as caught:
        collecting.collect()
    assert caught.value.batch.shape == (4, 9)
    assert caught.value.step == 9
    check_against_loop(caught.value.batch, Maze, 18)
    assert not any(process.is_alive() for process in processes)


def test_ctrl_c_closes_the_envs():
    envs = failing(2, "SameStep", unlucky=1, error=KeyboardInterrupt)
    collecting = HostCollector(envs, frames_per_batch=2 * 20, seed=0)
    with pytest.raises(KeyboardInterrupt):
        collecting.collect()
    assert collecting.closed
    assert all(env.closed for env in envs.envs)


def test_ctrl_c_ends_worker_processes():
    envs = failing(2, "SameStep", "async")

    def policy(td):
        raise KeyboardInterrupt

    collecting = HostCollector(envs, frames_per_batch=8, seed=0)
    collecting._act = policy
    with pytest.raises(KeyboardInterrupt):
        collecting.collect()
    assert not any(process.is_alive() for process in envs.processes)


def test_worker_processes_outlive_ctrl_c():
    envs = AsyncVectorEnv([ignore_interrupts(Maze)] * 2, autoreset_mode=AutoresetMode.SAME_STEP, context="fork")
    collecting = HostCollector(envs, frames_per_batch=8, seed=0)
    first = collecting.collect().clone()
    for process in envs.processes:
        os.kill(process.pid, signal.SIGINT)
    check_against_loop(torch.cat([first, collecting.collect()], 1), Maze, 0)
    collecting.shutdown()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_env_that_fails_to_reset():
    class Stuck(Maze):
        def reset(self, *, seed=None, options=None):
            raise OSError("no such map")

    with pytest.raises(HostEnvError, match="OSError at vector step 0: no such map") as caught:
        HostCollector(SyncVectorEnv([Stuck]), frames_per_batch=4).collect()
    assert caught.value.batch.shape == (1, 0)
    assert caught.value.seed is None


class TestRefusals:
    def test_unknown_autoreset_mode(self):
        envs = gym.make_vec("CartPole-v1", 2, vectorization_mode="vector_entry_point")
        envs.metadata = {}
        with pytest.raises(ValueError, match=r"autoreset_mode.*CartPoleVectorEnv.*received None. Remedy"):
            HostCollector(envs, frames_per_batch=4)

    def test_same_step_without_final_observation(self):
        envs = gym.make_vec("CartPole-v1", 2, vectorization_mode="vector_entry_point")
        envs.metadata = {"autoreset_mode": "SameStep"}  # it is not
        with pytest.raises(HostEnvError, match="expected info\\['final_obs'\\] from CartPoleVectorEnv"):
            HostCollector(envs, frames_per_batch=400).collect()

    def test_frame_counts(self):
        with pytest.raises(ValueError, match="positive multiple of the number of envs \\(3\\), received 10"):
            HostCollector(vector("maze", 3, "SameStep"), frames_per_batch=10)

    def test_not_a_vector_env(self):
        with pytest.raises(ValueError, match=r"expected gymnasium.vector.VectorEnv, received Maze"):
            HostCollector(Maze(), frames_per_batch=10)
        with pytest.raises(ValueError, match="empty list"):
            HostCollector([], frames_per_batch=10)

    def test_groups_that_differ(self):
        envs = [vector("maze", 2, "SameStep"), vector("CartPole-v1", 2, "SameStep")]
        with pytest.raises(ValueError, match=r"equal spaces.*group 0.*group 1"):
            HostCollector(envs, frames_per_batch=8)

    def test_composed_actions(self):
        space = spaces.Dict({"a": spaces.Discrete(2)})
        with pytest.raises(ValueError, match=r"expected Box, Discrete.*Remedy: flatten"):
            HostCollector(vector("maze", 2, "SameStep", actions=space), frames_per_batch=8)

    def test_graph_on_a_cpu(self):
        with pytest.raises(ValueError, match="mode='graph'"):
            HostCollector(vector("maze", 2, "SameStep"), frames_per_batch=8, mode="graph")

    @pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
    def test_cuda_where_there_is_none(self):
        with pytest.raises(ValueError, match=r"PyTorch sees no CUDA. Remedy"):
            HostCollector(vector("maze", 2, "SameStep"), frames_per_batch=8, device="cuda")

    @pytest.mark.parametrize(
        ("network", "in_keys", "message"),
        [
            (nn.Linear(2, 5), [("state", "pos")], r"expected 'action' of shape \[2\] and dtype torch.int64.*float32"),
            (nn.Linear(3, 5), [("state", "pos")], "expected it to act on"),
            (nn.Linear(2, 5), ["observation"], "expected in_keys among"),
        ],
    )
    def test_policy_that_does_not_fit(self, network, in_keys, message):
        policy = TensorDictModule(network, in_keys=in_keys, out_keys=["action"])
        with pytest.raises(ValueError, match=message):
            HostCollector(vector("maze", 2, "SameStep"), policy, frames_per_batch=8)

    def test_policy_without_action(self):
        with pytest.raises(ValueError, match=r"expected it to write \['action'\]"):
            HostCollector(vector("maze", 2, "SameStep"), maze_policy(out_keys=("a", "b")), frames_per_batch=8)


class TestInterface:
    def test_iteration_ends_and_yields_own_batches(self):
        collecting = HostCollector(vector("maze", 2, "SameStep"), frames_per_batch=8, total_frames=20, seed=0)
        batches = list(collecting)
        assert len(batches) == len(collecting) == 3
        check_against_loop(torch.cat(batches, 1), Maze, 0)
        assert batches[0].names == [None, "time"]
        assert collecting.stats()["frames"] == 24

    def test_batch_is_time_major(self):
        batch = HostCollector(vector("maze", 3, "SameStep"), frames_per_batch=12).collect()
        for key, leaf in batch.items(True, True):
            assert leaf.transpose(0, 1).is_contiguous(), key

    def test_specs(self):
        collecting = HostCollector(vector("maze", 3, "SameStep"), frames_per_batch=12)
        batch = collecting.collect()
        assert collecting.observation_spec.is_in(batch.select(*collecting.observation_spec.keys(True, True))[:, 0])
        assert collecting.action_spec.is_in(batch["action"][:, 0])
        assert collecting.getattr_env("full_action_spec_unbatched")["action"].shape == ()
        assert collecting.observation_spec["state", "step"].n == 10

    def test_seeds(self):
        make = lambda seed: HostCollector(vector("maze", 2, "SameStep"), frames_per_batch=8, seed=seed)  # noqa: E731
        one, two, three = make(0), make(0), make(1)
        first = one.collect().clone()
        assert (first == two.collect()).all()
        assert not (first["action"] == three.collect()["action"]).all()
        assert three.set_seed(0) == 1
        again = three.collect()
        assert torch.equal(again["action"], first["action"])
        assert torch.equal(again["image"], first["image"])

    def test_state(self, tmp_path):
        """Counters and random actions continue; episodes start over, alike in all collectors that load the state."""
        collecting = HostCollector(vector("maze", 2, "NextStep"), frames_per_batch=8, seed=3)
        for _ in range(3):
            last = collecting.collect().clone()
        torch.save(collecting.state_dict(), tmp_path / "state.pt")
        state = torch.load(tmp_path / "state.pt", weights_only=True)
        batches = []
        for _ in range(2):
            other = HostCollector(vector("maze", 2, "NextStep"), frames_per_batch=8, seed=9)
            other.load_state_dict(state)
            assert other.frames == 24
            batches.append(gather(other, 2))
        assert (batches[0] == batches[1]).all()
        assert batches[0]["collector", "traj_ids"].min() > last["collector", "traj_ids"].max()
        assert torch.equal(batches[0]["action"][:, 0], collecting.collect()["action"][:, 0])
        check_against_loop(batches[0], Maze, 3, start=4)
        with pytest.raises(ValueError, match="expected 1 groups"):
            other.load_state_dict({**state, "actions": []})

    def test_given_weights_are_copied_in_place(self):
        policy, other = maze_policy(), maze_policy()
        collecting = HostCollector(vector("maze", 2, "SameStep"), policy, frames_per_batch=8)
        collecting.update_policy_weights_(other)
        assert torch.equal(policy.module.weight, other.module.weight)
        data = collecting.collect()
        torch.testing.assert_close(data["scores"], data["state", "pos"] @ other.module.weight.T + other.module.bias)

    def test_construction_draws_no_random_numbers(self):
        state = torch.get_rng_state()
        HostCollector(
            vector("maze", 2, "SameStep"), lambda td: td.set("action", torch.randint(5, (2,))), frames_per_batch=4
        )
        assert torch.equal(state, torch.get_rng_state())

    def test_no_processes_left(self):
        collecting = HostCollector(vector("maze", 2, "SameStep", kind="async"), frames_per_batch=8)
        collecting.collect()
        collecting.shutdown()
        collecting.shutdown()
        assert not multiprocessing.active_children()


def test_actions_outside_a_box_are_passed_on():
    seen = []

    class Recorder(gym.Env):
        observation_space = spaces.Box(-1, 1, (1,))
        action_space = spaces.Box(-1, 1, (1,))

        def reset(self, *, seed=None, options=None):
            return np.zeros(1, np.float32), {}

        def step(self, action):
            seen.append(float(action[0]))
            return np.zeros(1, np.float32), 0.0, False, False, {}

    policy = lambda td: td.set("action", torch.full((2, 1), 3.0))  # noqa: E731
    batch = HostCollector(SyncVectorEnv([Recorder] * 2), policy, frames_per_batch=4).collect()
    assert seen == [3.0] * 4
    assert (batch["action"] == 3).all()


@pytest.mark.filterwarnings(
    "ignore:(PPO|SAC)Trainer is an experimental", "ignore:The '(optimizer|post_loss)' hook stage"
)
class TestTorchRLTrainers:
    def run(self, trainer_class, collecting, loss, network, **options):
        from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement

        storage = LazyTensorStorage(options.pop("rows"))
        before = next(network.parameters()).detach().clone()
        trainer = trainer_class(
            collector=collecting,
            total_frames=96,
            frame_skip=1,
            optim_steps_per_batch=1,
            loss_module=loss,
            optimizer=torch.optim.Adam(loss.parameters()),
            replay_buffer=ReplayBuffer(storage=storage, sampler=SamplerWithoutReplacement(), batch_size=16),
            enable_logging=False,
            progress_bar=False,
            **options,
        )
        trainer.train()
        assert trainer.collected_frames == 96
        assert collecting.closed
        assert not torch.equal(next(network.parameters()), before)

    def test_ppo(self):
        from torchrl.modules import ProbabilisticActor, ValueOperator
        from torchrl.objectives import ClipPPOLoss
        from torchrl.trainers.algorithms import PPOTrainer

        net = nn.Linear(4, 2)
        logits = TensorDictModule(net, ["observation"], ["logits"])
        actor = ProbabilisticActor(logits, ["logits"], distribution_class=GumbelCategorical, return_log_prob=True)
        loss = ClipPPOLoss(actor, ValueOperator(nn.Linear(4, 1), in_keys=["observation"]))
        envs = vector("CartPole-v1", 4, "NextStep")
        collecting = HostCollector(envs, actor, frames_per_batch=32, total_frames=96)
        self.run(PPOTrainer, collecting, loss, net, num_epochs=2, rows=32)

    def test_sac(self):
        """Which asks the collector's env for the action's spec."""
        from torchrl.modules import NormalParamExtractor, ProbabilisticActor, TanhNormal, ValueOperator
        from torchrl.objectives import SACLoss, SoftUpdate
        from torchrl.trainers.algorithms import SACTrainer

        envs = vector("Pendulum-v1", 4, "SameStep")
        net = nn.Sequential(nn.Linear(3, 2), NormalParamExtractor())
        params = TensorDictModule(net, ["observation"], ["loc", "scale"])
        options = {"distribution_kwargs": {"low": -2.0, "high": 2.0}, "return_log_prob": True}
        actor = ProbabilisticActor(params, ["loc", "scale"], distribution_class=TanhNormal, **options)

        class Critic(nn.Linear):
            def forward(self, observation, action):
                return super().forward(torch.cat([observation, action], -1))

        critic = ValueOperator(Critic(4, 1), in_keys=["observation", "action"])
        collecting = HostCollector(envs, actor, frames_per_batch=32, total_frames=96, init_random_frames=32)
        loss = SACLoss(actor, critic)
        self.run(SACTrainer, collecting, loss, net, rows=96, target_net_updater=SoftUpdate(loss, tau=0.01))
