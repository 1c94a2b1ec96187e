"""The command line: help, settings from files and options, exit codes, resume."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

import torchrl_perf
from torchrl_perf.cli import main
from torchrl_perf.trainers import PRESETS, PPOConfig

ROOT = Path(__file__).resolve().parents[1]
TINY = ["--num-envs", "4", "--num-steps", "8", "--total-steps", "96", "--log-interval", "1", "--no-progress"]
TINY += ["--device", "cpu"]


def run_dir_of(tmp_path: Path) -> Path:
    """The one run below a folder."""
    (found,) = tmp_path.glob("runs/*")
    return found


def settings_of(run_dir: Path) -> PPOConfig:
    """The settings that a run has stored."""
    return PPOConfig.from_dict(json.loads((run_dir / "config.json").read_text(encoding="utf-8")))


def train(tmp_path: Path, *options: str) -> int:
    """Exit code of a small run below ``tmp_path``."""
    return main(["train", "ppo", *TINY, "--run-dir", str(tmp_path / "runs"), *options])


class TestCommands:
    def test_help_lists_the_commands(self, capsys):
        assert main(["--help"]) == 0
        text = capsys.readouterr().out
        assert "train ppo" in text
        assert "ppo, gae, collector, replay, offpolicy, host" in text

    @pytest.mark.parametrize("command", ["evaluate", "play", "export", "compare", "plot", "zoo"])
    def test_help_of_a_command_for_a_run_does_not_wait_for_torch(self, command):
        code = (
            "import sys\nfrom torchrl_perf.cli import main\ntry:\n"
            f"    main([{command!r}, '--help'])\nexcept SystemExit as ended:\n"
            "    sys.exit(ended.code or int('torch' in sys.modules))"
        )
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        assert f"usage: torchrl-perf {command}" in ended.stdout

    def test_version(self, capsys):
        assert main(["--version"]) == 0
        assert capsys.readouterr().out == f"torchrl_perf {torchrl_perf.__version__}\n"

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (
                ["tain"],
                "command: expected one of train, bench, evaluate, play, export, compare, plot, sweep, zoo, envs, syncs",
            ),
            (["train", "a3c"], "torchrl-perf train: expected one of ppo, dqn, sac,"),
            (["train"], "torchrl-perf train: expected one of ppo, dqn, sac,"),
            (
                ["bench", "dqn"],
                "torchrl-perf bench: expected one of ppo, gae, collector, replay, offpolicy, host, training, ablation,",
            ),
        ],
    )
    def test_unknown_command_names_those_there_are(self, capsys, argv, message):
        assert main(argv) == 2
        assert message in capsys.readouterr().err

    def test_nothing_is_a_usage_error(self, capsys):
        assert main([]) == 2
        assert "usage: torchrl-perf" in capsys.readouterr().out

    def test_bench_passes_its_arguments_on(self, monkeypatch):
        received = []
        bench = types.ModuleType("torchrl_perf.bench.gae")
        bench.main = lambda argv: received.append(argv) or 7
        monkeypatch.setitem(sys.modules, "torchrl_perf.bench", types.ModuleType("torchrl_perf.bench"))
        monkeypatch.setitem(sys.modules, "torchrl_perf.bench.gae", bench)
        assert main(["bench", "gae", "--envs", "4"]) == 7
        assert received == [["--envs", "4"]]

    def test_module_runs_as_the_command_without_torch_or_tyro(self):
        code = (
            "import sys, runpy; sys.argv = ['torchrl-perf', '--help']\n"
            "try: runpy.run_module('torchrl_perf', run_name='__main__')\n"
            "except SystemExit as end: print(end.code, [m for m in ('torch', 'tyro', 'torchrl') if m in sys.modules])"
        )
        result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        assert result.stdout.splitlines()[-1] == "0 []"

    def test_entry_point(self):
        text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        assert 'torchrl-perf = "torchrl_perf.cli:main"' in text


class TestSettings:
    def test_help_explains_every_setting(self, capsys):
        with pytest.raises(SystemExit) as end:
            main(["train", "ppo", "--help"])
        assert end.value.code == 0
        text = capsys.readouterr().out
        options = set(re.findall(r"--[a-z][a-z0-9-]+", text))
        assert options >= {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(PPOConfig)}
        assert {"--config", "--resume", "--progress"} <= options
        words = " ".join(re.sub(r"[│|]", " ", text).split())
        for sentence in ("Number of envs that run at once (N).", "Discount factor.", "Passes over each batch."):
            assert sentence in words

    def test_run_stores_its_settings_and_prints_its_result_last(self, tmp_path, capsys):
        assert train(tmp_path, "--seed", "3", "--target-kl", "0.5", "--no-clip-value") == 0
        run_dir = run_dir_of(tmp_path)
        stored = settings_of(run_dir)
        assert (stored.num_envs, stored.num_steps, stored.total_steps, stored.seed) == (4, 8, 96, 3)
        assert (stored.target_kl, stored.clip_value) == (0.5, False)
        last = capsys.readouterr().out.splitlines()[-1]
        assert last.startswith("96 steps in ")
        assert last.endswith(f"saved in {run_dir}")
        names = {path.name for path in run_dir.iterdir()}
        assert names >= {"checkpoints", "progress.csv", "config.json", "machine.json", "status.json"}

    def test_run_that_finishes_no_episode(self, tmp_path, capsys):
        assert train(tmp_path, "--env", "Acrobot", "--total-steps", "32") == 0
        assert "mean return of the last 100 episodes nan" in capsys.readouterr().out.splitlines()[-1]

    def test_env_picks_its_preset_and_options_win(self, tmp_path):
        assert train(tmp_path, "--env", "Pendulum", "--gamma", "0.5", "--logger", "none") == 0
        stored = settings_of(run_dir_of(tmp_path))
        preset = PRESETS["Pendulum"]
        assert (stored.env, stored.gamma) == ("Pendulum", 0.5)
        assert (stored.learning_rate, stored.entropy_coeff, stored.epochs) == (
            preset.learning_rate,
            preset.entropy_coeff,
            preset.epochs,
        )

    @pytest.mark.parametrize("env", PRESETS)
    def test_presets_are_of_their_env(self, env):
        assert PRESETS[env].env == env
        assert PRESETS[env].stop_return is None

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("run.json", '{"env": "Acrobot", "learning_rate": 1e-5, "seed": 5, "target_kl": null}'),
            ("run.yaml", "env: Acrobot\nlearning_rate: 1e-5\nseed: 5\ntarget_kl: null\n"),
            ("run.yml", "env: Acrobot\nlearning_rate: 0.00001\nseed: 5.0\n"),
        ],
    )
    def test_file_over_preset_and_options_over_file(self, tmp_path, name, text):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        assert train(tmp_path, "--config", str(path), "--seed", "6", "--logger", "none") == 0
        stored = settings_of(run_dir_of(tmp_path))
        assert (stored.env, stored.learning_rate, stored.seed) == ("Acrobot", 1e-5, 6)
        assert stored.gamma == PRESETS["Acrobot"].gamma

    def test_config_of_a_run_starts_the_same_run(self, tmp_path):
        assert train(tmp_path) == 0
        first = run_dir_of(tmp_path)
        assert main(["train", "ppo", "--config", str(first / "config.json"), "--no-progress"]) == 0
        second = first.with_name(f"{first.name}-2")
        assert settings_of(second) == settings_of(first)

    @pytest.mark.parametrize(
        ("name", "text", "message"),
        [
            ("a.json", '{"num_env": 4}', "num_env: unknown setting, received with the value 4 (int); the nearest is"),
            ("a.json", '{"seed": 1, "seed": 2}', "expected each setting once, received seed more often"),
            ("a.yaml", "seed: 1\ngamma: 1\nseed: 2", "expected each setting once, received seed more often"),
            ("a.json", "{", "expected JSON"),
            ("a.json", "[1]", "expected a mapping of names to values, received list"),
            ("a.json", "[" * 100_000, "a.json: expected a mapping of names to values, received one that is nested"),
            ("a.yaml", "[" * 2_000, "a.yaml: expected a mapping of names to values, received one that is nested"),
            ("a.yaml", "a: [", "expected YAML"),
            ("a.toml", "", "expected a .json, .yaml or .yml file"),
            ("a.json", '{"num_envs": "four"}', "num_envs: expected an integer, received 'four' (str)"),
            ("a.json", '{"num_envs": 4.5}', "num_envs: expected an integer, received 4.5 (float)"),
            ("a.json", '{"clip_value": 1}', "clip_value: expected True or False, received 1 (int)"),
            ("a.json", '{"gamma": true}', "gamma: expected a finite number, received True (bool)"),
            ("a.json", '{"target_kl": "low"}', "target_kl: expected None or a finite number, received 'low' (str)"),
            (
                "a.json",
                '{"activation": "swish"}',
                "activation: expected one of ('tanh', 'relu', 'elu', 'silu', 'gelu', 'mish', 'leaky_relu'), received "
                "'swish'",
            ),
            ("a.json", '{"gamma": 2.0}', "gamma: expected a number in [0, 1], received 2.0."),
        ],
    )
    def test_bad_file_is_one_line_and_exit_code_1(self, tmp_path, capsys, name, text, message):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        assert main(["train", "ppo", "--config", str(path)]) == 1
        error = capsys.readouterr().err
        assert message in error
        assert "Traceback" not in error

    def test_missing_file(self, tmp_path, capsys):
        assert main(["train", "ppo", "--config", str(tmp_path / "none.json")]) == 1
        assert "expected a file, received" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--minibatches", "3"], "minibatches: expected a divisor of num_envs * num_steps = 32, received 3."),
            (["--num-envs", "0"], "num_envs: expected a positive integer, received 0."),
            (["--mode", "graph"], "mode='graph': expected a CUDA device, received cpu."),
            (["--logger", "csv,tensorbord"], "logger: expected one of csv, wandb, tensorboard, none, or several"),
            (["--env", "Walker3d"], "received 'Walker3d'. Remedy: --env Walker2d, the nearest"),
        ],
    )
    def test_settings_that_cannot_run_leave_no_folder(self, tmp_path, capsys, options, message):
        assert train(tmp_path, *options) == 1
        assert message in capsys.readouterr().err
        assert not (tmp_path / "runs").exists()

    @pytest.mark.parametrize("options", [["--mini-batch", "3"], ["--num-envs", "many"]])
    def test_options_that_do_not_exist_exit_with_2(self, tmp_path, options):
        with pytest.raises(SystemExit) as end:
            train(tmp_path, *options)
        assert end.value.code == 2
        assert not (tmp_path / "runs").exists()


class TestResume:
    def test_goes_on_from_the_checkpoint(self, tmp_path, capsys):
        assert train(tmp_path) == 0
        run_dir = run_dir_of(tmp_path)
        assert main(["train", "ppo", "--resume", str(run_dir), "--total-steps", "160", "--no-progress"]) == 0
        assert capsys.readouterr().out.splitlines()[-1].startswith("160 steps in ")
        assert settings_of(run_dir) == dataclasses.replace(
            settings_of(run_dir), total_steps=160, num_envs=4, num_steps=8
        )
        steps = [line.partition(",")[0] for line in (run_dir / "progress.csv").read_text(encoding="utf-8").split()]
        assert steps == ["step", "32", "64", "96", "128", "160"]
        assert run_dir_of(tmp_path) == run_dir

    def test_complete_run_says_so(self, tmp_path, capsys):
        assert train(tmp_path) == 0
        assert main(["train", "ppo", "--resume", str(run_dir_of(tmp_path)), "--no-progress"]) == 1
        assert "received one that has taken 96 of 96. Remedy: a larger --total-steps." in capsys.readouterr().err

    def test_settings_that_shape_the_checkpoint_are_fixed(self, tmp_path, capsys):
        assert train(tmp_path) == 0
        options = ["--resume", str(run_dir_of(tmp_path)), "--num-envs", "8", "--seed", "4"]
        assert main(["train", "ppo", *options]) == 1
        assert "received another num_envs, seed." in capsys.readouterr().err

    def test_folder_without_run(self, tmp_path, capsys):
        assert main(["train", "ppo", "--resume", str(tmp_path)]) == 1
        assert "--resume: expected the folder of a run, with its config.json" in capsys.readouterr().err

    def test_run_without_checkpoint(self, tmp_path, capsys):
        assert train(tmp_path) == 0
        shutil.rmtree(run_dir_of(tmp_path) / "checkpoints")
        assert main(["train", "ppo", "--resume", str(run_dir_of(tmp_path)), "--total-steps", "160"]) == 1
        assert "checkpoint: expected files <iteration>.pt in" in capsys.readouterr().err

    def test_config_beside_resume(self, tmp_path, capsys):
        (tmp_path / "config.json").write_text("{}")
        assert main(["train", "ppo", "--resume", str(tmp_path), "--config", "a.json"]) == 1
        assert "expected --config or --resume, received both." in capsys.readouterr().err


class TestEnds:
    def test_divergence_is_one_line_and_exit_code_1(self, tmp_path, capsys, monkeypatch):
        from torchrl_perf.cli import train as command
        from torchrl_perf.trainers import TrainingDivergedError

        def diverge(*args, **kwargs):
            raise TrainingDivergedError("Expected finite losses, received NaN in iteration 3.")

        monkeypatch.setattr(command, "train", diverge)
        assert train(tmp_path) == 1
        assert capsys.readouterr().err == "torchrl-perf: Expected finite losses, received NaN in iteration 3.\n"

    @pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
    @pytest.mark.parametrize("signum", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
    def test_signal_saves_and_exits_with_128_and_its_number(self, tmp_path, signum):
        options = [*TINY, "--total-steps", "100000000", "--run-dir", str(tmp_path / "runs"), "--progress"]
        command = [sys.executable, "-m", "torchrl_perf", "train", "ppo", *options]
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ.copy()
        )
        try:
            while not re.search(r"return \d", process.stderr.readline()):  # the loop runs, and has finished an episode
                assert process.poll() is None
            process.send_signal(signum)
            out, err = process.communicate(timeout=240)
        finally:
            process.kill()
        assert process.returncode == 128 + signum
        run_dir = run_dir_of(tmp_path)
        assert list((run_dir / "checkpoints").glob("0*.pt"))
        assert f"stopped by signal {int(signum)}; go on with: torchrl-perf train ppo --resume {run_dir}" in err
        assert out.splitlines()[-1].endswith(f"saved in {run_dir}")
