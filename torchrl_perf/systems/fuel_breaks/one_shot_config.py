"""Settings of a run that learns to place all fuel breaks of a landscape at once."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal

from torchrl_perf.systems.fuel_breaks.task import TASK, BreaksTask
from torchrl_perf.trainers.config import RunConfig
from torchrl_perf.trainers.config_checks import Checks, is_count, is_positive

__all__ = ["ONE_SHOT_PRESETS", "FuelBreaksOneShotConfig"]


@dataclass(frozen=True)
class FuelBreaksOneShotConfig(BreaksTask, RunConfig):
    """Every choice of a run on landscapes whose fuel breaks are placed at once, by REINFORCE (Williams, 1992).

    A step is one placement of all breaks. Those of a landscape are judged under the same fires, and each is reinforced
    by how much less burned than in the mean of the others. Step size and the entropy's weight fall to 0 over the run.

    Raises:
        ConfigError: a ValueError that lists every problem: the field, what was expected and what was received.
    """

    algorithm: ClassVar[str] = "fuel-breaks-one-shot"
    presets_in: ClassVar[str] = "systems.fuel_breaks.one_shot_config:ONE_SHOT_PRESETS"
    blueprint_in: ClassVar[str] = "systems.fuel_breaks.one_shot_blueprint:ONE_SHOT"
    env_class: ClassVar[str] = "FuelBreaks"
    work_of_step: ClassVar[int] = 4
    not_taken: ClassVar[tuple[str, ...]] = ("gamma", "compile_mode", "compile_after", "stop_return")
    fixed_by_checkpoint: ClassVar[tuple[str, ...]] = (
        *RunConfig.fixed_by_checkpoint,
        *("hidden_size", "blocks"),
        *TASK,
    )

    env: Literal["FuelBreaksVaried", "FuelBreaksEven"] = "FuelBreaksVaried"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which settings to start from: 1,024 landscapes of 20 x 20 cells that differ in hills, vegetation, wind, rivers
    and roads; or even ground of 10 x 10 cells, for a CPU. The task is that of the settings."""
    num_envs: int = 64
    """Landscapes of an iteration (N)."""
    num_steps: int = 16
    """Placements that are drawn for each of them and judged by the same fires (T), at least 2."""
    total_steps: int = 2_457_600
    """Placements of the whole run."""
    mode: Literal["auto", "eager", "graph"] = "auto"  # pyright: ignore[reportIncompatibleVariableOverride]
    """How an iteration runs: "graph" captures it into a CUDA graph, "auto" does so on CUDA and is "eager" on a CPU."""
    landscape: Literal["uniform", "fractal", "varied"] = "varied"
    """Even ground where fire passes with probability base; hills with patches of vegetation and bare ground; or such
    that differ in relief and wind, some with a river or a road."""
    landscapes: int = 1_024
    """Number of fractal or varied landscapes to learn from."""
    landscape_seed: int = 1
    """Names them; another number gives landscapes that were not learnt from."""
    fires: int = 32
    """Fires that each placement is judged by, at most 64."""
    learning_rate: float = 2e-3
    """Adam's step size at the start."""
    adam_eps: float = 1e-8
    """Added to the root of Adam's mean of squares, so that no step is divided by 0."""
    anneal_learning_rate: bool = True
    """Let it fall to 0 over the run."""
    entropy_weight: float = 0.05
    """Weight of the entropy of the first cell at the start; it falls to 0 over the run."""
    max_grad_norm: float = 1.0
    """Largest norm of the gradient."""
    hidden_size: int = 32
    """Channels of the network."""
    blocks: int = 6
    """Its residual blocks."""
    best_metric: str = "-fire/burned"
    """Metric whose highest value marks the best checkpoint; a leading "-" asks for the lowest, "" keeps none."""

    def _check(self, checks: Checks) -> None:
        super()._check(checks)
        checks.each(("hidden_size",), is_count, "a positive integer")
        checks.each(("num_steps",), lambda value: value >= 2, "an integer of at least 2")
        checks.each(("blocks",), lambda value: value >= 0, "0 or a positive integer")
        checks.each(("learning_rate", "max_grad_norm"), is_positive, "a positive number")
        checks.each(("entropy_weight",), lambda value: value >= 0, "a number of at least 0")

    @property
    def anneals_over_run(self) -> bool:
        """The entropy's weight falls over the run, and the step size does by default."""
        return True


ONE_SHOT_PRESETS: dict[str, FuelBreaksOneShotConfig] = {
    "FuelBreaksVaried": FuelBreaksOneShotConfig(),
    "FuelBreaksEven": dataclasses.replace(
        FuelBreaksOneShotConfig(),
        env="FuelBreaksEven",
        num_envs=4,
        num_steps=32,
        total_steps=19_200,
        size=10,
        budget=0.1,
        landscape="uniform",
        landscapes=1,
        landscape_seed=0,
        base=0.5,
        hidden_size=16,
        blocks=3,
        log_interval=5,
    ),
}
"""Settings by env name. The first one is for a GPU."""
