"""Settings of runs that train vessels to navigate: those that all agents share, and each agent's own."""

import itertools
from dataclasses import dataclass
from typing import ClassVar, Literal

from torchrl_perf.trainers.ac_iqn import ACIQNConfig
from torchrl_perf.trainers.config_checks import Checks, is_count
from torchrl_perf.trainers.ddpg import DDPGConfig
from torchrl_perf.trainers.dqn import DQNConfig
from torchrl_perf.trainers.iqn import IQNConfig
from torchrl_perf.trainers.networks import NETWORK_SETTINGS
from torchrl_perf.trainers.off_policy.config import OffPolicyConfig
from torchrl_perf.trainers.off_policy.slice_memory import SLICE_MEMORY_SETTINGS
from torchrl_perf.trainers.rainbow import RainbowConfig
from torchrl_perf.trainers.sac import SACConfig

Agent = Literal["iqn", "ac-iqn", "dqn", "rainbow", "ddpg", "sac"]
MarineEnv = Literal["MarineNavigation", "MarineEmpty"]

NETWORK = ("agent", "max_robots", "max_obstacles", "max_cores", "self_size", "object_size", "pool")
STAGES = ("stage_frames", "stage_robots", "stage_obstacles", "stage_cores", "stage_distance")
PLACES = {"stage_robots": "max_robots", "stage_obstacles": "max_obstacles", "stage_cores": "max_cores"}


@dataclass(frozen=True)
class MarineSettings:
    """The world and the encoder of a navigation run; the other half of each ``Marine...Config``.

    Frames count one step of all vessels of an env, whatever their number; a batch has a row for each place of a vessel,
    ``num_envs * max_robots`` of them in each step. Settings of the stages are numbers separated by commas, one for each
    stage; a single one holds for all.
    """

    env_class: ClassVar[str] = "MarineNavigation"
    work_of_step: ClassVar[int] = 20
    not_taken: ClassVar[tuple[str, ...]] = (*NETWORK_SETTINGS, *SLICE_MEMORY_SETTINGS)
    not_normalized: ClassVar[tuple[str, ...]] = ("normalize_observations",)
    sizes: ClassVar[tuple[str, ...]] = (*OffPolicyConfig.sizes, "max_robots")

    agent: Agent = "iqn"
    """The algorithm: iqn, dqn and rainbow choose among 25 changes of thrust, the others any."""
    env: MarineEnv = "MarineNavigation"
    """Which settings to start from: the whole curriculum, or one vessel in an empty world, 40 m from its goal."""
    max_robots: int = 5
    """Places for vessels in each env; a stage may use fewer."""
    max_obstacles: int = 4
    """Places for obstacles in each env."""
    max_cores: int = 0
    """Places for vortices in each env."""
    stage_frames: str = "0, 1e6, 2e6, 3e6, 4e6, 5e6"
    """Env steps at which the stages of the curriculum begin; the first is 0."""
    stage_robots: str = "3, 4, 5, 5, 5, 5"
    """Vessels of each stage."""
    stage_obstacles: str = "0, 0, 0, 2, 3, 4"
    """Obstacles of each stage."""
    stage_cores: str = "0"
    """Vortices of each stage."""
    stage_distance: str = "30, 35, 40, 40, 40, 40"
    """Least distance from start to goal in each stage, in metres."""
    colregs: bool = True
    """Whether vessels are penalised where they break the rules of the road at sea."""
    observation_noise: bool = True
    """Whether positions, velocities and sizes of other objects are observed with noise."""
    max_episode_steps: int = 1_000
    """Steps after which an episode is truncated."""
    self_size: int = 56
    """Width of the encoder's part for a vessel itself."""
    object_size: int = 200
    """Width of the encoder's part for the objects around it."""
    pool: Literal["mean", "max", "attention"] = "mean"
    """How the encoder makes one vector of those objects."""

    def _check(self, checks: Checks) -> None:
        """Note what is wrong with the values of these fields, and then with those of the agent's."""
        counts = ("max_robots", "max_episode_steps", "self_size", "object_size")
        checks.each(counts, is_count, "a positive integer")
        checks.each(("max_obstacles", "max_cores"), lambda value: value >= 0, "0 or a positive integer")
        own = type(self).agent
        checks.each(("agent",), lambda value: value == own, f"{own!r}, that of {type(self).__name__}")
        for name in STAGES:
            if checks.sound(name):
                self._check_stage(name, checks)
        if checks.sound(*STAGES):
            try:
                self.stages()
            except ValueError as error:
                checks.add("stage_frames", f"stage_frames: {error}")
        super()._check(checks)  # pyright: ignore[reportAttributeAccessIssue]

    def _check_stage(self, name: str, checks: Checks) -> None:
        """The numbers of one setting of the stages, and the places that there are."""
        numbers = _numbers_of(name, getattr(self, name))
        if isinstance(numbers, str):
            checks.add(name, numbers)
        elif name == "stage_robots" and min(numbers) < 1:
            checks.add(name, f"{name}: expected at least 1 vessel in each stage, received 0. Remedy: {name}='1'.")
        elif name in PLACES and checks.sound(PLACES[name]) and max(numbers) > getattr(self, PLACES[name]):
            limit = PLACES[name]
            checks.add(
                name,
                f"{name}: expected at most {limit} = {getattr(self, limit)}, received {max(numbers):g}. Remedy: a "
                f"larger {limit}, or fewer.",
            )

    def stages(self) -> dict[str, tuple[float, ...]]:
        """The curriculum's ``frames``, ``robots``, ``obstacles``, ``cores`` and ``distance``, one for each stage.

        Raises:
            ValueError: for text that is not numbers with commas, another number of them than of ``stage_frames``, and
                frames that do not rise from 0.
        """
        found: dict[str, tuple[float, ...]] = {}
        for name in STAGES:
            numbers = _numbers_of(name, getattr(self, name))
            if isinstance(numbers, str):
                raise ValueError(numbers)
            found[name.removeprefix("stage_")] = numbers
        frames = found["frames"]
        if frames[0] != 0 or any(later <= sooner for sooner, later in itertools.pairwise(frames)):
            raise ValueError(
                f"expected frames that rise from 0, received {', '.join(f'{frame:g}' for frame in frames)}. Remedy: a "
                "curriculum that does not go backwards."
            )
        for name, numbers in found.items():
            if len(numbers) not in (1, len(frames)):
                raise ValueError(
                    f"expected one stage_{name} for each of {len(frames)} stages, or one for all, received "
                    f"{len(numbers)}. Remedy: one number for all stages, or {len(frames)} with commas."
                )
            found[name] = numbers * len(frames) if len(numbers) == 1 else numbers
        return found

    @property
    def fixed_on_resume(self) -> tuple[str, ...]:
        """The agent's, and what the shapes of the networks depend on."""
        return (*super().fixed_on_resume, *NETWORK)  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def num_streams(self) -> int:
        """Rows that one step of all envs gives: one for each place of a vessel."""
        return self.num_envs * self.max_robots  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def rows_in_words(self) -> str:
        """What ``rows_per_iteration`` is the product of."""
        return "num_envs * max_robots * num_steps"


def _numbers_of(name: str, text: str) -> tuple[float, ...] | str:
    """The numbers of a text with commas, or what is wrong with it."""
    whole = name != "stage_distance"
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or any(not 0 <= number < 1e15 or (whole and number != int(number)) for number in numbers):
        words = "whole numbers" if whole else "numbers"
        return (
            f"{name}: expected {words} of at least 0 with commas, received {text[:120]!r}. Remedy: such as "
            f"{name}={'0, 1e6' if name == 'stage_frames' else '1'!r}."
        )
    return numbers


@dataclass(frozen=True)
class MarineDQNConfig(MarineSettings, DQNConfig):
    """Every choice of a navigation run with DQN (arXiv:1312.5602).

    Raises:
        ConfigError: a ValueError that lists every problem: the field, what was expected and what was received.
    """

    algorithm: ClassVar[str] = "marine-dqn"
    presets_in: ClassVar[str] = "systems.marine.presets:MARINE_DQN_PRESETS"
    blueprint_in: ClassVar[str] = "systems.marine.blueprint:VALUES"
    agent: Agent = "dqn"


@dataclass(frozen=True)
class MarineIQNConfig(MarineSettings, IQNConfig):
    """Every choice of a navigation run with implicit quantile networks (arXiv:1806.06923).

    Raises:
        ConfigError: a ValueError that lists every problem: the field, what was expected and what was received.
    """

    algorithm: ClassVar[str] = "marine-iqn"
    presets_in: ClassVar[str] = "systems.marine.presets:MARINE_IQN_PRESETS"
    blueprint_in: ClassVar[str] = "systems.marine.blueprint:VALUES"
    agent: Agent = "iqn"


@dataclass(frozen=True)
class MarineRainbowConfig(MarineSettings, RainbowConfig):
    """Every choice of a navigation run with Rainbow (arXiv:1710.02298).

    Raises:
        ConfigError: a ValueError that lists every problem: the field, what was expected and what was received.
    """

    algorithm: ClassVar[str] = "marine-rainbow"
    presets_in: ClassVar[str] = "systems.marine.presets:MARINE_RAINBOW_PRESETS"
    blueprint_in: ClassVar[str] = "systems.marine.blueprint:VALUES"
    agent: Agent = "rainbow"


@dataclass(frozen=True)
class MarineDDPGConfig(MarineSettings, DDPGConfig):
    """Every choice of a navigation run with DDPG (arXiv:1509.02971).

    Raises:
        ConfigError: a ValueError that lists every problem: the field, what was expected and what was received.
    """

    algorithm: ClassVar[str] = "marine-ddpg"
    presets_in: ClassVar[str] = "systems.marine.presets:MARINE_DDPG_PRESETS"
    blueprint_in: ClassVar[str] = "systems.marine.blueprint:DDPG"
    agent: Agent = "ddpg"


@dataclass(frozen=True)
class MarineACIQNConfig(MarineSettings, ACIQNConfig):
    """Every choice of a navigation run with a deterministic policy on implicit quantiles (arXiv:1806.06923).

    Raises:
        ConfigError: a ValueError that lists every problem: the field, what was expected and what was received.
    """

    algorithm: ClassVar[str] = "marine-ac-iqn"
    presets_in: ClassVar[str] = "systems.marine.presets:MARINE_ACIQN_PRESETS"
    blueprint_in: ClassVar[str] = "systems.marine.blueprint:AC_IQN"
    agent: Agent = "ac-iqn"


@dataclass(frozen=True)
class MarineSACConfig(MarineSettings, SACConfig):
    """Every choice of a navigation run with soft actor-critic (arXiv:1812.05905).

    Raises:
        ConfigError: a ValueError that lists every problem: the field, what was expected and what was received.
    """

    algorithm: ClassVar[str] = "marine-sac"
    presets_in: ClassVar[str] = "systems.marine.presets:MARINE_SAC_PRESETS"
    blueprint_in: ClassVar[str] = "systems.marine.blueprint:SAC"
    agent: Agent = "sac"


MarineConfig = (
    MarineDQNConfig | MarineIQNConfig | MarineRainbowConfig | MarineDDPGConfig | MarineACIQNConfig | MarineSACConfig
)
"""Settings of any agent."""
