"""Learning curves of whole systems over several seeds, with an evaluation after each run: JSON and a picture."""

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torchrl_perf.bench.curves_studies import STUDIES, WITH_EXTRAS, Run, Study
from torchrl_perf.bench.learning import MOST_POINTS, thinned
from torchrl_perf.bench.report import RESULTS, format_table, write_results
from torchrl_perf.metrics.figure import new_figure, save_figure
from torchrl_perf.metrics.plot import read_progress
from torchrl_perf.run_layout import PROGRESS
from torchrl_perf.runtime import Stopwatch

FOLDER = RESULTS / "curves"
PICTURES = RESULTS.parents[2] / "docs" / "pictures"


@dataclass(frozen=True)
class BenchCurves:
    """Options of ``torchrl-perf bench curves``."""

    study: tuple[str, ...] = tuple(name for name in STUDIES if name not in WITH_EXTRAS)
    """Studies: marine (three vessels), marine-empty (one, 40 m from its goal), durotaxis, fuel-breaks, ranks (one, two
    and three processes that learn CartPole with the same envs in all); and lunar-lander and half-cheetah, which need
    Gymnasium's extras box2d and mujoco."""
    runs: tuple[str, ...] = ()
    """Runs of a study, such as the agents of marine; all by default."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds."""
    total_steps: int | None = None
    """Env steps of each run; None has those of the study."""
    device: str = "auto"
    """Device."""
    draw: bool = False
    """Train nothing: draw what is in the folder, and print the evaluations."""
    out: str | None = None
    """Folder of a JSON file for each run and seed; the package's bench/results/curves by default."""
    pictures: str | None = None
    """Folder of the pictures; docs/pictures of the checkout by default."""


def one_run(study: Study, name: str, seed: int, options: BenchCurves) -> dict[str, Any]:
    """Trains one seed to the end of its settings, then evaluates it.

    Returns:
        A row: ``run``, ``seed``, ``steps``, ``seconds`` of the training loop, start and compilation included; by
        column ``curves``, of each "step" and "value"; ``evaluation``.

    Raises:
        InterruptedError: where a signal has stopped the run.
        RuntimeError: where ranks have failed.
    """
    from torchrl_perf.trainers.run.run import train

    run = study.runs[name]
    with tempfile.TemporaryDirectory() as folder:
        changes = {} if options.total_steps is None else {"total_steps": options.total_steps}
        settings = {"device": options.device, "logger": "csv", "run_dir": folder, "checkpoint_interval": 0, **changes}
        config = run.config(seed, **settings)
        watch = Stopwatch("cpu").start()
        if run.ranks > 1:
            trainer, run_dir, steps = _by_ranks(run, config, Path(folder))
        else:
            trainer = run.trainer(config)
            result = train(trainer, progress=False)
            if result.exit_code:
                raise InterruptedError(
                    f"{name}, seed {seed}: expected a whole run, received a signal after {result.steps} steps. Remedy: "
                    "resume it: the runs that are whole are kept"
                )
            run_dir, steps = result.run_dir, result.steps
        watch.stop()
        curves = {}
        for column in study.columns:
            data = read_progress(run_dir / PROGRESS, column)
            curves[column] = {"step": thinned(data["step"]), "value": thinned(data[column])}
        row = {"run": name, "seed": seed, "steps": steps, "seconds": watch.seconds, "curves": curves}
        row["evaluation"] = study.evaluate(trainer, name)
    trainer.close()
    return row


def _by_ranks(run: Run, config: Any, folder: Path) -> tuple[Any, Path, int]:
    """The same by several processes, as ``torchrl-perf train --ranks`` starts them.

    Returns:
        What is left of the trainer, for its evaluation: ``config``, ``policy`` and ``close``; folder and env steps.

    Raises:
        RuntimeError: where one has failed.
    """
    from torchrl_perf.parallel.launch import launch_ranks
    from torchrl_perf.trainers import load_policy

    settings = folder / "settings.json"
    settings.write_text(json.dumps(config.to_dict()))
    words = ("train", run.algorithm, "--config", str(settings), "--no-progress", "--ranks", str(run.ranks))
    code = launch_ranks(("-m", "torchrl_perf", *words), run.ranks)
    if code:
        raise RuntimeError(f"ranks: expected a whole run, received exit code {code}. Remedy: what the ranks have said.")
    (progress,) = folder.glob(f"*/{PROGRESS}")
    left = SimpleNamespace(config=config, policy=load_policy(progress.parent), close=lambda: None)
    return left, progress.parent, int(read_progress(progress)["step"][-1])


def stored(study: str, folder: Path) -> list[dict[str, Any]]:
    """The rows of a study, in order of runs and seeds."""
    rows = [json.loads(path.read_text())["rows"][0] for path in folder.glob(f"{study}_*.json")]
    order = list(STUDIES[study].runs)
    return sorted((row for row in rows if row["run"] in order), key=lambda row: (order.index(row["run"]), row["seed"]))


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for each run and seed, and one for each baseline."""
    lines = []
    for row in rows:
        lines += [
            {"run": row["run"], "seed": row["seed"], "of": who, **figures}
            for who, figures in row["evaluation"].items()
            if who == "trained" or not any(line["of"] == who for line in lines)
        ]
    return lines


def draw(study: Study, rows: Sequence[dict[str, Any]], path: Path) -> Path:
    """A panel for each column: the mean over the seeds of each run, and the range from the least to the greatest."""
    import numpy as np
    from matplotlib.ticker import EngFormatter

    figure = new_figure(4.6 * len(study.columns), 3.6)
    panels = figure.subplots(1, len(study.columns), squeeze=False)[0]
    for axes, (column, words) in zip(panels, study.columns.items(), strict=True):
        for name in dict.fromkeys(row["run"] for row in rows):
            own = [row["curves"][column] for row in rows if row["run"] == name]
            steps = np.linspace(max(one["step"][0] for one in own), min(one["step"][-1] for one in own), MOST_POINTS)
            values = np.stack([np.interp(steps, one["step"], one["value"]) for one in own])
            line = axes.plot(steps, values.mean(0), label=name, linewidth=1.2)[0]
            axes.fill_between(steps, values.min(0), values.max(0), alpha=0.15, color=line.get_color(), linewidth=0)
        axes.set_xlabel("env steps")
        axes.set_ylabel(words)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    seeds = len({row["seed"] for row in rows})
    figure.suptitle(f"{study.title}: mean and range of {seeds} seeds", fontsize=11)
    return save_figure(figure, path, dpi=110)


def main(argv: list[str] | None = None) -> int:
    """Trains, evaluates and draws; 1 after a signal, 2 for an unknown name or where there is nothing to draw."""
    import tyro

    options = tyro.cli(BenchCurves, args=argv, prog="torchrl-perf bench curves")
    folder = FOLDER if options.out is None else Path(options.out)
    if wrong := [name for name in options.study if name not in STUDIES]:
        print(f"study: expected names among {', '.join(STUDIES)}, received {', '.join(wrong)}", file=sys.stderr)
        return 2
    known = [name for study in options.study for name in STUDIES[study].runs]
    if wrong := [name for name in options.runs if name not in known]:
        print(f"runs: expected names among {', '.join(known)}, received {', '.join(wrong)}", file=sys.stderr)
        return 2
    for name in options.study:
        study = STUDIES[name]
        chosen = [] if options.draw else [run for run in study.runs if not options.runs or run in options.runs]
        for run in chosen:
            for seed in options.seeds:
                try:
                    row = one_run(study, run, seed, options)
                except InterruptedError as error:
                    print(error, file=sys.stderr)
                    return 1
                write_results(f"{name}_{run}_{seed}", [row], folder)
                print(f"{name} {run} {seed}: {row['seconds']:.0f} s, {row['evaluation']['trained']}", flush=True)
        if not (rows := stored(name, folder)):
            print(
                f"{name}: expected files {name}_*.json in {folder}, found none; train without --draw", file=sys.stderr
            )
            return 2
        lines = summary(rows)
        print(format_table(lines, list(dict.fromkeys(key for line in lines for key in line))))
        print(
            draw(study, rows, (PICTURES if options.pictures is None else Path(options.pictures)) / f"curve_{name}.png")
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
