"""The names of metrics that are refused or allowed before a run are those that its rows have."""

import pytest
from config_runs import KINDS, make

from torchrl_perf.trainers.run.metric_names import known_metrics, unknown_metric


@pytest.mark.parametrize("name", KINDS)
def test_every_metric_of_a_row_is_known_before_the_run(name):
    trainer = make(name, {})
    known = known_metrics(trainer)
    for _ in range(4):
        trainer.step()
    row = trainer.metrics.flush(64)
    assert [metric for metric in row if unknown_metric(metric, known)] == []
    assert "train/entropi" not in known
    assert unknown_metric("train/entropi", known)
    assert unknown_metric("", known) == unknown_metric("-episode/mean_return", known) == ""
    trainer.close()
