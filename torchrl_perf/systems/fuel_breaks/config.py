"""Settings of a run that learns where to place fuel breaks."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal

from torchrl_perf.systems.fuel_breaks.task import TASK, BreaksTask
from torchrl_perf.trainers.config_checks import Checks, is_share
from torchrl_perf.trainers.dqn import DQNConfig
from torchrl_perf.trainers.networks import NETWORK_SETTINGS
from torchrl_perf.trainers.off_policy.slice_memory import SLICE_MEMORY_SETTINGS

__all__ = ["FUEL_BREAKS_PRESETS", "FuelBreaksConfig"]

NETWORK = ("hidden_size", "blocks", "activation", "dueling")


@dataclass(frozen=True)
class FuelBreaksConfig(BreaksTask, DQNConfig):
    """Every choice of a run on :class:`~torchrl_perf.envs.fuel_breaks.FuelBreaks` with DQN (arXiv:1312.5602).

    A step places one break. Random actions may continue lines of breaks: lines divide a landscape, and random cells
    hardly ever form one.

    Raises:
        ConfigError: a ValueError that lists every problem: the field, what was expected and what was received.
    """

    algorithm: ClassVar[str] = "fuel-breaks"
    presets_in: ClassVar[str] = "systems.fuel_breaks.config:FUEL_BREAKS_PRESETS"
    blueprint_in: ClassVar[str] = "systems.fuel_breaks.blueprint:FUEL_BREAKS"
    env_class: ClassVar[str] = "FuelBreaks"
    work_of_step: ClassVar[int] = 4
    not_taken: ClassVar[tuple[str, ...]] = (*NETWORK_SETTINGS, *SLICE_MEMORY_SETTINGS)
    not_normalized: ClassVar[tuple[str, ...]] = ("normalize_observations",)
    fixed_by_checkpoint: ClassVar[tuple[str, ...]] = (*DQNConfig.fixed_by_checkpoint, "blocks", "reward", *TASK)

    env: Literal["FuelBreaks", "FuelBreaksSmall", "FuelBreaksOriginal"] = "FuelBreaks"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which settings to start from: those for 20 x 20 cells, for 10 x 10, or what a published trainer of one env has,
    its memory rules among them; the task is that of the settings."""
    num_envs: int = 32
    """Number of landscapes that breaks are placed in at once (N)."""
    num_steps: int = 20
    """Breaks that each env places in one iteration (T)."""
    total_steps: int = 100_000
    """Breaks placed in the whole run, over all envs; rounded up to whole iterations."""
    gamma: float = 0.98
    """Discount factor, of one break to the next."""
    reward: Literal["terminal", "shaped"] = "shaped"
    """Minus the burned fraction at the end, or what each break has saved."""
    common_random_numbers: bool = True
    """Whether the fires of an episode are the same at all its steps."""
    blocks: int = 3
    """Residual blocks of the network; hidden_size is the number of its channels."""
    demonstrations: int = 0
    """Episodes at the start that place breaks where DomiRank is highest, rounded up to whole iterations."""
    demonstration_noise: float = 0.1
    """Random share of the ranks of a demonstration, so that they differ: 0 for none."""
    line_exploration: float = 0.0
    """Share of the random actions that continue a line of breaks, straight if possible."""
    line_envs: float = 0.0
    """Share of the envs all of whose actions continue random lines, for the whole run."""
    best_metric: str = "-fire/burned"
    """Metric whose highest value marks the best checkpoint; a leading "-" asks for the lowest, "" keeps none."""

    def _check(self, checks: Checks) -> None:
        super()._check(checks)
        checks.each(("blocks", "demonstrations"), lambda value: value >= 0, "0 or a positive integer")
        checks.each(("line_exploration", "line_envs", "demonstration_noise"), is_share, "a number in [0, 1]")
        if checks.sound("demonstrations", "learning_starts", "size", "budget", *self.sizes):
            self._check_demonstrations(checks)

    def _check_demonstrations(self, checks: Checks) -> None:
        """Demonstrations are collected before learning starts."""
        if self.demonstration_frames > self.fill_iterations * self.batch_size:
            checks.add(
                "demonstrations",
                f"demonstrations: expected at most learning_starts = {self.learning_starts} frames, received "
                f"{self.demonstrations} episodes, {self.demonstration_frames} frames. Remedy: learning_starts="
                f"{self.demonstration_frames} or more.",
            )

    @property
    def demonstration_frames(self) -> int:
        """Frames of the demonstrations, whole iterations."""
        return -(-self.demonstrations * self.cells // self.batch_size) * self.batch_size


# A whole line across the landscape is what counts, and half of one is worth little: returns of ten steps, and lines to
# learn from. A quarter of the envs explores along lines to the end.
_USUAL = FuelBreaksConfig(
    num_envs=32,
    num_steps=20,
    total_steps=192_000,
    gamma=1.0,
    capacity=40_000,
    minibatch_size=64,
    updates_per_iteration=20,
    learning_starts=10_240,
    n_step=10,
    learning_rate=1e-3,
    anneal_learning_rate=True,
    target_interval=100,
    eps_end=0.05,
    eps_frames=25_000,
    fires=32,
    hidden_size=16,
    dueling=True,
    compact=True,
    demonstrations=64,
    line_exploration=1.0,
    line_envs=0.25,
)

FUEL_BREAKS_PRESETS: dict[str, FuelBreaksConfig] = {
    "FuelBreaks": _USUAL,
    "FuelBreaksSmall": dataclasses.replace(
        _USUAL,
        env="FuelBreaksSmall",
        size=10,
        budget=0.1,
        num_steps=10,
        total_steps=32_000,
        learning_starts=5_120,
        eps_frames=12_000,
    ),
    "FuelBreaksOriginal": dataclasses.replace(
        _USUAL,
        env="FuelBreaksOriginal",
        num_envs=8,
        num_steps=20,
        total_steps=32_000,
        gamma=0.95,
        capacity=2_000,
        minibatch_size=32,
        updates_per_iteration=40,
        learning_starts=160,
        n_step=1,
        learning_rate=1e-4,
        anneal_learning_rate=False,
        target_interval=250,
        eps_end=0.01,
        eps_frames=16_000,
        loss="l2",
        double=False,
        dueling=False,
        reward="terminal",
        demonstrations=8,
        line_exploration=0.0,
        line_envs=0.0,
        memory_rule="allocated",
        gc_interval=5_000,
        checkpoint_interval=50,
    ),
}
"""Settings by env name. The first one is for a CPU: about 2 s an iteration on one core."""
