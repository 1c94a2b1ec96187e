"""HybridTarget: specs, dynamics by hand, and a closed-form optimum that no plan beats."""

import itertools

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs.utils import check_env_specs

from torchrl_perf.envs import HybridTarget
from torchrl_perf.runtime import no_host_sync

F64 = torch.float64


def with_action(td, axis, displacement):
    td["action", "discrete"] = axis
    td["action", "continuous"] = displacement
    return td


def test_specs(device):
    env = HybridTarget(3, device=device)
    check_env_specs(env)
    assert set(env.action_keys) == {("action", "discrete"), ("action", "continuous")}


def test_dynamics_by_hand():
    env = HybridTarget(1)
    state = torch.tensor([[0.5, -0.25], [0.5, -0.25], [0.5, -0.25]])
    action = torch.tensor([[0.0, -0.5, 0.5], [1.0, -0.5, 0.25], [0.0, 9.0, 0.0]])  # the last is clipped to .5
    position, reward, terminated = env.dynamics(state, action)
    assert position.tolist() == [[0.0, -0.25], [0.5, 0.0], [1.0, -0.25]]
    assert reward.tolist() == [-0.25, -0.5, -1.25]
    assert not terminated.any()


def test_the_best_policy_gets_the_optimal_return():
    env = HybridTarget(500, dtype=F64)
    td = env.reset()
    best, total = env.optimal_return(td["observation"]), 0.0
    for _ in range(8):
        td, following = env.step_and_maybe_reset(with_action(td, *env.optimal_action(td["observation"])))
        total = total + td["next", "reward"].squeeze(-1)
        td = following
    torch.testing.assert_close(total, best)
    assert td["is_init"].all()


def test_no_plan_on_a_grid_beats_it():
    """All plans of 3 moves in steps of a quarter, from some states of the grid."""
    env = HybridTarget(1, dtype=F64)
    moves = [(axis, step) for axis in (0, 1) for step in (-0.5, -0.25, 0.0, 0.25, 0.5)]
    plans = torch.tensor(list(itertools.product(moves, repeat=3)), dtype=F64)  # [P, 3, 2]
    for start in ((1.0, 0.75), (-0.5, 0.25), (0.25, 0.0), (-0.75, -0.75)):
        state = torch.tensor([start], dtype=F64).expand(len(plans), 2)
        best, total = env.optimal_return(state[0], steps=3), 0.0
        for axis, step in (plans[:, t].unbind(-1) for t in range(3)):
            action = torch.stack([axis, step, step], -1)
            state, reward, _ = env.dynamics(state, action)
            total = total + reward
        assert total.max().item() == pytest.approx(best.item())


def test_mean_optimum_and_what_standing_still_gets():
    grid = (torch.arange(400, dtype=F64) + 0.5) / 200 - 1
    states = torch.cartesian_prod(grid, grid)
    assert HybridTarget.optimal_return(states).mean().item() == pytest.approx(-19 / 24, abs=1e-4)
    assert (-8 * states.abs().sum(-1)).mean().item() == pytest.approx(-8.0)
    assert HybridTarget.optimal_return(torch.tensor([1.0, 1.0])).item() == pytest.approx(-(1.5 + 1.0 + 0.5))
    assert HybridTarget.optimal_return(torch.zeros(2)).item() == 0.0


def test_step_makes_no_host_read(device):
    env = HybridTarget(4, device=device)
    td = with_action(env.reset(), torch.zeros(4, dtype=torch.int64), torch.zeros(4, 2))
    td = td.to(device)
    with no_host_sync(device):
        env.step_and_maybe_reset(td)


@pytest.mark.parametrize(
    ("axis", "displacement", "message"),
    [
        (torch.zeros(4), torch.zeros(4, 2), r"'discrete'\) \(4,\) of integers, received \(4,\) torch.float32"),
        (torch.zeros(4, dtype=torch.int64), torch.zeros(4, 1), r"'continuous'\) \(4, 2\) of floats, received \(4, 1\)"),
    ],
)
def test_bad_actions(axis, displacement, message):
    env = HybridTarget(4)
    with pytest.raises(ValueError, match=message):
        env._step(with_action(env.reset(), axis, displacement))


def test_missing_action():
    with pytest.raises(KeyError, match=r"expected \('action', 'discrete'\), received .*run a policy that writes it"):
        HybridTarget(4)._step(TensorDict({"observation": torch.zeros(4, 2)}, [4]))
