"""Loops of one's own: ranks end with the same parameters, captured and not, and with TorchRL's parts."""

import pytest
import torch
from rank_processes import results, run, said


def test_a_script_of_torchrls_parts_learns_one_policy(tmp_path):
    checks = "own_loops.torchrl_script", "own_loops.targets"
    assert run(tmp_path, 2, *checks) == {key: [0, 0] for key in checks}, [said(tmp_path, check, 0) for check in checks]
    one, other = results(tmp_path, "own_loops.torchrl_script", 2)
    assert one["after"] == other["after"] != one["before"] == other["before"]
    assert torch.equal(one["losses"], other["losses"])
    assert not torch.equal(one["observed"], other["observed"]), "each has envs of its own"
    one, other = results(tmp_path, "own_loops.targets", 2)
    assert len(one["ranks"]) > 7, "networks and their targets"
    assert all(map(torch.equal, one["ranks"], other["ranks"]))
    torch.testing.assert_close(one["ranks"], one["alone"])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_example_learns_one_policy_captured_or_not(tmp_path, ranks):
    assert run(tmp_path, ranks, "own_loops.example") == {"own_loops.example": [0] * ranks}, said(
        tmp_path, "own_loops.example", 0
    )
    found = results(tmp_path, "own_loops.example", ranks)
    assert all(one == found[0] for one in found)
    eager, captured = found[0]["parameters"]
    assert eager == captured
    assert len(set(found[0]["returns"])) == 1
    assert "mean return of the last episodes of each rank" in said(tmp_path, "own_loops.example", 0)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_are_equal_to_the_last_bit_after_many_updates(tmp_path, ranks):
    assert run(tmp_path, ranks, "own_loops.many_updates") == {"own_loops.many_updates": [0] * ranks}, said(
        tmp_path, "own_loops.many_updates", 0
    )
    found = results(tmp_path, "own_loops.many_updates", ranks)
    assert set(found[0]) == {"own", "ppo"}
    assert all(one == found[0] for one in found)
