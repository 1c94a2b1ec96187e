"""Every field of every config with hostile values, from Python, files and the command line: one sentence each.

Generated from the fields of the dataclasses. Nothing is trained: what passes the checks is not run.
"""

import dataclasses
import json
import math
import typing

import pytest
import torch

from torchrl_perf.cli import main
from torchrl_perf.cli import train as command
from torchrl_perf.cli.options import OPTIONS, joined, refuse_bad_options
from torchrl_perf.registry import Entry
from torchrl_perf.trainers import ConfigError, DQNConfig, PPOConfig, PPOTrainer, SACConfig
from torchrl_perf.trainers.config import TASKS
from torchrl_perf.trainers.run.memory_floor import check_fits, least_bytes

ALL = {**command.ALGORITHMS, **command.SYSTEMS}
KINDS = {name: algorithm.load("config") for name, algorithm in ALL.items()}
PRESETS = {name: algorithm.load("presets") for name, algorithm in ALL.items()}
every = pytest.mark.parametrize("name", KINDS)

HOSTILE = [
    float("nan"), float("inf"), -1, 0, -(2**63), 2**63, 10**400, 0.5, 1e300,
    "1e5", "", "x" * 10_000, None, True, [], object(),
]  # fmt: skip


def fields(kind):
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def origin(kind, field):
    """The class that says last what a field is."""
    return next(base for base in kind.__mro__ if field in vars(base).get("__annotations__", {}))


def own_fields(name):
    """The fields of a config that no config before it in the list has from the same class."""
    earlier = [KINDS[other] for other in list(KINDS)[: list(KINDS).index(name)]]
    tested = {(origin(kind, field), field) for kind in earlier for field in fields(kind)}
    return [field for field in fields(KINDS[name]) if (origin(KINDS[name], field), field) not in tested]


def tried(make):
    """The problems of a construction, or none; anything but a ConfigError is a fault."""
    try:
        make()
    except ConfigError as error:
        return error.problems
    return ()


def is_good(problem, name):
    """Whether a sentence names the field, what was expected and received, and a remedy, in few words."""
    return problem.startswith(f"{name}: ") and "received" in problem and "Remedy: " in problem and len(problem) < 900


@every
def test_hostile_values_from_python_and_from_files(name):
    kind, preset = KINDS[name], next(iter(PRESETS[name].values()))
    hints = fields(kind)
    for field in own_fields(name):
        for value in HOSTILE:
            for make in (
                lambda field=field, value=value: dataclasses.replace(preset, **{field: value}),
                lambda field=field, value=value: kind.from_dict({field: value}),
            ):
                problems = tried(make)
                named = [problem for problem in problems if problem.partition(":")[0] == field]
                assert all(is_good(problem, field) for problem in named), (field, value, named)
                if isinstance(value, float) and not math.isfinite(value):
                    assert named, (field, value)
                if value in (2**63, 10**400) and isinstance(value, int):
                    # a large integer is a float all the same, where one is asked for and it is not too large
                    assert named or float in (hints[field], *typing.get_args(hints[field])), (
                        field,
                        value,
                    )


@every
def test_hostile_values_of_the_command_line(name, capsys):
    kind, program = KINDS[name], f"torchrl-perf train {name}"
    hints = fields(kind)
    for field in own_fields(name):
        hint = hints[field]
        option = f"--{field.replace('_', '-')}"
        words = [[option], [f"{option}="], [option, "nan"], [option, "1e400"], [option, "x"], [f"--x{option[2:]}", "1"]]
        words += [[option, "99999999999999999999"], [option, "1", "stray"], [option, "-1"], [option, "0.5"]]
        for argv in words:
            try:
                refuse_bad_options(program, kind, argv)
            except SystemExit as end:
                error = capsys.readouterr().err
                assert end.code == 2
                assert error.startswith("torchrl-perf: ")
                assert error.endswith(f"Every option: {program} --help\n")
                assert "expected" in error or "unknown setting" in error
            else:
                # what passes is text, a number or a switch: the config judges its range
                assert hint is not int or argv[1:] in (["-1"],), (field, argv)
        assert joined(kind, [option, "-x"]) == ([option, "-x"] if hint is bool else [f"{option}=-x"])


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        ("--lr 3", 2, "--lr: unknown setting, received with the value '3' (str); the nearest is --learning-rate."),
        ("--n-envs=4 --lambda 1", 2, "the nearest is --num-envs"),
        ("--seed 1 stray", 2, "stray: expected an option, which begins with --"),
        ("--clip-value True", 2, "a switch takes no value"),
        ("--no-clip-value=1", 2, "--clip-value: expected no value, received '1'. Remedy: --clip-value or"),
        ("--gamma", 2, "--gamma: expected a value, received none"),
        ("--num-envs 1e3", 2, "--num-envs: expected an integer, received '1e3' (str). Remedy: --num-envs 1000."),
        ("--seed -1", 1, "seed: expected an integer from 0 to 2**63 - 1, received -1. Remedy: seed=0, the default."),
        ("--seed 9223372036854775808", 2, "--seed: expected an integer of 64 bits, at most 9223372036854775807"),
        ("--total-steps 99999999999999999999999", 2, "--total-steps: expected an integer of 64 bits"),
        ("--env cartpole", 1, "received 'cartpole'. Remedy: env='CartPole'."),
        ("--env CartPol", 1, "received 'CartPol'. Remedy: --env CartPole, the nearest"),
        ("--env CartPool-v1", 1, "Remedy: --env CartPole-v1, the nearest"),
        ("--env-args 3", 1, "env_args: expected name=value or a JSON object, received '3'. Remedy: such as length=12."),
        ("--env-groups 3", 1, "env_groups: expected a divisor of num_envs = 128, received 3. Remedy: env_groups=2."),
        ("--env-groups 2", 1, "env_groups: expected an env that steps on the CPU, such as Gymnasium's, received Cart"),
        ("--num-envs 99999999999", 1, "num_envs: expected settings that fit into memory"),
        ("--num-steps 99999999999", 1, "num_steps: expected settings that fit into memory"),
        ("--hidden-size 999999999", 1, "hidden_size: expected settings that fit into memory"),
        (
            "--minibatches 3",
            1,
            "minibatches: expected a divisor of num_envs * num_steps = 4096, received 3. Remedy: min",
        ),
        ("--run-dir= ", 2, "run_dir: expected the path of a folder"),
    ],
)
def test_sentences_of_ppo(tmp_path, monkeypatch, capsys, argv, code, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "train", lambda *_, **__: pytest.fail("was run"))
    try:
        found = main(["train", "ppo", *argv.split(" ")[: 1 if argv.startswith("--run-dir") else None]])
    except SystemExit as end:
        found = end.code
    error = capsys.readouterr().err
    assert words in error
    assert found == (1 if argv.startswith("--run-dir") else code)
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["cartpole", "CARTPOLE", "Cart-Pole", "cart_pole", " CartPole"])
@pytest.mark.parametrize("kind", [PPOConfig, DQNConfig, SACConfig])
def test_a_task_in_another_spelling_is_refused_with_its_name(kind, name):
    with pytest.raises(ConfigError, match=r"^env: expected one of .*CartPole.*received .*'CartPole'"):
        kind(env=name)


def test_any_other_name_may_be_that_of_ones_own_env():
    assert DQNConfig(env="Corridor").env == "Corridor"
    assert DQNConfig(env="CartPole-v1").env == "CartPole-v1"
    assert set(TASKS) > {"CartPole", "Ferry", "HybridTarget"}


@pytest.mark.parametrize(
    ("kind", "given", "near"),
    [
        (PPOConfig, "lr", "learning_rate"),
        (SACConfig, "lr", "actor_learning_rate or critic_learning_rate"),
        (SACConfig, "buffer_size", "capacity"),
        (PPOConfig, "gae_lambda", "lmbda"),
        (DQNConfig, "batch_size", "minibatch_size"),
        (PPOConfig, "num_env", "num_envs"),
    ],
)
def test_names_of_other_libraries(kind, given, near, tmp_path, capsys):
    problem = f"{given}: unknown setting, received with the value 3 (int); the nearest is {near}."
    # a TypeError too: that is what a call with an unknown name raises
    with pytest.raises(TypeError) as caught:
        kind(**{given: 3, "gamma": 2.0})
    assert isinstance(caught.value, ConfigError)
    assert caught.value.problems[0] == problem
    assert caught.value.problems[1].startswith("gamma: expected")
    with pytest.raises(ConfigError, match="the nearest is"):
        dataclasses.replace(kind(), **{given: 3})
    for suffix, text in (("json", json.dumps({given: 3})), ("yaml", f"{given}: 3\n")):
        path = tmp_path / f"settings.{suffix}"
        path.write_text(text)
        assert main(["train", kind.algorithm, "--config", str(path)]) == 1
        assert capsys.readouterr().err == f"torchrl-perf: {path}: {problem}\n"


class TestMemory:
    @every
    def test_presets_and_defaults_fit(self, name):
        for config in (*PRESETS[name].values(), KINDS[name]()):
            check_fits(config, torch.device("cpu")) if sum(least_bytes(config).values()) < 2**30 else None
            assert sum(least_bytes(config).values()) < 30 * 2**30

    @every
    def test_sizes_that_cannot_fit_are_refused_with_a_number_that_works(self, name):
        preset, taken = next(iter(PRESETS[name].values())), 0
        for field in fields(KINDS[name]):
            if type(getattr(preset, field)) is not int:
                continue
            try:
                config = dataclasses.replace(preset, **{field: 2**45})
                check_fits(config, torch.device("cpu"))
            except ConfigError as error:
                assert "Remedy: " in str(error)
            except ValueError as error:
                taken += 1
                text = str(error)
                assert text.startswith(f"{field}: expected settings that fit into memory, received {field}={2**45}")
                number = int(text.rpartition(f"Remedy: {field}=")[2].partition(" ")[0])
                check_fits(dataclasses.replace(preset, **{field: number}), torch.device("cpu"))
        assert taken >= 2

    @pytest.mark.parametrize("field", ["num_envs", "num_steps", "capacity", "hidden_size", "minibatch_size", "n_step"])
    def test_nothing_is_made_first(self, field, monkeypatch):
        from torchrl_perf.trainers import DQNTrainer
        from torchrl_perf.trainers.off_policy.task import Task

        values = {"capacity": 2**60, "learning_starts": 2**44, "total_steps": 2**50, field: 2**42}
        config = DQNConfig(**{**values, "device": "cpu"})
        monkeypatch.setattr(Task, "make_env", lambda *args: pytest.fail("an env was made"))
        with pytest.raises(ValueError, match="expected settings that fit into memory"):
            DQNTrainer(config)

    def test_what_the_arithmetic_does_not_see_is_a_sentence_too(self, capsys, monkeypatch):
        def fails(self):
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried"
            )

        monkeypatch.setattr(PPOTrainer, "make_env", fails)
        assert main(["train", "ppo", "--no-progress", "--device", "cpu"]) == 1
        assert "PPOTrainer: expected settings that fit into memory" in capsys.readouterr().err


class TestTasks:
    @every
    def test_python_and_the_command_line_have_the_same_settings(self, name):
        kind = KINDS[name]
        for env in (*PRESETS[name], ""):
            chosen = {"env": env} if env else {}
            arguments, _ = command.parse(name, ["--seed", "5", *(["--env", env] if env else [])])
            assert dataclasses.asdict(arguments.settings) == kind(seed=5, **chosen).to_dict(), env
            assert kind(**chosen) == kind.for_task(env) == kind.from_dict(chosen) == PRESETS[name].get(env, kind())
        assert kind() == next(iter(PRESETS[name].values()))

    @pytest.mark.parametrize("name", command.ALGORITHMS)
    def test_of_tasks_without_a_preset_too(self, name):
        for env in ("Acrobot", "MountainCarContinuous"):
            arguments, _ = command.parse(name, ["--env", env])
            assert dataclasses.asdict(arguments.settings) == KINDS[name](env=env).to_dict()

    def test_an_env_of_ones_own_has_the_defaults_of_no_task(self):
        own = SACConfig(env="Cheetah")
        assert own == SACConfig.without_task(env="Cheetah")
        assert (own.hidden_size, own.tau, SACConfig().hidden_size) == (256, 0.005, 64)
        assert dataclasses.replace(SACConfig(), env="Cheetah").hidden_size == 64

    def test_a_class_of_ones_own_keeps_the_defaults_that_it_declares(self):
        @dataclasses.dataclass(frozen=True)
        class Mine(DQNConfig):
            gamma: float = 0.5

        assert Mine() == Mine(**{**DQNConfig().to_dict(), "gamma": 0.5})
        assert Mine(gamma=0.25).gamma == 0.25

    @pytest.mark.parametrize("env", [None, 3, [], {}, float("nan")])
    def test_a_task_that_is_no_text_is_refused(self, env):
        with pytest.raises(ConfigError, match=r"^env: expected .*Remedy"):
            DQNConfig(env=env)

    def test_remedies_name_the_defaults_of_the_task(self):
        with pytest.raises(ConfigError, match=r"Remedy: gamma=0\.95, the default"):
            PPOConfig(env="Pendulum", gamma=2.0)

    def test_every_option_beside_the_settings_is_known_to_the_checks(self):
        assert {field.name for field in dataclasses.fields(command.Arguments)} == {"settings", *OPTIONS}

    def test_presets_are_settings_of_their_algorithm(self):
        for name, kind in KINDS.items():
            assert kind.algorithm == name
            assert kind.presets(), f"{name} has no preset: {kind.presets_in}"
            assert {type(preset) for preset in kind.presets().values()} == {kind}

    def test_what_a_contributor_forgets_is_named_with_the_file(self):
        with pytest.raises(LookupError, match=r"^torchrl_perf/registry\.py: .*'trainers.ppo:PPOTrain'.*Remedy"):
            Entry("trainers.ppo:PPOConfig", "trainers.ppo:PPOTrain").load("trainer")
        with pytest.raises(LookupError, match=r"^torchrl_perf/registry\.py: .*'trainers.none:PPOConfig'.*Remedy"):
            Entry("trainers.none:PPOConfig", "").load("config")
        with pytest.raises(LookupError, match=r"^RunConfig: .*presets_in=''.*in torchrl_perf/trainers/config\.py"):
            Entry("trainers.config:RunConfig", "").load("presets")

    @pytest.mark.parametrize("env", ["CartPole", "Acrobot", "MountainCar"])
    def test_atoms_of_each_task(self, env):
        from torchrl_perf.trainers import RainbowConfig, RainbowTrainer

        low, high = {"CartPole": (0.0, 50.0)}.get(env, (-50.0, 0.0))
        config = RainbowConfig.for_task(env, capacity=2_000, num_envs=4, device="cpu")
        assert (config.v_min, config.v_max) == (low, high)
        RainbowTrainer(config).close()
