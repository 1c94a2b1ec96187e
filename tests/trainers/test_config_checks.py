"""Every problem of a set of settings at once, with the nearest valid name; round trips through JSON and YAML."""

import dataclasses
import json
import pickle

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_perf.cli import main
from torchrl_perf.cli.stored_settings import read_settings
from torchrl_perf.trainers import DQN_PRESETS, PRESETS, SAC_PRESETS, ConfigError, DQNConfig, PPOConfig, SACConfig
from torchrl_perf.trainers.config_checks import settings_from

KINDS = [PPOConfig, DQNConfig, SACConfig]


def problems_of(make) -> list[str]:
    """The problems that a construction is refused for, by name."""
    with pytest.raises(ConfigError) as caught:
        make()
    return [problem.partition(":")[0] for problem in caught.value.problems]


class TestConstruction:
    def test_all_problems_at_once_in_the_order_of_the_fields(self):
        with pytest.raises(ConfigError) as caught:
            PPOConfig(epochs=0, gamma=2.0, num_envs="128", activation="gelo", on_nan=8, log_interval=None)
        assert str(caught.value).splitlines() == [
            "6 problems:",
            "  num_envs: expected a positive integer, received '128' (str). Remedy: num_envs=128.",
            "  gamma: expected a number in [0, 1], received 2.0. Remedy: gamma=0.98, the default.",
            "  log_interval: expected a positive integer, received None (NoneType). Remedy: log_interval=1, the "
            "default.",
            "  on_nan: expected one of ('stop', 'skip', 'rollback'), received 8 (int). Remedy: on_nan='stop', the "
            "default.",
            "  epochs: expected a positive integer, received 0. Remedy: epochs=8, the default.",
            "  activation: expected one of ('tanh', 'relu', 'elu', 'silu', 'gelu', 'mish', 'leaky_relu'), received "
            "'gelo'. Remedy: change activation; the nearest is 'gelu'.",
        ]

    def test_one_problem_is_one_line(self):
        with pytest.raises(ConfigError) as caught:
            PPOConfig(activation="rely")
        assert str(caught.value) == (
            "activation: expected one of ('tanh', 'relu', 'elu', 'silu', 'gelu', 'mish', 'leaky_relu'), received "
            "'rely'. Remedy: change activation; the nearest is 'relu'."
        )
        assert isinstance(caught.value, ValueError)
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)

    @pytest.mark.parametrize(
        ("options", "kind"),
        [
            ({"num_envs": "128"}, "str"),
            ({"num_envs": True}, "bool"),
            ({"num_envs": 128.0}, "float"),
            ({"num_envs": np.int64(4)}, "int64"),
            ({"seed": 0.5}, "float"),
            ({"learning_rate": float("nan")}, "float"),
            ({"learning_rate": float("inf")}, "float"),
            ({"learning_rate": "1e-3"}, "str"),
            ({"learning_rate": True}, "bool"),
            ({"max_grad_norm": 10**400}, "int"),
            ({"entropy_coeff": float("-inf")}, "float"),
            ({"stop_return": float("nan")}, "float"),
            ({"clip_value": 1}, "int"),
            ({"logger": None}, "NoneType"),
            ({"run_dir": 3}, "int"),
            ({"env": ["CartPole"]}, "list"),
        ],
        ids=str,
    )
    def test_values_of_another_type_are_named_with_it(self, options, kind):
        (name,) = options
        with pytest.raises(ConfigError, match=rf"^{name}: expected .* received .* \({kind}\)\. Remedy"):
            PPOConfig(**options)

    def test_integers_are_numbers_and_none_passes_where_it_may(self):
        config = PPOConfig(gamma=1, stop_return=475, target_kl=None)
        assert (config.gamma, config.stop_return) == (1, 475)

    @pytest.mark.parametrize("name", ["tensorbord", "csv,csv", "none,csv", "", ","])
    def test_loggers_are_refused_before_a_run_has_a_folder(self, name):
        with pytest.raises(ConfigError, match="logger: expected one of csv, wandb, tensorboard, none, or several"):
            PPOConfig(logger=name)
        assert PPOConfig(logger="wandb, csv").logger == "wandb, csv"

    @pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "mps"])
    def test_devices_that_there_cannot_be(self, name):
        with pytest.raises(ConfigError, match="device: expected 'auto', 'cpu', 'cuda' or 'cuda:<index>', received"):
            PPOConfig(device=name)

    def test_what_depends_on_a_wrong_value_is_not_judged(self):
        assert problems_of(lambda: PPOConfig(num_envs=0, minibatches=3)) == ["num_envs"]
        assert problems_of(lambda: DQNConfig(num_envs="9", capacity=1)) == ["num_envs"]
        assert problems_of(lambda: DQNConfig(sampler="epoch", beta_final=1.0)) == ["sampler"]

    def test_problems_of_rows_come_together_with_those_of_ranges(self):
        options = {"capacity": 100, "learning_starts": 10**6, "tau": 2.0, "beta_final": 0.5}
        found = problems_of(lambda: DQNConfig(**options))
        assert found == ["capacity", "learning_starts", "beta_final", "tau"]
        found = problems_of(lambda: SACConfig(tau=-1.0, num_critics=0, max_grad_norm=0.0, initial_temperature=0))
        assert sorted(found) == ["initial_temperature", "max_grad_norm", "num_critics", "tau"]


class TestPlainValues:
    def test_unknown_names_wrong_types_and_ranges_at_once(self):
        values = {"num_env": 4, "learning-rate": 0.1, "gamma": 2.0, "epochs": "many", "minibatches": 3, "zzz": []}
        with pytest.raises(ConfigError) as caught:
            PPOConfig.from_dict(values)
        lines = caught.value.problems
        assert len(lines) == 6
        assert lines[0] == "num_env: unknown setting, received with the value 4 (int); the nearest is num_envs."
        assert lines[1].endswith("the nearest is learning_rate.")
        assert lines[2] == "epochs: expected an integer, received 'many' (str). Remedy: epochs=8, the default."
        assert lines[3].startswith("zzz: unknown setting, received with the value [] (list); those there are: env, num")
        assert lines[4].startswith("gamma: expected a number in [0, 1]")
        assert lines[5].startswith("minibatches: expected a divisor of num_envs * num_steps = 4096, received 3.")

    def test_lossless_conversions_only(self):
        config = PPOConfig.from_dict({"num_envs": 64.0, "learning_rate": "1e-3", "gamma": 1, "target_kl": None})
        assert (config.num_envs, config.learning_rate, config.gamma, config.target_kl) == (64, 1e-3, 1.0, None)
        assert isinstance(config.num_envs, int)
        for values in ({"num_envs": "64"}, {"num_envs": 2.5}, {"gamma": "nan"}, {"clip_value": "yes"}, {"seed": 1e400}):
            assert problems_of(lambda values=values: PPOConfig.from_dict(values)) == list(values)

    @pytest.mark.parametrize("config", [*PRESETS.values(), *DQN_PRESETS.values(), *SAC_PRESETS.values()])
    def test_round_trip_is_exact(self, config, tmp_path):
        for name, text in (
            ("a.json", json.dumps(config.to_dict())),
            ("a.yaml", yaml.safe_dump(config.to_dict())),
        ):
            path = tmp_path / name
            path.write_text(text, encoding="utf-8")
            again = type(config).from_dict(read_settings(path, type(config)))
            assert again == config
            assert again.to_dict() == config.to_dict()

    @given(data=st.data())
    @settings(max_examples=25, deadline=None)
    def test_any_valid_numbers_come_back_bitwise(self, data):
        numbers = st.floats(1e-12, 1.0, exclude_max=True)
        values = {"learning_rate": data.draw(numbers), "gamma": data.draw(numbers), "clip_epsilon": data.draw(numbers)}
        values |= {"seed": data.draw(st.integers(0, 2**63 - 1)), "target_kl": data.draw(st.none() | numbers)}
        config = PPOConfig(**values)
        assert PPOConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
        assert PPOConfig.from_dict(yaml.safe_load(yaml.safe_dump(config.to_dict()))) == config

    @given(values=st.dictionaries(st.text(max_size=8), st.none() | st.booleans() | st.floats() | st.text(max_size=5)))
    @settings(max_examples=40, deadline=None)
    def test_no_mapping_raises_anything_else(self, values):
        for name in {"num_envs", "gamma", "env", "target_kl", "clip_value"} & set(map(str, values)):
            values.pop(name)
        good, problems = settings_from(PPOConfig, values)
        assert set(good) | set(problems) == set(values)
        if problems:
            with pytest.raises(ConfigError):
                PPOConfig.from_dict(values)


class TestFiles:
    def test_all_problems_of_a_file_are_printed_behind_its_name(self, tmp_path, capsys):
        path = tmp_path / "run.json"
        path.write_text('{"num_env": 4, "gamma": 1.5, "sede": 1, "epochs": 2.5}', encoding="utf-8")
        assert main(["train", "ppo", "--config", str(path)]) == 1
        lines = capsys.readouterr().err.splitlines()
        assert lines[0] == f"torchrl-perf: {path}: 4 problems:"
        assert [line.split(":")[0].strip() for line in lines[1:]] == ["num_env", "sede", "epochs", "gamma"]

    def test_options_win_over_what_is_out_of_range_in_a_file(self, tmp_path):
        path = tmp_path / "run.json"
        path.write_text('{"gamma": 1.5}', encoding="utf-8")
        assert read_settings(path, PPOConfig) == {"gamma": 1.5}

    def test_text_in_another_encoding(self, tmp_path):
        path = tmp_path / "run.json"
        path.write_bytes(b'{"env": "\xff"}')
        with pytest.raises(ValueError, match="expected text in UTF-8"):
            read_settings(path, PPOConfig)

    def test_all_range_problems_of_the_options(self, tmp_path, capsys):
        options = ["--gamma", "3", "--epochs", "0", "--clip-epsilon", "-1", "--run-dir", str(tmp_path / "runs")]
        assert main(["train", "ppo", *options]) == 1
        assert capsys.readouterr().err.startswith("torchrl-perf: 3 problems:\n  gamma: expected")
        assert not (tmp_path / "runs").exists()

    @pytest.mark.parametrize(
        ("option", "near"), [("--num-env", "--num-envs"), ("--leaning-rate", "--learning-rate"), ("--sed", "--seed")]
    )
    def test_unknown_option_names_the_nearest(self, capsys, option, near):
        with pytest.raises(SystemExit) as end:
            main(["train", "ppo", option, "3"])
        assert end.value.code == 2
        output = capsys.readouterr()
        assert near in output.out + output.err


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_have_no_problems(kind):
    assert kind.problems_of({}) == []
    assert kind.from_dict({}) == kind()
    assert kind.from_dict(kind().to_dict()) == kind()
    assert all(field.default is not dataclasses.MISSING for field in dataclasses.fields(kind))
