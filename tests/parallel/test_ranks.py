"""Two and three processes with gloo: equal to the last bit, and to one process with all rows but for rounding."""

import math
import signal

import pytest
import rank_checks
import torch
from rank_processes import results, run, said

from torchrl_perf.functional.moments import moments_of
from torchrl_perf.parallel import Ranks, SharedGradients
from torchrl_perf.registry import SYSTEMS
from torchrl_perf.trainers.optim.optimization import GuardedAdam

CHECKS = (
    *("shared_gradients", "uneven_parts", "nan_on_one_rank", "merged_moments", "agreements"),
    *("joint_updates", "sharded_draws", "equal_ranks"),
)


@pytest.fixture(scope="module", params=[2, 3], ids=lambda ranks: f"{ranks}-ranks")
def left(request, tmp_path_factory):
    """What two and three ranks left, by check."""
    folder, ranks = tmp_path_factory.mktemp("ranks"), request.param
    codes = run(folder, ranks, *CHECKS)
    assert all(code == 0 for of_check in codes.values() for code in of_check), {
        check: said(folder, check, rank)
        for check, of_check in codes.items()
        for rank, code in enumerate(of_check)
        if code
    }
    return {check: results(folder, check, ranks) for check in CHECKS}


def equal(one, other):
    """Whether tensors are equal to the last bit."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", [torch.optim.Adam, GuardedAdam], ids=["adam", "guarded"])
def test_own_loop_equals_one_process_with_all_rows(left, kind):
    found = [each[kind.__name__] for each in left["shared_gradients"]]
    assert all(equal(one["start"], found[0]["start"]) and equal(one["end"], found[0]["end"]) for one in found)
    rows = rank_checks.joint_numbers(12, 5)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    assert equal(found[0]["start"], model.parameters())
    optimizer, losses = kind(model.parameters(), lr=1e-2), []
    for _ in range(5):
        loss = model(rows).square().mean()
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
    torch.testing.assert_close(found[0]["end"], [*model.parameters()], rtol=0, atol=1e-5)
    torch.testing.assert_close(found[0]["loss"], torch.stack(losses), rtol=1e-5, atol=1e-6)


def test_weights_make_the_mean_of_uneven_parts_that_of_all_rows(left):
    found = left["uneven_parts"]
    rows = rank_checks.joint_numbers(sum([5, 1, 3][: len(found)]), 5)
    weight = torch.nn.Parameter(rank_checks.joint_numbers(5, seed=1))
    loss = (rows @ weight).square().mean()
    loss.backward()
    for one in found:
        torch.testing.assert_close(one["gradient"], weight.grad)
        torch.testing.assert_close(one["loss"], loss.detach())
        assert one["without_first"].isfinite()


def test_no_rank_steps_where_one_has_nan(left):
    for one in left["nan_on_one_rank"]:
        assert equal(one["before"], one["after"])


def test_moments_are_those_of_all_rows(left):
    expected = moments_of(rank_checks.joint_numbers(24, 3) + 1e4)
    found = left["merged_moments"]
    assert all(equal(one, found[0]) for one in found)
    torch.testing.assert_close(tuple(found[0]), tuple(expected), rtol=1e-12, atol=1e-9)


def test_values_are_agreed_on(left):
    found = left["agreements"]
    ranks = len(found)
    for one in found:
        assert one["values"] == [rank**2 for rank in range(ranks)]
        assert (one["any"], one["all"], one["of_first"]) == (True, False, "made by 0")
        assert one["gathered"].tolist() == [[float(rank), math.inf] for rank in range(ranks)]


@pytest.mark.parametrize("name", ["ppo", "pqn", "dqn", "rainbow", "iqn", "sac", "td3"])
def test_ranks_stay_equal_to_the_last_bit(left, name):
    assert len({one[name] for one in left["equal_ranks"]}) == 1


@pytest.fixture(scope="module")
def alone():
    """The same updates by one process, of the joint rows."""
    return rank_checks.joint_updates(Ranks.alone())


@pytest.mark.parametrize("name", ["ppo", "dqn", "ddpg"])
def test_updates_equal_those_of_one_process_with_all_rows(left, alone, name):
    found = [one[name] for one in left["joint_updates"]]
    assert all(equal(one, found[0]) for one in found)
    # sums of float32 in another order, in three updates by Adam, which divides small gradients by their own size
    torch.testing.assert_close(found[0], alone[name], rtol=0, atol=2e-5)


def test_weighted_draws_of_shards_are_draws_of_the_whole_replay(left):
    found = left["sharded_draws"]
    priority = torch.stack([one["priority"] for one in found]).double()
    drawn = torch.stack([
        torch.zeros(32, dtype=torch.float64).index_add_(0, one["slot"], one["weight"].double()) for one in found
    ])  # fmt: skip
    total = drawn.sum()
    expected = priority / priority.sum() * total
    # a weighted count of a shard has the variance of its draws times the square of their weight
    weight = torch.stack([one["weight"][0] for one in found]).double().unsqueeze(-1)
    assert all((one["weight"] == one["weight"][0]).all() for one in found)
    chi_square = ((drawn - expected).square() / (expected * weight)).sum().item()
    degrees = drawn.numel() - len(found)  # each rank's number of draws is fixed
    assert abs(chi_square - degrees) < 5 * math.sqrt(2 * degrees)
    uncorrected = torch.stack([torch.bincount(one["slot"], minlength=32) for one in found]).double()
    wrong = priority / priority.sum() * uncorrected.sum()
    assert ((uncorrected - wrong).square() / wrong).sum() > 20 * degrees


def test_a_process_alone_changes_nothing():
    weight = torch.nn.Parameter(torch.ones(3))
    (weight * 2).sum().backward()
    gradient, loss = weight.grad, torch.tensor(1.0)
    shared = SharedGradients([weight])
    assert shared.mean_(loss)[0] is loss
    assert weight.grad is gradient


def test_a_frozen_parameter_does_not_decay(monkeypatch):
    ranks = Ranks.alone()
    ranks.size = 2  # the other one has the same gradients
    monkeypatch.setattr(ranks, "summed", lambda values: values.mul_(2.0))
    monkeypatch.setattr(ranks, "broadcast_", lambda parts: None)
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    net[0].requires_grad_(False)
    shared = SharedGradients(net.parameters(), ranks=ranks)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)
    before = [param.detach().clone() for param in net.parameters()]
    net(torch.ones(2, 3)).sum().backward()
    gradient = net[1].weight.grad.clone()
    shared.mean_()
    torch.testing.assert_close(net[1].weight.grad, gradient)
    optimizer.step()
    assert [torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True)] == [True, True, False, False]


def test_what_cannot_be_averaged_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="expected parameters on one device, received 0"):
        SharedGradients([])
    with pytest.raises(ValueError, match=r"expected real floating-point parameters, received torch\.complex64"):
        SharedGradients([torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    ranks = Ranks.alone()
    ranks.size = 2
    monkeypatch.setattr(ranks, "broadcast_", lambda parts: None)
    shared = SharedGradients([torch.nn.Parameter(torch.ones(3))], ranks=ranks)
    with pytest.raises(ValueError, match=r"expected floating-point numbers to average, received torch\.bool, torch\.i"):
        shared.mean_(torch.tensor(1.0), torch.tensor(True), torch.tensor(3))


def test_shares_of_a_run(tmp_path):
    assert run(tmp_path, 2, "uneven_envs", "bad_settings", "other_settings", "lost_at_the_beginning") == {
        "uneven_envs": [0, 0],
        "bad_settings": [1, 1],
        "other_settings": [1, 1],
        "lost_at_the_beginning": [1, -signal.SIGKILL],
    }
    problems = results(tmp_path, "uneven_envs", 2)
    assert "num_envs: expected a multiple of the 2 ranks, received 7. Remedy: num_envs=6" in problems[0]
    expected = {"bad_settings": "gamma: expected a number in [0, 1]", "other_settings": "on rank 1"}
    expected["lost_at_the_beginning"] = "expected all 2 to begin the run, received at rank 0"
    for check, words in expected.items():
        told = [said(tmp_path, check, rank) for rank in range(2)]
        assert sum(text.count("torchrl-perf: ") for text in told) == 1, told
        assert words in "".join(told)
        assert "Traceback" not in "".join(told)


@pytest.mark.slow
def test_ranks_of_every_system_stay_equal(tmp_path):
    codes = run(tmp_path, 2, "equal_systems", timeout=900)
    assert codes == {"equal_systems": [0, 0]}, said(tmp_path, "equal_systems", 0) + said(tmp_path, "equal_systems", 1)
    one, other = results(tmp_path, "equal_systems", 2)
    assert {name.split()[0] for name in one} == {"ac-iqn", "sac-options", *SYSTEMS}
    assert {"options-market critic", "options-market returns 96 False"} <= set(one)
    assert one == other
