"""Every experiment of ``bench claims --quick`` runs, finds its outputs equal and gives its verdicts."""

import pytest
import torch

from studies import claims
from studies.sitting import CONFIRMED, NOT_HERE, NOT_REPRODUCED, PARTLY, Sitting

WORDS = {CONFIRMED, PARTLY, NOT_REPRODUCED, NOT_HERE}
ALL = [(system, name) for system in claims.SYSTEMS for name in claims.experiments(system)]
# the others' own files do the same, and know the claims of each experiment
HERE = [(system, name) for system, name in ALL if system in ("durotaxis", "marine")]


@pytest.mark.parametrize(("system", "name"), HERE)
def test_experiment(system, name, capsys):
    sitting = Sitting(system, torch.device("cpu"), quick=True)
    claims.run(sitting, {name: claims.experiments(system)[name]})
    bad = [row for row in sitting.rows if row.get("ok") is False]
    assert not bad, bad
    assert sitting.verdicts
    assert {row["verdict"] for row in sitting.verdicts} <= WORDS
    timed = [row for row in sitting.rows if "us" in row]
    assert all(0 < row["p10_us"] <= row["us"] <= row["p90_us"] for row in timed)
    assert all({"system", "experiment", "case", "variant"} <= set(row) for row in sitting.rows)
    capsys.readouterr()


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(("system", "name"), ALL)
def test_experiment_on_cuda(system, name, capsys):
    sitting = Sitting(system, torch.device("cuda"), quick=True)
    claims.run(sitting, {name: claims.experiments(system)[name]})
    assert not [row for row in sitting.rows if row.get("ok") is False]
    assert sitting.verdicts
    capsys.readouterr()
