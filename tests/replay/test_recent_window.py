"""RecentWindow against Python deques, and BoundedHistory."""

import copy
import math
import pickle
from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import Bounded, Composite, Unbounded

from torchrl_perf.replay import BoundedHistory, RecentWindow
from torchrl_perf.runtime import no_host_sync


def make_step(N, t, device="cpu"):
    """Identifiable: observation = 10 * t + env + 1, frame = t % 256."""
    env = torch.arange(N, device=device)
    observation = (10 * t + env + 1).float().unsqueeze(-1).repeat(1, 2)
    frame = torch.full((N, 2, 2), t % 256, dtype=torch.uint8, device=device)
    return TensorDict({"observation": observation, "pixels": {"frame": frame}, "flag": env % 2 == t % 2}, [N])


class Deques:
    """The last L steps of each environment, as lists that restart with each episode."""

    def __init__(self, num_envs, length):
        self.steps = [deque(maxlen=length) for _ in range(num_envs)]
        self.length = length

    def append(self, step, reset=None):
        for env, steps in enumerate(self.steps):
            if reset is not None and reset[env]:
                steps.clear()
            steps.append(step[env].clone())

    def check(self, view):
        for env, steps in enumerate(self.steps):
            missing = self.length - len(steps)
            assert view["mask"][env].tolist() == [False] * missing + [True] * len(steps)
            for key in ("observation", ("pixels", "frame"), "flag"):
                padding = torch.zeros_like(view[key][env][:missing])
                expected = torch.cat([padding, *(step[key].unsqueeze(0).to(view.device) for step in steps)])
                assert view[key][env].equal(expected)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(1, 6), st.integers(0, 15), st.sampled_from([0.0, 0.3, 1.0]))
def test_equals_deques(N, length, steps, p_reset):
    window, reference = RecentWindow(length, make_step(N, 0)), Deques(N, length)
    reference.check(window.view())
    for t in range(steps):
        step, reset = make_step(N, t), torch.rand(N) < p_reset
        window.append(step, reset.unsqueeze(-1) if t % 2 else reset)
        reference.append(step, reset)
        reference.check(window.view())


def test_variants_equal_deques(variant):
    """Eager, compiled and captured: append and view of one step."""
    window, reference = RecentWindow(3, make_step(2, 0, variant.device)), Deques(2, 3)
    static, reset = make_step(2, 0, variant.device), torch.zeros(2, dtype=torch.bool, device=variant.device)

    def step():
        window.append(static, reset)
        return window.view()

    run = variant(step)
    for t in range(8):
        static.update_(make_step(2, t, variant.device))
        reset[1] = t == 4
        reference.append(static.clone(), reset.tolist())
        reference.check(run())


def test_no_host_wait_and_one_view(device):
    window = RecentWindow(4, make_step(3, 0, device))
    step, reset = make_step(3, 1, device), torch.zeros(3, 1, dtype=torch.bool, device=device)
    view = window.view()
    pointers = [leaf.data_ptr() for leaf in view.values(True, True)]
    with no_host_sync():
        window.append(step, reset)
        assert window.view() is view
    assert [leaf.data_ptr() for leaf in view.values(True, True)] == pointers
    assert view.names == [None, "time"]


@pytest.mark.gpu
def test_no_memory_is_allocated():
    window = RecentWindow(20, make_step(64, 0, "cuda"))
    step, reset = make_step(64, 1, "cuda"), torch.zeros(64, dtype=torch.bool, device="cuda")
    window.append(step, reset)
    window.view()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(10):
        window.append(step, reset)
        window.view()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_steps_are_copies_without_a_graph():
    window = RecentWindow(2, TensorDict({"x": torch.zeros(1)}, [1]))
    x = torch.ones(1, requires_grad=True)
    window.append(TensorDict({"x": x * 2}, [1]))
    view = window.view()
    with torch.no_grad():
        x.zero_()
    assert view["x"].tolist() == [[0, 2]]
    assert not view["x"].requires_grad


def test_bad_numbers_of_an_older_episode_do_not_show():
    window = RecentWindow(3, TensorDict({"x": torch.zeros(1)}, [1]))
    window.append(TensorDict({"x": torch.tensor([math.nan])}, [1]))
    window.append(TensorDict({"x": torch.tensor([1.0])}, [1]), torch.tensor([True]))
    assert window.view()["x"].tolist() == [[0, 0, 1]]


def test_made_from_a_spec():
    spec = Composite(obs=Unbounded((4, 3)), action=Bounded(-1, 1, (4, 2), dtype=torch.float64), shape=(4,))
    view = RecentWindow(5, spec).view()
    assert view["obs"].shape == (4, 5, 3)
    assert view["action"].dtype == torch.float64


def test_clear_hides_every_step():
    window = RecentWindow(3, make_step(2, 0))
    window.append(make_step(2, 1))
    window.clear()
    assert not window.view()["mask"].any()
    assert not window.view()["observation"].any()


def test_state_goes_on_exactly():
    window, other = RecentWindow(3, make_step(2, 0)), RecentWindow(3, make_step(2, 0))
    for t in range(4):
        window.append(make_step(2, t), torch.tensor([t == 3, False]))
    other.load_state_dict(copy.deepcopy(window.state_dict()))
    for each in (window, other):
        each.append(make_step(2, 9))
    assert (window.view() == other.view()).all()


class TestErrors:
    @pytest.mark.parametrize("length", [0, -1])
    def test_length(self, length):
        with pytest.raises(ValueError, match="at least 1"):
            RecentWindow(length, make_step(2, 0))

    @pytest.mark.parametrize(
        "example", [TensorDict({}, [2]), TensorDict({"mask": torch.ones(2)}, [2]), TensorDict({"x": torch.ones(2)}, [])]
    )
    def test_example(self, example):
        with pytest.raises(ValueError, match="batch size"):
            RecentWindow(2, example)

    def test_step(self):
        window = RecentWindow(2, make_step(2, 0))
        with pytest.raises(KeyError, match="observation"):
            window.append(make_step(2, 0).exclude("observation"))
        with pytest.raises(ValueError, match="float64"):
            window.append(make_step(2, 0).apply(lambda leaf: leaf.double()))
        with pytest.raises(ValueError, match=r"\[3, 2\]"):
            window.append(make_step(3, 0))

    def test_state_of_another_window(self):
        with pytest.raises(ValueError, match="shapes"):
            RecentWindow(2, make_step(2, 0)).load_state_dict(RecentWindow(3, make_step(2, 0)).state_dict())


class TestBoundedHistory:
    def test_keeps_the_newest(self):
        history = BoundedHistory(maxlen=3)
        for number in range(5):
            history.append(float(number))
        assert list(history) == [2, 3, 4]
        assert history[-1] == 4
        assert history[-2:] == [3, 4]
        assert history.mean() == 3
        assert history.mean(last=2) == 3.5
        assert history.mean(last=9) == 3

    def test_empty_mean_is_nan(self):
        assert math.isnan(BoundedHistory().mean())

    def test_state_and_copies(self):
        history = BoundedHistory([1.0, 2.0, 3.0], maxlen=3)
        smaller = BoundedHistory(maxlen=2)
        smaller.load_state_dict(history.state_dict())
        assert list(smaller) == [2, 3]
        for copied in (copy.copy(history), pickle.loads(pickle.dumps(history))):
            assert list(copied) == [1, 2, 3]
            assert copied.maxlen == 3

    def test_no_bound_is_refused(self):
        with pytest.raises(ValueError, match="maxlen"):
            BoundedHistory(maxlen=0)
