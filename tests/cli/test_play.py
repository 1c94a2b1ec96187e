"""``torchrl-perf play``: films whose pictures are not blank and change, of each kind of env; what is refused."""

import os
import stat
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from finished_runs import SETTINGS, finished
from PIL import Image

from torchrl_perf.cli import film, main
from torchrl_perf.collectors import HostCollector, host_specs
from torchrl_perf.trainers import DQNConfig, DQNTrainer, make_q_policy, train
from torchrl_perf.trainers.frames import frames
from torchrl_perf.trainers.policies import policy_of, read_run

SHOWN = [name for name in SETTINGS if name != "dqn"]  # of CartPole, as PPO's


def pictures_of(path: Path) -> np.ndarray:
    """The pictures of a gif, ``[T, H, W, 3]``."""
    with Image.open(path) as image:
        found = []
        for number in range(image.n_frames):
            image.seek(number)
            found.append(np.asarray(image.convert("RGB")))
    return np.stack(found)


@pytest.mark.parametrize("name", SHOWN)
def test_pictures_are_not_blank_and_change(name, tmp_path, capsys):
    out = tmp_path / "film.gif"
    command = ["play", str(finished(name)), "--out", str(out), "--height", "64", "--max-steps", "8", "--episodes", "3"]
    assert main(command) == 0
    assert f"pictures in {out}" in capsys.readouterr().out
    film = pictures_of(out)
    assert film.shape[1:] == (64, 96, 3)
    assert len(film) > 1
    assert all(picture.std() > 3 for picture in film)
    assert (film[1:] != film[:-1]).any()
    assert list(tmp_path.iterdir()) == [out]


class TestFilm:
    def test_goes_to_the_runs_folder(self, tmp_path):
        run = finished("ppo", seed=2)
        assert main(["play", str(run), "--max-steps", "3", "--height", "32"]) == 0
        assert len(pictures_of(run / "play.gif")) == 3
        checkpoint = next((run / "checkpoints").glob("0*.pt"))
        (run / "play.gif").unlink()
        assert main(["play", str(checkpoint), "--max-steps", "3", "--height", "32"]) == 0
        assert (run / "play.gif").is_file()

    def test_shows_the_episode_that_the_policy_plays(self):
        run = read_run(finished("ppo"))
        first, second = (list(frames(run, policy_of(run), seed=4, size=(32, 48))) for _ in range(2))
        assert len(first) == len(second) > 5
        assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
        other = list(frames(run, policy_of(run), seed=4, size=(32, 48), changes={"max_episode_steps": 4}))
        assert len(other) == 3  # the picture after the last step is that of the next episode

    def test_an_mp4_is_piped_to_ffmpeg(self, tmp_path, monkeypatch):
        program = tmp_path / "bin" / "ffmpeg"
        program.parent.mkdir()
        script = f"#!{sys.executable}\nimport sys\nopen(sys.argv[-1], 'wb').write(sys.stdin.buffer.read())\n"
        program.write_text(script)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
        out = tmp_path / "film.mp4"
        assert main(["play", str(finished("ppo")), "--out", str(out), "--max-steps", "3", "--height", "32"]) == 0
        assert out.stat().st_size == 3 * 32 * 48 * 3

    def test_what_ffmpeg_says_is_passed_on_and_nothing_is_left(self, tmp_path, monkeypatch, capsys):
        program = tmp_path / "bin" / "ffmpeg"
        program.parent.mkdir()
        program.write_text(f"#!{sys.executable}\nimport sys\nsys.stdin.buffer.read()\nsys.exit('no such codec')\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(program.parent))
        out = tmp_path / "films" / "film.mp4"
        assert main(["play", str(finished("ppo")), "--out", str(out), "--max-steps", "3", "--height", "32"]) == 1
        assert "expected a film from ffmpeg, received 'no such codec'. Remedy:" in capsys.readouterr().err
        assert list(out.parent.iterdir()) == []


class TestRefusals:
    def test_no_ffmpeg(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setenv("PATH", str(tmp_path))
        assert main(["play", str(finished("ppo")), "--out", str(tmp_path / "film.mp4")]) == 1
        assert "expected the program ffmpeg for" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []

    def test_another_suffix(self, tmp_path, capsys):
        assert main(["play", str(finished("ppo")), "--out", str(tmp_path / "film.avi")]) == 1
        assert "expected a name that ends in .gif or .mp4, received" in capsys.readouterr().err

    def test_no_display(self, monkeypatch, capsys):
        monkeypatch.setattr(film.sys, "platform", "linux")
        monkeypatch.delenv("DISPLAY", raising=False)
        monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
        assert main(["play", str(finished("ppo")), "--window"]) == 1
        assert "window: expected a display, received neither DISPLAY nor WAYLAND_DISPLAY." in capsys.readouterr().err

    def test_no_window_system(self, monkeypatch, capsys):
        monkeypatch.setenv("DISPLAY", ":99")
        monkeypatch.setenv("MPLBACKEND", "agg")
        assert main(["play", str(finished("ppo")), "--window"]) == 1
        assert "expected a window system for matplotlib, received its backend" in capsys.readouterr().err

    def test_an_episode_without_pictures(self, tmp_path, capsys):
        out = tmp_path / "film.gif"
        assert main(["play", str(finished("ppo")), "--out", str(out), "--variant", "max_episode_steps=1"]) == 1
        assert "expected an episode of at least two steps" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []

    def test_numbers(self, capsys):
        assert main(["play", str(finished("ppo")), "--fps", "0"]) == 1
        assert "fps: expected a positive integer, received 0." in capsys.readouterr().err


def test_gymnasium_draws_its_own(tmp_path):
    envs = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")
    config = DQNConfig.without_task(
        **{"num_envs": 2, "num_steps": 8, "total_steps": 160, "capacity": 160, "learning_starts": 64},
        **{"minibatch_size": 16, "device": "cpu", "mode": "eager", "hidden_size": 32},
        **{"run_dir": str(tmp_path), "env": "CartPole-v1"},
    )
    policy = make_q_policy(host_specs(envs), config)
    trainer = DQNTrainer(config, collector=HostCollector(envs, policy, frames_per_batch=16, seed=0), policy=policy)
    run = train(trainer, progress=False).run_dir
    trainer.close()
    assert main(["play", str(run), "--max-steps", "5"]) == 0
    shown = pictures_of(run / "play.gif")
    assert shown.shape[1:] == (400, 600, 3)
    assert 2 <= len(shown) <= 5  # Pillow shows equal ones once, for longer
    assert shown.std() > 3
    assert (shown[1:] != shown[:-1]).any()
