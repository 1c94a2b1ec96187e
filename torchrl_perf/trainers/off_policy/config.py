"""Settings that off-policy algorithms share."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torchrl_perf.trainers.config import RunConfig
from torchrl_perf.trainers.config_checks import Checks, is_count, is_share
from torchrl_perf.trainers.normalization import NORMALIZATION_SETTINGS, NormalizationSettings

LARGEST_DRAW = 65_536
"""Rows that are drawn at once: beyond, memory is spent and nothing is gained."""


@dataclass(frozen=True)
class OffPolicyConfig(NormalizationSettings, RunConfig):
    """A run that learns from a replay buffer: each iteration collects N * T frames and makes a fixed number of updates.

    Attributes:
        sizes: fields that say how many rows there are; they have to be sound before these are judged.

    Raises:
        ConfigError: a ValueError that lists every problem: the field, what was expected and what was received.
    """

    fixed_by_checkpoint: ClassVar[tuple[str, ...]] = (
        *RunConfig.fixed_by_checkpoint,
        "capacity",
        "sampler",
        "n_step",
        "compact",
        *NORMALIZATION_SETTINGS,
    )

    sizes: ClassVar[tuple[str, ...]] = (
        *("num_envs", "num_steps", "total_steps"),
        *("capacity", "minibatch_size", "learning_starts"),
    )

    capacity: int = 100_000
    """Rows of the replay buffer; rounded down to a multiple of num_envs."""
    minibatch_size: int = 256
    """Rows that one update learns from (B)."""
    updates_per_iteration: int = 1
    """Updates after each collected batch of num_envs * num_steps frames."""
    learning_starts: int = 10_000
    """Frames collected with random actions before the first update, rounded up to whole iterations."""
    n_step: int = 1
    """Rewards that are summed before the target network's value."""
    sampler: Literal["random", "prioritized"] = "random"
    """How rows are drawn: uniformly, or in proportion to priority ** alpha (arXiv:1511.05952)."""
    alpha: float = 0.6
    """Exponent of the priorities where sampler is "prioritized"; 0 draws uniformly."""
    beta: float = 0.4
    """Exponent of the importance weights of prioritized draws at the start; 1 corrects the draw fully."""
    beta_final: float | None = None
    """Exponent of the importance weights at the end, reached linearly; None keeps it constant."""
    compact: bool = False
    """Store each observation once and look the next one up: about half the memory."""

    def _check(self, checks: Checks) -> None:
        super()._check(checks)
        counts = ("capacity", "minibatch_size", "updates_per_iteration", "n_step")
        checks.each(counts, is_count, "a positive integer")
        checks.each(("learning_starts",), lambda value: value >= 0, "0 or a positive integer")
        checks.each(("alpha",), lambda value: value >= 0, "a number of at least 0")
        checks.each(("beta", "beta_final"), is_share, "a number in [0, 1]")
        checks.idle(("alpha", "beta", "beta_final"), "sampler", lambda sampler: sampler != "prioritized")
        if (
            checks.sound("reward_clip", "n_step", "normalize_rewards")
            and self.reward_clip is not None
            and self.normalize_rewards
            and self.n_step > 1
        ):
            checks.add(
                "reward_clip",
                f"reward_clip: expected None with normalize_rewards and n_step={self.n_step}, where sums of rewards "
                f"are normalised, received {self.reward_clip}. Remedy: n_step=1, or one of the two.",
            )
        if checks.sound(*self.sizes):
            self._check_rows(checks)

    def _check_rows(self, checks: Checks) -> None:
        """The first update needs a whole minibatch of rows, and the buffer has to hold one."""
        if self.capacity < self.rows_per_iteration:
            checks.add(
                "capacity",
                f"capacity: expected at least {self.rows_in_words} = {self.rows_per_iteration} rows, the frames of one "
                f"iteration, received {self.capacity}. Remedy: capacity={self.rows_per_iteration} or more, or "
                f"{self.rows_in_words} of {self.capacity} or less.",
            )
        if self.fill_iterations >= self.iterations:
            checks.add(
                "learning_starts",
                f"learning_starts: expected fewer frames than the run's {self.iterations} iterations of "
                f"{self.batch_size} frames, or nothing is learnt, received {self.learning_starts}. Remedy: a larger "
                "total_steps, or fewer learning_starts.",
            )
        rows = self.rows_at_first_update
        if self.capacity >= self.rows_per_iteration and rows < self.minibatch_size:
            checks.add(
                "minibatch_size",
                f"minibatch_size: expected at most {rows}, the rows that are filled at the first update, received "
                f"{self.minibatch_size}. Remedy: learning_starts={self.minibatch_size} or more, within the capacity.",
            )

    @property
    def fill_iterations(self) -> int:
        """Iterations that only fill the buffer, with random actions, before the first update."""
        return -(-self.learning_starts // self.batch_size)

    @property
    def rows_at_first_update(self) -> int:
        """Rows that the buffer holds when learning starts."""
        whole = self.capacity // self.num_streams * self.num_streams
        return min((self.fill_iterations + 1) * self.rows_per_iteration, whole)

    @property
    def experiences_per_iteration(self) -> int:
        """Rows that the updates of one iteration learn from, repeats counted."""
        return self.updates_per_iteration * self.minibatch_size

    @property
    def updates_each_iteration(self) -> int:
        """Updates of one iteration that learns."""
        return self.updates_per_iteration

    @property
    def draws_together(self) -> bool:
        """Whether the samples of an iteration are drawn at once, as uniform ones may: there must be rows for them."""
        rows = self.experiences_per_iteration
        return self.sampler == "random" and rows <= min(self.rows_at_first_update, LARGEST_DRAW)

    @property
    def utd_ratio(self) -> float:
        """Updates to data: rows learnt from for each one collected, ``updates * minibatch_size / (N * T)``."""
        return self.experiences_per_iteration / self.rows_per_iteration
