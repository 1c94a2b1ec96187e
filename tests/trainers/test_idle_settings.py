"""Settings that nothing reads beside the others are refused where they are given, and never where they are left out."""

import dataclasses
from typing import Any

import pytest

from torchrl_perf.trainers import DQNConfig, IQNConfig, PPOConfig, RainbowConfig, SACConfig, SACOptionsConfig
from torchrl_perf.trainers.config_checks import ConfigError

BY_PRIORITY = {"sampler": "prioritized"}
# settings that are idle by default, another value, and what makes something read them
IDLE: list[tuple[type, str, Any, dict[str, Any]]] = [
    (DQNConfig, "alpha", 0.7, BY_PRIORITY),
    (DQNConfig, "beta", 0.5, BY_PRIORITY),
    (SACConfig, "beta_final", 0.9, BY_PRIORITY),
    (PPOConfig, "value_clip_epsilon", 0.1, {"clip_value": True}),
    (PPOConfig, "entropy_frames", 100, {"entropy_coeff_final": 0.0}),
    (PPOConfig, "entropy_floor_coeff", 2.0, {"entropy_floor": 0.1}),
    (PPOConfig, "min_learning_rate", 1e-6, {"desired_kl": 0.02}),
    (PPOConfig, "max_learning_rate", 0.1, {"desired_kl": 0.02}),
    (IQNConfig, "risk_eta", 0.5, {"risk": "cvar"}),
]
# settings that are read by default, another value, and what leaves them unread
READ_BY_DEFAULT: list[tuple[type, str, Any, dict[str, Any]]] = [
    (SACConfig, "target_entropy", -3.0, {"learn_temperature": False}),
    (SACConfig, "temperature_learning_rate", 0.1, {"learn_temperature": False}),
    (SACOptionsConfig, "option_clip", 0.1, {"option_learning": "critic"}),
    (SACOptionsConfig, "option_capacity", 10_000, {"option_learning": "critic"}),
]


def refused(kind: type, name: str, value: Any, off: dict[str, Any]) -> None:
    """The setting is named with the value that it got and with the one that decides."""
    (switch,) = off
    with pytest.raises(ConfigError, match=f"^{name}: expected .* with {switch}.*received .*Remedy: another {switch}"):
        kind.without_task(**off, **{name: value})


@pytest.mark.parametrize(("kind", "name", "value", "on"), IDLE)
def test_a_setting_counts_with_its_switch_alone(kind, name, value, on):
    assert getattr(kind.without_task(**on, **{name: value}), name) == value
    (switch,) = on
    refused(kind, name, value, {switch: getattr(kind.without_task(), switch)})


@pytest.mark.parametrize(("kind", "name", "value", "off"), READ_BY_DEFAULT)
def test_a_setting_is_refused_where_the_switch_leaves_it_unread(kind, name, value, off):
    assert getattr(kind.without_task(**{name: value}), name) == value
    refused(kind, name, value, off)


def test_what_the_task_brings_is_no_fault_of_the_user():
    """Rainbow's settings of CartPole anneal beta, which a run without priorities has no use for."""
    with_priorities = RainbowConfig.for_task("CartPole")
    assert with_priorities.beta_final == 1.0
    plain = dataclasses.replace(with_priorities, sampler="random")
    assert not dataclasses.replace(plain, anneal_learning_rate=False).anneals_over_run
    assert dataclasses.replace(with_priorities, anneal_learning_rate=False).anneals_over_run


def test_widths_of_the_task_are_not_taken_for_the_users():
    """``hidden_size`` alone would change nothing where the task's settings say the width of each layer."""
    with pytest.raises(ConfigError, match=r"hidden_size: expected 64 with hidden_sizes=\(.*received 32"):
        PPOConfig(env="Hopper", hidden_size=32)
    assert PPOConfig(env="Hopper", hidden_size=32, hidden_sizes=None).widths == (32, 32)
    assert PPOConfig(env="CartPole", hidden_size=32, hidden_sizes=(8,)).widths == (8,)
