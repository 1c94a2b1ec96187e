"""``torchrl-perf evaluate``: a table of a task and its variants, for each kind of run; what is refused."""

import json
import shutil

import gymnasium
import pytest
import torch
from finished_runs import SETTINGS, finished

from torchrl_perf.cli import main
from torchrl_perf.collectors import HostCollector, host_specs
from torchrl_perf.envs import CartPole
from torchrl_perf.trainers import (
    DQNConfig,
    DQNTrainer,
    PPOConfig,
    PPOTrainer,
    evaluate_episodes,
    load_policy,
    make_q_policy,
    train,
)


def evaluated(capsys, run, *options):
    """What the command says with --json."""
    assert main(["evaluate", str(run), "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", SETTINGS)
def test_every_kind_of_run(name, capsys):
    found = evaluated(capsys, finished(name), "--episodes", "3", "--max-steps", "25")
    (task,) = found["tasks"]
    assert task["episodes"] == len(task["returns"]) == (6 if name == "marine-iqn" else 3)  # an episode a vessel
    assert all(0 < length <= 25 for length in task["lengths"])
    assert task["mean_return"] == pytest.approx(sum(task["returns"]) / len(task["returns"]))


OF_SLICES = {"memory": "gru", "memory_size": 8, "slice_length": 4, "burn_in": 1, "n_step": 1}
WITH_MEMORY = {
    "ppo": ("named_envs:Mixed", {"memory": "lstm", "memory_size": 8}),
    "dqn": ("named_envs:Corridor", OF_SLICES),
    "sac": ("named_envs:Reacher", {**OF_SLICES, "minibatch_size": 16}),
}


@pytest.mark.parametrize("name", WITH_MEMORY)
def test_a_memory_of_envs_that_step_on_the_cpu(name, capsys):
    env, options = WITH_MEMORY[name]
    run = finished(name, env=env, **options)
    (task,) = evaluated(capsys, run, "--episodes", "3", "--max-steps", "25")["tasks"]
    assert all(0 < length <= 25 for length in task["lengths"])
    keys = load_policy(run).specs.observation_spec.keys(True, True)
    assert not any("recurrent" in str(key) for key in keys), "the state is the policy's, and no observation"


class TestFigures:
    def test_are_those_of_the_loaded_policy(self, capsys):
        run = finished("ppo")
        (task,) = evaluated(capsys, run, "--episodes", "7", "--seed", "3")["tasks"]
        with torch.random.fork_rng():
            torch.manual_seed(3)
            env = CartPole(7, device="cpu")
        found = evaluate_episodes(load_policy(run), env, seed=3)
        assert (task["returns"], task["lengths"]) == (found.returns, found.lengths)
        assert evaluated(capsys, run, "--episodes", "7")["tasks"] != evaluated(capsys, run, "--episodes", "8")["tasks"]

    def test_variants_have_lines_of_their_own(self, capsys):
        options = ["--variant", "max_episode_steps=5", "--variant", "max-episode-steps=7"]
        assert main(["evaluate", str(finished("ppo")), "--episodes", "4", *options]) == 0
        title, columns, *lines = capsys.readouterr().out.splitlines()
        assert title.startswith("ppo on CartPole, 640 steps, ")
        assert columns.split("  ")[0] == "task"
        assert [line.split("  ")[0] for line in lines] == [
            "CartPole",
            "CartPole, max_episode_steps=5",
            "CartPole, max_episode_steps=7",
        ]
        assert [line.split()[-1] for line in lines[1:]] == ["5.0", "7.0"]

    def test_settings_of_a_systems_world(self, capsys):
        run = finished("fuel-breaks")
        plain, other = evaluated(capsys, run, "--episodes", "4", "--variant", "landscape=fractal")["tasks"]
        assert other["variant"] == {"landscape": "fractal"}
        assert plain["returns"] != other["returns"]

    def test_best_checkpoint(self, capsys):
        run = finished("ppo", seed=1, eval_interval=5, eval_episodes=2)
        assert evaluated(capsys, run, "--checkpoint", "best", "--episodes", "2")["checkpoint"].endswith("best.pt")


class TestGymnasium:
    def test_a_run_that_was_made_on_its_envs(self, tmp_path, capsys):
        envs = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync", max_episode_steps=30)
        config = DQNConfig.without_task(
            num_envs=2, num_steps=8, total_steps=160, capacity=160, learning_starts=64, minibatch_size=16,
            device="cpu", mode="eager",
            hidden_size=32, run_dir=str(tmp_path), env="CartPole-v1",
        )  # fmt: skip
        policy = make_q_policy(host_specs(envs), config)
        collector = HostCollector(envs, policy, frames_per_batch=16, seed=0)
        trainer = DQNTrainer(config, collector=collector, policy=policy)
        run = train(trainer, progress=False).run_dir
        trainer.close()
        found = evaluated(capsys, run, "--episodes", "3", "--variant", "max_episode_steps=6")["tasks"]
        assert found[1]["lengths"] == [6, 6, 6]
        assert found[0]["returns"] == [float(length) for length in found[0]["lengths"]]
        assert evaluated(capsys, run, "--episodes", "3")["tasks"] == found[:1]
        assert main(["evaluate", str(run), "--variant", "gravity=3"]) == 1
        assert "variant: expected arguments of CartPole-v1, received gravity=3 (" in capsys.readouterr().err


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--episodes", "0"], "episodes: expected a positive integer, received 0. Remedy:"),
            (
                ["--variant", "gravity=3"],
                "variant: expected arguments of CartPole, received gravity=3 (expected arguments of CartPole(",
            ),
            (["--checkpoint", "best", "--device", "tpu"], "device: expected 'auto', 'cpu', 'cuda'"),
        ],
    )
    def test_options(self, options, message, capsys):
        assert main(["evaluate", str(finished("ppo")), *options]) == 1
        assert message in capsys.readouterr().err

    def test_a_variant_without_a_value(self, capsys):
        with pytest.raises(SystemExit, match="2"):
            main(["evaluate", str(finished("ppo")), "--variant", "gravity"])
        assert "expected NAME=VALUE, several with commas, received 'gravity'. Remedy:" in capsys.readouterr().err

    def test_a_run_without_checkpoints(self, tmp_path, capsys):
        run = shutil.copytree(finished("ppo"), tmp_path / "run")
        shutil.rmtree(run / "checkpoints")
        assert main(["evaluate", str(run)]) == 1
        assert "expected files <iteration>.pt in" in capsys.readouterr().err

    def test_an_env_from_python(self, tmp_path, capsys):
        class Corridor(CartPole):
            """A task that the command line cannot make."""

        config = PPOConfig(num_envs=2, num_steps=8, total_steps=16, minibatches=2, device="cpu", run_dir=str(tmp_path))
        trainer = PPOTrainer(config, env=Corridor(2, device="cpu"))
        run = train(trainer, progress=False).run_dir
        assert main(["evaluate", str(run)]) == 1
        error = capsys.readouterr().err
        assert "one of the env Corridor, which came from Python. Remedy: from Python, evaluate_episodes(" in error
