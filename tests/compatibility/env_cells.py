"""Our envs and our collector with TorchRL's transforms: each kind of env, and each mode of the collector."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from cells import Cell, no_cells_twice
from tensordict.nn import TensorDictModule
from torch import Tensor
from torchrl.collectors import Collector
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs import transforms as T
from torchrl.envs.utils import check_env_specs
from torchrl.record import PixelRenderTransform

from torchrl_perf import envs
from torchrl_perf.collectors import DeviceCollector

N, LIMIT = 3, 4


class Steps(envs.DeviceEnv):
    """Observes (env, step) and pays ``10 env + step``; nothing is random, so that two collectors can be compared."""

    num_state = 2
    num_reset_noise = 1
    observation_low = (0.0, 0.0)
    observation_high = (100.0, 100.0)

    def initial_state(self, uniform: Tensor) -> Tensor:
        """Step 0."""
        index = torch.arange(self.num_envs, dtype=uniform.dtype, device=uniform.device)
        return torch.stack([index, torch.zeros_like(index)], -1)

    def dynamics(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One more step; env 1 terminates at step 2."""
        env, step = state.unbind(-1)
        reward = 10 * env + step + action.reshape(self.num_envs, -1)[:, 0] / 4
        return torch.stack([env, step + 1], -1), reward, (env == 1) & (step == 1)

    def observe(self, state: Tensor) -> Tensor:
        """The state itself."""
        return state


class DiscreteSteps(Steps):
    """With three actions."""

    num_actions = 3


class BoxSteps(Steps):
    """With an action between -1 and 1."""

    action_low, action_high = (-1.0,), (1.0,)


ENVS: dict[str, Callable[..., EnvBase]] = {
    "discrete": lambda **options: envs.CartPole(N, max_episode_steps=2, **options),
    "continuous": lambda **options: envs.Pendulum(N, max_episode_steps=2, **options),
    "hybrid": lambda **options: envs.HybridTarget(N, **options),
    "masked": lambda **options: envs.FuelBreaks(N, **options),
    "structured": lambda **options: envs.MarineNavigation(N, **options),
    "groups": lambda **options: envs.Durotaxis(N, **options),
}
"""One env of each kind."""


@dataclass(frozen=True)
class Entry:
    """A transform and where it is refused.

    Attributes:
        make: the transform, for an env.
        refused: kind of env -> why; "*" for every kind.
        compared: whether the collector's data is compared with that of TorchRL's ``Collector``.
        why_not: the reason where it is not.
    """

    make: Callable[[EnvBase], T.Transform]
    refused: dict[str, str]
    compared: bool = True
    why_not: str = ""


def _first_float(env: EnvBase) -> list:
    """The first float observation with a dim of features."""
    leaves = env.full_observation_spec.items(True, True)
    return [next(key for key, spec in leaves if spec.dtype.is_floating_point and spec.ndim > 1)]


def _entry(make: Callable[[EnvBase], T.Transform], why_not: str = "", **refused: str) -> Entry:
    return Entry(make, {("*" if kind == "every" else kind): why for kind, why in refused.items()}, not why_not, why_not)


_BOX_ONLY = "the transform is for one continuous action"
_ONE_ENV = "TorchRL's transform takes a single env, not a batch"
_BUFFER = "TorchRL's transform is for replay buffers, not envs"
_DISCRETE = dict.fromkeys(("discrete", "hybrid", "masked", "structured"), _BOX_ONLY)
_AGENTS = "TorchRL's transform has one return for each env, and the rewards are of agents"
_RANDOM = "its limits are random"

TRANSFORMS: dict[str, Entry] = {
    "ActionDiscretizer": _entry(lambda env: T.ActionDiscretizer(5), **_DISCRETE),
    "ActionDiscretizer, new key": _entry(
        lambda env: T.ActionDiscretizer(5, out_action_key="disc"), "TorchRL's Collector fails with it", **_DISCRETE
    ),
    "BinarizeReward": _entry(lambda env: T.BinarizeReward(in_keys=env.reward_keys)),
    "CatFrames": _entry(
        lambda env: T.CatFrames(N=2, dim=-1, in_keys=_first_float(env), out_keys=["frames"], reset_key="_reset")
    ),
    "CatTensors": _entry(lambda env: T.CatTensors(in_keys=_first_float(env), out_key="joined", del_keys=False)),
    "ClipTransform": _entry(lambda env: T.ClipTransform(in_keys=_first_float(env), low=-0.5, high=0.5)),
    "Compose": _entry(lambda env: T.Compose(T.StepCounter(), T.RewardSum())),
    "DTypeCastTransform": _entry(lambda env: T.DTypeCastTransform(torch.float32, torch.float64, _first_float(env))),
    "DeviceCastTransform": _entry(lambda env: T.DeviceCastTransform("cpu")),
    "DoubleToFloat": _entry(lambda env: T.DoubleToFloat(in_keys=_first_float(env))),
    "ExcludeTransform": _entry(lambda env: T.ExcludeTransform("is_init")),
    "FiniteTensorDictCheck": _entry(lambda env: T.FiniteTensorDictCheck()),
    "FlattenObservation": _entry(lambda env: T.FlattenObservation(-1, -1, in_keys=_first_float(env))),
    "FrameSkipTransform": _entry(
        lambda env: T.FrameSkipTransform(2), "TorchRL's collector is compared through the env, which keeps the ends"
    ),
    "InitTracker": _entry(
        lambda env: T.InitTracker("first"), "the flag under next differs: TorchRL's reset of a row writes it there"
    ),
    "LineariseRewards": _entry(lambda env: T.LineariseRewards(in_keys=env.reward_keys)),
    "NoopResetEnv": _entry(lambda env: T.NoopResetEnv(2), _ONE_ENV, every=_ONE_ENV),
    "ObservationNorm": _entry(lambda env: T.ObservationNorm(loc=0.5, scale=2.0, in_keys=_first_float(env))),
    "PixelRenderTransform": _entry(lambda env: PixelRenderTransform(height=8, width=8)),
    "RandomTruncationTransform": _entry(
        lambda env: T.Compose(T.StepCounter(), T.RandomTruncationTransform(2, 3)), _RANDOM
    ),
    "RenameTransform": _entry(lambda env: T.RenameTransform(_first_float(env), ["other"])),
    "RewardClipping": _entry(lambda env: T.RewardClipping(-0.5, 0.5, in_keys=env.reward_keys)),
    "RewardScaling": _entry(lambda env: T.RewardScaling(1.0, 2.0, in_keys=env.reward_keys)),
    "RewardSum": _entry(lambda env: T.RewardSum()),
    "SelectTransform": _entry(lambda env: T.SelectTransform(*env.observation_keys, *env.reward_keys)),
    "SignTransform": _entry(lambda env: T.SignTransform(in_keys=env.reward_keys)),
    "StepCounter": _entry(lambda env: T.StepCounter(max_steps=3)),
    "TargetReturn": _entry(lambda env: T.TargetReturn(10.0, reset_key="_reset"), structured=_AGENTS),
    "TensorDictPrimer": _entry(
        lambda env: T.TensorDictPrimer(Composite(hidden=Unbounded((N, 2)), shape=(N,)), reset_key="_reset")
    ),
    "TimeMaxPool": _entry(
        lambda env: T.TimeMaxPool(in_keys=_first_float(env), out_keys=["max"], T=2, reset_key="_reset")
    ),
    "UnsqueezeTransform": _entry(lambda env: T.UnsqueezeTransform(-1, in_keys=_first_float(env), out_keys=["deep"])),
    "VecNormV2": _entry(lambda env: T.VecNormV2(in_keys=_first_float(env)), "its statistics are of the whole run"),
}


def _reason(entry: Entry, kind: str) -> str:
    return entry.refused.get("*", entry.refused.get(kind, ""))


def run_env_cell(name: str, kind: str) -> None:
    """``check_env_specs``, which rolls out over ends of episodes, of the env below the transform."""
    env = ENVS[kind](dtype=_dtype(name))
    env = TransformedEnv(env, TRANSFORMS[name].make(env))
    check_env_specs(env, break_when_any_done=False)


def _dtype(name: str) -> torch.dtype:
    return torch.float64 if name == "DoubleToFloat" else torch.float32


def _steps(name: str, device: str = "cpu") -> EnvBase:
    task = BoxSteps if name.startswith("ActionDiscretizer") else DiscreteSteps
    env = task(N, max_episode_steps=LIMIT, dtype=_dtype(name), device=device)
    return TransformedEnv(env, TRANSFORMS[name].make(env))


def run_collector_cell(name: str, mode: str) -> None:
    """Three episodes of ``DeviceCollector``, equal to those of TorchRL's ``Collector`` where they are compared."""
    options = {"frames_per_batch": N * 7, "total_frames": N * 14}
    env = _steps(name, "cuda" if mode == "graph" else "cpu")
    ours = DeviceCollector(env, _policy(env), mode=mode, **options)
    batches = [batch.to("cpu").clone() for batch in ours]
    if TRANSFORMS[name].compared:
        for batch, expected in zip(batches, _stock(name), strict=True):
            _same(batch, expected)
    assert torch.cat(batches, -1)["next", "done"].sum() >= 2 * N
    ours.shutdown()


@cache
def _stock(name: str) -> list:
    env = _steps(name)
    options = {"frames_per_batch": N * 7, "total_frames": N * 14}
    stock = Collector(env, _policy(env), auto_register_policy_transforms=False, **options)
    batches = [batch.clone() for batch in stock]
    stock.shutdown()
    return batches


def _policy(env: EnvBase) -> TensorDictModule:
    """The action 1, under the key and in the form that the env wants."""
    (key,) = env.action_keys
    action = env.full_action_spec[key].zero() + 1
    flags = TensorDictModule(lambda flag: action.clone(), ["done"], [key])
    return flags


def _same(batch: object, expected: object) -> None:
    """All entries that TorchRL's batch has, ids of episodes by what they group."""
    for key in expected.keys(True, True):
        if key == ("collector", "traj_ids"):
            one, other = batch[key].flatten(), expected[key].flatten()
            assert torch.equal(one[:, None] == one, other[:, None] == other)
            continue
        torch.testing.assert_close(batch[key], expected[key], rtol=0, atol=0, msg=str(key), equal_nan=True)


ENV_TABLE, COLLECTOR_TABLE = "Our envs below TorchRL's transforms", "Our collector over TorchRL's transforms"
COMPILED = ("Compose",)
"""Modes that compile take seconds: on an ordinary transform alone."""


def _collector_kind(name: str) -> str:
    return "continuous" if name.startswith("ActionDiscretizer") else "discrete"


CELLS = [
    Cell(ENV_TABLE, name, kind, partial(run_env_cell, name, kind), _reason(entry, kind), says=r"\w")
    for name, entry in TRANSFORMS.items()
    for kind in ENVS
]
CELLS += [
    Cell(COLLECTOR_TABLE, name, mode, partial(run_collector_cell, name, mode), reason, says=r"\w")
    for name, entry in TRANSFORMS.items()
    for reason in [_reason(entry, _collector_kind(name))]
    for mode in ("eager", "auto")
]
CELLS += [
    Cell(COLLECTOR_TABLE, name, mode, partial(run_collector_cell, name, mode), mark=mark)
    for name in COMPILED
    for mode, mark in (("compile", "long"), ("graph", "gpu"))
]
CELLS = no_cells_twice(CELLS)
