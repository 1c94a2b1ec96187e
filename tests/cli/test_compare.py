"""``torchrl-perf compare`` and ``plot``: groups, curves on one axis, tables, pictures; what is refused."""

import json

import numpy as np
import pytest
from finished_runs import finished
from matplotlib.image import imread

from torchrl_perf.cli import main
from torchrl_perf.metrics.comparison import Curve, band_of, save_comparison


def logged(folder, name, rows, **settings):
    """A folder of a run with these returns, by step."""
    run = folder / name
    run.mkdir()
    usual = {"algorithm": "ppo", "env": "CartPole", "learning_rate": 0.1, "seed": 0, "run_dir": "runs"}
    (run / "config.json").write_text(json.dumps({**usual, **settings}))
    lines = ["step,wall_time,episode/mean_return"]
    lines += [f"{step},{step / 10},{value}" for step, value in rows]
    (run / "progress.csv").write_text("\n".join(lines) + "\n")
    return str(run)


@pytest.fixture
def runs(tmp_path):
    """Three seeds of one experiment, and one run of another."""
    found = [logged(tmp_path, f"a{n}", [(10, 0.0), (20, 10.0 * (n + 1))], seed=n) for n in range(3)]
    return [*found, logged(tmp_path, "b", [(10, 5.0), (30, 7.0)], learning_rate=0.2)]


def test_table_and_picture(runs, tmp_path, capsys):
    out = tmp_path / "both.png"
    assert main(["compare", *runs, "--out", str(out)]) == 0
    table = (tmp_path / "both.md").read_text()
    assert table in capsys.readouterr().out
    assert table.startswith("`episode/mean_return` at the last row of each run:")
    titles, rule, first, second = (line.strip("| ").split(" | ") for line in table.splitlines()[2:])
    cells = [[cell.strip() for cell in line] for line in (titles, rule, first, second)]
    assert cells[2] == ["ppo on CartPole, learning_rate=0.1", "3", "20.00", cells[2][3], "20.00", "10.0, 20.0, 30.0"]
    low, high = map(float, cells[2][3].split(" to "))
    assert 10.0 <= low < 20.0 < high <= 30.0
    assert cells[3] == ["ppo on CartPole, learning_rate=0.2", "1", "7.00", "needs two seeds", "7.00", "7.0"]
    picture = imread(out)
    assert picture[..., :3].std() > 0.05
    assert len(np.unique(picture[..., :3].reshape(-1, 3), axis=0)) > 50


def test_a_run_counts_once(runs, tmp_path, capsys):
    out = ["--out", str(tmp_path / "c.svg")]
    assert main(["compare", *runs, f"{tmp_path}/../{tmp_path.name}/a1", *out]) == 1
    assert "runs: expected each once, received" in capsys.readouterr().err
    again = logged(tmp_path, "again", [(10, 0.0), (20, 40.0)], seed=2)
    assert main(["compare", *runs, again, *out]) == 0
    assert "| 3 in 4 runs |" in capsys.readouterr().out


def test_two_algorithms_have_their_names_alone(tmp_path, capsys):
    one = logged(tmp_path, "one", [(10, 1.0)])
    other = logged(tmp_path, "other", [(10, 2.0)], algorithm="dqn", gamma=0.9)
    assert main(["compare", one, other, "--out", str(tmp_path / "c.svg")]) == 0
    out = capsys.readouterr().out
    assert "| ppo on CartPole " in out
    assert "| dqn on CartPole " in out


def test_evaluations_where_all_have_them(tmp_path, capsys):
    evaluated = [str(finished("ppo", seed=seed, eval_interval=5, eval_episodes=2)) for seed in (1, 2)]
    assert main(["compare", *evaluated, "--out", str(tmp_path / "c.png")]) == 0
    assert capsys.readouterr().out.startswith("`eval/mean_return`")
    assert main(["compare", *evaluated, str(finished("ppo")), "--out", str(tmp_path / "c.png")]) == 0
    assert capsys.readouterr().out.startswith("`episode/mean_return`")


class TestBand:
    def test_by_hand(self):
        curves = [Curve([0, 10], [0.0, 10.0]), Curve([0, 5, 10], [2.0, 2.0, 2.0]), Curve([-5, 15], [4.0, 4.0])]
        band = band_of(curves, points=3)
        assert band.steps.tolist() == [0.0, 5.0, 10.0]
        # of three values those at the ends count a quarter each, the middle one whole: (a / 4 + b + c / 4) / 1.5
        assert band.middle == pytest.approx(
            [(0 / 4 + 2 + 4 / 4) / 1.5, (2 / 4 + 4 + 5 / 4) / 1.5, (2 / 4 + 4 + 10 / 4) / 1.5]
        )
        assert (band.low <= band.middle).all()
        assert (band.middle <= band.high).all()

    def test_of_one_run_is_its_curve(self):
        band = band_of([Curve([1, 3], [1.0, 5.0])], points=3)
        assert band.middle.tolist() == [1.0, 3.0, 5.0]
        assert np.isnan(band.low).all()

    def test_of_one_row(self, tmp_path):
        assert band_of([Curve([4], [2.0])]).middle.tolist() == [2.0]
        path = save_comparison({"a": [Curve([4], [2.0])]}, tmp_path / "a.png", label="r", finals={"a": [2.0]})
        assert path.stat().st_size > 5_000

    def test_nothing_in_common(self):
        with pytest.raises(ValueError, match=r"one that ends at 2 and one that begins at 5\. Remedy:"):
            band_of([Curve([1, 2], [0.0, 0.0]), Curve([5, 6], [0.0, 0.0])])


class TestPlot:
    def test_draws_the_curve_again(self, tmp_path, capsys):
        run = finished("ppo")
        assert main(["plot", str(run), "--out", str(tmp_path / "curve.png")]) == 0
        assert imread(tmp_path / "curve.png")[..., :3].std() > 0.05
        assert "curve.png is written" in capsys.readouterr().out
        (run / "learning_curve.png").unlink()
        assert main(["plot", str(run), "--metric", "train/entropy"]) == 0
        assert (run / "learning_curve.png").is_file()

    def test_a_metric_that_there_is_not(self, tmp_path, capsys):
        assert main(["plot", str(finished("ppo")), "--metric", "return", "--out", str(tmp_path / "c.png")]) == 1
        assert "expected the columns ['step', 'wall_time', 'return'], received" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["compare", "plot"])
class TestRefusals:
    def test_what_is_no_run(self, command, tmp_path, capsys):
        (tmp_path / "empty").mkdir()
        for path in ("empty", "nothing"):
            assert main([command, str(tmp_path / path)]) == 1
            error = capsys.readouterr().err
            assert (
                f"torchrl-perf {command}: run: expected the folder of a run with config.json and progress.csv" in error
            )

    def test_another_kind_of_picture(self, command, tmp_path, capsys):
        assert main([command, logged(tmp_path, "a", [(1, 1.0)]), "--out", str(tmp_path / "c.txt")]) == 1
        assert "expected a name that ends in .png, .pdf or .svg, received" in capsys.readouterr().err

    def test_a_run_without_a_return(self, command, tmp_path, capsys):
        assert main([command, logged(tmp_path, "a", [(1, "nan")]), "--out", str(tmp_path / "c.png")]) == 1
        assert "expected rows with a finite episode/mean_return, received none. Remedy:" in capsys.readouterr().err
        assert not (tmp_path / "c.png").exists()
