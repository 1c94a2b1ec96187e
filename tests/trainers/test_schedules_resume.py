"""A resumed run with other settings: which schedules change is said, they change, or they are kept."""

import dataclasses
import logging

import pytest
import torch

from torchrl_perf.cli import main
from torchrl_perf.systems.active_dynamics.config import ActiveDynamicsConfig
from torchrl_perf.systems.options_market.config import OptionsMarketConfig
from torchrl_perf.trainers import PPOConfig, PPOTrainer, train
from torchrl_perf.trainers.ddpg import DDPGConfig, DDPGTrainer, TD3Config
from torchrl_perf.trainers.dqn import DQNConfig, DQNTrainer
from torchrl_perf.trainers.run.schedules import (
    describe_changes,
    schedule_changes,
    scheduled_values,
    with_schedules_of,
)
from torchrl_perf.trainers.sac import SACConfig, SACTrainer

SMALL = {"num_envs": 4, "num_steps": 8, "hidden_size": 32, "device": "cpu", "log_interval": 1, "logger": "none"}
PPO = PPOConfig(**SMALL, total_steps=320, epochs=1, minibatches=1, learning_rate=1.5e-3)
REPLAY = {"capacity": 512, "minibatch_size": 16, "learning_starts": 32}
DQN = DQNConfig.without_task(
    **SMALL, **REPLAY, total_steps=320, updates_per_iteration=1, sampler="prioritized", beta_final=1.0
)
DDPG = DDPGConfig.without_task(**SMALL, **REPLAY, env="Pendulum", total_steps=320, updates_per_iteration=1)
SAC = SACConfig.without_task(**SMALL, **REPLAY, env="Pendulum", total_steps=320, updates_per_iteration=1)
OF_SAC = {"actor_learning_rate", "critic_learning_rate", "temperature_learning_rate"}


def replaced(config, **changes):
    return dataclasses.replace(config, **changes)


class TestChanges:
    def test_a_longer_run_jumps_as_told(self):
        before = PPOConfig(total_steps=300_000, num_envs=128, num_steps=32, learning_rate=1.5e-3)
        after = replaced(before, total_steps=600_000)
        (change,) = schedule_changes(before, after, 66)
        assert change.name == "learning_rate"
        assert change.before == pytest.approx(1.5e-3 * (1 - 66 / 74))
        assert change.after == pytest.approx(1.5e-3 * (1 - 66 / 147))
        text = describe_changes(before, after, 66)
        assert "total_steps 300000 -> 600000" in text
        assert f"learning_rate is {change.after:.6g}, by the stored settings {change.before:.6g}" in text
        assert "--keep-schedules, in Python schedule_steps=300000" in text

    @pytest.mark.parametrize(
        ("config", "changes", "names"),
        [
            (PPO, {"total_steps": 640}, {"learning_rate"}),
            (PPO, {"learning_rate": 1e-3}, {"learning_rate"}),
            (PPO, {"anneal_learning_rate": False}, {"learning_rate"}),
            (PPO, {"entropy_coeff": 0.1}, {"entropy_coeff"}),
            (replaced(PPO, entropy_coeff_final=0.0), {"total_steps": 640}, {"learning_rate", "entropy_coeff"}),
            (replaced(PPO, entropy_coeff_final=0.0, entropy_frames=64), {"total_steps": 640}, {"learning_rate"}),
            (replaced(PPO, anneal_learning_rate=False), {"total_steps": 640}, set()),
            (PPO, {"gamma": 0.5, "log_interval": 7, "clip_epsilon": 0.3}, set()),
            (replaced(DQN, anneal_learning_rate=True), {"total_steps": 640}, {"learning_rate", "beta"}),
            (replaced(DQN, anneal_learning_rate=False), {"total_steps": 640}, {"beta"}),
            (DQN, {"eps_end": 0.5}, {"epsilon"}),
            (DQN, {"eps_frames": 100}, {"epsilon"}),
            (DQN, {"beta": 0.6}, {"beta"}),
            (DDPG, {"noise_end": 0.5}, {"noise"}),
            (TD3Config.without_task(), {"noise_frames": 100}, {"noise"}),
            (SAC, {"actor_learning_rate": 1e-5}, {"actor_learning_rate"}),
            (SAC, {"temperature_learning_rate": 1e-5}, {"temperature_learning_rate"}),
            (SAC, {"anneal_learning_rate": True}, OF_SAC),
            (replaced(SAC, anneal_learning_rate=True), {"total_steps": 640}, OF_SAC),
            (
                OptionsMarketConfig.without_task(option_temperature_final=0.1),
                {"option_temperature_frames": 9},
                {"option_temperature"},
            ),
            (ActiveDynamicsConfig.without_task(), {"beta_anneal": 1000}, {"kl_weight"}),
            (ActiveDynamicsConfig.without_task(), {"random_steps": 10_000}, {"random_share"}),
        ],
        ids=lambda value: value.algorithm if hasattr(value, "algorithm") else "+".join(sorted(value)),
    )
    def test_every_schedule_of_every_trainer(self, config, changes, names):
        after = replaced(config, **changes)
        assert {change.name for change in schedule_changes(config, after, 3)} == names
        text = describe_changes(config, after, 3)
        assert all(name in text for name in names)
        assert bool(text) == bool(names)
        assert not schedule_changes(config, config, 3)

    def test_a_schedule_that_differs_only_later_is_said(self):
        text = describe_changes(DQN, replaced(DQN, eps_end=0.5), 0)
        assert "epsilon is 1 as before, and at the end" in text

    def test_kept_schedules_are_those_of_the_stored_run(self):
        config = replaced(PPO, entropy_coeff_final=0.0)
        after = with_schedules_of(config, replaced(config, total_steps=3200))
        assert after.schedule_steps == 320
        for iteration in (0, 3, 9):
            assert scheduled_values(after, iteration) == scheduled_values(config, iteration)
        assert scheduled_values(after, 50)["learning_rate"] == 0.0
        # and once more
        assert with_schedules_of(after, replaced(after, total_steps=6400)).schedule_steps == 320
        with pytest.raises(
            ValueError, match=r"--keep-schedules: expected no other setting .*learning_rate=0.5.*Remedy"
        ):
            with_schedules_of(config, replaced(config, learning_rate=0.5))


def run(make, config, run_dir, state=None):
    trainer = make(config)
    if state is not None:
        trainer.load_state_dict(state)
    train(trainer, run_dir, progress=False)
    trainer.close()
    return trainer


def resumed(make, before, after, tmp_path):
    """A trainer that has taken one more run of settings ``after`` behind one of ``before``."""
    first = run(make, before, tmp_path / "run")
    return first, run(make, after, tmp_path / "run", first.state_dict())


@pytest.mark.parametrize(
    ("make", "before", "changes", "read"),
    [
        (PPOTrainer, replaced(PPO, anneal_learning_rate=False), {"learning_rate": 0.25}, "optimizer.learning_rate"),
        (PPOTrainer, PPO, {"entropy_coeff": 0.25}, "loss.entropy_coeff"),
        (DQNTrainer, replaced(DQN, anneal_learning_rate=False), {"learning_rate": 0.25}, "optimizer.learning_rate"),
        (DQNTrainer, DQN, {"eps_end": 0.25, "eps_frames": 1}, "policy.epsilon"),
        (DQNTrainer, replaced(DQN, beta_final=None), {"beta": 0.25}, "buffer.sampler.beta"),
        (DQNTrainer, DQN, {"beta_final": 0.25}, "buffer.sampler.beta"),
        (DDPGTrainer, DDPG, {"noise_end": 0.25, "noise_frames": 1}, "policy.sigma"),
        (SACTrainer, SAC, {"critic_learning_rate": 0.25}, "critic_optimizer.learning_rates.0"),
        (SACTrainer, SAC, {"actor_learning_rate": 0.25}, "actor_optimizer.learning_rates.0"),
        (SACTrainer, SAC, {"temperature_learning_rate": 0.25}, "actor_optimizer.learning_rates.1"),
        (PPOTrainer, PPO, {"weight_decay": 0.25}, "optimizer.param_groups.0.weight_decay"),
        (DQNTrainer, DQN, {"adam_eps": 0.25}, "optimizer.param_groups.0.eps"),
        (SACTrainer, SAC, {"adam_beta1": 0.25}, "actor_optimizer.param_groups.1.betas.0"),
        (SACTrainer, SAC, {"weight_decay": 0.25}, "actor_optimizer.param_groups.0.weight_decay"),
    ],
    ids=str,
)
def test_what_is_set_otherwise_counts_and_is_said(make, before, changes, read, tmp_path, caplog):
    before = replaced(before, total_steps=96)
    with caplog.at_level(logging.WARNING, "torchrl_perf"):
        _, trainer = resumed(make, before, replaced(before, total_steps=128, **changes), tmp_path)
    value = trainer
    for name in read.split("."):
        key = int(name) if name.isdecimal() else name
        value = value[key] if isinstance(value, (list, tuple, dict)) else getattr(value, name)
    assert float(value) == pytest.approx(0.25)
    if make is SACTrainer:
        assert trainer.actor_optimizer.param_groups[1]["weight_decay"] == 0.0  # of the temperature
    said = [record.getMessage() for record in caplog.records if "the schedules change" in record.getMessage()]
    assert len(said) == 1
    assert all(f"{name} " in said[0] for name in changes)


@pytest.mark.parametrize(
    ("make", "config"), [(PPOTrainer, PPO), (DQNTrainer, replaced(DQN, anneal_learning_rate=True))]
)
def test_kept_schedules_end_where_they_did(make, config, tmp_path, caplog):
    config = replaced(config, total_steps=96)
    longer = with_schedules_of(config, replaced(config, total_steps=192))
    with caplog.at_level(logging.WARNING, "torchrl_perf"):
        _, trainer = resumed(make, config, longer, tmp_path)
    assert trainer.iterations_done == 6
    assert float(trainer.optimizer.learning_rate) == 0.0
    assert not [record for record in caplog.records if "the schedules change" in record.getMessage()]


def test_a_resumed_run_of_the_same_settings_is_bitwise_that_of_one_go(tmp_path):
    whole = run(PPOTrainer, PPO, tmp_path / "whole")
    half = PPOTrainer(PPO)
    for _ in range(5):
        half.step()
        half.iterations_done += 1
    other = run(PPOTrainer, PPO, tmp_path / "half", half.state_dict())
    half.close()
    for one, two in zip(whole.loss.parameters(), other.loss.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(
    "config", [SAC, DDPG, ActiveDynamicsConfig.without_task(), replaced(PPO, anneal_learning_rate=False)]
)
def test_a_length_of_no_schedule_is_refused(config):
    with pytest.raises(
        ValueError, match=r"schedule_steps: expected None where nothing is annealed over the run.*Remedy"
    ):
        replaced(config, schedule_steps=100)
    assert with_schedules_of(config, replaced(config, total_steps=6400)).schedule_steps is None


class TestCommandLine:
    TINY = ("--num-envs", "4", "--num-steps", "8", "--log-interval", "1", "--no-progress", "--device", "cpu")
    PPO = ("train", "ppo", *TINY, "--epochs", "1", "--minibatches", "1", "--hidden-size", "32")

    def test_it_says_so_keeps_them_and_refuses_both(self, tmp_path, capsys, caplog):
        folder = tmp_path / "runs"
        assert main([*self.PPO, "--run-dir", str(folder), "--total-steps", "96"]) == 0
        run_dir = str(folder / "ppo-CartPole-0")
        resume = ["train", "ppo", "--resume", run_dir, "--no-progress"]
        assert main([*resume, "--total-steps", "128", "--keep-schedules", "--learning-rate", "1"]) == 1
        assert "--keep-schedules: expected no other setting of a schedule" in capsys.readouterr().err
        with caplog.at_level(logging.WARNING, "torchrl_perf"):
            assert main([*resume, "--total-steps", "128", "--keep-schedules"]) == 0
            assert "the schedules change" not in caplog.text
            assert "ends at step 96 of 128 and stays there: learning_rate 0" in caplog.text
            assert main([*resume, "--total-steps", "192", "--schedule-steps", "192"]) == 0
        changed = "total_steps 128 -> 192, schedule_steps 96 -> 192"
        text = f"the schedules change at step 128 ({changed}): learning_rate is 0.0005"
        assert text in caplog.text

    def test_a_new_run_has_none_to_keep(self, tmp_path, capsys):
        options = ["--run-dir", str(tmp_path), "--total-steps", "96", "--keep-schedules"]
        assert main([*self.PPO, *options]) == 1
        assert "--keep-schedules: expected --resume of a run" in capsys.readouterr().err
