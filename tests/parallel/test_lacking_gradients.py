"""A parameter without a gradient on any rank is left alone, as in one process; one that has it on some is not."""

import lacking_gradients as checks
import pytest
import torch
from rank_processes import results, run, said

FUNCTIONS = ("own_loop", "trainers", "other_networks")


@pytest.fixture(scope="module", params=[2, 3], ids=lambda ranks: f"{ranks}-ranks")
def left(request, tmp_path_factory):
    """What two and three ranks left, by check."""
    folder, ranks = tmp_path_factory.mktemp("lacking"), request.param
    names = [f"lacking_gradients.{name}" for name in FUNCTIONS]
    codes = run(folder, ranks, *names)
    assert all(code == 0 for of_check in codes.values() for code in of_check), [
        said(folder, name, rank) for name in names for rank in range(ranks)
    ]
    return {short: results(folder, name, ranks) for short, name in zip(FUNCTIONS, names, strict=True)}


def alone(kind, ranks, numbers):
    """Parameters that one process has of the rows of all ranks."""
    params = checks.made()
    optimizer = kind(params.values())
    parts = checks.joint_numbers(12, 5, seed=9).chunk(ranks)
    for number in numbers:
        optimizer.zero_grad()
        losses = [checks.loss_of(params, rows, number, rows is parts[-1]) for rows in parts]
        torch.stack(losses).mean().backward()
        optimizer.step()
    return {name: value.detach() for name, value in params.items()}


@pytest.mark.parametrize("weighted", [False, True], ids=["even", "weighted"])
@pytest.mark.parametrize("kind", list(checks.KINDS))
def test_a_loop_equals_one_process(left, kind, weighted):
    found = [one[f"{kind}-{weighted}"] for one in left["own_loop"]]
    expected, start = alone(checks.KINDS[kind], len(found), range(checks.UPDATES)), checks.made()
    for one in found:
        torch.testing.assert_close(one, expected, rtol=0, atol=1e-5)
        assert all(torch.equal(one[name], found[0][name]) for name in checks.NAMES)
        same = [name for name in checks.NAMES if torch.equal(one[name], start[name])]
        assert same == ["never", "frozen"]


def test_a_captured_loop_does_too(left):
    found = [one["captured"] for one in left["own_loop"]]
    expected = alone(checks.KINDS["GuardedAdam"], len(found), [0] * 4)
    for one in found:
        torch.testing.assert_close(one, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_trainers_leave_it_alone(left, name):
    for one in left["trainers"]:
        assert one[name]["moved"]
        assert torch.equal(one[name]["spare"], torch.ones(3)), "no loss depends on it"
        assert (one[name]["frozen"] == 1.0).all()


def test_other_networks_are_refused_by_one_message(left):
    first, *others = (told.splitlines() for told in left["other_networks"])
    assert [line.split(":")[0] for line in first] == ["ValueError"] * 3
    assert all(line.startswith("RankStoppedError") for told in others for line in told)
    assert "((3,), 'torch.float32') for number 0 as rank 0 has them, received ((4,), 'torch.float32')" in first[0]
    assert "received ((3,), 'torch.float64') on rank 1" in first[1]
    assert "2 of them as rank 0 has them, received 1 of them on rank 1" in first[2]
