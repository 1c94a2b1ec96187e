"""Robots on MuJoCo Warp: the env alone, PPO in one graph, its share of the env's speed, and rsl_rl on the same env.

Every row has the env's speed, what it is measured against, and compilation apart. ``--learn`` trains, and judges in
MuJoCo's C code; the policies are kept for ``evaluate`` and ``play``.
"""

import gc
import importlib.util
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from torchrl_perf.bench.report import Sheet
from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.registry import ROBOTS, entry_of
from torchrl_perf.runtime import Stopwatch, capture, synchronize, time_cuda
from torchrl_perf.runtime.files import save_checkpoint
from torchrl_perf.trainers import PPOConfig, PPOTrainer
from torchrl_perf.trainers.captures import collector_mode
from torchrl_perf.trainers.device import resolve_device
from torchrl_perf.trainers.env_arguments import env_arguments
from torchrl_perf.trainers.mujoco_c import episodes_in_c

SPEED = ("worlds", "ms", "steps_per_second", "share", "of", "start_s")
COLUMNS = ("task", "variant", "algorithm", *SPEED, "mean_return", "deviation", "seconds")
STEPS = 16
ALGORITHMS = ("ppo", "sac", "td3", "ddpg")
OF_OPTIONS = ("env", "seed", "num_envs", "device", "mode")
"""Settings of trainers that options of the benchmark decide."""


@dataclass(frozen=True)
class BenchRobots:
    """Options of ``torchrl-perf bench robots``."""

    tasks: tuple[str, ...] = ("HalfCheetah", "Ant", "Humanoid")
    """Tasks of MuJoCo."""
    worlds: int = 4096
    """Worlds that run at once (N) in measurements of speed."""
    variants: tuple[str, ...] = ("physics", "eager", "env", "followed", "ppo", "rsl-rl")
    """Rows: bare physics in a graph, an env step by step, the env in a graph under random actions, the same under those
    that PPO takes, from the worlds that it is in, PPO in one graph, rsl-rl-lib (if it is installed) on the same env."""
    repeats: int = 10
    """Timed batches or iterations."""
    mode: Literal["auto", "graph"] = "graph"
    """Kernels of rollouts and PPO on CUDA, always in a graph: compiled ones (graph), or eager ones (auto)."""
    learn: float = 0.0
    """Greatest seconds of training of each task, algorithm and seed, after compilation; 0 trains none. A run also ends
    after the steps of the task's settings, over which a learning rate that is lowered is lowered."""
    learn_worlds: int | None = None
    """Worlds of the training; None is as many as the task's settings say."""
    algorithms: tuple[str, ...] = ("ppo",)
    """What is trained: ppo, sac, td3, ddpg."""
    seeds: int = 3
    """Seeds of the training."""
    first_seed: int = 0
    """The first of them."""
    physics: tuple[str, ...] = ()
    """Settings of the physics, name=value, such as integrator=implicitfast."""
    settings: tuple[str, ...] = ()
    """Settings of the trainers in place of the task's, name=value, such as num_steps=32 desired_kl=0.02."""
    policies: str = "runs"
    """Folder that gets each policy that was trained, as <algorithm>-<task>-<seed>.pt, which evaluate and play take."""
    device: str = "auto"
    """Device."""
    out: str | None = None
    """Folder for robots.json; the package's bench/results by default."""


class Task:
    """One task's envs, and the measurements of them.

    Args:
        name: of the task.
        options: of the benchmark.
        device: where it runs.
    """

    def __init__(self, name: str, options: BenchRobots, device: torch.device) -> None:
        import torchrl_perf.envs.mujoco as robots

        self.name, self.options, self.device = name, options, device
        self._kind, self._settings = getattr(robots, name), env_arguments(options.physics)
        self._chosen = env_arguments(options.settings)
        self._learner: PPOTrainer | None = None
        self._warm = 4 if device.type == "cuda" else 1  # calls before a graph is there, and replayed

    def make(self, seed: int = 0) -> Any:
        """New worlds."""
        return self._kind(self.options.worlds, device=self.device, seed=seed, **self._settings)

    def row(self, variant: str, ms: float, **more: Any) -> dict[str, Any]:
        """A row of a step of all worlds that takes ``ms``."""
        worlds = self.options.worlds
        base = {"task": self.name, "variant": variant, "worlds": worlds, "ms": ms}
        return {
            **base,
            "steps_per_second": worlds / ms * 1e3,
            "physics": self._settings,
            "settings": self._chosen,
            "mode": self.options.mode,
            **more,
        }

    def timed(self, call: Callable[[], Any], steps: int) -> float:
        """Median ms of a step, of calls of ``steps`` each."""
        return time_cuda(call, self.options.repeats, warmup=2, device=self.device).median / 1e3 / steps

    def physics(self) -> dict[str, Any]:
        """Physics steps alone, with new controls at each, and nothing of an env around them."""
        with Started(self.device) as start:
            env = self.make()
            controls = torch.rand(STEPS, self.options.worlds, env.model.nu, device=self.device) * 2 - 1
            call = self._captured(lambda: [env.simulation.run(control) for control in controls])
        return self.row("physics", self.timed(call, STEPS), start_s=start.seconds)

    def _captured(self, fn: Callable[[], Any]) -> Callable[[], Any]:
        if self.device.type != "cuda":
            return fn
        call = capture(lambda: fn() and None, audit=False)
        for _ in range(3):
            call()
        return call

    def eager(self) -> dict[str, Any]:
        """Steps that are called one by one from Python; physics replays a graph of its own on CUDA."""
        with Started(self.device) as start:
            env = self.make()
            root = env.reset()
            root["action"] = env.action_spec.rand()
        return self.row("eager", self.timed(lambda: env.step_and_maybe_reset(root.copy()), 1), start_s=start.seconds)

    def env(self) -> dict[str, Any]:
        """Rollouts of random actions, in a graph on CUDA."""
        with Started(self.device) as start:
            env = self.make()
            frames, later = self.options.worlds * STEPS, self.options.mode == "auto"
            mode = "graph" if self.device.type == "cuda" else "eager"
            collector = DeviceCollector(env, None, frames_per_batch=frames, mode=mode, compile_later=later)
            for _ in range(3):
                collector.collect()
        row = self.row("env", self.timed(collector.collect, STEPS), start_s=start.seconds, faults=env.faults())
        collector.shutdown()
        return row

    def followed(self) -> dict[str, Any]:
        """Rollouts of the actions that PPO takes, from its worlds: what they cost without a policy and updates."""
        with Started(self.device) as start:
            trainer = self._started()
            begin = trainer.collector.state_dict()
            actions = Recorded(trainer.collector.collect().get("action"))
            mode = collector_mode(trainer.mode, trainer.env)
            mode = "graph" if self.device.type == "cuda" else mode
            policy = TensorDictModule(actions, in_keys=["observation"], out_keys=["action"])
            frames = trainer.config.batch_size
            collector = DeviceCollector(trainer.env, policy, frames_per_batch=frames, mode=mode)
            for _ in range(self._warm):
                collector.collect()
        spent = []
        for _ in range(self.options.repeats):
            collector.load_state_dict(begin)
            actions.step.zero_()
            synchronize(self.device)
            watch = Stopwatch(self.device).start()
            collector.collect()
            watch.stop()
            spent.append(watch.seconds * 1e3 / trainer.config.num_steps)
        collector.shutdown(close_env=False)
        trainer.collector.load_state_dict(begin)
        return self.row("followed", statistics.median(spent), start_s=start.seconds)

    def _started(self) -> PPOTrainer:
        """A trainer that has made its graph, or the one that there is."""
        if self._learner is None:
            self._learner = self.trainer(0)
            for _ in range(self._warm):
                self._learner.step()
        return self._learner

    def ppo(self) -> dict[str, Any]:
        """Whole iterations of PPO with the task's settings, a single graph on CUDA."""
        with Started(self.device) as start:
            trainer = self._started()
        config = trainer.config
        ms = self.timed(trainer.step, config.num_steps)
        row = self.row("ppo", ms, start_s=start.seconds, updates=config.updates_each_iteration)
        trainer.close()
        self._learner = None
        return row

    def trainer(self, seed: int) -> PPOTrainer:
        """A PPO trainer with the settings of the task, and those that were given."""
        config = self._config(PPOConfig, seed, num_envs=self.options.worlds, total_steps=10**12)
        return PPOTrainer(config, env=self.make(seed))

    def _config(self, kind: Any, seed: int, **settings: Any) -> Any:
        """Settings of a trainer: the task's, then ``settings``, then those that were given."""
        mode = self.options.mode if self.device.type == "cuda" else "auto"
        place = {"env": self.name, "seed": seed, "device": str(self.device), "mode": mode, "logger": "none"}
        return kind.from_dict({**place, **settings, **self._chosen})

    def check(self) -> None:
        """Refuse settings that cannot be run, before anything is.

        Raises:
            ConfigError: a ValueError, with all problems.
        """
        if {"followed", "ppo"} & set(self.options.variants):
            self._config(PPOConfig, 0, num_envs=self.options.worlds, total_steps=10**12)
        for algorithm in self.options.algorithms if self.options.learn else ():
            self._learning(algorithm, 0)

    def _learning(self, algorithm: str, seed: int) -> Any:
        """Settings of a training."""
        chosen = self.options.learn_worlds
        worlds = {} if chosen is None else {"num_envs": chosen}
        return self._config(entry_of(algorithm).load("config"), seed, eval_episodes=100, **worlds)

    def rsl_rl(self) -> dict[str, Any] | None:
        """PPO of rsl-rl-lib on the same worlds; None where it is not installed."""
        if importlib.util.find_spec("rsl_rl") is None:
            return None
        from torchrl_perf.bench.peers.rsl_rl import measure

        with Started(self.device) as start:
            env = self.make()
        seconds, steps = measure(env, self.options.repeats, self.device)
        return self.row("rsl-rl", seconds / steps * 1e3, start_s=start.seconds)

    def learn(self, algorithm: str, seed: int, sheet: Sheet) -> dict[str, Any]:
        """Train with the task's settings after compilation, keep the policy, and judge it in MuJoCo's C code.

        The curve has a point for each ``log_interval`` iterations: seconds, steps, and the mean return of the last 100
        episodes on Warp, exploration included. The row is written before the policy is judged, and once more after.
        """
        entry = entry_of(algorithm)
        with Started(self.device) as start:
            config = self._learning(algorithm, seed)
            env = self._kind(config.num_envs, device=self.device, seed=seed, **self._settings)
            trainer = entry.load("trainer")(config, env=env)
            warm = getattr(config, "fill_iterations", 0) + 4
            for _ in range(warm):
                trainer.step()
        watch, count, curve = Stopwatch("cpu").start(), 0, []
        while watch.host_seconds < self.options.learn and (left := config.iterations - warm - count) > 0:
            for _ in range(min(config.log_interval, left)):
                trainer.step()
                count += 1
            synchronize(self.device)
            watch.stop()
            if (mean := float(trainer.episodes.mean_return)) == mean:  # there are none before the first episodes end
                curve.append([watch.host_seconds, count * config.batch_size, mean])
        row = {"task": self.name, "variant": "learn", "algorithm": algorithm, "worlds": config.num_envs, "seed": seed}
        row |= {"curve": curve, "seconds": watch.host_seconds, "steps": count * config.batch_size}
        row |= {"start_s": start.seconds, "physics": self._settings, "settings": self._chosen}
        trainer.iterations_done = warm + count  # what is kept says how many steps it has learnt from
        row["policy"] = str(self._keep(trainer, f"{algorithm}-{self.name}-{seed}.pt"))
        sheet.add(row)
        if (episodes := episodes_in_c(trainer)) is not None:
            row |= {"mean_return": episodes.mean_return, "deviation": episodes.return_deviation}
            row |= {"episodes": len(episodes.returns), "returns": episodes.returns}
            sheet.show(row)
        trainer.close()
        return row

    def _keep(self, trainer: Any, name: str) -> Path:
        """Write a checkpoint of the trainer, without what it has replayed."""
        return save_checkpoint(trainer.train_state.snapshot(skip=("replay",)), Path(self.options.policies) / name)


class Recorded(nn.Module):
    """A policy that takes recorded actions again, one step after the other.

    Args:
        actions: ``[N, T, U]``.

    Attributes:
        step: int64 0-d, the next one.
    """

    step: Tensor

    def __init__(self, actions: Tensor) -> None:
        super().__init__()
        self.register_buffer("actions", actions.transpose(0, 1).contiguous().clone())
        self.register_buffer("step", torch.zeros(1, dtype=torch.int64, device=actions.device))

    def forward(self, observation: Tensor) -> Tensor:
        """Return the actions ``[N, U]`` of the step; what is observed makes no difference."""
        action = self.actions.index_select(0, self.step)[0]
        self.step.copy_((self.step + 1) % self.actions.shape[0])
        return action


class Started:
    """Wall time of what is done once: envs are made, kernels compiled, graphs recorded.

    Args:
        device: that is waited for at the end.

    Attributes:
        seconds: the time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.seconds = device, 0.0

    def __enter__(self) -> "Started":
        gc.collect()
        self._watch = Stopwatch("cpu").start()
        return self

    def __exit__(self, *error: object) -> None:
        synchronize(self._device)
        self._watch.stop()
        self.seconds = self._watch.host_seconds


AGAINST = {"env": "physics", "followed": "env", "ppo": "env", "rsl-rl": "env"}
"""What the share of a variant's speed is of; that of PPO is also found of what its own worlds cost."""


def measure_task(task: Task, sheet: Sheet) -> None:
    """All variants of a task, each with its share of the one that limits it."""
    speeds: dict[str, float] = {}
    measures = {
        "physics": task.physics,
        "eager": task.eager,
        "env": task.env,
        "followed": task.followed,
        "ppo": task.ppo,
        "rsl-rl": task.rsl_rl,
    }
    for variant in task.options.variants:
        row = measures[variant]()
        if row is None:
            print(f"{task.name}: rsl-rl-lib is not installed, its row is left out")
            continue
        speeds[variant] = row["steps_per_second"]
        if (limit := speeds.get(AGAINST.get(variant, ""))) is not None:
            row |= {"share": row["steps_per_second"] / limit, "of": AGAINST[variant]}
        if variant == "ppo" and "followed" in speeds:
            row["share_followed"] = row["steps_per_second"] / speeds["followed"]
        sheet.add(row)


def check(options: BenchRobots) -> None:
    """Refuse tasks, variants and algorithms that there are none of, and settings that are options.

    Raises:
        ValueError: naming them.
    """
    known = {"tasks": ROBOTS, "variants": BenchRobots.variants, "algorithms": ALGORITHMS}
    for name, names in known.items():
        if unknown := [each for each in getattr(options, name) if each not in names]:
            raise ValueError(
                f"{name}: expected some of {', '.join(names)}, received {', '.join(unknown)}. Remedy: these names."
            )
    if taken := [name for name in OF_OPTIONS if name in env_arguments(options.settings)]:
        raise ValueError(
            f"settings: expected others than {', '.join(OF_OPTIONS)}, received {', '.join(taken)}. Remedy: --tasks, "
            "--first-seed, --worlds, --learn-worlds, --device and --mode."
        )


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark, prints rows as they come and writes ``robots.json``."""
    import tyro

    options = tyro.cli(BenchRobots, args=argv, prog="torchrl-perf bench robots")
    try:
        check(options)
        device = resolve_device(options.device)
        tasks = [Task(name, options, device) for name in options.tasks]
        for task in tasks:
            task.check()
    except ValueError as error:
        print(f"torchrl-perf bench robots: {error}", file=sys.stderr)
        return 1
    sheet = Sheet(COLUMNS, "robots", options.out)
    for task in tasks:
        measure_task(task, sheet)
        seeds = range(options.first_seed, options.first_seed + options.seeds) if options.learn else ()
        for algorithm, seed in product(options.algorithms, seeds):
            task.learn(algorithm, seed, sheet)
    print(f"written to {sheet.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
