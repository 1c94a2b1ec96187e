"""A lower bound of the memory of settings, by arithmetic: those that cannot fit are refused before anything is made.

The actual need is probed once the networks exist (:mod:`~torchrl_perf.trainers.run.memory_estimate`); but a network of
a billion units, or the states of a billion envs, must not be allocated for that.
"""

import dataclasses
import itertools
from typing import Any

import torch

from torchrl_perf.replay.memory import available_bytes, readable
from torchrl_perf.trainers.config import RunConfig

__all__ = ["check_fits", "least_bytes"]

OBSERVATIONS = {"CartPole": 4, "Pendulum": 3, "Acrobot": 6, "MountainCar": 2, "MountainCarContinuous": 2}
"""Numbers of an observation, of the package's tasks; 1 for any other env."""
FLOAT = 4  # bytes
ADAM = 4  # copies of a parameter: itself, its gradient, two moments
COLLECTED, STORED = 24, 11  # bytes of a row beside observations: reward, action, flags, what the collector adds
OBJECT = 5  # numbers of an object that a vessel sees
NODE = 45  # bytes of a node of a colony
SHARE = 0.5  # of the free memory that a remedy's number may use, since a run needs more than the floor counts


def check_fits(config: RunConfig, device: torch.device) -> None:
    """Refuse settings that cannot fit into the free memory of a device.

    Args:
        config: settings of a run.
        device: where it is to run.

    Raises:
        ValueError: with the least bytes needed, the bytes available, and a number that works.
    """
    floor = least_bytes(config)
    needed, free = sum(floor.values()), available_bytes(device)
    if needed <= free:
        return
    parts = ", ".join(f"{name} {readable(count)}" for name, count in floor.items() if count)
    name, remedy = _remedy(config, int(free * SHARE))
    raise ValueError(
        f"{name}: expected settings that fit into memory, received {name}={getattr(config, name)}, with which the run "
        f"needs {readable(needed)} ({needed} bytes) at least on {device}, where {readable(free)} ({free} bytes) are "
        f"free ({parts}). Remedy: {remedy}."
    )


def least_bytes(config: RunConfig) -> dict[str, int]:
    """Bytes that a run takes at least, by purpose.

    Args:
        config: settings of any algorithm or system.
    """
    rows = getattr(config, "num_streams", config.num_envs)
    seen = _observation_bytes(config)
    found = {
        "envs": rows * seen + _world_bytes(config),
        "rollout": rows * config.num_steps * (2 * seen + COLLECTED),
        "networks": ADAM * FLOAT * _weights(config),
        "acting": FLOAT * rows * _act(config),
        "update": _update_bytes(config),
    }
    if capacity := getattr(config, "capacity", 0):
        times = 1 if getattr(config, "compact", False) else 2
        found["replay"] = capacity * (times * _stored_bytes(config, seen) + STORED)
        # the rows of a sample, and of n-step returns the place of each reward
        places = 8 * _of(config, "n_step") if _of(config, "n_step") > 1 else 0
        found["sample"] = _of(config, "minibatch_size") * (2 * _stored_bytes(config, seen) + STORED + places)
    found["options"] = getattr(config, "option_capacity", 0) * 2 * seen
    return found


def _of(config: RunConfig, name: str) -> int:
    """A setting that only some algorithms have, or 0."""
    return int(getattr(config, name, 0) or 0)


def _observation_bytes(config: RunConfig) -> int:
    """Bytes of one observation of one row."""
    if size := _of(config, "size"):
        return 2 * size * size  # cells that are a break, cells that may become one
    if nodes := _of(config, "critical_nodes"):
        return 2 * nodes * NODE
    if hasattr(config, "max_robots"):
        objects = sum(_of(config, name) for name in ("max_robots", "max_obstacles", "max_cores")) - 1
        return FLOAT * OBJECT * max(1, objects)
    if hasattr(config, "market"):
        return FLOAT * _of(config, "window")
    return FLOAT * (_of(config, "observation_size") or OBSERVATIONS.get(config.env, 1))


def _stored_bytes(config: RunConfig, seen: int) -> int:
    """Bytes of an observation in the replay buffer."""
    return seen // 2 if _of(config, "size") else seen


def _world_bytes(config: RunConfig) -> int:
    """Bytes of the worlds' states beside observations: planes of landscapes, fires, recent steps."""
    cells = _of(config, "size") ** 2
    history = _of(config, "history") * config.num_envs * FLOAT * _of(config, "observation_size")
    return cells * (FLOAT * _of(config, "landscapes") + _of(config, "fires") * config.num_envs) + history


def _weights(config: RunConfig) -> int:
    """Number of learnt weights; targets count a quarter, since they have no gradient and moments."""
    width = _of(config, "hidden_size")
    critics = max(1, _of(config, "num_critics"))
    nets = 1 if hasattr(config, "eps_start") else 2 if hasattr(config, "lmbda") else 1 + critics
    widths = getattr(config, "hidden_sizes", None)
    weights = width * width if widths is None else sum(one * other for one, other in itertools.pairwise(widths))
    found = nets * weights if not hasattr(config, "encoder_width") else 0
    if hasattr(config, "blocks"):
        found = 18 * _of(config, "blocks") * width * width  # two convolutions of 3 x 3 each
    # two actions at least
    found += width * (2 * (_of(config, "num_quantiles") + _of(config, "num_atoms")) + _of(config, "num_cosines"))
    found += 2 * 8 * _of(config, "encoder_layers") * _of(config, "encoder_width") ** 2
    found += width * (_of(config, "self_size") + _of(config, "object_size"))
    if hasattr(config, "latent_size"):
        encoder, latent = _of(config, "encoder_size"), _of(config, "latent_size")
        found += encoder * (_of(config, "observation_size") + 2 * latent) + _of(config, "observation_size") * latent
        kind = getattr(config, "dynamics", "")
        members = {"mlp": 1, "ensemble": _of(config, "members")}.get(kind, 0)
        found += members * _of(config, "dynamics_size") * latent
        sets = {"rbf": 1, "rbf_ensemble": _of(config, "members")}.get(kind, 0)
        found += sets * _of(config, "centres") ** latent * latent
    return found


def _act(config: RunConfig) -> int:
    """Numbers that acting takes for a row."""
    taus = _of(config, "num_action_taus") * _of(config, "hidden_size")
    plans = _of(config, "candidates") * _of(config, "plan_horizon") * max(1, _of(config, "latent_size"))
    plans = plans if getattr(config, "inputs", "random") != "random" else 0
    return max(_of(config, "hidden_size"), taus, plans, 2 * (_of(config, "num_quantiles") + _of(config, "num_atoms")))


def _update_bytes(config: RunConfig) -> int:
    """Bytes of an update beside its rows; for one row if updates may be split."""
    rows = _of(config, "minibatch_size") or config.num_envs * config.num_steps // max(1, _of(config, "minibatches"))
    rows = 1 if config.split_on_oom else rows
    taus, others, width = _of(config, "num_taus"), _of(config, "num_target_taus"), _of(config, "hidden_size")
    quantiles, actor = _of(config, "num_quantiles"), _of(config, "num_actor_taus")
    found = taus * others + quantiles * quantiles + (taus + others + actor) * (width + _of(config, "num_cosines"))
    if hasattr(config, "latent_size"):
        found += _of(config, "window") * _of(config, "samples") * _of(config, "latent_size")
    return FLOAT * rows * max(found, 2 * width)


def _remedy(config: RunConfig, room: int) -> tuple[str, str]:
    """The setting that takes most, and a number of it that fits."""
    usual = {field.name: field.default for field in dataclasses.fields(config) if type(field.default) is int}
    now = sum(least_bytes(config).values())
    spared: dict[str, int] = {}
    for name, default in usual.items():
        if getattr(config, name) is not None and getattr(config, name) > max(1, default):
            spared[name] = now - sum(least_bytes(_with(config, name, max(1, default))).values())
    name = max(spared, key=lambda each: spared[each], default="num_envs")
    fits = _largest_fitting(config, name, room)
    if fits is not None:
        return name, f"{name}={fits} or less, or a device with more memory"
    others = ", ".join(each for each in sorted(spared, key=lambda each: -spared[each])[:3] if spared[each] > 0)
    return name, f"smaller {others or name}, or a device with more memory"


def _largest_fitting(config: RunConfig, name: str, room: int) -> int | None:
    """The largest power of two of a setting that fits and that the other settings go with."""
    power = 1 << max(0, int(getattr(config, name)).bit_length() - 1)
    while power >= 1:
        changed = _with(config, name, power)
        if sum(least_bytes(changed).values()) <= room and not type(config).problems_of(changed.to_dict()):
            return power
        power //= 2
    return None


def _with(config: RunConfig, name: str, value: Any) -> RunConfig:
    """The settings with another value of one, without checking that they go together."""
    changed = object.__new__(type(config))
    for field in dataclasses.fields(config):
        object.__setattr__(changed, field.name, value if field.name == name else getattr(config, field.name))
    return changed
