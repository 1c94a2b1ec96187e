"""The host benchmark gives one row a variant, on an env that needs no simulator."""

import pytest

from torchrl_perf.bench.host import BenchHost, measure


@pytest.mark.filterwarnings("ignore")  # TorchRL's and gymnasium's own deprecations
def test_rows():
    variants = ("bare", "bare-policy", "host", "host-groups", "host-next-step", "host-random", "torchrl-vector")
    rows = measure(BenchHost(env="Pendulum-v1", num_envs=2, num_steps=3, rounds=2, variants=variants), "cpu")
    assert [row["variant"] for row in rows] == list(variants)
    assert rows[0]["share_of_bare"] == 1
    assert all(row["frames_per_second"] > 0 for row in rows)
