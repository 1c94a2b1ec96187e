"""Makes the zoo: trains each entry of the plan as ``torchrl-perf train`` does, evaluates it, and writes its folder.

``python -m torchrl_perf.bench.zoo --out FOLDER``. Nothing is chosen by hand: seed 0, the settings of
:mod:`~torchrl_perf.bench.zoo_plan`, and the policy at the end of the run.
"""

import argparse
import contextlib
import csv
import math
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from torchrl_perf.bench.curves import MOST_POINTS, thinned
from torchrl_perf.bench.report import json_text
from torchrl_perf.bench.zoo_plan import PLAN, Planned
from torchrl_perf.near_names import nearest_word
from torchrl_perf.registry import entry_of
from torchrl_perf.run_layout import CHECKPOINTS, CONFIG, FRESH_SEEDS, PROGRESS
from torchrl_perf.runtime import Stopwatch, machine_card
from torchrl_perf.zoo import CARD, FOLDER, MOST_BYTES, ZooEntry, zoo_entries

EPISODES = 100
"""Evaluated of each entry."""
ON = "cpu"
"""Device of the evaluation: the numbers of a CPU's generator are the same on every machine."""
LEFT_OUT = ("nonfinite/", "train/", "time/", "memory/")
"""Beginnings of the columns that are no result."""
DIGITS = 6
"""Of a figure of the curve."""
OF_MACHINE = ("commit", "dirty", "date", "gpu", "cpu", "cores", "python", "packages")


def make_entry(planned: Planned, out: Path, device: str = "auto") -> ZooEntry:
    """Trains and evaluates an entry, and writes its folder, whole or not at all.

    Args:
        planned: of the plan.
        out: folder of all entries; an earlier one of the same name is replaced.
        device: to train on.

    Raises:
        InterruptedError: where a signal has stopped the run.
        Exception: whatever ends the run.
    """
    from torchrl_perf.trainers.run.run import train

    config = entry_of(planned.algorithm).load("config")(env=planned.task, device=device, **planned.changes)
    between = math.ceil(config.total_steps / config.batch_size / MOST_POINTS)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".zoo-", dir=out.absolute()) as folder:
        # the run's folder is a setting, and the settings are stored: it is the usual one, of another current folder
        with contextlib.chdir(folder):
            trainer = entry_of(planned.algorithm).load("trainer")(replace(config, log_interval=between))
            with contextlib.closing(trainer):
                result = train(trainer, progress=False)
        if result.exit_code:
            raise InterruptedError(
                f"{planned.name}: expected a whole run, received a signal after {result.steps} steps. Remedy: run it "
                "again; the entries that are whole are kept."
            )
        made = Path(folder) / planned.name
        pack(Path(folder) / result.run_dir, made)
        card = card_of(made, seconds=result.seconds, measure=result.evaluated)
        (made / CARD).write_text(json_text(card, indent=1) + "\n", encoding="utf-8")
        shutil.rmtree(out / planned.name, ignore_errors=True)
        made.replace(out / planned.name)
    return zoo_entries(out)[planned.name]


def pack(run: Path, folder: Path) -> None:
    """The folder of a run with no more than its settings, its curve, and the policy alone.

    Args:
        run: whole.
        folder: to be made.
    """
    from torchrl_perf.trainers.policies import read_run, save_policy

    folder.mkdir()
    shutil.copy(run / CONFIG, folder / CONFIG)
    saved = read_run(run)
    save_policy(saved.path, folder / CHECKPOINTS / saved.path.name)
    with (run / PROGRESS).open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    columns = [name for name in rows[0] if not name.startswith(LEFT_OUT)]
    with (folder / PROGRESS).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: short(row[name]) for name in columns} for row in thinned(rows))


def short(text: str) -> str:
    """A figure in few digits; an absent one stays empty."""
    return f"{float(text):.{DIGITS}g}" if "." in text else text


def card_of(folder: Path, *, seconds: float, measure: float) -> dict[str, Any]:
    """What :class:`~torchrl_perf.zoo.ZooEntry` says of an entry, after an evaluation of the stored policy.

    Args:
        folder: with the files of :func:`pack`.
        seconds: that the training took.
        measure: the last evaluation during the run; NaN without one.
    """
    from torchrl_perf.trainers.policies import policy_of, read_run
    from torchrl_perf.trainers.variants import evaluate_run

    run = read_run(folder, ON)
    policy, config = policy_of(run), run.config
    seed = config.seed + FRESH_SEEDS
    found = evaluate_run(run, policy, EPISODES, seed=seed)
    card: dict[str, Any] = {
        "algorithm": config.algorithm,
        "task": config.env,
        "parameters": sum(each.numel() for each in policy.parameters()),
        "steps": run.steps,
        "seconds": round(seconds, 1),
        "seed": config.seed,
        "evaluation": {
            "episodes": len(found.returns),
            "unfinished": found.unfinished,
            "mean_return": found.mean_return,
            "return_deviation": found.return_deviation,
            "interval": list(found.interval()),
            "mean_length": found.mean_length,
            "seed": seed,
            "device": ON,
        },
    }
    if math.isfinite(measure):
        card["measure"] = {"name": config.evaluated_by, "value": measure}
    return {**card, "machine": {name: value for name, value in machine_card().items() if name in OF_MACHINE}}


def make_all(plan: Sequence[Planned], out: Path, *, device: str = "auto", budget: float | None = None) -> int:
    """Makes entries one after the other, and says of each how it went; 1 where one has failed.

    Args:
        plan: the entries.
        out: folder of all of them.
        device: to train on.
        budget: seconds for everything: an entry that would not end within them is left out; None is no limit.
    """
    whole, planned_seconds, failed, left = Stopwatch("cpu").start(), 0.0, [], []
    for planned in plan:
        whole.stop()
        # a slower machine shows in the entries so far
        slower = max(1.0, whole.seconds / planned_seconds) if planned_seconds else 1.0
        if budget is not None and whole.seconds + slower * planned.seconds > budget:
            left.append(planned.name)
            continue
        try:
            entry = make_entry(planned, out, device)
        except InterruptedError as error:
            print(error, file=sys.stderr)
            return 1
        except Exception as error:  # the others are worth having
            failed.append(planned.name)
            print(f"{planned.name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        else:
            found = entry.card["evaluation"]
            words = f"{found['mean_return']:.2f} ± {found['return_deviation']:.2f} of {found['episodes']} episodes"
            print(f"{entry.name}: {entry.card['seconds']} s, {entry.size / 1024:.0f} KiB, {words}", flush=True)
        planned_seconds += planned.seconds
    for names, why in ((failed, "failed"), (left, "would not have ended in time")):
        if names:
            print(f"{why}: --only {' '.join(names)}", flush=True)
    return int(bool(failed))


def zoo_table(folder: Path = FOLDER) -> str:
    """Markdown: the entries with what their evaluation found, and where they were trained.

    Args:
        folder: of the entries.
    """
    entries = zoo_entries(folder).values()
    lines = [
        "| name | parameters | KiB | env steps | trained on | return of the evaluated episodes |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for entry in entries:
        card, found = entry.card, entry.card["evaluation"]
        returns = f"{found['mean_return']:.2f} ± {found['return_deviation']:.2f} ({found['episodes']})"
        if "measure" in card:
            returns += f"; `{card['measure']['name']}` {card['measure']['value']:.3f}"
        where = card["machine"]["gpu"] or "a CPU"
        size = f"{entry.size / 1024:.0f}"
        lines.append(
            f"| `{entry.name}` | {card['parameters']:,} | {size} | {card['steps']:,} | {where}, {card['seconds']} s | "
            f"{returns} |"
        )
    total = sum(entry.size for entry in entries)
    return "\n".join(
        [*lines, "", f"All {len(entries)} together have {total / 1024:.0f} KiB; the limit is {MOST_BYTES >> 10:,} KiB."]
    )


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser("torchrl-perf bench zoo", description="Train the entries of the zoo again.")
    made.add_argument("--only", nargs="+", default=[], metavar="NAME", help="entries, such as ppo-CartPole")
    made.add_argument("--budget", type=float, help="seconds for all: entries that would not end in time are left out")
    made.add_argument("--device", default="auto", help="device to train on (default: auto)")
    made.add_argument("--out", type=Path, default=FOLDER, help="folder of the entries (default: the package's)")
    return made


def main(argv: list[str] | None = None) -> int:
    """Makes the entries; 1 where one has failed or a signal came, 2 for an unknown name."""
    options = parser().parse_args(argv)
    if unknown := [name for name in options.only if name not in PLAN]:
        near = nearest_word(unknown[0], PLAN) or next(iter(PLAN))
        print(
            f"only: expected names among {', '.join(PLAN)}, received {', '.join(unknown)}. Remedy: {near}.",
            file=sys.stderr,
        )
        return 2
    torch.set_num_threads(1)  # as torchrl-perf train: small networks gain nothing from a second core
    plan = [planned for name, planned in PLAN.items() if not options.only or name in options.only]
    return make_all(plan, options.out, device=options.device, budget=options.budget)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
