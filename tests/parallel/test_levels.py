"""Sums in two levels, by four processes of which two share a host."""

import pytest
import torch
from rank_processes import results, run, said

from torchrl_perf import cli
from torchrl_perf.parallel.levels import problem_of_hosts
from torchrl_perf.trainers.run.rank_folder import newest_common


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("levels")
    assert run(folder, 4, "sums_by_host") == {"sums_by_host": [0] * 4}, said(folder, "sums_by_host", 0)
    return results(folder, "sums_by_host", 4)


@pytest.mark.parametrize("size", [1, 2, 7, 1_000])
def test_sums_are_those_of_one_level_and_equal_on_all_ranks(found, size):
    levels, flat = found[0][size]
    torch.testing.assert_close(levels, flat, rtol=0, atol=1e-5)
    assert all(torch.equal(one[size][0], levels) for one in found)
    assert found[0]["gathered"].tolist() == [[0.0], [1.0], [2.0], [3.0]]


def test_ranks_stay_equal_to_the_last_bit_and_learn_what_they_learn_in_one_level(found):
    for name in ("levels", "flat"):
        for one in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(one[name], found[0][name], strict=True))
    for levels, flat in zip(found[0]["levels"], found[0]["flat"], strict=True):
        torch.testing.assert_close(levels, flat, rtol=0, atol=1e-3)


def test_hosts_that_do_not_fit_are_refused():
    assert problem_of_hosts(["a", "a", "b", "b"]) == problem_of_hosts(["a", "b", "b", "a"]) == ""
    for hosts, words in (
        (["a", "a"], "received 2 on 1"),
        (["a", "b"], "received 1, 1 on 2"),
        (["a", "a", "b"], "received 2, 1 on 2"),
    ):
        assert words in problem_of_hosts(hosts)


def test_one_process_has_no_hosts(capsys):
    assert cli.main(["train", "ppo", "--device", "cpu", "--by-host", "--total-steps", "96", "--num-envs", "4"]) == 1
    assert "--by-host: expected ranks on several hosts, received one process" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_by_command(tmp_path):
    assert run(tmp_path, 3, "uneven_hosts") == {"uneven_hosts": [1, 1, 1]}
    told = "".join(said(tmp_path, "uneven_hosts", rank) for rank in range(3))
    assert told.count("torchrl-perf: ") == 1, told
    assert "by_host: expected as many ranks, at least 2, on each of at least 2 hosts, received 2, 1 on 2" in told
    assert run(tmp_path, 4, "run_by_host") == {"run_by_host": [0] * 4}, said(tmp_path, "run_by_host", 0)
    newest = newest_common(tmp_path / "runs/ppo-CartPole-0", 4)
    assert newest.name == "000000010.pt"
    others = [newest.parent / f"rank{rank}" / newest.name for rank in range(1, 4)]
    first, *rest = (torch.load(path, weights_only=True)["parts"]["actor"] for path in (newest, *others))
    assert all(torch.equal(one[name], first[name]) for one in rest for name in first)
