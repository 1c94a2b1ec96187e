"""Settings of a run: what all algorithms share, and PPO's own."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

EnvName = Literal["CartPole", "Pendulum", "Acrobot", "MountainCar", "MountainCarContinuous"]


@dataclass(frozen=True)
class RunConfig:
    """What every run has to settle, whatever its algorithm. Frames, steps, transitions: one action of one env.

    Attributes:
        algorithm: name of the algorithm, as the command line and the folders of the runs have it.
        fixed_by_checkpoint: fields that a resumed run cannot change, since a checkpoint holds state of their shapes.

    Raises:
        ValueError: naming the field, what was expected and what was received.
    """

    algorithm: ClassVar[str] = ""
    fixed_by_checkpoint: ClassVar[tuple[str, ...]] = ("env", "num_envs", "num_steps", "seed")

    env: str = "CartPole"
    """Which of the package's classic-control tasks to learn."""
    num_envs: int = 128
    """Number of envs that run at once (N)."""
    num_steps: int = 32
    """Steps of each env in one iteration (T)."""
    total_steps: int = 300_000
    """Env steps of the whole run, over all envs; rounded up to whole iterations."""
    gamma: float = 0.99
    """Discount factor."""
    seed: int = 0
    """Seed of networks, envs and sampling."""
    device: str = "auto"
    """Device of everything: "auto" (CUDA where there is one), "cpu", "cuda", "cuda:1"."""
    mode: Literal["auto", "eager", "compile", "graph"] = "auto"
    """How an iteration runs: "graph" captures it into a CUDA graph; "auto" is "graph" on CUDA and "eager" on a CPU."""
    log_interval: int = 10
    """Iterations between two rows of metrics (one copy to the host each)."""
    logger: str = "csv"
    """Where metrics go: csv, wandb, tensorboard, none, or several with commas."""
    run_dir: str = "runs"
    """Folder under which the run gets a folder of its own."""
    checkpoint_interval: int = 0
    """Iterations between two checkpoints; 0 writes one at the end only."""
    stop_return: float | None = None
    """Stop once the mean return of the last 100 finished episodes reaches this; None runs total_steps."""

    def __post_init__(self) -> None:
        self._check_choices()
        self._require_all(("num_envs", "num_steps", "total_steps", "log_interval"), is_count, "a positive integer")
        self._require("checkpoint_interval", self.checkpoint_interval >= 0, "0 or a positive integer")
        self._require_all(("gamma",), is_share, "a number in [0, 1]")

    def _require(self, name: str, is_met: bool, expected: str) -> None:
        if not is_met:
            raise ValueError(f"{name}: expected {expected}, received {getattr(self, name)!r}. Remedy: change {name}.")

    def _require_all(self, names: Iterable[str], check: Callable[[Any], bool], expected: str) -> None:
        for name in names:
            self._require(name, check(getattr(self, name)), expected)

    def _check_choices(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            if get_origin(hint) is Literal and getattr(self, name) not in get_args(hint):
                raise ValueError(f"{name}: expected one of {get_args(hint)}, received {getattr(self, name)!r}.")

    @property
    def batch_size(self) -> int:
        """Frames of one iteration, N * T."""
        return self.num_envs * self.num_steps

    @property
    def iterations(self) -> int:
        """Iterations of the whole run."""
        return -(-self.total_steps // self.batch_size)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)


def is_count(value: Any) -> bool:
    """Whether a setting is an integer of at least 1."""
    return isinstance(value, int) and value >= 1


def is_share(value: Any) -> bool:
    """Whether a setting lies in [0, 1]."""
    return 0.0 <= value <= 1.0


def is_positive(value: Any) -> bool:
    """Whether a setting is above 0."""
    return value > 0


@dataclass(frozen=True)
class PPOConfig(RunConfig):
    """Every choice of a PPO run (arXiv:1707.06347). Frames, steps, transitions: all one action of one env.

    Raises:
        ValueError: naming the field, what was expected and what was received.
    """

    algorithm: ClassVar[str] = "ppo"
    fixed_by_checkpoint: ClassVar[tuple[str, ...]] = (*RunConfig.fixed_by_checkpoint, "hidden_size", "activation")

    env: EnvName = "CartPole"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Which of the package's classic-control tasks to learn."""
    gamma: float = 0.98
    """Discount factor."""
    epochs: int = 8
    """Passes over each batch."""
    minibatches: int = 4
    """Parts that a batch is split into at each pass; has to divide num_envs * num_steps."""
    learning_rate: float = 1.5e-3
    """Adam's step size at the start."""
    anneal_learning_rate: bool = True
    """Lower the learning rate linearly to 0 over the run."""
    lmbda: float = 0.95
    """Lambda of generalised advantage estimation."""
    clip_epsilon: float = 0.2
    """Clipping range of the probability ratio."""
    clip_value: bool = False
    """Clip the change of the value estimate as well, by clip_epsilon."""
    normalize_advantage: bool = True
    """Normalise the advantages of each minibatch."""
    entropy_coeff: float = 0.01
    """Weight of the entropy bonus at the start."""
    entropy_coeff_final: float | None = None
    """Weight of the entropy bonus at the end, reached linearly; None keeps it constant."""
    critic_coeff: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 0.5
    """Largest norm of the gradient."""
    target_kl: float | None = None
    """Skip the rest of an iteration's updates once a minibatch's KL estimate exceeds this; None never."""
    hidden_size: int = 64
    """Width of the two hidden layers of actor and critic; 32, 64 and 128 run as fused kernels on CUDA."""
    activation: Literal["tanh", "relu"] = "tanh"
    """Activation of the hidden layers."""
    precision: Literal["tf32", "bf16", "ieee"] = "tf32"
    """Precision of the matrix products in fused kernels (CUDA only)."""
    loss: Literal["device", "torchrl"] = "device"
    """The package's DeviceClipPPOLoss, or TorchRL's own ClipPPOLoss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_all(("epochs", "minibatches", "hidden_size"), is_count, "a positive integer")
        if self.batch_size % self.minibatches:
            raise ValueError(
                f"minibatches: expected a divisor of num_envs * num_steps = {self.batch_size}, received "
                f"{self.minibatches}. Remedy: a power of two, with num_envs and num_steps powers of two."
            )
        self._require_all(("lmbda",), is_share, "a number in [0, 1]")
        self._require_all(("learning_rate", "max_grad_norm", "critic_coeff"), is_positive, "a positive number")
        self._require("clip_epsilon", 0 < self.clip_epsilon < 1, "a number in (0, 1)")
        self._require("target_kl", self.target_kl is None or self.target_kl >= 0, "None or a number of at least 0")


PRESETS: dict[str, PPOConfig] = {
    "CartPole": PPOConfig(),
    # Values reach -100 here: a small critic weight and a wide limit keep the gradient from being the critic's alone.
    "Pendulum": PPOConfig(
        env="Pendulum",
        num_steps=64,
        total_steps=600_000,
        minibatches=8,
        learning_rate=2e-3,
        gamma=0.95,
        clip_epsilon=0.1,
        entropy_coeff=0.0,
        critic_coeff=0.1,
        max_grad_norm=10.0,
        activation="relu",
    ),
    "Acrobot": PPOConfig(env="Acrobot", total_steps=400_000, gamma=0.99),
    # PPO's noise, drawn anew at each step, does not climb the hill: the mean return stays at -200, the least there is.
    "MountainCar": PPOConfig(env="MountainCar", total_steps=1_000_000, gamma=0.99),
    # The goal is first reached by chance: a large entropy weight keeps the noise up, and falls to let it end. 92 to 95.
    "MountainCarContinuous": PPOConfig(
        env="MountainCarContinuous",
        num_envs=256,
        num_steps=64,
        total_steps=2_000_000,
        minibatches=8,
        learning_rate=3e-3,
        gamma=0.9995,
        lmbda=0.99,
        clip_epsilon=0.1,
        entropy_coeff=0.15,
        entropy_coeff_final=0.0,
        critic_coeff=0.1,
        max_grad_norm=10.0,
        activation="relu",
    ),
}
"""Settings for each task, by env name. They solve all but MountainCar, within a minute on two CPU cores."""
