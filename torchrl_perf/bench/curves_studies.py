"""The studies of ``torchrl-perf bench curves``: presets of whole systems, metrics to draw, and an evaluation."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from torchrl_perf.bench.curves_agents import PPO_SETTINGS, make_vessel_ppo
from torchrl_perf.bench.curves_breaks import unseen_breaks
from torchrl_perf.bench.curves_dynamics import RULES, STATED, changes_of, draw_fields, explored
from torchrl_perf.bench.curves_marine import CURRICULUM, RISK, TARGETS, draw_risk, navigated, on_risks
from torchrl_perf.bench.curves_market import kelly_weight, unseen_prices
from torchrl_perf.bench.curves_stages import FULL, SMALL, Size, draw_stages, stage_runs, taught
from torchrl_perf.bench.curves_walk import walked
from torchrl_perf.registry import MARINE_AGENTS, SYSTEMS, entry_of
from torchrl_perf.run_layout import FRESH_SEEDS
from torchrl_perf.systems.active_dynamics.config import FROM_ONE_PLACE

__all__ = ["PREPARED", "STUDIES", "WITH_EXTRAS", "Run", "Study", "episodes_without_exploration"]

Evaluation = Callable[[Any, str], dict[str, dict[str, float]]]
Picture = Callable[[str, Sequence[Mapping[str, Any]], Path], Path]
EVALUATION_FIRES = 2_048
EVALUATION_EPISODES = 50
GYMNASIUM = {"CartPole": "CartPole-v1", "Acrobot": "Acrobot-v1", "Pendulum": "Pendulum-v1"}
NOT_RECORDED = "not recorded, 0 to 2 perhaps"
LATER_SEEDS = (30, 31, 32)
"""Of the studies for which that is not known: a run of any of them is a new one."""


class Run(NamedTuple):
    """One line of a study's picture: a preset, and the settings that differ from it."""

    algorithm: str
    """As ``torchrl-perf train`` names it."""
    preset: str
    """Of a system; else the env, whose preset it is."""
    changes: Mapping[str, Any] = {}
    ranks: int = 1
    """Processes that learn it together; the settings are those of the whole run."""
    make: Callable[[Any], Any] | None = None
    """Makes the trainer of the settings, in place of the algorithm's own."""
    rows: int = 1
    """Rows of its batches that are one env step, by which the steps of a run are counted."""

    def config(self, seed: int, **changes: Any) -> Any:
        """The settings of one seed."""
        entry, given = entry_of(self.algorithm), {**self.changes, "seed": seed, **changes}
        if self.algorithm in SYSTEMS:
            return dataclasses.replace(entry.load("presets")[self.preset], **given)
        return entry.load("config")(env=self.preset, **given)

    def trainer(self, config: Any) -> Any:
        """A trainer of the settings."""
        if self.make is not None:
            return self.make(config)
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
        chosen_on: seeds on which settings were chosen, in words; what is shown of one of them is no evidence.
        seeds: those that are shown, on which nothing was chosen.
        figures: of ``trained``, those that the study is about.
        beside: others of the evaluation, which are ways to do the same.
        whole: trains and evaluates by the settings of a run, in place of a trainer and ``evaluate``: a row with
            ``steps``, ``curves`` and ``evaluation``.
        axis: what is counted along the curves.
        dashed: of a column, another curve to draw with it, one for all runs.
        picture: draws title and rows to a path, in place of a panel for each column.
        together: whether a file has all seeds of a run.
    """

    title: str
    runs: Mapping[str, Run]
    columns: Mapping[str, str]
    evaluate: Evaluation | None
    chosen_on: str
    seeds: tuple[int, ...] = (0, 1, 2)
    figures: tuple[str, ...] = ("mean_return",)
    beside: tuple[str, ...] = ()
    whole: Callable[[Any], dict[str, Any]] | None = None
    axis: str = "env steps"
    dashed: Mapping[str, str] = field(default_factory=dict)
    picture: Picture | None = None
    together: bool = False


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


def in_gymnasium(trainer: Any, name: str) -> dict[str, dict[str, float]]:
    """:func:`episodes_without_exploration` of a policy of one of the package's tasks, in Gymnasium's env of it."""
    config = SimpleNamespace(env=GYMNASIUM[trainer.config.env], seed=trainer.config.seed)
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
_FAST = {"n_step": 5, "tau": 0.02}
"""The targets of AC-IQN, with which DDPG learns less."""
_CHANGES = {"iqn": _VALUES, "ac-iqn": _NOISE, "dqn": _VALUES, "rainbow": _STAGE, "ddpg": _NOISE, "sac": _STAGE}
# of the whole curriculum exploration is a quarter
_EXPLORES: dict[str, dict[str, Any]] = {agent: {} for agent in MARINE_AGENTS}
_EXPLORES |= {agent: {"eps_frames": 250_000} for agent in ("iqn", "dqn")}
_EXPLORES |= {agent: {"noise_frames": 250_000} | _FAST for agent in ("ac-iqn", "ddpg")}
_SIX_MILLION = {"total_steps": 6_000_000}
# small enough for two processes on two cores, large enough that three ranks could divide it
_POLES: dict[str, Any] = {"num_envs": 48, "num_steps": 32, "epochs": 4, "minibatches": 4, "total_steps": 153_600}
_POLES |= {"learning_rate": 7e-4, "anneal_learning_rate": True}
# as many updates in two hundred iterations of a GPU
_MANY_POLES = {**_POLES, "num_envs": 2_048, "total_steps": 13_107_200}
# fewer steps than the preset's, in fewer and larger updates: five windows and five seeds take minutes on a core
_WALK: dict[str, Any] = {"num_envs": 64, "total_steps": 24_576, "updates_per_iteration": 4, "minibatch_size": 512}
_WALK |= {"learning_starts": 4_096, "actor_learning_rate": 1e-3, "critic_learning_rate": 1e-3}
_RETURNS = {"episode/mean_return": "mean return, exploration included"}
_ARRIVED = {"episode/mean_return": "mean return", "navigation/success": "share that arrived"}


def _task(task: str, *algorithms: str) -> Study:
    """Algorithms on a task of the package, each by its preset."""
    runs = {name: Run(name, task) for name in algorithms}
    return Study(task, runs, _RETURNS, in_gymnasium, NOT_RECORDED, LATER_SEEDS)


def _stages(size: Size, title: str, chosen_on: str) -> Study:
    """A colony without stages, and with each kind of them."""
    return Study(
        title,
        {name: Run("durotaxis", "Durotaxis", changes) for name, changes in stage_runs(size).items()},
        {"eval/mean_return": "return on the whole task", "episode/overgrowth": "share that over-grew, by its stage"},
        taught,
        chosen_on,
        (2, 3, 4),
        figures=("success",),
        beside=("half",),
        picture=functools.partial(draw_stages, size),
    )


def _ppo_of_vessels(*, shared: bool) -> Run:
    """PPO in as many worlds, and for as many of their steps, as the other agents."""
    vessels, worlds, steps = CURRICULUM["max_robots"], 256, CURRICULUM["total_steps"]
    changes = {**PPO_SETTINGS, "num_envs": worlds * vessels, "total_steps": steps * vessels}
    make = functools.partial(make_vessel_ppo, world=CURRICULUM, shared=shared)
    return Run("ppo", "MarineNavigation", changes, make=make, rows=vessels)


STUDIES: dict[str, Study] = {
    "marine": Study(
        "Navigation: three vessels, no obstacle",
        {agent: Run(f"marine-{agent}", "MarineNavigation", _CHANGES[agent]) for agent in MARINE_AGENTS}
        | {"ddpg-fast": Run("marine-ddpg", "MarineNavigation", _NOISE | _FAST)},
        {**_ARRIVED, "navigation/collision": "share that collided"},
        _navigation(3, count=500, distance=30.0),
        "AC-IQN on 100 and 101, DDPG on those shown; of the others not recorded, 0 to 2 perhaps",
        LATER_SEEDS,
        figures=("success", "collision"),
        beside=("scripted",),
    ),
    "marine-empty": Study(
        "Navigation: one vessel, 40 m from its goal",
        {agent: Run(f"marine-{agent}", "MarineEmpty") for agent in MARINE_AGENTS},
        _ARRIVED,
        _navigation(1, count=500, exact=True, max_episode_steps=200),
        NOT_RECORDED,
        LATER_SEEDS,
        figures=("success", "mean_return"),
        beside=("scripted",),
    ),
    "marine-curriculum": Study(
        "Navigation: three to six vessels, obstacles, vortices",
        {agent: Run(f"marine-{agent}", "MarineNavigation", _EXPLORES[agent] | CURRICULUM) for agent in MARINE_AGENTS}
        | {name: _ppo_of_vessels(shared=shared) for name, shared in (("ippo", False), ("mappo", True))},
        {**_ARRIVED, "navigation/collision": "share that collided"},
        navigated,
        "none: the settings are those of the curriculum without vortices",
        figures=("success", "collision", "mean_time", "mean_energy"),
        beside=("scripted",),
    ),
    "marine-curriculum-long": Study(
        "Navigation: three to six vessels, obstacles, vortices, for six million steps",
        {
            agent: Run(f"marine-{agent}", "MarineNavigation", {**_EXPLORES[agent], **CURRICULUM, **_SIX_MILLION})
            for agent in ("rainbow", "iqn")
        },
        {**_ARRIVED, "navigation/collision": "share that collided"},
        navigated,
        "none: the settings are those of marine-curriculum; its two best agents on the same seeds",
        figures=("5 vessels, obstacles: success", "success", "collision", "mean_time", "mean_energy"),
        beside=("scripted",),
    ),
    "marine-targets": Study(
        "AC-IQN on three vessels, with slow and fast targets",
        {name: Run("marine-ac-iqn", "MarineEmpty", changes) for name, changes in TARGETS.items()},
        {**_ARRIVED, "train/value": "mean value of the critic"},
        _navigation(3, count=200, distance=30.0),
        "100 and 101",
        figures=("success", "collision", "timeout"),
        beside=("scripted",),
    ),
    "marine-risk": Study(
        "Three vessels that act on the worst of what they expect",
        {"iqn": Run("marine-iqn", "MarineEmpty", RISK)},
        _ARRIVED,
        on_risks,
        "none",
        figures=("success", "collision", "mean_time"),
        beside=("worst 0.75", "worst 0.5", "worst 0.25", "worst 0.1", "scripted"),
        picture=draw_risk,
    ),
    "durotaxis": Study(
        "A colony on a stiffness gradient",
        {"ppo": Run("durotaxis", "Durotaxis")},
        {"episode/success": "share that reached the goal", "episode/mean_return": "mean return"},
        _colony,
        NOT_RECORDED,
        LATER_SEEDS,
        figures=("success",),
    ),
    "durotaxis-stages": _stages(SMALL, "A colony whose task comes in stages", "0, 1, 100 and 101"),
    "durotaxis-stages-full": _stages(
        FULL, "The colony of the preset, whose task comes in stages", "none: the stages are those of the small colony"
    ),
    "fuel-breaks": Study(
        "Fuel breaks on 20 x 20 cells",
        {
            "dqn": Run("fuel-breaks", "FuelBreaks"),
            "dqn-long": Run("fuel-breaks", "FuelBreaks", {"total_steps": 384_000}),
        },
        {"fire/burned": "burned fraction, exploration included"},
        _breaks,
        NOT_RECORDED,
        LATER_SEEDS,
        figures=("burned",),
        beside=("column", "domirank", "random", "none"),
    ),
    "fuel-breaks-one-shot": Study(
        "All fuel breaks at once",
        {"one-shot": Run("fuel-breaks-one-shot", "FuelBreaksVaried")},
        {"fire/burned": "burned, exploration included"},
        unseen_breaks,
        "other seeds and landscapes",
        figures=("burned", "gain"),
        beside=("column", "betweenness, anew", "search"),
    ),
    "options-market": Study(
        "Five regimes of a market",
        {"options": Run("options-market", "OptionMarket"), "plain": Run("options-market", "OptionMarketPlain")},
        {"episode/mean_return": "log growth of an episode"},
        unseen_prices,
        "seed 10 and other prices",
        figures=("of_best",),
        beside=("hold",),
    ),
    "kelly": Study(
        "A market whose best position is known",
        {"options": Run("options-market", "OptionMarketKelly")},
        {"market/weight": "mean weight, exploration included", "option/max_usage": "share of the option used most"},
        kelly_weight,
        "seeds 10 to 12",
        figures=("weight", "of_kelly"),
        beside=("kelly",),
    ),
    "sp500": Study(
        "S&P 500: ten years learnt from, the next four traded, five times",
        {"options": Run("options-market", "OptionMarketSP500", _WALK)},
        {"growth": "log growth, costs paid"},
        None,
        "seed 0 and three of the tests, perhaps",
        seeds=(30, 31, 32, 33, 34),
        figures=("growth", "costs", "won"),
        beside=("hold",),
        whole=walked,
        axis="days traded",
        dashed={"growth": "hold"},
    ),
    "active-dynamics": Study(
        "Samples until a field is known",
        {
            f"{field}-{rule}": Run("active-dynamics", f"{field}{FROM_ONE_PLACE}", changes_of(field, rule))
            for field in STATED
            for rule in RULES
        },
        {"error": "error over the region"},
        None,
        "seeds 100 and 101",
        seeds=tuple(range(8)),
        figures=("samples", "reached", "error"),
        whole=explored,
        axis="samples",
        picture=draw_fields,
        together=True,
    ),
    "cartpole": _task("CartPole", "ppo", "pqn", "dqn", "qr-dqn", "iqn", "rainbow"),
    "acrobot": _task("Acrobot", "ppo", "pqn", "dqn"),
    "pendulum": _task("Pendulum", "ppo", "sac", "td3", "ddpg", "ac-iqn"),
    "lunar-lander": Study(
        "LunarLander-v3",
        {name: Run(name, "LunarLander-v3") for name in ("ppo", "dqn")},
        _RETURNS,
        episodes_without_exploration,
        "seed 10",
    ),
    "half-cheetah": Study(
        "HalfCheetah-v5",
        {name: Run(name, "HalfCheetah-v5") for name in ("ppo", "sac")},
        _RETURNS,
        episodes_without_exploration,
        NOT_RECORDED,
        LATER_SEEDS,
    ),
    "ranks": Study(
        "CartPole, 48 envs in all",
        {
            "one": Run("ppo", "CartPole", _POLES),
            "two": Run("ppo", "CartPole", _POLES, ranks=2),
            "three": Run("ppo", "CartPole", _POLES, ranks=3),
        },
        _RETURNS,
        in_gymnasium,
        NOT_RECORDED,
        LATER_SEEDS,
    ),
    "ranks-gpu": Study(
        "CartPole, 2,048 envs in all on one GPU and on two",
        {
            "one": Run("ppo", "CartPole", _MANY_POLES),
            "two": Run("ppo", "CartPole", _MANY_POLES, ranks=2),
        },
        _RETURNS,
        in_gymnasium,
        NOT_RECORDED,
        LATER_SEEDS,
    ),
}
"""Studies by name."""
WITH_EXTRAS = ("lunar-lander", "half-cheetah", "sp500", "ranks-gpu")
"""Studies that need more than the package: Gymnasium's extras box2d and mujoco, the extra data, two GPUs."""
PREPARED = (
    *("marine-curriculum", "marine-curriculum-long", "marine-targets", "marine-risk", "durotaxis-stages-full"),
    *("cartpole", "acrobot", "pendulum"),
)
"""Long studies, not all of whose runs are committed, which are made by name alone."""
