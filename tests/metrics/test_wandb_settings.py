"""A W&B run as people use it: names, tags, code, pictures and films; sweeps over the command line."""

import json
import re
from pathlib import Path

import pytest
import torch

from torchrl_perf.cli import main
from torchrl_perf.metrics import WandbSettings, make_loggers, wandb_sink
from torchrl_perf.metrics.figure import new_figure, save_figure
from torchrl_perf.metrics.wandb_file import read_history, read_records, run_files
from torchrl_perf.trainers import PPOConfig

SWEEP = Path(__file__).resolve().parents[2] / "examples" / "sweep.yaml"


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """No key and no W&B settings of the person who runs the tests."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    # a busy machine takes long to write the last rows
    monkeypatch.setattr(wandb_sink, "_CLOSE_LIMITS", {"online": 60.0, "offline": 60.0})


def test_a_run_has_its_names_its_code_and_its_pictures(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    code = tmp_path / "code"
    code.mkdir()
    (code / "physics.py").write_text("GRAVITY = 9.81\n", encoding="utf-8")
    monkeypatch.setenv("WANDB_RUN_ID", "fromagent")
    settings = WandbSettings("team", "seeds", "first", ("a", "b"), "why", "offline", str(code))
    picture = save_figure(new_figure(1, 1), tmp_path / "curve.png", dpi=20)
    rows = make_loggers("csv,wandb,tensorboard", tmp_path, "project", "folder", {"gamma": 0.9}, wandb=settings)
    rows.log_metrics({"a": 1.0}, step=10)
    rows.log_file("curve", picture, 10)
    rows.log_metrics({"a": 2.0}, step=20)
    assert rows.drain(60)
    rows.close()
    assert rows.problems == ()
    (file,) = run_files(tmp_path, "fromagent")
    (run,) = (record.run for record in read_records(file) if record.HasField("run"))
    assert (run.entity, run.project, run.run_group, run.display_name) == ("team", "project", "seeds", "first")
    assert (list(run.tags), run.notes) == (["a", "b"], "why")
    history = read_history(file)
    assert [row["_step"] for row in history if "a" in row] == [10, 20]
    assert [row["curve/_type"] for row in history if "curve/_type" in row] == ["image-file"]
    stored = [record.artifact for record in read_records(file) if record.HasField("artifact")]
    assert [entry.path for each in stored for entry in each.manifest.contents] == ["physics.py"]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (image,) = events.Images("curve")
    assert (image.step, image.encoded_image_string) == (10, picture.read_bytes())


def test_a_run_shows_its_curve_and_counts_its_time(tmp_path, monkeypatch):
    options = ["--num-envs=8", "--num-steps=32", "--epochs=1", "--device=cpu", "--log-interval=1", "--no-progress"]
    names = ["--logger=csv,wandb", "--wandb-mode=offline", "--wandb-name=mine", f"--run-dir={tmp_path}"]
    assert main(["train", "ppo", "--total-steps=1024", *options, *names]) == 0
    run_dir = tmp_path / "ppo-CartPole-0"
    assert main(["train", "ppo", "--resume", str(run_dir), "--total-steps=2048", "--no-progress"]) == 0
    identifier = json.loads((run_dir / "wandb.json").read_text())["id"]
    first, second = (read_history(file) for file in run_files(run_dir, identifier))
    rows = [row for row in (*first, *second) if "time/total_seconds" in row]
    assert [row["_step"] for row in rows] == [256 * number for number in range(1, 9)]
    seconds = [row["time/total_seconds"] for row in rows]
    assert seconds == sorted(seconds)
    assert all(row["time/steps_per_second"] > 0 for row in rows)
    assert [any("learning_curve/path" in row for row in each) for each in (first, second)] == [True, True]


def test_tags_are_separated_by_commas_and_code_is_a_folder(tmp_path):
    assert PPOConfig(wandb_tags=" a, b,").wandb.tags == ("a", "b")
    assert PPOConfig().wandb == WandbSettings()
    with pytest.raises(ValueError, match="wandb_code: expected a folder"):
        make_loggers("wandb", tmp_path, "project", "run", wandb=WandbSettings(code=str(tmp_path / "none")))


def test_the_sweep_of_the_examples_runs_on_the_command_line(tmp_path):
    yaml = pytest.importorskip("yaml")
    from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

    sweep = yaml.safe_load(SWEEP.read_text(encoding="utf-8"))
    known = PPOConfig().to_dict()
    assert set(sweep["parameters"]) <= set(known)
    values = {"learning_rate": 0.001, "epochs": 1, "normalize_observations": True, "total_steps": 256}
    assert set(values) == set(sweep["parameters"])
    written = create_sweep_command_args({"args": {name: {"value": value} for name, value in values.items()}})
    program, *words = sweep["command"]
    assert program == sweep["program"] == "torchrl-perf"
    arguments = [
        part for word in words for part in (written[word[2:-1]] if re.fullmatch(r"\$\{\w+\}", word) else [word])
    ]
    small = ["--num-envs=8", "--num-steps=16", "--logger=csv", "--device=cpu", f"--run-dir={tmp_path}"]
    assert main([*(word for word in arguments if "--logger" not in word), *small]) == 0
    stored = json.loads((tmp_path / "ppo-CartPole-0" / "config.json").read_text(encoding="utf-8"))
    assert {name: stored[name] for name in values} == values
    assert stored["wandb_tags"] == "sweep"


def test_files_are_passed_on_by_loggers_that_cannot_show_them(tmp_path):
    rows = make_loggers("csv", tmp_path, "project", "run")
    rows.log_metrics({"a": torch.tensor(1.0)}, step=1)
    rows.log_file("curve", tmp_path / "none.png", 1)
    rows.close()
    assert rows.problems == ()
