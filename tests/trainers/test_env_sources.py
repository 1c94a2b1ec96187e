"""Trainers on every kind of env: named ones, classes and functions, Gymnasium vector envs, collectors."""

import functools
import json
import re

import numpy as np
import pytest
import torch
from config_runs import KINDS, SMALL, TRAINERS, make
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from named_envs import Corridor, Line, Reacher, make_corridor, make_vector

from torchrl_perf.cli import main
from torchrl_perf.collectors import DeviceCollector, HostCollector, host_specs
from torchrl_perf.envs import CartPole
from torchrl_perf.modules import HybridActor
from torchrl_perf.modules.encoders.cnn import ConvNet
from torchrl_perf.modules.encoders.observations import ObservationEncoder
from torchrl_perf.runtime import no_host_sync
from torchrl_perf.trainers import PPOConfig, PPOTrainer, make_actor, train
from torchrl_perf.trainers.config_checks import ConfigError
from torchrl_perf.trainers.known_envs import settings_for

DISCRETE = ("ppo", "hybrid-ppo", "pqn", "dqn", "qr-dqn", "iqn", "rainbow")
BOUNDED = ("ppo", "hybrid-ppo", "sac", "td3", "ddpg", "ac-iqn")


def steps(trainer, number=7):
    """A few iterations; the number of updates that were taken."""
    for _ in range(number):
        trainer.step()
        trainer.iterations_done += 1
    row = trainer.metrics.flush(1)
    trainer.close()
    return row["train/updates_applied"]


class TestAlgorithms:
    @pytest.mark.parametrize("name", DISCRETE)
    def test_discrete_actions_on_the_cpu(self, name):
        trainer = make(name, {"env": "named_envs:Corridor"})
        assert trainer.env is None
        assert (type(trainer.collector), trainer.collects_on_device) == (HostCollector, False)
        assert steps(trainer) > 0
        assert trainer.episodes.count > 0

    @pytest.mark.parametrize("name", BOUNDED)
    def test_bounded_actions_on_the_cpu(self, name):
        trainer = make(name, {"env": "named_envs:Reacher", "env_groups": 2})
        assert len(trainer.collector.groups) == 2
        assert steps(trainer) > 0

    @pytest.mark.parametrize("name", [name for name in TRAINERS if name not in (*DISCRETE, "sac-options")])
    def test_discrete_actions_are_refused(self, name):
        with pytest.raises(ValueError, match=r"action.*received .*Remedy"):
            make(name, {"env": "named_envs:Corridor"})

    @pytest.mark.parametrize("name", [name for name in TRAINERS if name not in (*BOUNDED, "sac-options")])
    def test_bounded_actions_are_refused(self, name):
        with pytest.raises(ValueError, match=r"action_spec: expected discrete actions.*Remedy: SAC or PPO"):
            make(name, {"env": "named_envs:Reacher"})

    def test_options_are_refused(self):
        with pytest.raises(ValueError, match=r"expected a task that has options, Ferry, received 'CartPole-v1'"):
            make("sac-options", {"env": "CartPole-v1"})

    def test_the_envs_of_a_trainer_that_is_not_made_are_closed(self, monkeypatch):
        closed = []
        monkeypatch.setattr(Corridor, "close", lambda self: closed.append(type(self).__name__))
        with pytest.raises(ValueError, match="action_spec"):
            make("sac", {"env": "named_envs:Corridor"})
        assert len(closed) == SMALL["sac"]["num_envs"]


class TestEnvsOfTorchRL:
    @pytest.mark.parametrize("name", ["ppo", "pqn", "dqn"])
    def test_one_without_a_batch(self, name):
        trainer = make(name, {"env": "named_envs:Single"})
        assert not trainer.collects_on_device
        assert steps(trainer) > 0

    @pytest.mark.parametrize("name", ["ppo", "sac"])
    def test_one_with_a_batch(self, name):
        assert steps(make(name, {"env": "named_envs:Batched"})) > 0

    def test_a_compiled_run_steps_the_envs_as_they_are(self, traced_only):
        trainer = make("ppo", {"env": "named_envs:Single", "mode": "compile"})
        assert trainer.collector.mode == "eager"
        assert steps(trainer, 2) > 0

    def test_a_device_env(self):
        trainer = make("dqn", {"env": "named_envs:Line", "env_args": ("speed=0.5",)})
        assert (trainer.env.speed, trainer.collects_on_device) == (0.5, True)
        assert steps(trainer) > 0


class TestObservations:
    @pytest.mark.parametrize("name", DISCRETE)
    def test_of_several_kinds(self, name):
        trainer = make(name, {"env": "named_envs:Mixed"})
        (encoder, *_) = [each for each in trainer.policy.modules() if isinstance(each, ObservationEncoder)]
        assert [part.kind for part in encoder.parts] == ["numbers", "image", "choices", "choices", "numbers"]
        assert encoder.out_features == 6 + 128 + 4 + 5 + 3
        assert steps(trainer) > 0

    @pytest.mark.parametrize("name", [name for name in BOUNDED if name != "ac-iqn"])
    def test_of_several_kinds_with_bounded_actions(self, name):
        assert steps(make(name, {"env": "named_envs:MixedBounded"})) > 0

    def test_what_reads_one_vector_says_so(self):
        with pytest.raises(ValueError, match=r"observation_spec: expected one vector.*the envs on the CPU\. Remedy"):
            make("ac-iqn", {"env": "named_envs:MixedBounded"})

    @pytest.mark.parametrize("name", ["ppo"])
    def test_several_choices(self, name):
        trainer = make(name, {"env": "named_envs:MixedChoices"})
        assert trainer.collect()["action"].shape == (4, 4, 2)
        assert steps(trainer) > 0

    @pytest.mark.parametrize("name", ["ppo", "hybrid-ppo"])
    def test_actions_of_several_parts(self, name):
        trainer = make(name, {"env": "HybridTarget"})
        assert isinstance(trainer.actor, HybridActor)
        assert steps(trainer) > 0

    def test_a_space_of_several_actions_on_the_cpu_is_refused(self):
        with pytest.raises(ValueError, match=r"action space: expected Box.*received Dict.*Remedy: flatten it"):
            make("ppo", {"env": "named_envs:Parts"})


PONG = {"env": "ALE/Pong-v5", "num_envs": 2, "env_args": ("max_num_frames_per_episode=48", "noop_max=1")}


class TestAtari:
    @pytest.fixture(autouse=True)
    def needs_ale(self):
        pytest.importorskip("ale_py")

    @pytest.mark.parametrize("compact", [False, True])
    @pytest.mark.parametrize("n_step", [1, 3])
    def test_frames_are_stored_once_and_sampled_as_stacks(self, compact, n_step):
        trainer = make("dqn", {**PONG, "compact": compact, "n_step": n_step, "hidden_sizes": (8,)})
        collected = set()
        for _ in range(4):
            batch = trainer.collect()
            for key in ("observation", ("next", "observation")):
                collected |= {stack.numpy().tobytes() for stack in batch.get(key).reshape(-1, 4, 84, 84)}
            trainer.store(batch)
        stored = trainer.buffer.storage.field("observation")
        assert (stored.shape[2:], stored.dtype) == ((1, 84, 84), torch.uint8)
        for sample in trainer.samples():
            for key in ("observation", ("next", "observation")):
                assert {stack.numpy().tobytes() for stack in sample.get(key)} <= collected
        trainer.close()

    @pytest.mark.parametrize("name", ["ppo", "dqn", "iqn", "rainbow"])
    def test_each_learns_from_images(self, name):
        plain = {} if name in ("iqn", "rainbow") else {"hidden_sizes": (8,)}
        trainer = make(name, {**PONG, **plain})
        assert any(isinstance(module, ConvNet) for module in trainer.policy.modules())
        assert steps(trainer, 5) > 0


class TestWhatIsGiven:
    @pytest.mark.parametrize("name", ["ppo", "dqn"])
    @pytest.mark.parametrize(
        ("given", "label"),
        [
            (Corridor, "Corridor"),
            (make_corridor, "Corridor"),
            (functools.partial(make_corridor, 2), "Corridor"),
            (make_vector, "Corridor"),
            (Line, "Line"),
        ],
        ids=["class", "function", "partial", "vector", "device"],
    )
    def test_a_class_or_function(self, name, given, label):
        trainer = make(name, {}, env=given)
        assert (trainer.own_env, trainer.source.label) == (True, label)
        assert steps(trainer) > 0

    @pytest.mark.parametrize("name", ["ppo", "pqn", "dqn"])
    def test_vector_envs(self, name):
        assert steps(make(name, {}, env=[make_vector(2), make_vector(2)])) > 0

    @pytest.mark.parametrize("given", [Reacher, lambda: SyncVectorEnv([Reacher] * 4)])
    @pytest.mark.parametrize("processes", [False, True])
    def test_an_env_gets_actions_within_its_bounds(self, given, processes):
        trainer = make("ppo", {"initial_scale": 50.0, "env_processes": processes and given is Reacher}, env=given)
        batch = trainer.collect()
        rewards, actions = batch["next", "reward"], batch["action"]
        assert actions.abs().max() > 20.0, "what was drawn is stored, since log-probabilities are of it"
        before, after = batch["observation"], batch["next", "observation"]
        torch.testing.assert_close(after, (before + actions.clamp(-1, 1)).clamp(-10, 10))
        assert rewards.isfinite().all()
        trainer.close()

    @pytest.mark.parametrize("name", ["ppo", "sac", "td3"])
    @pytest.mark.parametrize("shape", [(), (2, 2)])
    def test_actions_that_are_no_vectors_are_refused(self, name, shape):
        class Shaped(Reacher):
            def __init__(self):
                super().__init__()
                self.action_space = spaces.Box(-1.0, 1.0, shape, np.float32)

        words = (
            rf"action_spec: expected a vector \[D\] .*received the shape {re.escape(str(shape))} in the envs on the CPU"
        )
        with pytest.raises(ValueError, match=words):
            make(name, {}, env=Shaped)

    def test_what_is_no_env(self):
        for given, words in (
            (Corridor(), "received Corridor. Remedy: a function"),
            (3, "received int"),
            ([Corridor()], "list"),
        ):
            with pytest.raises(ValueError, match=rf"env: expected a TorchRL env .*{words}"):
                make("ppo", {}, env=given)

    def test_another_number_of_envs(self):
        with pytest.raises(ValueError, match=r"expected batch_size \[4\].*received \[3\]"):
            make("ppo", {}, env=make_vector(3))

    @pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
    def test_each_way_to_reset(self, mode):
        assert steps(make("ppo", {}, env=SyncVectorEnv([Corridor] * 4, autoreset_mode=mode))) > 0


class TestCollectors:
    def test_ppo_takes_a_host_collector_and_learns_its_actor(self):
        envs, config = make_vector(4), PPOConfig.without_task(**SMALL["ppo"])
        actor = make_actor(host_specs(envs), config)
        collector = HostCollector(envs, actor, frames_per_batch=config.batch_size, seed=0)
        trainer = PPOTrainer(config, collector=collector)
        assert trainer.actor is actor
        assert trainer.collector is collector
        before = [value.clone() for value in actor.parameters()]
        assert steps(trainer) > 0
        assert not all(torch.equal(one, other) for one, other in zip(before, actor.parameters(), strict=True))

    def test_ppo_takes_a_device_collector(self):
        config = PPOConfig.without_task(**SMALL["ppo"])
        env = CartPole(4, device="cpu")
        collector = DeviceCollector(env, make_actor(env, config), frames_per_batch=config.batch_size, mode="eager")
        assert steps(PPOTrainer(config, collector=collector)) > 0

    def test_one_that_does_not_fit(self):
        envs, config = make_vector(4), PPOConfig.without_task(**SMALL["ppo"])
        actor = make_actor(host_specs(envs), config)
        with pytest.raises(ValueError, match=r"collector: expected 4 envs and frames_per_batch=16.*received 4 .* 8"):
            PPOTrainer(config, collector=HostCollector(envs, actor, frames_per_batch=8))
        collector = HostCollector(make_vector(4), actor, frames_per_batch=16)
        other = make_actor(host_specs(envs), config)
        with pytest.raises(ValueError, match="collector: expected it to act with the trainer's policy"):
            PPOTrainer(config, collector=collector, actor=other)
        collector.shutdown()


@pytest.mark.parametrize("name", ["ppo", "pqn", "dqn", "sac"])
def test_nothing_after_the_collection_waits_for_the_host(name):
    trainer = make(name, {"env": "named_envs:Reacher" if name == "sac" else "named_envs:Corridor"})
    for _ in range(3):
        trainer.step()
    trainer.schedule()
    batch = trainer.collect()
    with no_host_sync():
        trainer.digest(batch)
    trainer.close()


@pytest.mark.parametrize("name", ["ppo", "dqn", "sac"])
def test_a_compiled_run_on_the_cpu(name, traced_only):
    env = "named_envs:Reacher" if name == "sac" else "named_envs:Corridor"
    trainer = make(name, {"env": env, "mode": "compile"})
    assert trainer.collector.mode == "compile"
    assert steps(trainer, 3) > 0


@pytest.mark.parametrize("name", ["ppo", "dqn", "sac"])
def test_the_same_seed_gives_the_same_run(name):
    env = "named_envs:Reacher" if name == "sac" else "named_envs:Corridor"

    def parameters(seed):
        trainer = make(name, {"env": env, "seed": seed})
        steps(trainer)
        return torch.cat([value.detach().flatten() for value in trainer.policy.parameters()])

    first = parameters(0)
    assert torch.equal(first, parameters(0))
    assert not torch.equal(first, parameters(1))


def test_rewards_and_ends_reach_the_learner_as_the_env_gave_them():
    trainer = make("ppo", {"env": "named_envs:Corridor", "env_args": ("length=2",)})
    batch = trainer.collect()
    place = batch.get(("next", "observation"))[..., :1]
    assert torch.equal(batch.get(("next", "terminated")), place >= 1.0)
    assert torch.equal(batch.get(("next", "reward")), (place >= 1.0).float())
    assert "logits" not in batch.keys()
    trainer.close()


def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    options = {"env": "named_envs:Corridor", "run_dir": str(tmp_path)}
    trainer = make("ppo", options)
    run_dir = train(trainer, progress=False).run_dir
    trainer.close()
    assert run_dir == tmp_path / "ppo-Corridor-0"
    assert json.loads((run_dir / "config.json").read_text())["env"] == "named_envs:Corridor"
    again = make("ppo", {**options, "total_steps": 320})
    again.load(run_dir / "checkpoints" / "best.pt" if (run_dir / "checkpoints/best.pt").exists() else _newest(run_dir))
    assert train(again, run_dir, progress=False).steps == 320
    again.close()


def _newest(run_dir):
    return max((run_dir / "checkpoints").glob("0*.pt"))


class TestKnownSettings:
    def test_patterns(self):
        assert settings_for("HalfCheetah-v5", "ppo")["normalize_observations"] is True
        assert settings_for("LunarLander-v3", "ppo")["gamma"] == 0.999
        assert settings_for("gym:HalfCheetah-v5", "ppo") == settings_for("HalfCheetah-v5", "ppo")
        assert settings_for("ALE/Pong-v5", "dqn")["compact"] is True
        assert settings_for("LunarLander-v3", "dqn")["num_envs"] == 8
        assert settings_for("named_envs:Corridor", "ppo") == {}
        assert settings_for("CartPole-v1", "nothing") == {}

    @pytest.mark.parametrize("name", [name for name in TRAINERS if name != "sac-options"])
    @pytest.mark.parametrize("env", ["ALE/Pong-v5", "HalfCheetah-v5", "LunarLander-v3", "vmas:navigation"])
    def test_they_are_settings_that_can_be_run(self, name, env):
        known = settings_for(env, name)
        config = KINDS[name](env=env)
        assert {key: getattr(config, key) for key in known} == known


class TestCommandLine:
    ARGS = ("--device", "cpu", "--num-envs", "2", "--num-steps", "8", "--total-steps", "64", "--minibatches", "2")

    def run(self, tmp_path, monkeypatch, *options, name="ppo"):
        monkeypatch.chdir(tmp_path)
        return main(["train", name, *options, *self.ARGS, "--no-progress", "--log-interval", "1"])

    def test_a_file(self, tmp_path, monkeypatch, capsys):
        (tmp_path / "hall.py").write_text("from named_envs import Corridor\n\n\nclass Hall(Corridor):\n    pass\n")
        assert self.run(tmp_path, monkeypatch, "--env", "hall.py:Hall", "--env-args", "length=2") == 0
        config = json.loads((tmp_path / "runs/ppo-Hall-0/config.json").read_text())
        assert (config["env"], config["env_args"]) == ("hall.py:Hall", ["length=2"])
        assert main(["train", "ppo", "--resume", "runs/ppo-Hall-0", "--total-steps", "96", "--no-progress"]) == 0
        assert "64 of 96 steps" in capsys.readouterr().err
        again = ["--resume", "auto", "--env", "hall.py:Hall", "--total-steps", "128", "--no-progress"]
        assert main(["train", "ppo", *again]) == 0
        assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["ppo-Hall-0"]

    def test_an_env_of_gymnasium(self, tmp_path, monkeypatch):
        assert self.run(tmp_path, monkeypatch, "--env", "CartPole-v1", "--env-args", '{"max_episode_steps": 5}') == 0
        assert (tmp_path / "runs/ppo-CartPole-v1-0").is_dir()

    def test_what_is_refused_leaves_nothing(self, tmp_path, monkeypatch, capsys):
        for options, words in (
            (("--env", "nowhere:Env"), "there is no module nowhere"),
            (("--env", "named_envs:Nothing"), "received the class named_envs.Nothing"),
            (("--env", "named_envs:Corridor", "--env-args", "lenght=3"), "Remedy: length, the nearest"),
            (("--env", "named_envs:Corridor", "--env-args", "{length"), "expected name=value or a JSON object"),
            (("--env", "CartPole", "--env-processes"), "expected an env that steps on the CPU"),
        ):
            assert self.run(tmp_path, monkeypatch, *options) == 1
            error = capsys.readouterr().err
            assert words in error
            assert "Traceback" not in error
        assert not (tmp_path / "runs").exists()


def test_systems_take_no_other_env():
    from torchrl_perf.systems.durotaxis.config import DurotaxisConfig

    with pytest.raises(ConfigError, match=r"env_args: expected \(\), since durotaxis has settings of its own"):
        DurotaxisConfig(env_args=("length=3",))
