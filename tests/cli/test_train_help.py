"""``train NAME --help`` is shown without torch, and says of each setting what the imported config says."""

import dataclasses
import inspect
import subprocess
import sys
import typing
from typing import ClassVar

import pytest

from torchrl_perf.cli import TRAINED, main
from torchrl_perf.cli.read_settings import Source
from torchrl_perf.cli.train_help import read_for_help
from torchrl_perf.registry import ALGORITHMS, MARINE, MARINE_AGENTS, SYSTEMS, entry_of

HEAVY = ("torch", "torchrl", "tensordict", "gymnasium", "numpy", "wandb", "matplotlib")


def read(place: str):
    """The object at ``module:name``, read from its source."""
    module, _, name = place.partition(":")
    return Source(module)[name]


@pytest.mark.parametrize("name", [*ALGORITHMS, *SYSTEMS])
class TestReadSettings:
    def test_fields_are_those_of_the_class(self, name):
        kind = entry_of(name).load("config")
        found = read(entry_of(name).config)
        assert [field.name for field in dataclasses.fields(found)] == [field.name for field in dataclasses.fields(kind)]
        types = [
            {name: hint for name, hint in typing.get_type_hints(one).items() if typing.get_origin(hint) is not ClassVar}
            for one in (found, kind)
        ]
        assert types[0] == types[1]
        defaults = {field.name: field.default for field in dataclasses.fields(found)}
        assert defaults == {field.name: field.default for field in dataclasses.fields(kind)}
        assert inspect.getdoc(found) == inspect.getdoc(kind)

    def test_every_field_is_described(self, name):
        for field in dataclasses.fields(read(entry_of(name).config)):
            (told,) = field.type.__metadata__
            assert len(told.help.split()) > 1, field.name

    def test_defaults_are_the_settings_of_the_first_task(self, name):
        kind = entry_of(name).load("config")
        first = next(iter(read(kind.presets_in).values()))
        assert dataclasses.asdict(first) == kind.task_settings("")


class TestHelp:
    @pytest.mark.parametrize("name", TRAINED)
    def test_loads_nothing_heavy(self, name):
        code = (
            "import sys\nfrom torchrl_perf.cli import main\ntry:\n"
            f"    main(['train', {name!r}, '--help'])\nexcept SystemExit as ended:\n"
            f"    sys.exit(ended.code or ' '.join(set({HEAVY!r}) & set(sys.modules)) or 0)"
        )
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        assert f"usage: torchrl-perf train {name} [-h]" in ended.stdout
        assert "--total-steps INT" in ended.stdout

    def test_words_are_those_of_the_parser_that_runs(self, capsys):
        texts = []
        for options in (["--help"], ["--env", "CartPole", "--help"]):
            with pytest.raises(SystemExit):
                main(["train", "ppo", *options])
            texts.append(" ".join(capsys.readouterr().out.replace("│", " ").split()))
        read_text, imported_text = texts
        assert read_text.partition(" --env STR")[2] == imported_text.partition(" --env STR")[2]
        assert len(read_text) > 5_000

    def test_an_agent_has_settings_of_its_own(self):
        assert read_for_help(MARINE, ["--agent", "sac", "-h"]) == "marine-sac"
        assert read_for_help(MARINE, ["--help"]) == f"marine-{next(iter(MARINE_AGENTS))}"

    @pytest.mark.parametrize("argv", [[], ["--env", "Pendulum", "--help"], ["--seed", "1"], ["--agent", "iqn", "-h"]])
    def test_whatever_depends_on_more_is_loaded(self, argv):
        assert read_for_help("ppo", argv) is None


def test_a_name_that_a_module_does_not_have():
    with pytest.raises(KeyError, match="PPOSettings"):
        Source("trainers.ppo")["PPOSettings"]


def test_ranks_are_started_before_what_they_import():
    code = (
        "import sys\nfrom torchrl_perf.cli import asked, main\n"
        "def launch_ranks(words, ranks):\n"
        f"    print(ranks, *words, *set({HEAVY!r}) & set(sys.modules))\n    return 3\n"
        "asked.launch_ranks = launch_ranks\n"
        "sys.exit(main(['train', 'ppo', '--backend', 'gym', '--env', 'HalfCheetah', '--ranks', '2']))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 3, ended.stderr
    assert ended.stdout == "2 -m torchrl_perf train ppo --ranks 2 --env HalfCheetah-v5\n"
