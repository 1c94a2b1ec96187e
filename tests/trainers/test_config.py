"""PPOConfig: defaults, derived values, refusals; networks made from it."""

import dataclasses
import json

import pytest
import torch
from torchrl.envs import GymEnv

from torchrl_perf import envs
from torchrl_perf.modules import FusedMLP
from torchrl_perf.trainers import PRESETS, PPOConfig, make_actor, make_critic

BAD = [
    ({"num_envs": 0}, "num_envs: expected a positive integer, received 0"),
    ({"num_envs": 2.5}, "num_envs: expected a positive integer, received 2.5"),
    ({"num_steps": -1}, "num_steps: expected a positive integer, received -1"),
    ({"total_steps": 0}, "total_steps"),
    ({"epochs": 0}, "epochs"),
    ({"minibatches": 0}, "minibatches"),
    ({"hidden_size": 0}, "hidden_size"),
    ({"log_interval": 0}, "log_interval"),
    ({"num_envs": 5, "num_steps": 3, "minibatches": 4}, r"a divisor of num_envs \* num_steps = 15, received 4. Remedy"),
    ({"gamma": 1.5}, r"gamma: expected a number in \[0, 1\], received 1.5"),
    ({"lmbda": -0.1}, r"lmbda: expected a number in \[0, 1\], received -0.1"),
    ({"gamma": float("nan")}, "gamma"),
    ({"learning_rate": 0.0}, "learning_rate: expected a positive number, received 0.0"),
    ({"learning_rate": float("nan")}, "learning_rate"),
    ({"max_grad_norm": 0.0}, "max_grad_norm"),
    ({"critic_coeff": 0.0}, "critic_coeff"),
    ({"clip_epsilon": 1.0}, "clip_epsilon"),
    ({"target_kl": -1.0}, "target_kl"),
    ({"checkpoint_interval": -1}, "checkpoint_interval"),
    ({"env": "cart-pole"}, r"env: expected one of CartPole, .*received 'cart-pole'. Remedy: env='CartPole'"),
    ({"env_args": ("length",)}, r"env_args: expected name=value or a JSON object, received 'length'"),
    ({"env_args": "length=3"}, r"env_args: expected a tuple of texts, received .* Remedy: env_args=\('length=3',\)"),
    ({"env_groups": 3}, r"env_groups: expected a divisor of num_envs = 128, received 3. Remedy: env_groups=2"),
    ({"activation": "swish"}, "activation: expected one of .*received 'swish'"),
    ({"precision": "fp8"}, "precision: expected one of .*received 'fp8'"),
    ({"loss": "mine"}, "loss: expected one of .*received 'mine'"),
    ({"mode": "fast"}, "mode: expected one of .*received 'fast'"),
]


@pytest.mark.parametrize(("options", "words"), BAD, ids=lambda value: str(value)[:40])
def test_bad_values_are_refused_with_name_and_value(options, words):
    with pytest.raises(ValueError, match=words):
        PPOConfig(**options)


def test_derived_values():
    config = PPOConfig(num_envs=8, num_steps=16, total_steps=1000, minibatches=4)
    assert config.batch_size == 128
    assert config.iterations == 8  # 7.8 rounded up
    assert json.loads(json.dumps(config.to_dict()))["num_steps"] == 16
    assert PPOConfig(**config.to_dict()) == config


def test_every_field_has_a_help_line_and_a_default():
    import inspect

    source = "".join(map(inspect.getsource, PPOConfig.__mro__[:-1])).splitlines()  # its own class and its base
    for field in dataclasses.fields(PPOConfig):
        line = next(i for i, text in enumerate(source) if text.startswith(f"    {field.name}: "))
        assert source[line + 1].strip().startswith('"""'), field.name
        assert field.default is not dataclasses.MISSING, field.name


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PPOConfig().gamma = 0.5


def test_presets_name_their_task():
    classic = {"CartPole", "Pendulum", "Acrobot", "MountainCar", "MountainCarContinuous"}
    assert set(PRESETS) == {*classic, "StatelessCartPole"}
    for name, preset in PRESETS.items():
        assert preset.env == name
        assert hasattr(envs, name)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_networks_fit_the_task(name):
    env = getattr(envs, name)(3)
    config = dataclasses.replace(PRESETS[name], hidden_size=32)
    with torch.no_grad():
        td = make_critic(env, config)(make_actor(env, config)(env.reset()))
    assert td["action"].shape == env.action_spec.shape
    assert td["action"].dtype == env.action_spec.dtype
    assert td["action_log_prob"].shape == (3,)
    assert td["state_value"].shape == (3, 1)


def test_continuous_actor_has_a_learnt_scale_of_one_at_first():
    env = envs.Pendulum(3)
    actor = make_actor(env, PPOConfig(env="Pendulum", hidden_size=32))
    names = [name for name, _ in actor.named_parameters()]
    assert sum("log_scale" in name for name in names) == 1
    distribution = actor.get_dist(env.reset())
    torch.testing.assert_close(distribution.entropy(), torch.full((3,), 1.4189385))
    assert any(isinstance(module, FusedMLP) for module in actor.modules())


def test_other_action_specs_are_refused():
    env = GymEnv("CartPole-v1", device="cpu")  # one-hot
    with pytest.raises(ValueError, match=r"action_spec: expected Categorical.*received OneHot"):
        make_actor(env, PPOConfig())


@pytest.mark.parametrize("env", PRESETS)
def test_a_whole_run_of_ppo_logs_enough_rows_for_a_curve(env):
    assert 50 <= PRESETS[env].iterations // PRESETS[env].log_interval <= 110
