"""A policy from a checkpoint of a run in an env of any kind: equal to the trainer's, evaluated, exported."""

import itertools
import json

import pytest
import torch
from config_runs import KINDS, make

from torchrl_perf.cli import main
from torchrl_perf.trainers import load_policy, train
from torchrl_perf.trainers.export import export_policy
from torchrl_perf.trainers.frames import frames
from torchrl_perf.trainers.policies import GreedyPolicy, policy_of, read_run

DISCRETE = ("ppo", "hybrid-ppo", "pqn", "dqn", "qr-dqn", "iqn", "rainbow")
BOUNDED = ("ppo", "hybrid-ppo", "sac", "td3", "ddpg", "ac-iqn")
NETWORK = {"hidden_sizes": (24, 16), "activation": "elu"}
NORMED = [name for name in KINDS if "layer_norm" not in KINDS[name].not_taken and name != "sac-options"]

CASES = {
    **{f"{name}, discrete": (name, {"env": "named_envs:Corridor"}) for name in DISCRETE},
    **{f"{name}, bounded": (name, {"env": "named_envs:Reacher"}) for name in BOUNDED},
    **{f"{name}, several observations": (name, {"env": "named_envs:Mixed"}) for name in DISCRETE},
    **{
        f"{name}, several observations, bounded": (name, {"env": "named_envs:MixedBounded"})
        for name in BOUNDED
        if name != "ac-iqn"
    },
    "ppo, several choices": ("ppo", {"env": "named_envs:MixedChoices"}),
    **{f"{name}, layers": (name, NETWORK) for name in KINDS if "hidden_sizes" not in KINDS[name].not_taken},
    **{f"{name}, layer norm": (name, {"layer_norm": True}) for name in NORMED},
    **{
        f"{name}, normalised": (name, {"normalize_observations": True})
        for name in KINDS
        if "normalize_observations" not in KINDS[name].not_normalized
    },
    "iqn, layers, normalised": ("iqn", {"normalize_observations": True, **NETWORK}),
    "ac-iqn, layers, normalised": ("ac-iqn", {"normalize_observations": True, **NETWORK}),
    "sac, normalised on the CPU": ("sac", {"env": "named_envs:Reacher", "normalize_observations": True}),
    "dqn, layers on images": ("dqn", {"env": "named_envs:Mixed", **NETWORK}),
    "dqn, duelling, layers": ("dqn", {"dueling": True, **NETWORK}),
    "iqn, layers on images": ("iqn", {"env": "named_envs:Mixed", **NETWORK}),
    "ppo, linear": ("ppo", {"hidden_sizes": ()}),
}
EXPORTED = (  # one of each kind of network; those of hidden_size alone are tested with the command
    *("ppo, discrete", "ppo, bounded", "dqn, several observations", "iqn, several observations"),
    *("rainbow, several observations", "sac, several observations, bounded", "ppo, several choices"),
    *("iqn, layers", "rainbow, layers", "ac-iqn, layers", "sac, layer norm", "dqn, duelling, layers", "ppo, linear"),
    *("ppo, normalised", "sac, normalised", "iqn, layers, normalised"),
)
cases = pytest.mark.parametrize(("name", "options"), CASES.values(), ids=CASES.keys())


def learnt(name, options, iterations=5):
    """A trainer after some iterations, and a batch of observations."""
    trainer = make(name, options)
    for _ in range(iterations):
        trainer.step()
        trainer.iterations_done += 1
    return trainer, trainer.collect().clone()


@cases
def test_equals_the_trainers_policy_bit_for_bit(name, options, tmp_path):
    trainer, batch = learnt(name, options)
    policy = load_policy(trainer.save(tmp_path / "checkpoint.pt"))
    # one step, as envs give it: of strided rows torch adds in another order for parameters without gradients
    root = batch.select(*policy.in_keys)[:, -1].contiguous()
    expected, acted = GreedyPolicy(trainer.policy)(root.clone()), policy(root.clone())
    for key in policy.specs.action_keys:
        assert torch.equal(acted.get(key), expected.get(key))
    trainer.close()


@pytest.mark.parametrize(("name", "options"), [CASES[case] for case in EXPORTED], ids=EXPORTED)
def test_exports(name, options, tmp_path):
    pytest.importorskip("onnxscript")
    trainer, _ = learnt(name, options, iterations=3)
    policy = load_policy(trainer.save(tmp_path / "checkpoint.pt"))
    trainer.close()
    assert export_policy(policy, tmp_path).difference <= 1e-5


MAKERS = {
    "a gymnasium.Env": ("named_envs:Corridor", ("length=3",)),
    "a function": ("named_envs:make_corridor", ()),
    "a DeviceEnv": ("named_envs:Line", ("speed=0.3",)),
    "a vector env": ("named_envs:make_vector", ()),
    "an id": ("CartPole-v1", ("max_episode_steps=9",)),
    "an id with its origin": ("gym:CartPole-v1", ("max_episode_steps=9",)),
}


@pytest.mark.parametrize(("env", "arguments"), MAKERS.values(), ids=MAKERS.keys())
def test_is_evaluated_during_a_run_and_after_it(env, arguments, tmp_path, capsys):
    options = {"eval_interval": 2, "eval_episodes": 3, "log_interval": 2, "run_dir": str(tmp_path)}
    trainer = make("ppo", {"env": env, "env_args": arguments, **options})
    result = train(trainer, progress=False)
    trainer.close()
    assert result.evaluated == result.evaluated
    assert main(["evaluate", str(result.run_dir), "--episodes", "5", "--max-steps", "40", "--json"]) == 0
    (task,) = json.loads(capsys.readouterr().out)["tasks"]
    assert len(task["returns"]) == 5


class TestEvaluationsOfWhatWasGiven:
    """A class or function that was given makes the envs of evaluations, too."""

    def test_a_class(self, tmp_path):
        from named_envs import Reacher

        options = {"eval_interval": 2, "eval_episodes": 3, "run_dir": str(tmp_path)}
        trainer = make("sac", options, env=Reacher)
        result = train(trainer, progress=False)
        trainer.close()
        assert result.evaluated < 0

    def test_a_variant_of_a_named_env(self, tmp_path, capsys):
        options = {"env": "named_envs:Corridor", "run_dir": str(tmp_path)}
        trainer = make("dqn", options)
        run = train(trainer, progress=False).run_dir
        trainer.close()
        variants = ["--variant", "length=2,max_episode_steps=7", "--variant", "max_episode_steps=1"]
        assert main(["evaluate", str(run), "--episodes", "2", "--max-steps", "9", "--json", *variants]) == 0
        plain, short, one = json.loads(capsys.readouterr().out)["tasks"]
        assert max(plain["lengths"]) <= 9
        assert max(short["lengths"]) <= 7
        assert one["lengths"] == [1, 1]
        assert main(["evaluate", str(run), "--variant", "lenght=2"]) == 1
        error = capsys.readouterr().err
        assert "variant: expected arguments of Corridor, received lenght=2 (" in error
        assert "length, the nearest" in error

    def test_an_env_that_has_been_changed_since(self, tmp_path, monkeypatch, capsys):
        import named_envs

        trainer = make("dqn", {"env": "named_envs:Corridor", "run_dir": str(tmp_path)})
        run = train(trainer, progress=False).run_dir
        trainer.close()
        monkeypatch.setattr(named_envs, "Corridor", named_envs.Reacher)
        assert main(["evaluate", str(run), "--episodes", "2"]) == 1
        error = capsys.readouterr().err
        assert "expected Corridor to have the observations and actions of the run, observation Bounded [2]" in error
        assert "received observation Bounded [1] float32, action Bounded [1] float32" in error


@pytest.mark.parametrize("env", ["named_envs:Corridor", "named_envs:Mixed", "named_envs:Single"])
def test_play_shows_what_is_observed_where_there_is_no_picture(env, tmp_path):
    trainer = make("ppo", {"env": env, "run_dir": str(tmp_path)})
    run = read_run(train(trainer, progress=False).run_dir)
    trainer.close()
    shown = list(frames(run, policy_of(run), seed=3, max_steps=6, episodes=3, size=(32, 48)))
    assert {picture.shape for picture in shown} == {(32, 48, 3)}
    assert all(picture.std() > 3 for picture in shown)
    assert any((one != other).any() for one, other in itertools.pairwise(shown))
