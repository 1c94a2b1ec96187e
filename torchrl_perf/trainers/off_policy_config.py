"""Settings that off-policy algorithms share."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torchrl_perf.trainers.config import RunConfig, is_count, is_share

LARGEST_DRAW = 65_536
"""Rows that are drawn at once: beyond, memory is spent and nothing is gained."""


@dataclass(frozen=True)
class OffPolicyConfig(RunConfig):
    """A run that learns from a replay buffer: each iteration collects N * T frames and makes a fixed number of updates.

    Raises:
        ValueError: naming the field, what was expected and what was received.
    """

    fixed_by_checkpoint: ClassVar[tuple[str, ...]] = (
        *RunConfig.fixed_by_checkpoint,
        "capacity",
        "sampler",
        "n_step",
        "compact",
    )

    env: str = "CartPole"
    """Task to learn: CartPole, Pendulum, Acrobot, MountainCar, MountainCarContinuous; any name beside env=."""
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
    """Exponent of the priorities; 0 draws uniformly."""
    beta: float = 0.4
    """Exponent of the importance weights at the start; 1 corrects the draw fully."""
    beta_final: float | None = None
    """Exponent of the importance weights at the end, reached linearly; None keeps it constant."""
    compact: bool = False
    """Store each observation once and look the next one up: about half the memory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        counts = ("capacity", "minibatch_size", "updates_per_iteration", "n_step")
        self._require_all(counts, is_count, "a positive integer")
        starts = self.learning_starts
        self._require("learning_starts", is_count(starts) or starts == 0, "0 or a positive integer")
        self._require("alpha", self.alpha >= 0, "a number of at least 0")
        self._require_all(("beta",), is_share, "a number in [0, 1]")
        self._require("beta_final", self.beta_final is None or is_share(self.beta_final), "None or a number in [0, 1]")
        has_weights = self.sampler == "prioritized"
        self._require("beta_final", self.beta_final is None or has_weights, "None unless sampler is 'prioritized'")
        self._check_rows()

    def _check_rows(self) -> None:
        """The first update needs a whole minibatch of rows, and the buffer has to hold one."""
        if self.capacity < self.batch_size:
            raise ValueError(
                f"capacity: expected at least num_envs * num_steps = {self.batch_size} rows, the frames of one "
                f"iteration, received {self.capacity}. Remedy: a larger capacity, or fewer envs or steps."
            )
        if self.fill_iterations >= self.iterations:
            raise ValueError(
                f"learning_starts: expected fewer frames than the run's {self.iterations} iterations of "
                f"{self.batch_size} frames, or nothing is learnt, received {self.learning_starts}. Remedy: a larger "
                "total_steps, or fewer learning_starts."
            )
        rows = self.rows_at_first_update
        if rows < self.minibatch_size:
            raise ValueError(
                f"minibatch_size: expected at most {rows}, the rows that are filled at the first update, received "
                f"{self.minibatch_size}. Remedy: learning_starts={self.minibatch_size} or more, within the capacity."
            )

    @property
    def fill_iterations(self) -> int:
        """Iterations that only fill the buffer, with random actions, before the first update."""
        return -(-self.learning_starts // self.batch_size)

    @property
    def rows_at_first_update(self) -> int:
        """Rows that the buffer holds when learning starts."""
        return min((self.fill_iterations + 1) * self.batch_size, self.capacity // self.num_envs * self.num_envs)

    @property
    def draws_together(self) -> bool:
        """Whether the samples of an iteration are drawn at once, as uniform ones may: there must be rows for them."""
        rows = self.updates_per_iteration * self.minibatch_size
        return self.sampler == "random" and rows <= min(self.rows_at_first_update, LARGEST_DRAW)

    @property
    def utd_ratio(self) -> float:
        """Updates to data: rows learnt from for each frame collected, ``updates * minibatch_size / (N * T)``."""
        return self.updates_per_iteration * self.minibatch_size / self.batch_size
