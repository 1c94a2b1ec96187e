"""The speed of learning that a run writes down while its buffer fills, and after."""

import csv
import dataclasses

import pytest
from test_numerics import DQN

from torchrl_perf.trainers import DQNTrainer, train


def test_no_experiences_are_counted_before_the_first_update(tmp_path):
    # three filling iterations of 32 rows; the second row of the table holds the third of them and the first update's
    config = dataclasses.replace(
        DQN, learning_starts=96, total_steps=256, log_interval=2, logger="csv", run_dir=str(tmp_path)
    )
    run_dir = train(DQNTrainer(config), progress=False).run_dir
    with (run_dir / "progress.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    seen = [float(row["time/experiences_per_second"]) / float(row["time/steps_per_second"]) for row in rows]
    # two updates of 32 rows for the 32 steps of an iteration that learns
    assert seen == pytest.approx([0.0, 1.0, 2.0, 2.0])
