"""Entries of a state that outlive an episode: left out of the redraw they go on, in every way to end or begin one."""

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import StepCounter, TransformedEnv, check_env_specs

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import EnvSpecs, OptionMarket, StructuredEnv, Transition
from torchrl_perf.runtime import host_syncs

LIMIT = 3


class Clock(StructuredEnv):
    """Two clocks, "hand" of the episode and "total", which goes on, and "start", drawn for each; the action ends it."""

    redrawn = ("hand", "start")

    def __init__(self, num_envs, **options):
        super().__init__(num_envs, **{"max_episode_steps": LIMIT, **options})
        self.begin(0)

    def make_specs(self):
        seen = {"hand": self.unbounded(1), "total": self.unbounded(1), "start": self.unbounded(1)}
        return EnvSpecs(seen, {"action": self.choice(2)}, {"reward": self.unbounded(1)})

    def draw_state(self):
        zero = torch.zeros(self.num_envs, 1, dtype=self.dtype, device=self.device)
        start = torch.rand(self.num_envs, 1, dtype=self.dtype, device=self.device)
        return {"hand": zero, "total": zero + 100.0, "start": start}

    def redraw_state(self, ended):
        drawn = self.draw_state()
        return {name: drawn[name] for name in self.redrawn}

    def advance(self, state, action):
        following = {**state, "hand": state["hand"] + 1, "total": state["total"] + 1}
        return Transition(following, {"reward": torch.zeros_like(state["hand"])}, action == 1)

    def observe(self, state):
        return dict(state)  # views of the state: what is returned must not be its buffers


class Mistaken(Clock):
    """Redraws an entry that does not exist."""

    def redraw_state(self, ended):
        return {**super().redraw_state(ended), "hands": ended, "begin": ended}


def run(env, actions, td=None):
    """The steps under the given actions ``[T, N]``, and the last root."""
    td, log = env.reset() if td is None else td, []
    for action in torch.as_tensor(actions, device=env.device):
        td, root = env.step_and_maybe_reset(td.set("action", action))
        log.append(td.clone())
        td = root
    return torch.stack(log), td


def test_it_goes_on_where_an_episode_ends(device):
    env = Clock(3, device=device)
    check_env_specs(env)
    # row 0 is truncated every third step, row 1 terminates at once, row 2 at its second step
    data, root = run(env, [[0, 1, 0], [0, 1, 1], [0, 1, 0], [0, 1, 1]])
    assert data["hand"].squeeze(-1).tolist() == [[0, 0, 0], [1, 0, 1], [2, 0, 0], [0, 0, 1]]
    assert data["next", "hand"].squeeze(-1).tolist() == [[1, 1, 1], [2, 1, 2], [3, 1, 1], [1, 1, 2]]
    assert data["total"].squeeze(-1).tolist() == [[100.0 + t] * 3 for t in range(4)]
    assert data["next", "total"].squeeze(-1).tolist() == [[101.0 + t] * 3 for t in range(4)]
    assert root["total"].squeeze(-1).tolist() == env.state_total.squeeze(-1).tolist() == [104.0] * 3
    changed = data["start"][1:] != data["start"][:-1]
    assert torch.equal(changed, data["next", "done"][:-1])


def test_a_masked_reset_keeps_it():
    env = Clock(4)
    td = env.reset().set("action", torch.tensor([0, 1, 0, 0]))
    _, root = env.step_and_maybe_reset(td)
    start = env.state_start.clone()
    mask = torch.tensor([[True], [True], [False], [True]])
    out = env.reset(root.set("_reset", mask))
    assert env.state_total.squeeze(-1).tolist() == out["total"].squeeze(-1).tolist() == [101.0] * 4
    assert env.state_hand.squeeze(-1).tolist() == [0.0, 0.0, 1.0, 0.0]
    # row 1 has been reset by the step already
    assert (env.state_start != start).squeeze(-1).tolist() == [True, False, False, True]


def test_a_partial_step_moves_its_own_rows_only():
    env = Clock(4)
    td = env.reset().set("action", torch.tensor([1, 1, 0, 0]))
    start = env.state_start.clone()
    env.step(td.set("_step", torch.tensor([True, False, True, False])))
    assert env.state_total.squeeze(-1).tolist() == [101.0, 100.0, 101.0, 100.0]
    assert env.state_hand.squeeze(-1).tolist() == [0.0, 0.0, 1.0, 0.0]
    assert (env.state_start != start).squeeze(-1).tolist() == [True, False, False, False]


def test_a_full_reset_draws_it_anew():
    env = Clock(2)
    run(env, [[0, 1]] * 5)
    assert env.state_total.squeeze(-1).tolist() == [105.0] * 2
    assert env.reset()["total"].squeeze(-1).tolist() == env.state_total.squeeze(-1).tolist() == [100.0] * 2


def test_nothing_returned_is_internal_or_shared():
    env = Clock(3)
    td, root = env.step_and_maybe_reset(env.reset().set("action", torch.tensor([0, 1, 0])))
    masked = env.reset(TensorDict({"_reset": torch.tensor([[True], [False], [False]])}, [3]))
    tensors = [td["next", "total"], root["total"], masked["total"], env.state_total]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 4
    kept = [tensor.clone() for tensor in tensors[:3]]
    run(env, [[0, 1, 0]] * 4, root.clone())
    assert all(torch.equal(now, then) for now, then in zip(tensors[:3], kept, strict=True))


def test_one_that_is_not_finite_ends_each_episode():
    env = Clock(2)
    env.resets_nonfinite = True
    td = env.reset()
    env.state_total[1] = torch.nan
    data, _ = run(env, [[0, 0]] * 2, td)
    assert data["next", "truncated"].squeeze(-1).tolist() == [[False, True]] * 2
    assert not env.reset()["total"].isnan().any()


@pytest.mark.parametrize("form", ["general", "transformed", "rollout", "eager", "compile"])
def test_in_every_loop(form):
    env = Clock(3)
    if form == "general":  # a preset "next" goes through TorchRL's own bookkeeping
        td, log = env.reset(), []
        for _ in range(7):
            td = td.set("action", torch.zeros(3, dtype=torch.int64))
            td["next"] = TensorDict({"note": torch.ones(3)}, [3])
            td, root = env.step_and_maybe_reset(td)
            log.append(td.clone())
            td = root.exclude("note")
        data = torch.stack(log, 1)
    elif form == "transformed":
        data = TransformedEnv(env, StepCounter(max_steps=2)).rollout(7, break_when_any_done=False)
    elif form == "rollout":
        data = env.rollout(7, break_when_any_done=False)
    else:
        data = DeviceCollector(env, None, frames_per_batch=21, mode=form).collect()
    assert data["next", "done"].any()
    expected = 101.0 + torch.arange(7.0).view(1, 7, 1).expand(3, 7, 1)
    assert torch.equal(data["next", "total"], expected)
    assert torch.equal(data["total"], expected - 1.0)
    assert torch.equal(data["hand"][:, 1:], data["next", "hand"][:, :-1] * ~data["next", "done"][:, :-1])


@pytest.mark.gpu
def test_in_a_captured_collector(fresh_dynamo):
    env = Clock(64, device="cuda")
    collector = DeviceCollector(env, None, frames_per_batch=64 * 4, mode="graph")
    total = torch.cat([collector.collect()["next", "total"].clone() for _ in range(4)], 1)
    assert torch.equal(total.diff(dim=1), torch.ones_like(total[:, 1:]))


def test_no_host_reads():
    env = Clock(3)
    td, action, mask = env.reset(), torch.tensor([0, 1, 0]), torch.tensor([[True], [False], [True]])
    with host_syncs("cpu") as report:
        for _ in range(4):
            _, td = env.step_and_maybe_reset(td.set("action", action))
        env._reset(td.set("_reset", mask))
    assert report.total == 0, str(report)


def test_an_unknown_name_is_refused_at_construction():
    words = r"Mistaken.redraw_state: expected .*\['hand', 'start', 'total'\], received \['begin', 'hands'\].*Remedy"
    with pytest.raises(ValueError, match=words):
        Mistaken(2)


def test_learning_the_names_draws_no_random_number():
    states = []
    for kind in (Clock, type("Whole", (Clock,), {"redraw_state": StructuredEnv.redraw_state})):
        env = kind(3)
        states.append((env.state_start.clone(), torch.get_rng_state()))
    assert all(torch.equal(one, other) for one, other in zip(*states, strict=True))


def test_a_market_is_left_out_where_it_goes_on():
    nobody = torch.zeros(2, 1, dtype=torch.bool)
    own = {"price", "steps", "cash", "shares"}
    env = OptionMarket(2)
    assert own <= env.redraw_state(nobody).keys()
    assert not env.redraw_state(nobody).keys() & {*env.market.entries}
    given = OptionMarket(2, prices=torch.rand(100) + 1.0, max_episode_steps=5)
    assert own | {"bar"} <= given.redraw_state(nobody).keys()


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (0,)])
def test_what_is_not_finite_is_found_in_any_shape(shape):
    class Entry(Clock):
        def draw_state(self):
            return {
                **super().draw_state(),
                "x": torch.zeros(self.num_envs, *shape),
                "n": torch.ones(self.num_envs).long(),
            }

        def observe(self, state):
            return {name: value for name, value in state.items() if name not in ("x", "n")}

    env = Entry(3)
    env.resets_nonfinite = True
    td = env.reset()
    env.state_x[1:2] = torch.inf
    data, _ = run(env, [[0, 0, 0]], td)
    assert data["next", "truncated"].squeeze(-1).tolist() == [[False, bool(env.state_x[0].numel()), False]]


def test_a_state_without_floats_is_always_finite():
    class Whole(Clock):
        def draw_state(self):
            return {name: value.long() for name, value in super().draw_state().items()}

        def observe(self, state):
            return {name: value.to(self.dtype) for name, value in state.items()}

    env = Whole(2)
    env.resets_nonfinite = True
    data, _ = run(env, [[0, 1], [0, 0]])
    assert data["next", "done"].squeeze(-1).tolist() == [[False, True], [False, False]]
