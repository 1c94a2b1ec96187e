"""The studies of ``torchrl-perf bench curves``: presets of whole systems, metrics to draw, and an evaluation."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from torchrl_perf.registry import MARINE_AGENTS, SYSTEMS, entry_of
from torchrl_perf.run_layout import FRESH_SEEDS

__all__ = ["STUDIES", "WITH_EXTRAS", "Run", "Study", "episodes_without_exploration"]

Evaluation = Callable[[Any, str], dict[str, dict[str, float]]]
EVALUATION_FIRES = 2_048
EVALUATION_EPISODES = 50


class Run(NamedTuple):
    """One line of a study's picture: a preset, and the settings that differ from it."""

    algorithm: str
    """As ``torchrl-perf train`` names it."""
    preset: str
    """Of a system; else the env, whose preset it is."""
    changes: Mapping[str, Any] = {}
    ranks: int = 1
    """Processes that learn it together; the settings are those of the whole run."""

    def config(self, seed: int, **changes: Any) -> Any:
        """The settings of one seed."""
        entry, given = entry_of(self.algorithm), {**self.changes, "seed": seed, **changes}
        if self.algorithm in SYSTEMS:
            return dataclasses.replace(entry.load("presets")[self.preset], **given)
        return entry.load("config")(env=self.preset, **given)

    def trainer(self, config: Any) -> Any:
        """A trainer of the settings."""
        return entry_of(self.algorithm).load("trainer")(config)


@dataclass(frozen=True)
class Study:
    """Runs that are drawn together.

    Attributes:
        title: heading of the picture.
        runs: by name.
        columns: metrics of ``progress.csv``, a panel each, with the words beside it.
        evaluate: of the trainer after its run and the run's name, figures by what they are of: ``trained``, and others
            to compare it with.
    """

    title: str
    runs: Mapping[str, Run]
    columns: Mapping[str, str]
    evaluate: Evaluation


def _navigation(robots: int, **scenario: Any) -> Evaluation:
    """Fixed scenarios, for the trained policy without exploration and the scripted controller."""

    def evaluated(trainer: Any, name: str) -> dict[str, dict[str, float]]:
        from torchrl_perf.systems.marine.evaluation import Scenarios, evaluate, scripted
        from torchrl_perf.systems.marine.trainer import DISCRETE

        scenarios, device = Scenarios(robots=robots, **scenario), trainer.device
        learnt = scenarios.env("discrete" if name in DISCRETE else "continuous", device)
        by_script = scenarios.env("continuous", device)
        found = {
            "trained": evaluate(trainer.policy, scenarios, learnt),
            "scripted": evaluate(scripted(by_script), scenarios, by_script),
        }
        return {who: dataclasses.asdict(figures) for who, figures in found.items()}

    return evaluated


def _colony(trainer: Any, name: str) -> dict[str, dict[str, float]]:
    """Share of fresh colonies that reach the goal under the policy without noise."""
    from torchrl.envs.utils import ExplorationType, set_exploration_type

    env = trainer.make_env()
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        batch = env.rollout(trainer.config.max_episode_steps, trainer.actor, break_when_any_done=False)
    done, outcome = batch["next", "done"].squeeze(-1), batch["next", "outcome"].squeeze(-1)
    first = done.int().argmax(1, keepdim=True)
    reached = (outcome.gather(1, first) == 1) & done.any(1, keepdim=True)
    return {"trained": {"success": float(reached.float().mean()), "colonies": float(len(reached))}}


def _breaks(trainer: Any, name: str) -> dict[str, dict[str, float]]:
    """Burned fractions of the trained placement and of others under the same fires."""
    from torchrl_perf.systems.fuel_breaks.evaluation import compare

    figures = compare(trainer.policy, trainer.env, fires=EVALUATION_FIRES)
    return {
        "trained" if who == "policy" else who: {"burned": share, "error": figures.error[who]}
        for who, share in figures.burned.items()
    }


def cart_poles(trainer: Any, name: str) -> dict[str, dict[str, float]]:
    """:func:`episodes_without_exploration` of a policy of the package's CartPole, in Gymnasium's."""
    config = SimpleNamespace(env="CartPole-v1", seed=trainer.config.seed)
    return episodes_without_exploration(SimpleNamespace(policy=trainer.policy, config=config), name)


def episodes_without_exploration(trainer: Any, name: str) -> dict[str, dict[str, float]]:
    """Returns of whole episodes without exploration, in envs with another seed than that of the run."""
    import gymnasium

    from torchrl_perf.trainers import evaluate_episodes

    envs = gymnasium.make_vec(trainer.config.env, num_envs=EVALUATION_EPISODES, vectorization_mode="sync")
    found = evaluate_episodes(trainer.policy, envs, seed=FRESH_SEEDS + trainer.config.seed)
    figures = {"mean_return": found.mean_return, "deviation": found.return_deviation}
    return {"trained": {**figures, "episodes": float(len(found.returns))}}


# the first stage of the curriculum; exploration ends within it
_STAGE: dict[str, Any] = {
    "stage_frames": "0",
    "stage_robots": "3",
    "stage_obstacles": "0",
    "stage_distance": "30",
    "total_steps": 1_000_000,
    "max_obstacles": 0,
    "max_robots": 3,
}
_VALUES, _NOISE = {**_STAGE, "eps_frames": 300_000}, {**_STAGE, "noise_frames": 300_000}
_CHANGES = {"iqn": _VALUES, "ac-iqn": _NOISE, "dqn": _VALUES, "rainbow": _STAGE, "ddpg": _NOISE, "sac": _STAGE}
# small enough for two processes on two cores, large enough that three ranks could divide it
_POLES: dict[str, Any] = {"num_envs": 48, "num_steps": 32, "epochs": 4, "minibatches": 4, "total_steps": 153_600}
_POLES |= {"learning_rate": 7e-4, "anneal_learning_rate": True}
_RETURNS = {"episode/mean_return": "mean return, exploration included"}
_ARRIVED = {"episode/mean_return": "mean return", "navigation/success": "share that arrived"}

STUDIES: dict[str, Study] = {
    "marine": Study(
        "Navigation: three vessels, no obstacle",
        {agent: Run(f"marine-{agent}", "MarineNavigation", _CHANGES[agent]) for agent in MARINE_AGENTS},
        {**_ARRIVED, "navigation/collision": "share that collided"},
        _navigation(3, count=500, distance=30.0),
    ),
    "marine-empty": Study(
        "Navigation: one vessel, 40 m from its goal",
        {agent: Run(f"marine-{agent}", "MarineEmpty") for agent in MARINE_AGENTS},
        _ARRIVED,
        _navigation(1, count=500, exact=True, max_episode_steps=200),
    ),
    "durotaxis": Study(
        "A colony on a stiffness gradient",
        {"ppo": Run("durotaxis", "Durotaxis")},
        {"episode/success": "share that reached the goal", "episode/mean_return": "mean return"},
        _colony,
    ),
    "fuel-breaks": Study(
        "Fuel breaks on 20 x 20 cells",
        {
            "dqn": Run("fuel-breaks", "FuelBreaks"),
            "dqn-long": Run("fuel-breaks", "FuelBreaks", {"total_steps": 384_000}),
        },
        {"fire/burned": "burned fraction, exploration included"},
        _breaks,
    ),
    "lunar-lander": Study(
        "LunarLander-v3",
        {name: Run(name, "LunarLander-v3") for name in ("ppo", "dqn")},
        _RETURNS,
        episodes_without_exploration,
    ),
    "half-cheetah": Study(
        "HalfCheetah-v5",
        {name: Run(name, "HalfCheetah-v5") for name in ("ppo", "sac")},
        _RETURNS,
        episodes_without_exploration,
    ),
    "ranks": Study(
        "CartPole, 48 envs in all",
        {
            "one": Run("ppo", "CartPole", _POLES),
            "two": Run("ppo", "CartPole", _POLES, ranks=2),
            "three": Run("ppo", "CartPole", _POLES, ranks=3),
        },
        _RETURNS,
        cart_poles,
    ),
}
"""Studies by name."""
WITH_EXTRAS = ("lunar-lander", "half-cheetah")
"""Studies of envs that need more than the package: Gymnasium's extras box2d and mujoco."""
