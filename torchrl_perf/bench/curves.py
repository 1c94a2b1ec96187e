"""Learning curves of whole systems over several seeds, with an evaluation after each run: JSON and a picture.

Figures are interquartile means over the seeds with 95% bootstrap intervals (arXiv:2108.13264).
"""

import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torchrl_perf.bench.curves_seeds import over_seeds, table_of, write_over_seeds
from torchrl_perf.bench.curves_studies import PREPARED, STUDIES, WITH_EXTRAS, Run, Study
from torchrl_perf.bench.learning import MOST_POINTS, thinned
from torchrl_perf.bench.report import RESULTS, format_table, write_results
from torchrl_perf.metrics.comparison import Curve, band_of
from torchrl_perf.metrics.figure import new_figure, save_figure
from torchrl_perf.metrics.plot import read_progress
from torchrl_perf.run_layout import PROGRESS
from torchrl_perf.runtime import Stopwatch

FOLDER = RESULTS / "curves"
PICTURES = RESULTS.parents[2] / "docs" / "pictures"


@dataclass(frozen=True)
class BenchCurves:
    """Options of ``torchrl-perf bench curves``."""

    study: tuple[str, ...] = tuple(name for name in STUDIES if name not in (*WITH_EXTRAS, *PREPARED))
    """Studies: marine (three vessels), marine-empty (one, 40 m from its goal), marine-risk (one policy on levels of
    risk), durotaxis, durotaxis-stages (nearer goals, more nodes, the share to delete alone), fuel-breaks,
    fuel-breaks-one-shot (all breaks at once, judged on unseen landscapes), options-market (options and plain soft
    actor-critic, judged on unseen prices), kelly (a market whose best position is known), active-dynamics (samples
    until a field is known, by what inputs are chosen for, on six fields), ranks (one, two and three processes that
    learn CartPole with the same envs in all). By name alone: ranks-gpu (the same of 2,048 envs on one GPU and on two);
    marine-curriculum (three to six vessels, obstacles and vortices, on a GPU); marine-curriculum-long (its two best
    agents for six times its steps); marine-targets (AC-IQN with slow and fast targets); durotaxis-stages-full (the
    stages on the colony of the preset, on a GPU); cartpole, acrobot and pendulum (each algorithm by its preset);
    lunar-lander, half-cheetah and sp500 (a walk forward over real prices), which need Gymnasium's extras box2d and
    mujoco, and the package's extra data."""
    runs: tuple[str, ...] = ()
    """Runs of a study, such as the agents of marine; all by default."""
    seeds: tuple[int, ...] = ()
    """Seeds; by default three of each study on which none of its settings was chosen."""
    total_steps: int | None = None
    """Env steps of each run; None has those of the study."""
    device: str = "auto"
    """Device."""
    draw: bool = False
    """Train nothing: draw what is in the folder, and print the evaluations."""
    out: str | None = None
    """Folder of a JSON file for each run and seed (active-dynamics: for each run); the package's bench/results/curves
    by default."""
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
        changes = {} if options.total_steps is None else {"total_steps": options.total_steps * run.rows}
        settings = {"device": options.device, "logger": "csv", "run_dir": folder, "checkpoint_interval": 0, **changes}
        config = run.config(seed, **settings)
        watch = Stopwatch("cpu").start()
        if study.whole is not None:
            found = study.whole(dataclasses.replace(config, logger="none"))
            watch.stop()
            return {"run": name, "seed": seed, "steps": found.pop("steps"), "seconds": watch.seconds, **found}
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
            curves[column] = {"step": thinned([at / run.rows for at in data["step"]]), "value": thinned(data[column])}
        row = {"run": name, "seed": seed, "steps": steps // run.rows, "seconds": watch.seconds, "curves": curves}
        assert study.evaluate is not None
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
    from torchrl_perf.launch import launch_ranks
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
    """The rows of a study, in order of runs and seeds; of a run with all seeds of the study those alone."""
    rows = [row for path in folder.glob(f"{study}_*.json") for row in json.loads(path.read_text())["rows"]]
    kept, unseen = [], set(STUDIES[study].seeds)
    for run in STUDIES[study].runs:
        own = sorted((row for row in rows if row["run"] == run), key=lambda row: row["seed"])
        whole = unseen <= {row["seed"] for row in own}
        kept += [row for row in own if not whole or row["seed"] in unseen]
    return kept


def keep(study: str, row: dict[str, Any], folder: Path) -> Path:
    """Writes a row to a file of its run and seed, or, where a study has many runs, among those of its run's others."""
    name = f"{study}_{row['run']}"
    if not STUDIES[study].together:
        return write_results(f"{name}_{row['seed']}", [row], folder)
    path = folder / f"{name}.json"
    others = json.loads(path.read_text())["rows"] if path.is_file() else []
    rows = [row, *(other for other in others if other["seed"] != row["seed"])]
    return write_results(name, sorted(rows, key=lambda one: one["seed"]), folder)


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
    """A panel for each column: of each run the interquartile mean over the seeds, and its 95% interval.

    Where the evaluation has the figure of a column, the ways beside it are lines across, in the evaluation's worlds.
    """
    from matplotlib.ticker import EngFormatter

    figure = new_figure(4.6 * len(study.columns), 3.8)
    panels = figure.subplots(1, len(study.columns), squeeze=False)[0]
    for axes, (column, words) in zip(panels, study.columns.items(), strict=True):
        for name in dict.fromkeys(row["run"] for row in rows):
            own = [row["curves"][column] for row in rows if row["run"] == name]
            band = band_of([Curve(one["step"], one["value"]) for one in own], MOST_POINTS)
            line = axes.plot(band.steps, band.middle, label=name, linewidth=1.2)[0]
            axes.fill_between(band.steps, band.low, band.high, alpha=0.15, color=line.get_color(), linewidth=0)
        if column in study.dashed:
            other = rows[0]["curves"][study.dashed[column]]
            axes.plot(other["step"], other["value"], color="0.3", linewidth=1.0, ls="--", label=study.dashed[column])
        for who, value in _across(study, rows, column).items():
            line = axes.axhline(value, color="0.3", linewidth=1.0, ls=_LINES[study.beside.index(who) % len(_LINES)])
            line.set_label(who)
        axes.set_xlabel(study.axis)
        axes.set_ylabel(words)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.grid(alpha=0.3)
    # some lines, such as a baseline's, are in one panel only: the legend names those of all panels
    named = {label: line for each in panels for line, label in zip(*each.get_legend_handles_labels(), strict=True)}
    panels[-1].legend(list(named.values()), list(named), fontsize=8)
    seeds = ", ".join(str(seed) for seed in sorted({row["seed"] for row in rows}))
    figure.suptitle(f"{study.title}\ninterquartile mean and 95% interval, seeds {seeds}", fontsize=10)
    return save_figure(figure, path, dpi=110)


_LINES = ("--", ":", "-.", (0, (1, 3)))


def _across(study: Study, rows: Sequence[dict[str, Any]], column: str) -> dict[str, float]:
    """What the ways beside a study reach of a column, the mean over the rows, by name; not of one with a curve."""
    figure, found = column.rpartition("/")[2], {}
    for who in study.beside:
        if who == study.dashed.get(column):
            continue
        values = [row["evaluation"].get(who, {}).get(figure) for row in rows]
        if values and all(value is not None for value in values):
            found[who] = sum(values) / len(values)
    return found


def _print(lines: list[dict[str, Any]]) -> None:
    print(format_table(lines, list(dict.fromkeys(key for line in lines for key in line))))


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
            for seed in options.seeds or study.seeds:
                try:
                    row = one_run(study, run, seed, options)
                except InterruptedError as error:
                    print(error, file=sys.stderr)
                    return 1
                keep(name, row, folder)
                print(f"{name} {run} {seed}: {row['seconds']:.0f} s, {row['evaluation']['trained']}", flush=True)
        if not (rows := stored(name, folder)):
            print(
                f"{name}: expected files {name}_*.json in {folder}, found none; train without --draw", file=sys.stderr
            )
            return 2
        _print(summary(rows))
        _print(table_of(over_seeds(rows)))
        path = write_over_seeds(name, study.title, study.chosen_on, rows, folder)
        print(f"interquartile mean [95% interval]; settings were chosen on: {study.chosen_on}; {path}")
        path = (PICTURES if options.pictures is None else Path(options.pictures)) / f"curve_{name}.png"
        print(draw(study, rows, path) if study.picture is None else study.picture(study.title, rows, path))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
