"""A run of one's own env or networks: its name, what its checkpoint knows, and who may go on with it."""

import dataclasses
import json

import pytest
import torch
from tensordict.nn import TensorDictModule
from tiny_runs import TINY, newest
from torch import nn
from torchrl.envs import GymEnv, RewardSum, StepCounter, TransformedEnv

from torchrl_perf.cli import main
from torchrl_perf.collectors import HostCollector
from torchrl_perf.envs import CartPole, MountainCar
from torchrl_perf.modules import EpsilonGreedy
from torchrl_perf.trainers import DQNConfig, DQNTrainer, PPOConfig, PPOTrainer, RunFolderError, train
from torchrl_perf.trainers.run import run as run_module
from torchrl_perf.trainers.run.checkpoint import CheckpointFolder
from torchrl_perf.trainers.run.made_of import describe_env, env_name


class Corridor(CartPole):
    """An env of one's own with the specs of another."""

    def __init__(self, num_envs, *, length=7, weights=None):
        self.length = length
        super().__init__(num_envs, device="cpu")
        self.register_buffer("weights", torch.ones(3) if weights is None else weights, persistent=False)


class Wide(Corridor):
    observation_low = (*CartPole.observation_low, -1.0)
    observation_high = (*CartPole.observation_high, 1.0)

    def observe(self, state):
        return torch.cat([state, state[:, :1]], -1)


def ppo(tmp_path, env=None, **parts):
    options = {name: parts.pop(name) for name in list(parts) if name in {f.name for f in dataclasses.fields(PPOConfig)}}
    config = dataclasses.replace(TINY, **{"total_steps": 128, "run_dir": str(tmp_path), "logger": "csv", **options})
    return PPOTrainer(config, env=env, **parts)


def dqn(tmp_path, env=None, **parts):
    options = {"num_envs": 8, "num_steps": 8, "total_steps": 256, "capacity": 128, "minibatch_size": 16}
    config = DQNConfig.without_task(
        **options, learning_starts=64, hidden_size=32, device="cpu", run_dir=str(tmp_path), logger="csv"
    )
    return DQNTrainer(config, env=env, **parts)


class TestName:
    @pytest.mark.parametrize(("make", "algorithm"), [(ppo, "ppo"), (dqn, "dqn")])
    def test_folder_config_picture_and_logger_have_the_true_name(
        self, tmp_path, no_picture, make, algorithm, monkeypatch
    ):
        names = []
        loggers = run_module.make_loggers
        monkeypatch.setattr(
            run_module, "make_loggers", lambda *args, **options: (names.append(args[3:5]), loggers(*args, **options))[1]
        )
        run_dir = train(make(tmp_path, Corridor(8)), progress=False).run_dir
        assert run_dir == tmp_path / f"{algorithm}-Corridor-0"
        stored = json.loads((run_dir / "config.json").read_text())
        assert (stored["env"], stored["algorithm"], stored["seed"]) == ("Corridor", algorithm, 0)
        assert no_picture == [f"{algorithm.upper()} on Corridor"]
        assert names[0][0] == f"{algorithm}-Corridor-0"
        assert names[0][1]["env"] == "Corridor"

    @pytest.mark.parametrize(
        ("make", "expected"),
        [
            (lambda: Corridor(2), "Corridor"),
            (
                lambda: TransformedEnv(TransformedEnv(Corridor(2), RewardSum()), StepCounter(), auto_unwrap=False),
                "Corridor",
            ),
            (lambda: CartPole(2, device="cpu"), "CartPole"),
            (lambda: GymEnv("MountainCar-v0"), "MountainCar-v0"),
            (lambda: None, "CartPole"),
        ],
    )
    def test_of_wrapped_and_gymnasium_envs(self, make, expected):
        assert env_name(PPOConfig(), make()) == expected

    def test_of_a_collector_of_gymnasium_envs(self):
        import gymnasium

        envs = gymnasium.make_vec("MountainCar-v0", num_envs=2, vectorization_mode="sync")
        collector = HostCollector(envs, None, frames_per_batch=4)
        try:
            assert env_name(DQNConfig.without_task(env="any"), collector) == "MountainCar-v0"
            assert "observation" in describe_env(collector, given=True)["specs"]
        finally:
            collector.shutdown()

    def test_a_folder_of_another_env_is_refused_as_it_is(self, tmp_path):
        run_dir = train(ppo(tmp_path), progress=False).run_dir
        before = (run_dir / "config.json").read_bytes()
        with pytest.raises(
            RunFolderError, match=r"run with env Corridor, received .*ppo-CartPole-0, which is one of Cart"
        ):
            train(ppo(tmp_path, Corridor(8)), run_dir, progress=False)
        assert (run_dir / "config.json").read_bytes() == before
        train(ppo(tmp_path), run_dir, progress=False)  # and the lock is free again


class TestCheckpoint:
    def saved(self, tmp_path, env=None, make=ppo, **parts):
        trainer = make(tmp_path, env, **parts)
        return newest(train(trainer, progress=False).run_dir)

    def refused(self, trainer, state, *words):
        before = {name: value.clone() for name, value in trainer.actor.state_dict().items()}
        with pytest.raises(ValueError, match="checkpoint: expected") as caught:
            trainer.load_state_dict(state)
        for word in (*words, "Nothing was changed. Remedy:"):
            assert word in str(caught.value), caught.value
        assert all(torch.equal(value, before[name]) for name, value in trainer.actor.state_dict().items())

    def test_the_same_env_goes_on(self, tmp_path):
        state = self.saved(tmp_path, Corridor(8))
        trainer = ppo(tmp_path, Corridor(8), total_steps=256)
        trainer.load_state_dict(state)
        assert train(trainer, tmp_path / "ppo-Corridor-0", progress=False).steps == 256

    def test_another_class_spec_argument_or_transform(self, tmp_path):
        state = self.saved(tmp_path, Corridor(8))
        self.refused(ppo(tmp_path), state, "CartPole", "Corridor")
        self.refused(ppo(tmp_path, Corridor(8, length=9)), state, "length: 9, received 7")
        self.refused(ppo(tmp_path, Corridor(8, weights=torch.zeros(3))), state, "weights: [0.0, 0.0, 0.0], received")
        self.refused(ppo(tmp_path, TransformedEnv(Corridor(8), StepCounter(5))), state, "StepCounter")
        self.refused(ppo(tmp_path, Wide(8)), state, "Wide", "Corridor")

    def test_specs_of_one_class_may_differ(self, tmp_path):
        class Grid(Corridor):
            def __init__(self, num_envs, columns):
                self.extra = columns
                super().__init__(num_envs)

            def observe(self, state):
                return torch.cat([state] + [state[:, :1]] * self.extra, -1)

            def _box(self, low, high):
                more = self.extra if len(low) == 4 else 0
                return super()._box((*low, *(-1.0,) * more), (*high, *(1.0,) * more))

        state = self.saved(tmp_path, Grid(8, 1))
        self.refused(ppo(tmp_path, Grid(8, 2)), state, "specs observation: ", "[6]", "[5]")

    def test_a_package_env_with_another_argument(self, tmp_path):
        state = self.saved(tmp_path, CartPole(8, device="cpu", max_episode_steps=50))
        self.refused(ppo(tmp_path), state, "max_episode_steps: 500, received 50")
        self.saved(tmp_path, CartPole(8, device="cpu"))
        assert (
            main(
                [
                    "train",
                    "ppo",
                    "--resume",
                    str(tmp_path / "ppo-CartPole-0-2"),
                    "--total-steps",
                    "192",
                    "--no-progress",
                ]
            )
            == 0
        )

    def test_an_argument_that_an_env_changes_later_is_that_of_its_construction(self, tmp_path):
        env = Corridor(8)
        trainer = ppo(tmp_path, env)
        env.length = 99
        state = newest(train(trainer, progress=False).run_dir)
        ppo(tmp_path, Corridor(8)).load_state_dict(state)

    def test_networks_of_another_class_or_shape(self, tmp_path):
        def critic(*layers):
            return TensorDictModule(nn.Sequential(*layers), ["observation"], ["state_value"])

        state = self.saved(tmp_path, critic=critic(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
        ppo(tmp_path, critic=critic(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))).load_state_dict(state)
        relu = ppo(tmp_path, critic=critic(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
        self.refused(relu, state, "in critic the network", "ReLU, received Tanh")
        self.refused(
            ppo(tmp_path, critic=critic(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))), state, "critic", "[16, 4]"
        )
        self.refused(ppo(tmp_path), state, "critic")

    def test_a_checkpoint_from_before_goes_on(self, tmp_path):
        state = self.saved(tmp_path, Corridor(8))
        del state["made_of"]
        ppo(tmp_path, Corridor(8, length=3)).load_state_dict(state)


class TestCommandLine:
    def test_a_run_of_ones_own_env_is_refused_with_the_way_from_python(self, tmp_path, capsys):
        run_dir = train(ppo(tmp_path, Corridor(8)), progress=False).run_dir
        before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
        for path in (run_dir, CheckpointFolder(run_dir / "checkpoints").files()[0]):
            assert main(["train", "ppo", "--resume", str(path), "--total-steps", "256", "--no-progress"]) == 1
            error = capsys.readouterr().err
            assert "received one of the env Corridor, which the command line cannot make" in error
            assert "trainer = PPOTrainer(config, env=Corridor(...))" in error
            assert f"trainer.load('{run_dir}/checkpoints/000000002.pt'); train(trainer, '{run_dir}')" in error
        assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before

    def test_the_way_works(self, tmp_path):
        run_dir = train(ppo(tmp_path, Corridor(8)), progress=False).run_dir
        trainer = ppo(tmp_path, Corridor(8), total_steps=256)
        trainer.load(str(run_dir / "checkpoints" / "000000002.pt"))
        assert train(trainer, str(run_dir), progress=False).steps == 256

    def test_an_env_with_the_name_of_a_task(self, tmp_path, capsys):
        named = type("CartPole", (Corridor,), {"__module__": __name__})
        run_dir = train(dqn(tmp_path, named(8)), progress=False).run_dir
        assert run_dir.name == "dqn-CartPole-0"
        assert main(["train", "dqn", "--resume", str(run_dir), "--total-steps", "512", "--no-progress"]) == 1
        error = capsys.readouterr().err
        assert "received one of CartPole of test_own_parts" in error
        assert "From Python: trainer = DQNTrainer(config, env=CartPole(...))" in error

    def test_networks_of_ones_own(self, tmp_path, capsys):
        env = CartPole(8, device="cpu")
        network = nn.Sequential(nn.Linear(4, 32), nn.ELU(), nn.Linear(32, 2))
        run_dir = train(dqn(tmp_path, env, policy=EpsilonGreedy(network, spec=env.action_spec)), progress=False).run_dir
        assert main(["train", "dqn", "--resume", str(run_dir), "--total-steps", "512", "--no-progress"]) == 1
        error = capsys.readouterr().err
        assert "expected in policy" in error
        assert "with the networks that the run was given" in error

    def test_auto_starts_a_run_of_its_own_beside_one_of_another_env(self, tmp_path, capsys):
        train(ppo(tmp_path, Corridor(8), checkpoint_interval=1), progress=False)
        options = ["--num-envs", "8", "--num-steps", "8", "--total-steps", "64", "--minibatches", "2", "--no-progress"]
        assert main(["train", "ppo", "--resume", "auto", "--run-dir", str(tmp_path), "--device", "cpu", *options]) == 0
        assert sorted(path.name for path in tmp_path.iterdir()) == ["ppo-CartPole-0", "ppo-Corridor-0"]


def test_mountain_car_keeps_its_own_name_and_specs():
    described = describe_env(MountainCar(3, device="cpu"), given=False)
    assert described["name"] == "MountainCar"
    assert described["specs"]["observation"].startswith("BoundedContinuous [2] torch.float32 in [-1.2")
    assert described["arguments"]["max_episode_steps"] == 200
