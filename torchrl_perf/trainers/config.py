"""Settings of a run that all algorithms share."""

import copy
import dataclasses
import importlib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from torchrl_perf.metrics.loggers import LOGGER_NAMES
from torchrl_perf.metrics.wandb_settings import WandbMode, WandbSettings
from torchrl_perf.moved import moved_from
from torchrl_perf.near_names import nearest_word, plain_word
from torchrl_perf.registry import TASKS
from torchrl_perf.trainers.config_checks import (
    Checks,
    ConfigError,
    UnknownSettingError,
    as_tuple,
    is_count,
    is_share,
    settings_from,
    unknown_setting,
)
from torchrl_perf.trainers.env_arguments import env_arguments
from torchrl_perf.trainers.known_envs import settings_for

WORK_BEFORE_COMPILING = {"cuda": 400_000, "cpu": 100_000}
"""Steps, of all envs at once, in which compiled kernels repay half a minute of compiling, by type of device.

They save some 75 us each in a CUDA graph, and some 300 us on a CPU, most of it Python's time.
"""

WORK_OF_UPDATE = 5
"""Steps that save as much as one update of small networks."""

ENV_SETTINGS = ("env_args", "env_groups", "env_processes")
"""What a run settles about envs that are named; a system's env has settings of its own in their place."""


@dataclass(frozen=True)
class RunConfig:
    """What every run has to settle, whatever its algorithm. Frames, steps, transitions: one action of one env.

    A setting that is not given is that of the task's preset, as on the command line: ``DQNConfig()`` is what
    ``torchrl-perf train dqn`` runs, and ``PPOConfig(env="Pendulum")`` what ``train ppo --env Pendulum`` does. A task
    without a preset has the first one's. The defaults that the fields show are those of no task, for which
    :meth:`without_task` is there, and for ``env="Name"`` of an env of your own. :func:`dataclasses.replace` with
    another ``env`` keeps every other setting.

    One that is not given also follows those that are, where the preset's excludes them: with a memory ``n_step`` is 1.
    One that is given is refused then.

    Attributes:
        algorithm: name of the algorithm, as the command line and the folders of the runs have it.
        env_class: name of the class behind the names of ``env``, where they are not names of classes themselves.
        presets_in: where the settings for each task are, as ``module:name`` below ``torchrl_perf``.
        work_of_step: kernels of one step of envs and policy, in those of CartPole's, about 60.
        blueprint_in: where its :class:`~torchrl_perf.trainers.blueprints.Blueprint` is, in the same way.
        evaluated_by: metric of an evaluation that says how good a policy is.
        fixed_by_checkpoint: fields that a resumed run cannot change, since a checkpoint holds state of their shapes.
        not_taken: fields of a base class that have no meaning here, and have to keep their defaults.

    Raises:
        ConfigError: a ValueError that lists every problem: the field, what was expected and what was received.
    """

    algorithm: ClassVar[str] = ""
    env_class: ClassVar[str] = ""
    presets_in: ClassVar[str] = ""
    work_of_step: ClassVar[int] = 1
    blueprint_in: ClassVar[str] = ""
    evaluated_by: ClassVar[str] = "eval/mean_return"
    fixed_by_checkpoint: ClassVar[tuple[str, ...]] = ("env", "num_envs", "num_steps", "seed", "env_args")
    not_taken: ClassVar[tuple[str, ...]] = ()

    env: str = "CartPole"
    """Env to learn in: a task of the package, an id of Gymnasium's (HalfCheetah-v5, ALE/Pong-v5), vmas:SCENARIO,
    module.path:Class or file.py:function; torchrl-perf envs lists them. Any name beside env=."""
    num_envs: int = 128
    """Number of envs that run at once (N)."""
    num_steps: int = 32
    """Steps of each env in one iteration (T)."""
    total_steps: int = 300_000
    """Env steps of the whole run, over all envs; rounded up to whole iterations."""
    schedule_steps: int | None = None
    """Env steps over which what is annealed over the run reaches its end; None is total_steps."""
    gamma: float = 0.99
    """Discount factor."""
    adam_beta1: float = 0.9
    """Decay of Adam's mean of the gradients (arXiv:1412.6980)."""
    adam_beta2: float = 0.999
    """Decay of its mean of their squares."""
    adam_eps: float = 1e-5
    """Added to the root of that mean, so that no step is divided by 0."""
    weight_decay: float = 0.0
    """Share of each parameter, times the step size, that a step takes away, as AdamW does (arXiv:1711.05101)."""
    seed: int = 0
    """Seed of networks, envs and sampling."""
    device: str = "auto"
    """Device of everything: "auto" (CUDA where there is one), "cpu", "cuda", "cuda:1"."""
    mode: Literal["auto", "eager", "compile", "graph"] = "auto"
    """How an iteration runs: "graph" captures it into a CUDA graph of compiled kernels. "auto" captures eager kernels
    on CUDA, within seconds, and is "eager" on a CPU; it compiles them once that repays (see compile_after)."""
    log_interval: int = 10
    """Iterations between two rows of metrics (one copy to the host each)."""
    logger: str = "csv"
    """Where metrics go: csv, wandb, tensorboard, none, or several with commas."""
    wandb_project: str = "torchrl_perf"
    """W&B project."""
    wandb_entity: str | None = None
    """User or team that a W&B run belongs to; None is that of the key."""
    wandb_group: str | None = None
    """Name of W&B runs that belong together, such as the seeds of one setting."""
    wandb_name: str | None = None
    """Name of the W&B run; None is that of the run's folder."""
    wandb_tags: str = ""
    """Words to find the W&B run by, separated by commas."""
    wandb_notes: str = ""
    """Description of the W&B run."""
    wandb_mode: WandbMode = "auto"
    """Whether W&B sends rows to its server; "auto" is WANDB_MODE where that is set, else "online" where there is a key
    and "offline" where there is none."""
    wandb_code: str | None = None
    """Folder whose Python files are stored with the W&B run, such as "."; None stores none."""
    run_dir: str = "runs"
    """Folder under which the run gets a folder of its own."""
    checkpoint_interval: int = 0
    """Iterations between two checkpoints; 0 writes one at the end only."""
    keep_checkpoints: int = 3
    """How many of the newest checkpoints are kept; the best one is kept beside them."""
    best_metric: str = "episode/mean_return"
    """Metric whose highest value marks the best checkpoint; a leading "-" asks for the lowest, "" keeps none. Where
    eval_interval is set, evaluations take the place of the default."""
    eval_interval: int = 0
    """Iterations between two evaluations of the policy: whole episodes without exploration, in envs of their own with
    other seeds; 0 makes none. The last iteration is evaluated too."""
    eval_episodes: int = 32
    """Envs of an evaluation, each for one episode."""
    on_nan: Literal["stop", "skip", "rollback"] = "stop"
    """After a loss, gradient, observation or reward that is not finite: stop the run, go on without that update, or go
    back to the last state that was good, with other random numbers."""
    precision: Literal["tf32", "bf16", "fp16", "ieee"] = "tf32"
    """Precision of matrix products when acting and updating; targets and losses stay in float32."""
    compile_mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    """How long the compiler looks for fast kernels, in the modes "compile" and "graph"."""
    compile_after: int | None = None
    """Iterations before kernels are compiled; they differ from eager ones by rounding. None is 0 in the modes "compile"
    and "graph"; in "auto" as many as repay the compiler, where as many are left, else never."""
    split_on_oom: bool = True
    """After an out-of-memory error in an update, go on in micro-batches that give the same gradient."""
    memory_rule: Literal["unused", "allocated", "never"] = "unused"
    """When cached memory is given back: much of it reserved but unused, or more than 80% of the device allocated."""
    gc_interval: int = 5_000
    """Iterations between two runs of Python's garbage collector that the run asks for; 0 leaves it to Python."""
    stop_return: float | None = None
    """Stop once the mean return of the last 100 finished episodes reaches this; None runs total_steps."""
    env_args: tuple[str, ...] = ()
    """Arguments of the env, each name=value with a value in JSON, or a JSON object of several."""
    env_groups: int = 1
    """Groups of envs that step on the CPU: one steps while the policy acts for another."""
    env_processes: bool = False
    """Step each Gymnasium env in a process of its own; pays with as many cores as envs, or steps of milliseconds."""

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        """An instance without its fields, after names that are no fields are refused with the nearest that are.

        Raises:
            UnknownSettingError: a ConfigError and a TypeError, with all problems of the other settings beside it.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        if unknown := {name: value for name, value in settings.items() if name not in known}:
            named = dict(zip(known, args, strict=False)) | {name: settings[name] for name in known if name in settings}
            problems = [unknown_setting(name, value, known) for name, value in unknown.items()]
            raise UnknownSettingError([*problems, *cls.problems_of(named)])
        config = super().__new__(cls)
        object.__setattr__(config, "_given", {*known[: len(args)], *settings})  # until __post_init__, which reads it
        return config

    def __post_init__(self) -> None:
        given = self.__dict__.pop("_given")
        for name, value in type(self).defaults(self.env).items():
            if name not in given:
                object.__setattr__(self, name, value)
            elif isinstance(chosen := getattr(self, name), list):
                object.__setattr__(self, name, as_tuple(type(self), name, chosen))
        for name, value in self.giving_way(given).items():
            object.__setattr__(self, name, value)
        checks = Checks(self)
        self._check(checks)
        if problems := checks.problems():
            raise ConfigError(problems)

    def giving_way(self, given: Collection[str]) -> dict[str, Any]:
        """What settings that were left out become because of those that were given, where the two exclude each other.

        Args:
            given: names of those that were given; they keep their values, which :meth:`_check` judges.
        """
        own = self._declared_anew()
        return {name: value for name, value in self._room().items() if name not in given and name not in own}

    def _room(self) -> dict[str, Any]:
        """Values that go with the others, by field; values of a wrong type may be among the others."""
        return {}

    def _check(self, checks: Checks) -> None:
        """Note what is wrong with the values of this class's fields."""
        checks.each(("num_envs", "num_steps", "total_steps", "log_interval"), is_count, "a positive integer")
        checks.each(("keep_checkpoints", "schedule_steps"), is_count, "a positive integer")
        checks.each(("eval_episodes",), is_count, "a positive integer")
        checks.each(
            ("checkpoint_interval", "gc_interval", "eval_interval"), lambda value: value >= 0, "0 or a positive integer"
        )
        checks.each(("gamma",), is_share, "a number in [0, 1]")
        checks.each(("adam_beta1", "adam_beta2"), lambda value: 0 <= value < 1, "a number in [0, 1)")
        checks.each(("adam_eps", "weight_decay"), lambda value: value >= 0, "a number of at least 0")
        if checks.sound("schedule_steps") and self.schedule_steps is not None and not self.anneals_over_run:
            checks.add(
                "schedule_steps",
                f"schedule_steps: expected None where nothing is annealed over the run, received {self.schedule_steps}."
                " Remedy: leave it out.",
            )
        if checks.sound("env") and (problem := misspelt_task(self.env)):
            checks.add("env", problem)
        checks.each(("seed",), lambda value: value >= 0, "an integer from 0 to 2**63 - 1")
        checks.each(("wandb_project",), lambda value: bool(value.strip()), "the name of a project")
        checks.each(("run_dir",), lambda value: bool(value.strip()), "the path of a folder")
        checks.each(("logger",), _names_loggers, f"one of {', '.join(LOGGER_NAMES)}, or several with commas")
        checks.each(("device",), _is_device, "'auto', 'cpu', 'cuda' or 'cuda:<index>'")
        checks.each(("compile_after",), lambda value: value >= 0, "0 or a positive integer")
        if checks.sound("compile_after", "mode") and self.compile_after is not None and self.mode == "eager":
            checks.add(
                "compile_after",
                f"compile_after: expected None with mode='eager', which compiles nothing, received {self.compile_after}"
                ". Remedy: leave it out, or mode='auto'.",
            )
        checks.each(("env_groups",), is_count, "a positive integer")
        self._check_env(checks)
        self._check_not_taken(checks)

    def _check_env(self, checks: Checks) -> None:
        """What can be said of a named env without making it."""
        if checks.sound("env_args"):
            try:
                env_arguments(self.env_args)
            except ValueError as error:
                checks.add("env_args", str(error))
        if checks.sound("env_groups", "num_envs") and self.num_envs % self.env_groups:
            checks.add(
                "env_groups",
                f"env_groups: expected a divisor of num_envs = {self.num_envs}, received {self.env_groups}. Remedy: "
                f"env_groups={largest_divisor(self.num_envs, self.env_groups)}.",
            )

    def _check_not_taken(self, checks: Checks) -> None:
        """Refuse what the class inherits and does not use."""
        usual = {field.name: field.default for field in dataclasses.fields(self)}
        for name in (*self.not_taken, *(ENV_SETTINGS if self.env_class else ())):
            if name in usual and checks.sound(name) and getattr(self, name) != usual[name]:
                checks.add(
                    name,
                    f"{name}: expected {usual[name]!r}, since {self.algorithm or type(self).__name__} has settings of "
                    f"its own in its place, received {getattr(self, name)!r}. Remedy: leave it out.",
                )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Settings from plain values, as :meth:`card` gives them or a file holds them; defaults for the others.

        Args:
            values: name to value; a whole float is taken for an integer, and text such as ``"1e-3"`` for a number.

        Raises:
            ConfigError: with all problems at once: unknown names with the nearest valid one, values of another type,
                values out of range, values that do not fit each other.
        """
        good, problems = settings_from(cls, values)
        if problems:
            raise ConfigError([*problems.values(), *cls.problems_of(good, bad=problems)])
        return cls(**good)

    @classmethod
    def for_task(cls, env: str = "", **changes: Any) -> Self:
        """The settings that the command line has for a task: ``torchrl-perf train ALGORITHM --env NAME``.

        The constructor with the same ``env`` gives the same; here the task may be left out.

        Args:
            env: name of the task; by default the algorithm's first.
            **changes: settings in place of the preset's.

        Raises:
            ConfigError: for settings that do not exist, cannot be run or do not fit each other.
        """
        return cls(**({"env": env} if env else {}), **changes)

    @classmethod
    def without_task(cls, **settings: Any) -> Self:
        """Settings of no task in particular: the fields' own defaults, which no preset takes the place of.

        Args:
            **settings: in place of those defaults.

        Raises:
            ConfigError: for settings that do not exist, cannot be run or do not fit each other.
        """
        return cls(**{**{field.name: field.default for field in dataclasses.fields(cls)}, **settings})

    @classmethod
    def task_settings(cls, env: str = "") -> dict[str, Any]:
        """Plain values of the settings that the command line has for an env; those of the first task for no name."""
        if not env or (cls.env_class and env not in cls.presets()):
            return cls._preset_of("").to_dict()
        return {**cls.defaults(env), "env": env}

    @classmethod
    def _preset_of(cls, env: str) -> "RunConfig":
        presets = cls.presets()
        return presets.get(env) or next(iter(presets.values()))

    @classmethod
    def presets(cls) -> Mapping[str, "RunConfig"]:
        """Settings for each task; none for a class without any, nor while its presets are made themselves."""
        module, _, name = cls.presets_in.partition(":")
        return getattr(importlib.import_module(f"torchrl_perf.{module}"), name, {}) if module else {}

    @classmethod
    def defaults(cls, env: Any = None) -> dict[str, Any]:
        """What settings that are not given become: the command line's of a task, else the fields' own defaults.

        A class of a user's below one of the package's keeps the defaults that it declares itself.

        Args:
            env: name of the task; by default, and for what is no text, the first. Any other env has the fields' own
                defaults, and what is known to work with it.
        """
        usual = {field.name: field.default for field in dataclasses.fields(cls)}
        presets = cls.presets()
        if not presets:
            return usual
        owner, own = cls._owner(), cls._declared_anew()
        if isinstance(env, str) and env not in presets and env not in TASKS:
            chosen = settings_for(env, owner.algorithm)
        else:
            chosen = cls._preset_of(env if isinstance(env, str) else "").to_dict()
        names = [field.name for field in dataclasses.fields(owner)]
        kept = {name: chosen[name] for name in names if name not in own and name in chosen}
        return {**usual, **kept, "env": usual["env"]}

    @classmethod
    def _owner(cls) -> "type[RunConfig]":
        """The class whose presets these settings have."""
        return next(parent for parent in cls.__mro__ if "presets_in" in vars(parent))

    @classmethod
    def _declared_anew(cls) -> set[str]:
        """Fields whose defaults a class of a user's declares itself."""
        usual = {field.name: field.default for field in dataclasses.fields(cls)}
        return {field.name for field in dataclasses.fields(cls._owner()) if usual[field.name] is not field.default}

    @classmethod
    def problems_of(cls, values: Mapping[str, Any], bad: Iterable[str] = ()) -> list[str]:
        """What keeps a config from being made of these values, and defaults for the others.

        Args:
            values: name to value, of known fields.
            bad: fields that are known to be wrong; they are not judged, nor what depends on them.

        Returns:
            One sentence or two for each problem, beginning with the field's name.
        """
        config = object.__new__(cls)
        for name, default in cls.defaults(values.get("env")).items():
            object.__setattr__(config, name, values.get(name, default))
        for name, value in config.giving_way({*values, *bad}).items():
            object.__setattr__(config, name, value)
        checks = Checks(config, bad)
        cls._check(config, checks)
        return checks.problems()

    def for_rows(self, num_envs: int) -> Self:
        """These settings with another number of envs, to make an env of; what depends on the batch is not checked.

        Args:
            num_envs: N.
        """
        changed = copy.copy(self)
        object.__setattr__(changed, "num_envs", num_envs)
        return changed

    @property
    def whole(self) -> Self:
        """The settings of the whole run, where these are one rank's part of them; see ``trainers/shards.py``."""
        return self.__dict__.get("_whole", self)

    @property
    def wandb(self) -> WandbSettings:
        """What a W&B run is called and where it belongs."""
        tags = tuple(tag.strip() for tag in self.wandb_tags.split(",") if tag.strip())
        return WandbSettings(
            entity=self.wandb_entity,
            group=self.wandb_group,
            name=self.wandb_name,
            tags=tags,
            notes=self.wandb_notes or None,
            mode=self.wandb_mode,
            code=self.wandb_code,
        )

    @property
    def fixed_on_resume(self) -> tuple[str, ...]:
        """Fields that a run with these settings cannot change when it goes on."""
        return self.fixed_by_checkpoint

    @property
    def best_by(self) -> str:
        """The metric that marks the best checkpoint: ``best_metric``, or where that is the default, evaluations."""
        default = next(field.default for field in dataclasses.fields(self) if field.name == "best_metric")
        return self.evaluated_by if self.eval_interval and self.best_metric == default else self.best_metric

    @property
    def batch_size(self) -> int:
        """Frames of one iteration, N * T."""
        return self.num_envs * self.num_steps

    @property
    def num_streams(self) -> int:
        """Rows that one step of all envs gives (N of the batches): one for each env, or for each agent of each env."""
        return self.num_envs

    @property
    def rows_in_words(self) -> str:
        """What :attr:`rows_per_iteration` is the product of."""
        return "num_envs * num_steps"

    @property
    def rows_per_iteration(self) -> int:
        """Rows of one collected batch."""
        return self.num_streams * self.num_steps

    @property
    def experiences_per_iteration(self) -> int:
        """Rows that the updates of one iteration learn from, repeats counted."""
        return self.batch_size

    @property
    def updates_each_iteration(self) -> int:
        """Updates of one iteration."""
        return 1

    @property
    def compiles_at(self) -> int | None:
        """:meth:`compiles_on` CUDA."""
        return self.compiles_on("cuda")

    def compiles_on(self, device: str) -> int | None:
        """The iteration, counted from 0, from which on kernels are compiled where a mode compiles; None for never.

        Settings alone decide, so that a resumed run changes where the one that was not stopped does.

        Args:
            device: ``"cuda"`` or ``"cpu"``.
        """
        if self.compile_after is not None:
            return self.compile_after
        if self.mode != "auto":
            return 0
        work = self.work_of_step * self.num_steps + WORK_OF_UPDATE * self.updates_each_iteration
        first = getattr(self, "fill_iterations", 0) + -(-WORK_BEFORE_COMPILING[device] // work)
        return first if 2 * first <= self.iterations else None

    @property
    def iterations(self) -> int:
        """Iterations of the whole run."""
        return -(-self.total_steps // self.batch_size)

    @property
    def anneals_over_run(self) -> bool:
        """Whether anything depends on the length of the run: learning rate, entropy weight, exponent of the weights."""
        entropy = getattr(self, "entropy_coeff_final", None) is not None and getattr(self, "entropy_frames", 1) is None
        by_priority = getattr(self, "sampler", None) == "prioritized"
        beta = by_priority and getattr(self, "beta_final", None) is not None
        return getattr(self, "anneal_learning_rate", False) or beta or entropy

    @property
    def schedule_iterations(self) -> int:
        """Iterations over which what is annealed over the run reaches its end."""
        return self.iterations if self.schedule_steps is None else -(-self.schedule_steps // self.batch_size)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)

    def card(self) -> dict[str, Any]:
        """:meth:`to_dict`, headed by the name of the algorithm: what the files and loggers of a run store."""
        return {"algorithm": self.algorithm, **self.to_dict()}


def misspelt_task(name: str) -> str:
    """What is wrong with a task's name in another case or spelling, or with none; an empty text for any other name.

    A name with a version, such as ``CartPole-v1``, is one of Gymnasium's.
    """
    if name in TASKS or re.search(r"-v\d+$", name):
        return ""
    near = nearest_word(name, TASKS)
    if name.strip() and (near is None or plain_word(near) != plain_word(name)):
        return ""
    return f"env: expected {_tasks_in_words()}, received {name!r}. Remedy: env={near or TASKS[0]!r}."


def _tasks_in_words() -> str:
    return f"one of {', '.join(TASKS)}"


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of a number that is not above a limit and not above 4096; 1 at least."""
    return next(part for part in range(min(number, limit, 4096), 0, -1) if number % part == 0)


def _names_loggers(names: str) -> bool:
    parts = [name.strip() for name in names.split(",") if name.strip()]
    allowed = set(LOGGER_NAMES) - ({"none"} if len(parts) > 1 else set())
    return bool(parts) and set(parts) <= allowed and len(set(parts)) == len(parts)


def _is_device(name: str) -> bool:
    return re.fullmatch(r"auto|(cpu|cuda)(:\d+)?", name) is not None


def check_minibatches(config: Any, checks: Checks) -> None:
    """Note a number of ``minibatches`` that does not divide the rows of a batch."""
    if checks.sound("num_envs", "num_steps", "minibatches") and config.batch_size % config.minibatches:
        checks.add(
            "minibatches",
            f"minibatches: expected a divisor of num_envs * num_steps = {config.batch_size}, received "
            f"{config.minibatches}. Remedy: minibatches={largest_divisor(config.batch_size, config.minibatches)}.",
        )


__getattr__ = moved_from(__name__)
