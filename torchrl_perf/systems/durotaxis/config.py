"""Settings of a run that trains a colony to climb a stiffness gradient."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torchrl_perf.systems.durotaxis.stages import stage_problems
from torchrl_perf.trainers.config_checks import Checks, is_count, is_positive
from torchrl_perf.trainers.memory import STREAM_MEMORY_SETTINGS
from torchrl_perf.trainers.networks import NETWORK_SETTINGS, POLICY_SETTINGS
from torchrl_perf.trainers.normalization import NORMALIZATION_SETTINGS
from torchrl_perf.trainers.ppo import PPOConfig


@dataclass(frozen=True)
class DurotaxisConfig(PPOConfig):
    """Every choice of a PPO run on :class:`~torchrl_perf.envs.Durotaxis` (arXiv:1707.06347, hybrid: arXiv:1903.01344).

    The best checkpoint is the one of the highest score, ``1000 * success + 100 * progress + return``, means over the
    last finished episodes. Updates stop at a closed-form divergence, whatever the noise of the sampled one.

    Raises:
        ConfigError: a ValueError that lists every problem: the field, what was expected and what was received.
    """

    algorithm: ClassVar[str] = "durotaxis"
    presets_in: ClassVar[str] = "systems.durotaxis.config:DUROTAXIS_PRESETS"
    blueprint_in: ClassVar[str] = "systems.durotaxis.blueprint:COLONY"
    env_class: ClassVar[str] = "Durotaxis"
    work_of_step: ClassVar[int] = 12
    not_taken: ClassVar[tuple[str, ...]] = (*NETWORK_SETTINGS, *POLICY_SETTINGS, *STREAM_MEMORY_SETTINGS)
    not_normalized: ClassVar[tuple[str, ...]] = (*NORMALIZATION_SETTINGS, "reward_clip")  # it learns from components
    fixed_by_checkpoint: ClassVar[tuple[str, ...]] = (
        *PPOConfig.fixed_by_checkpoint,
        *("critical_nodes", "actions", "reward_mode", "value_heads"),
        *("encoder_width", "encoder_layers", "encoder_heads", "simplex_groups"),
    )

    env: Literal["Durotaxis"] = "Durotaxis"  # pyright: ignore[reportIncompatibleVariableOverride]
    """The colony's task; its settings are those for two CPU cores, and learn on a GPU as they are."""
    num_envs: int = 64
    """Number of colonies that run at once (N)."""
    num_steps: int = 16
    """Steps of each env in one iteration (T)."""
    total_steps: int = 250_000
    """Env steps of the whole run, over all envs; rounded up to whole iterations."""
    gamma: float = 0.99
    """Discount factor."""
    epochs: int = 3
    """Passes over each batch."""
    minibatches: int = 2
    """Parts that a batch is split into at each pass; has to divide num_envs * num_steps."""
    learning_rate: float = 1e-3
    """Adam's step size at the start."""
    entropy_coeff: float = 3e-3
    """Weight of the entropy bonus at the start."""
    target_kl: float | None = 0.06
    """Skip the rest of an iteration's updates once a minibatch's KL divergence exceeds this; None never."""
    kl_estimate: Literal["samples", "closed_form"] = "closed_form"
    """How that divergence is computed: the mean of the log-ratios, or from both policies' parameters, without noise
    and never negative."""
    best_metric: str = "episode/score"
    """Metric whose highest value marks the best checkpoint; a leading "-" asks for the lowest, "" keeps none."""
    loss: Literal["device"] = "device"  # pyright: ignore[reportIncompatibleVariableOverride]
    """The package's DeviceClipPPOLoss."""

    critical_nodes: int = 100
    """An episode ends when the colony has more nodes than this; the observation has room for twice as many."""
    width: float = 400.0
    """Extent of the substrate along the gradient; the goal is at 95% of it."""
    height: float = 400.0
    """Extent of the substrate across the gradient."""
    field: Literal["linear", "exponential"] = "linear"
    """How the stiffness grows with the position."""
    slope: float = 0.01
    """Growth of the stiffness."""
    intercept: float = 1.0
    """Stiffness at the left edge."""
    delete_max: float = 0.5
    """Largest share of the nodes that one action deletes."""
    reward_mode: Literal["centroid", "full", "delete"] = "centroid"
    """Which components the reward sums."""
    max_episode_steps: int = 1000
    """An episode is truncated after this many steps."""
    actions: Literal["global", "per_node"] = "global"
    """Five numbers for the whole colony, or also a choice for each node, to spawn or to be deleted."""
    stage_one_frames: int = 0
    """Env steps at the start in which only the action's share to delete counts and the rest is fixed; 0 for none."""
    stage_frames: str = "0"
    """Env steps from which each stage of the task applies, from 0 on: "0, 100000" has two."""
    stage_goals: str = "0.95"
    """Share of the width that is the goal of each stage, or one for all: "0.5, 0.95" begins with a nearer one. A policy
    is judged by the last."""
    stage_nodes: str = ""
    """Nodes that end an episode in each stage, at most critical_nodes, or one for all; "" is critical_nodes."""
    encoder_width: int = 32
    """Size of the embeddings of nodes and colony."""
    encoder_layers: int = 1
    """Layers of the encoder of the policy, and of the critic's."""
    encoder_heads: int = 2
    """Heads of their attention; a divisor of encoder_width."""
    simplex_groups: int = 8
    """Groups of their simplicial embedding, a divisor of encoder_width; 0 for a linear one."""
    simplex_temperature: float = 1.0
    """Temperature of its softmax."""
    value_heads: Literal["components", "total"] = "components"
    """One value for each component of the reward that counts, or one for the whole."""
    standardize_components: bool = False
    """Bring the advantages of the components to the same scale before they are added."""

    def _check(self, checks: Checks) -> None:
        super()._check(checks)
        counts = ("critical_nodes", "max_episode_steps", "encoder_width", "encoder_layers", "encoder_heads")
        checks.each(counts, is_count, "a positive integer")
        checks.each(("width", "height", "simplex_temperature"), is_positive, "a positive number")
        checks.each(("stage_one_frames", "simplex_groups"), lambda value: value >= 0, "0 or a positive integer")
        if checks.sound("stage_frames", "stage_goals", "stage_nodes", "critical_nodes", "stage_one_frames"):
            for problem in stage_problems(self):
                checks.add(problem.partition(":")[0], problem)
        checks.each(("delete_max",), lambda value: 0 < value <= 1, "a number in (0, 1]")
        for name in ("encoder_heads", "simplex_groups"):
            part = getattr(self, name)
            if checks.sound("encoder_width", name) and part and self.encoder_width % part:
                problem = f"expected a divisor of encoder_width = {self.encoder_width}, received {part}."
                checks.add(name, f"{name}: {problem} Remedy: powers of two.")
        total = checks.sound("value_heads", "standardize_components") and self.value_heads == "total"
        if total and self.standardize_components:
            problem = "expected False with value_heads='total', which has no components, received True."
            checks.add("standardize_components", f"standardize_components: {problem} Remedy: value_heads='components'.")
        if checks.sound("stage_one_frames", "actions") and self.stage_one_frames and self.actions == "per_node":
            checks.add(
                "stage_one_frames",
                f"stage_one_frames: expected 0 with actions='per_node', which have no share to delete, received "
                f"{self.stage_one_frames}. Remedy: actions='global'.",
            )


DUROTAXIS_PRESETS: dict[str, DurotaxisConfig] = {"Durotaxis": DurotaxisConfig()}
"""Settings by env name."""
