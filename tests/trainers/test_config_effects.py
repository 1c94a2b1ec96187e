"""Each key of each config changes what a run does: parameters, rows, files, or how the run goes on after a fault.

A key is tried against a usual run, both with what the key needs to matter (a weight of the draw needs prioritised
replay). A key without a case fails.

A key is tried where it is declared: once for all algorithms that inherit it, of which another test shows that they
read it. The second part of the tests tries it with each of them.
"""

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch
from config_runs import KINDS, RUN_KEYS, SMALL, TRAINERS, WHOLE_RUNS, observe
from declared import ADAM, declaring, unread

LEARNING = {
    # (what both runs have, the value that is tried)
    "env": ({}, "Acrobot"),
    "num_envs": ({}, 8),
    "num_steps": ({}, 8),
    "gamma": ({}, 0.5),
    "seed": ({}, 1),
    "precision": ({}, "bf16"),
    "learning_rate": ({}, 0.02),
    "anneal_learning_rate": ({"anneal_learning_rate": False}, True),
    "schedule_steps": ({"anneal_learning_rate": True}, 16),
    "max_grad_norm": ({}, 1e-3),
    "hidden_size": ({}, 64),
    **ADAM,
}
NETWORK = {"activation": ({"activation": "relu"}, "tanh")}
OFF_POLICY = {
    "capacity": ({}, 32),
    "minibatch_size": ({}, 8),
    "updates_per_iteration": ({}, 3),
    "learning_starts": ({}, 32),
    "n_step": ({}, 3),
    "sampler": ({}, "prioritized"),
    "alpha": ({"sampler": "prioritized"}, 0.9),
    "beta": ({"sampler": "prioritized"}, 0.9),
    "beta_final": ({"sampler": "prioritized"}, 1.0),
    "schedule_steps": ({"sampler": "prioritized", "beta_final": 1.0}, 16),
    "tau": ({"target_interval": 1}, 0.5),
    "target_interval": ({"target_interval": 1}, 3),
}
PPO = {
    **LEARNING,
    **NETWORK,
    "epochs": ({}, 3),
    "minibatches": ({}, 4),
    "lmbda": ({}, 0.5),
    "clip_epsilon": ({}, 0.001),
    "clip_value": ({"clip_epsilon": 0.001}, True),
    "value_clip_epsilon": ({"clip_value": True}, 0.001),
    "normalize_advantage": ({}, False),
    "entropy_coeff": ({}, 0.5),
    "entropy_coeff_final": ({}, 0.5),
    "entropy_frames": ({"entropy_coeff_final": 0.5}, 32),
    "entropy_floor": ({}, 10.0),
    "entropy_floor_coeff": ({"entropy_floor": 10.0}, 5.0),
    "critic_coeff": ({}, 5.0),
    "target_kl": ({}, 0.0),
    "kl_estimate": ({"target_kl": 1e-3}, "closed_form"),
}
VALUE = {
    **LEARNING,
    **NETWORK,
    **OFF_POLICY,
    "env": ({}, "MountainCar"),
    "double": ({"double": True, "target_interval": 50, "updates_per_iteration": 10, "learning_rate": 1e-2}, False),
    "dueling": ({"dueling": False}, True),
    "eps_start": ({"learning_starts": 16, "eps_start": 1.0}, 0.5),
    "eps_end": ({}, 1.0),
    "eps_frames": ({"eps_start": 1.0}, 1),
}
# so that the best action by the mean is not the best by every quantile
DISAGREEING = {
    "env": "Acrobot",
    "learning_rate": 0.01,
    "updates_per_iteration": 40,
    "eps_start": 0.0,
    "eps_end": 0.0,
}
QUANTILE = {
    **VALUE,
    "greedy": (DISAGREEING, "per_quantile"),
    "kappa": ({}, 0.01),
    "risk": ({**DISAGREEING, "risk_eta": 0.1}, "cvar"),
    "risk_eta": ({**DISAGREEING, "risk": "cvar", "risk_eta": 1.0}, 0.05),
}
ACTOR_CRITIC = {
    **{name: case for name, case in LEARNING.items() if "learning_rate" not in name},
    **NETWORK,
    **{name: case for name, case in OFF_POLICY.items() if name != "target_interval"},
    "env": ({}, "MountainCarContinuous"),
    "tau": ({}, 0.5),
    "actor_learning_rate": ({}, 0.02),
    "critic_learning_rate": ({}, 0.02),
}
SAC = {
    **ACTOR_CRITIC,
    "target_interval": ({}, 3),
    "temperature_learning_rate": ({}, 0.02),
    "initial_temperature": ({}, 0.1),
    "learn_temperature": ({}, False),
    "target_entropy": ({}, 3.0),
    "num_critics": ({}, 3),
    "loss_function": ({}, "smooth_l1"),
}
NOISE = {
    "noise": ({}, "ou"),
    "noise_start": ({}, 0.8),
    "noise_end": ({}, 0.8),
    "noise_frames": ({}, 1),
}
DDPG = {**ACTOR_CRITIC, **NOISE, "loss_function": ({}, "smooth_l1")}
TAUS = {"num_taus": ({}, 4), "num_target_taus": ({}, 4), "num_cosines": ({}, 4)}
CASES: dict[str, dict[str, tuple[dict[str, Any], Any]]] = {
    "ppo": PPO,
    "dqn": {**VALUE, "loss": ({}, "l2")},
    "sac": SAC,
    "qr-dqn": {**QUANTILE, "num_quantiles": ({}, 4)},
    "iqn": {**QUANTILE, **TAUS, "num_action_taus": ({}, 4)},
    "rainbow": {
        **VALUE,
        "env": ({"v_min": -100.0}, "MountainCar"),
        "sampler": ({}, "random"),
        "alpha": ({}, 0.9),
        "beta": ({}, 0.9),
        "beta_final": ({}, 1.0),
        "n_step": ({}, 1),
        "eps_end": ({"eps_start": 1.0}, 1.0),
        "noisy": ({}, "per_row"),
        "precision": ({}, "bf16"),
        "num_atoms": ({}, 5),
        "v_min": ({}, -1.0),
        "v_max": ({}, 200.0),
    },
    "ddpg": DDPG,
    "td3": {
        **DDPG,
        "updates_per_iteration": ({}, 4),
        "num_critics": ({}, 3),
        "policy_delay": ({}, 1),
        "target_noise": ({}, 0.5),
        "noise_clip": ({}, 0.01),
    },
    "ac-iqn": {
        **ACTOR_CRITIC,
        **NOISE,
        **TAUS,
        "kappa": ({}, 0.01),
        "num_actor_taus": ({}, 4),
        # where the loss is linear a target counts by its sign alone
        "gamma": ({"kappa": 50.0}, 0.5),
        "n_step": ({"kappa": 50.0}, 3),
    },
    "sac-options": {
        **{name: case for name, case in SAC.items() if name != "env"},
        "capacity": ({}, 48),
        "num_steps": ({}, 2),
        "num_envs": ({}, 2),
        "option_learning_rate": ({}, 0.02),
        "option_temperature": ({}, 0.5),
        "option_entropy_coeff": ({}, 0.5),
        "option_clip": ({"updates_per_iteration": 8, "option_learning_rate": 0.1}, 0.01),
        "option_capacity": ({}, 24),
    },
    "hybrid-ppo": {**PPO, "env": ({}, "Pendulum")},
}


def loss_of(trainer: Any) -> str:
    """The class of the loss."""
    return type(trainer.loss).__name__


def stored_bytes(trainer: Any) -> int:
    """Memory of the replay buffer, once it has rows."""
    for _ in range(2):
        trainer.step()
    leaves, _ = torch.utils._pytree.tree_flatten(trainer.buffer.state_dict())
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, torch.Tensor))


# keys that change no number: what they change instead
OTHERS = {
    name: {"loss": ("torchrl", loss_of)} if "ppo" in name else {"compact": (True, stored_bytes)} for name in KINDS
}
# one task has options so far
ALONE = {("sac-options", "env")}


def _numbers(module: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters, and buffers: those of a loss are its targets."""
    return [*module.parameters(), *module.buffers()]


@cache
def learnt(name: str, options: tuple[tuple[str, Any], ...]) -> bytes:
    """All parameters after five small iterations."""
    trainer = TRAINERS[name](KINDS[name].without_task(**{**SMALL[name], **dict(options)}))
    for _ in range(5):
        trainer.step()
        trainer.iterations_done += 1
    parts = [trainer.actor, trainer.critic] if "ppo" in name else trainer.parts().values()
    tensors = [p for part in parts if isinstance(part, torch.nn.Module) for p in _numbers(part)]
    trainer.close()
    return torch.cat([tensor.detach().flatten().to(torch.float64) for tensor in tensors]).numpy().tobytes()


# each algorithm has its own code for these, though the base class declares them
OF_EACH = ("mode", "compile_mode", "on_nan", "split_on_oom")


def _tries() -> list[Any]:
    """Each key of each algorithm; slow where an algorithm before tries the same declaration."""
    tries, declared = [], set()
    for name, kind in KINDS.items():
        for field in [field.name for field in dataclasses.fields(kind)]:
            if (field in RUN_KEYS and name not in WHOLE_RUNS) or (name, field) in ALONE:
                continue
            declaration = (declaring(kind, field), field)
            again = declaration in declared and field not in OF_EACH
            tries.append(pytest.param(name, field, marks=pytest.mark.slow if again else (), id=f"{name}-{field}"))
            declared.add(declaration)
    return tries


@pytest.mark.parametrize(("name", "field"), _tries())
def test_key_has_an_effect(name, field, tmp_path, monkeypatch):
    assert field in CASES[name] or field in OTHERS[name] or field in RUN_KEYS, (
        f"{KINDS[name].__name__}.{field} has no case here: add one that shows what the key does"
    )
    if field in CASES[name]:
        shared, value = CASES[name][field]
        options = {**SMALL[name], **shared}
        assert options.get(field, getattr(KINDS[name].without_task(), field)) != value
        usual, changed = learnt(name, tuple(shared.items())), learnt(name, tuple({**shared, field: value}.items()))
    elif field in OTHERS[name]:
        value, look = OTHERS[name][field]
        trainers = [
            TRAINERS[name](KINDS[name].without_task(**SMALL[name], **options)) for options in ({}, {field: value})
        ]
        usual, changed = map(look, trainers)
        for trainer in trainers:
            trainer.close()
    else:
        usual, changed = observe(name, field, tmp_path, monkeypatch)
    assert usual != changed


# what a key needs to be looked at
ASKING = {"sampler": "prioritized", "beta_final": 1.0, "entropy_coeff_final": 0.5, "risk": "cvar"}


@pytest.mark.parametrize("name", KINDS)
def test_every_key_is_read(name, monkeypatch):
    def iterate(config):
        trainer = TRAINERS[name](config)
        for _ in range(3):
            trainer.step()
            trainer.iterations_done += 1
        trainer.close()

    fields = {field.name for field in dataclasses.fields(KINDS[name])}
    asking = {key: value for key, value in ASKING.items() if key in fields}
    config = KINDS[name].without_task(**{**SMALL[name], **asking})
    assert unread(config, iterate, monkeypatch) - set(RUN_KEYS) == set()


@pytest.mark.parametrize("name", KINDS)
def test_the_same_settings_learn_the_same(name):
    learnt.cache_clear()
    first = learnt(name, ())
    learnt.cache_clear()
    assert learnt(name, ()) == first
