"""Each key of each config changes what a run does: parameters, rows, files, or how the run goes on after a fault.

A key is tried against a usual run, both with what the key needs to matter (a weight of the draw needs prioritised
replay). A key without a case fails.

A key is tried where it is declared: once for all algorithms that inherit it, of which another test shows that they
read it. The second part of the tests tries it with each of them.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import pytest
import torch
from config_runs import KINDS, RUN_KEYS, SMALL, TRAINERS, WHOLE_RUNS, modules_of, observe
from declared import declaring, unread
from tensordict import TensorDict
from torchrl.objectives.common import LossModule

from torchrl_perf import envs
from torchrl_perf.trainers.normalization import NORMALIZATION_SETTINGS
from torchrl_perf.trainers.tasks import TASKS

HERE = "tests/trainers/test_config_effects.py"


def loss_of(trainer: Any) -> str:
    """The class of the loss."""
    return type(trainer.loss).__name__


def stored_bytes(trainer: Any) -> int:
    """Memory of the replay buffer, once it has rows."""
    for _ in range(2):
        trainer.step()
    leaves, _ = torch.utils._pytree.tree_flatten(trainer.buffer.state_dict())
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, torch.Tensor))


class Case(NamedTuple):
    """How the effect of a setting is seen."""

    value: Any
    """The value that is tried."""
    shared: Mapping[str, Any] = {}
    """What both runs have, as far as the algorithm knows it."""
    look: Callable[[Any], Any] | None = None
    """What is compared of both trainers; None for what they learn in a few iterations."""


PRIORITIES, EASILY_CLIPPED = {"sampler": "prioritized"}, {"clip_epsilon": 0.001}
# so that the best action by the mean is not the best by every quantile
DISAGREEING = {
    "env": "Acrobot",
    "learning_rate": 0.01,
    "updates_per_iteration": 40,
    "eps_start": 0.0,
    "eps_end": 0.0,
}
SLICES = {"slice_length": 4, "burn_in": 1, "n_step": 1, "learning_starts": 32}
FAR_TARGET = {"target_interval": 50, "updates_per_iteration": 10, "learning_rate": 1e-2}


def choices(trainer):
    """Actions after a few iterations, for so many states that some differ where the risk does."""
    for _ in range(6):
        trainer.step()
        trainer.iterations_done += 1
    torch.manual_seed(0)
    states = TensorDict({"observation": torch.randn(4096, 6)}, [4096])
    return trainer.policy(states)["action"].tolist()


# by the name of the field; what is not here gets another value that its type suggests, beside a usual run
CASES: dict[str, Case] = {
    "num_envs": Case(8),
    "num_steps": Case(8),
    "gamma": Case(0.5),
    "seed": Case(1),
    "precision": Case("bf16"),
    "adam_beta1": Case(0.5),
    "adam_beta2": Case(0.5),
    "adam_eps": Case(0.1),
    "weight_decay": Case(0.5),
    "anneal_learning_rate": Case(True, {"anneal_learning_rate": False}),
    "schedule_steps": Case(16, {"anneal_learning_rate": True, **PRIORITIES, "beta_final": 1.0}),
    "max_grad_norm": Case(1e-3),
    "hidden_sizes": Case((16, 8)),
    "critic_hidden_sizes": Case((16,)),
    "conv_layers": Case("small", {"env": "named_envs:Pixels"}),
    "conv_features": Case(8, {"env": "named_envs:Pixels"}),
    "activation": Case("tanh", {"activation": "relu"}),
    "reward_clip": Case(0.1),
    # replay
    "capacity": Case(32),
    "n_step": Case(3),
    "sampler": Case("prioritized"),
    "alpha": Case(0.9, PRIORITIES),
    "beta": Case(0.9, PRIORITIES),
    "beta_final": Case(1.0, PRIORITIES),
    "compact": Case(True, {}, stored_bytes),
    "tau": Case(0.5, {"target_interval": 1}),
    "target_interval": Case(3, {"target_interval": 1}),
    # PPO
    "clip_epsilon": Case(0.001),
    "clip_value": Case(True, EASILY_CLIPPED),
    "value_clip_epsilon": Case(0.001, {"clip_value": True}),
    "entropy_coeff": Case(0.5),
    "entropy_coeff_final": Case(0.5),
    "entropy_frames": Case(32, {"entropy_coeff_final": 0.5}),
    "entropy_floor": Case(10.0),
    "entropy_floor_coeff": Case(5.0, {"entropy_floor": 10.0}),
    "critic_coeff": Case(5.0),
    "target_kl": Case(0.0),
    "desired_kl": Case(1e-3, {"anneal_learning_rate": False}),
    "min_learning_rate": Case(5e-3, {"desired_kl": 1e-8}),
    "max_learning_rate": Case(5e-2, {"desired_kl": 10.0}),
    "kl_estimate": Case("closed_form", {"target_kl": 1e-3}),
    "policy_scale": Case("state_dependent", {"env": "Pendulum"}),
    "initial_scale": Case(0.5, {"env": "Pendulum"}),
    "memory": Case("mingru", {"memory": "gru", **SLICES}),
    "memory_size": Case(16, {"memory": "gru", **SLICES}),
    "slice_length": Case(8, {"memory": "gru", **SLICES}),
    "burn_in": Case(2, {"memory": "gru", **SLICES}),
    # action values
    "double": Case(False, {"double": True, **FAR_TARGET}),
    "eps_start": Case(0.5, {"eps_start": 1.0}),
    "eps_end": Case(1.0),
    "eps_frames": Case(1, {"eps_start": 1.0}),
    "greedy": Case("per_quantile", DISAGREEING),
    "risk": Case("wang", DISAGREEING, choices),
    "risk_eta": Case(0.05, {**DISAGREEING, "risk": "cvar", "risk_eta": 1.0}, choices),
    "kappa": Case(0.01),
    "noisy": Case("per_row"),
    "v_min": Case(-1.0),
    # actors and critics
    "target_entropy": Case(3.0),
    "noise_frames": Case(1),
    "dropped_target_taus": Case(2),
    "policy_delay": Case(1),
    "option_learning": Case("critic", {"option_capacity": 2_000}),
    "option_interrupt": Case(True, {"option_learning": "critic", "option_capacity": 2_000}),
    "option_relabel": Case(1.0),
    "option_clip": Case(0.01, {"updates_per_iteration": 8, "option_learning_rate": 0.1}),
    "option_capacity": Case(24),
}

OF_BOUNDED = {"env": "named_envs:PixelsBounded"}
CONVOLUTIONS = {"conv_layers": Case("small", OF_BOUNDED), "conv_features": Case(8, OF_BOUNDED)}

# where a setting matters otherwise than elsewhere
OF_ALGORITHM: dict[str, dict[str, Case]] = {
    "ppo": {"loss": Case("torchrl", {}, loss_of)},
    "rainbow": {
        "env": Case("MountainCar", {"v_min": -100.0}),
        "sampler": Case("random"),
        "n_step": Case(1),
        "eps_end": Case(1.0, {"eps_start": 1.0}),
    },
    # the actor learns at the last update of four alone
    "td3": {"updates_per_iteration": Case(4), **CONVOLUTIONS},
    "sac": CONVOLUTIONS,
    "ddpg": CONVOLUTIONS,
    # where the loss is linear a target counts by its sign alone
    "ac-iqn": {"gamma": Case(0.5, {"kappa": 50.0}), "n_step": Case(3, {"kappa": 50.0})},
    "sac-options": {"capacity": Case(48), "num_steps": Case(2), "num_envs": Case(2)},
    "hybrid-ppo": {
        "env": Case("Pendulum"),
        "loss": Case("torchrl", {}, loss_of),
        "policy_scale": Case("state_independent"),
    },
}


def case_of(name: str, field: str) -> Case:
    """The case of the algorithm, of the field, or one that follows from the field's type; settings it lacks left out.

    Raises:
        LookupError: for a field whose type suggests no other value.
    """
    known = {known.name for known in dataclasses.fields(KINDS[name])}
    case = OF_ALGORITHM.get(name, {}).get(field) or CASES.get(field) or Case(another(name, field))
    return case._replace(shared={key: value for key, value in case.shared.items() if key in known})


def another(name: str, field: str) -> Any:
    """Another value of a field: the other choice, twice the number, another task."""
    kind = KINDS[name]
    usual, hint = SMALL[name].get(field, getattr(kind.without_task(), field)), get_type_hints(kind)[field]
    if field == "env":
        return next(task for task in TASKS if task != usual and actions_of(task) == actions_of(usual))
    if isinstance(usual, bool):
        return not usual
    if get_origin(hint) is Literal:
        return next(choice for choice in get_args(hint) if choice != usual)
    if isinstance(usual, int | float):
        share = isinstance(usual, float) and 0.5 < usual <= 1.0  # of what has to be in [0, 1]
        return usual / 2 if share else 2 * usual or 0.1
    raise LookupError(
        f"{kind.__name__}.{field}: expected a case that shows what the key does, received none. Remedy: a value for it "
        f"in CASES of {HERE}."
    )


def actions_of(task: str) -> list[type]:
    """The kinds of a task's actions."""
    return [type(spec) for spec in getattr(envs, task)(1, device="cpu").full_action_spec.values(True, True)]


# one task has options so far
ALONE = {("sac-options", "env")} | {("sac-options", name) for name in NORMALIZATION_SETTINGS}  # which it refuses


def _numbers(module: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters, and the targets of a loss; a policy's other buffers are its settings."""
    return [*module.parameters(), *(module.buffers() if isinstance(module, LossModule) else ())]


@cache
def learnt(name: str, options: tuple[tuple[str, Any], ...]) -> bytes:
    """All parameters after five small iterations."""
    trainer = TRAINERS[name](KINDS[name].without_task(**{**SMALL[name], **dict(options)}))
    for _ in range(5):
        trainer.step()
        trainer.iterations_done += 1
    tensors = [number for part in modules_of(trainer).values() for number in _numbers(part)]
    trainer.close()
    return torch.cat([tensor.detach().flatten().to(torch.float64) for tensor in tensors]).numpy().tobytes()


# each algorithm has its own code for these, though the base class declares them
OF_EACH = ("mode", "compile_mode", "on_nan", "split_on_oom")


def _tries() -> list[Any]:
    """Each key of each algorithm; slow where an algorithm before tries the same declaration."""
    tries, declared = [], set()
    for name, kind in KINDS.items():
        for field in [field.name for field in dataclasses.fields(kind)]:
            untried = field in kind.not_taken or (name, field) in ALONE
            if untried or (field in RUN_KEYS and name not in WHOLE_RUNS):
                continue
            declaration = (declaring(kind, field), field)
            again = declaration in declared and field not in OF_EACH
            tries.append(pytest.param(name, field, marks=pytest.mark.slow if again else (), id=f"{name}-{field}"))
            declared.add(declaration)
    return tries


@pytest.mark.parametrize(("name", "field"), _tries())
def test_key_has_an_effect(name, field, tmp_path, monkeypatch):
    if field in RUN_KEYS:
        usual, changed = observe(name, field, tmp_path, monkeypatch)
    else:
        value, shared, look = case_of(name, field)
        assert {**SMALL[name], **shared}.get(field, getattr(KINDS[name].without_task(), field)) != value
        seen = (lambda options: learnt(name, tuple(options.items()))) if look is None else seen_by(look, name)
        usual, changed = seen(shared), seen({**shared, field: value})
    assert usual != changed, (
        f"{KINDS[name].__name__}.{field}: no effect. If it needs other settings to have one, they belong to CASES in "
        f"{HERE}; if this algorithm alone needs them, to OF_ALGORITHM there"
    )


def seen_by(look: Callable[[Any], Any], name: str) -> Callable[[dict[str, Any]], Any]:
    """What a function sees of a trainer with some settings."""

    def seen(options: dict[str, Any]) -> Any:
        trainer = TRAINERS[name](KINDS[name].without_task(**{**SMALL[name], **options}))
        try:
            return look(trainer)
        finally:
            trainer.close()

    return seen


# what a key needs to be looked at
ASKING = {"sampler": "prioritized", "beta_final": 1.0, "entropy_coeff_final": 0.5, "risk": "cvar", "desired_kl": 0.01}
REMEMBERING = {"memory": "gru", **SLICES}


@pytest.mark.parametrize("name", KINDS)
def test_every_key_is_read(name, monkeypatch):
    def iterate(config):
        trainer = TRAINERS[name](config)
        for _ in range(3):
            trainer.step()
            trainer.iterations_done += 1
        trainer.close()

    fields = {field.name for field in dataclasses.fields(KINDS[name])}
    runs = [{key: value for key, value in ASKING.items() if key in fields}]
    if "memory" in fields - {*KINDS[name].not_taken}:
        runs.append({key: value for key, value in REMEMBERING.items() if key in fields})
    left = fields - {*RUN_KEYS, *KINDS[name].not_taken}
    for options in runs:
        config = KINDS[name].without_task(**{**SMALL[name], **options})
        left &= unread(config, iterate, monkeypatch)
    assert left == set()


@pytest.mark.parametrize("name", KINDS)
def test_the_same_settings_learn_the_same(name):
    learnt.cache_clear()
    first = learnt(name, ())
    learnt.cache_clear()
    assert learnt(name, ()) == first
