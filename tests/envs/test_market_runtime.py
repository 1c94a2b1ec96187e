"""What OptionMarket owes to captured, batched and resumed runs."""

import pytest
import torch
from tensordict import TensorDict

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import MarketSettings, OptionMarket
from torchrl_perf.envs.market import option_set
from torchrl_perf.envs.market.columns import flatten, market_parts
from torchrl_perf.envs.market.portfolio import Portfolio, execute, marked, rule_trade, target_trade
from torchrl_perf.envs.market.regime import RegimeMarket
from torchrl_perf.runtime import capture, host_syncs
from torchrl_perf.runtime.compile import compiled

KINDS = ["synthetic", "given"]


def make(kind, rows, device="cpu", **settings):
    if kind == "given":
        moves = torch.randn(3, 150, generator=torch.Generator().manual_seed(0))
        settings |= {"prices": (0.02 * moves).cumsum(-1).exp()}
    return OptionMarket(rows, device=device, **settings)


def assert_close(left, right, **tolerance):
    assert set(left.keys(True, True)) == set(right.keys(True, True))
    for key in left.keys(True, True):
        torch.testing.assert_close(left[key], right[key], **tolerance)


@pytest.mark.parametrize("semantics", ["target", "rules"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_host_reads_with_and_without_ends(kind, semantics):
    for limit in (1, 50):
        env = make(kind, 6, semantics=semantics, observation="both", max_episode_steps=limit)
        options = option_set(env)
        td = env.rand_action(env.reset())
        action, mask = td["action"].clone(), torch.tensor([[True], [False]] * 3)
        age = torch.full((6,), 7)
        with host_syncs("cpu") as report:
            for _ in range(3):
                _, td = env.step_and_maybe_reset(td.set("action", action))
                options.initiation(td)
                options.termination(td.set("option_age", age))
            env._reset(td.set("_reset", mask))
            env._reset(None)
        assert report.total == 0, str(report)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_no_synchronisation_on_cuda(kind):
    env = make(kind, 64, "cuda", max_episode_steps=2)
    td = env.rand_action(env.reset())
    action, mask = td["action"].clone(), torch.arange(64, device="cuda").view(64, 1) % 2 == 0
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            _, td = env.step_and_maybe_reset(td.set("action", action))
        env._reset(td.set("_reset", mask))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", KINDS)
def test_one_env_equals_its_row_of_many(kind, device):
    many, one = make(kind, 300, device, max_episode_steps=30, seed=0), make(kind, 1, device, max_episode_steps=30)
    td = many.reset()
    shocks = [(torch.randn(2, 300, device=device), torch.rand(300, device=device)) for _ in range(12)]
    actions = (2 * torch.rand(12, 300, 1) - 1).to(device)

    def run(env, td, rows):
        log = []
        for action, (normal, uniform) in zip(actions, shocks, strict=True):
            if kind == "synthetic":
                env.market.advance = lambda s, p, n=normal, u=uniform: env.market.step(s, p, n[:, rows], u[rows])
            stepped, td = env.step_and_maybe_reset(td.set("action", action[rows]))
            log.append(stepped["next"])
        return torch.stack(log)

    start = {name: value.clone() for name, value in many.state_dict().items()}
    expected = run(many, td, slice(None))
    for row in (0, 7, 299):
        rows = slice(row, row + 1)
        one.load_state_dict({name: value[rows] for name, value in start.items()})
        ours = run(one, one._root(one._state()), rows)
        for key, value in ours.items():
            theirs = expected[key][:, rows]
            if device.type == "cpu":
                torch.testing.assert_close(value, theirs, rtol=1e-6, atol=1e-7)
            else:
                torch.testing.assert_close(value, theirs, rtol=1e-4, atol=1e-4)


def episodes(step, env, steps=9):
    """The log of a run under one seed; ``step`` is the env's, in any form."""
    env.set_seed(0)
    td, log = env._reset(None), []
    actions = torch.linspace(-1, 1, steps * env.num_envs).view(steps, env.num_envs, 1).to(env.device)
    for action in actions:
        td, root = step(td.set("action", action))
        log.append(td.clone())
        td = root
    return torch.stack(log)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("kind", KINDS)
def test_traced_whole_equals_eager_and_compiles_once(kind):
    options = {"semantics": "rules", "max_episode_steps": 5, "observation": "both"}
    eager, traced = make(kind, 4, **options), make(kind, 4, **options)
    with torch._dynamo.config.patch(error_on_recompile=True):
        step = compiled(traced.step_and_maybe_reset, backend="aot_eager")
        ours = episodes(step, traced)
    theirs = episodes(eager.step_and_maybe_reset, eager)
    assert theirs["next", "done"].any() and not theirs["next", "done"].all()
    assert_close(ours, theirs, rtol=0, atol=0)
    for name, value in eager._state().items():
        assert torch.equal(value, traced._state()[name]), name


def test_parts_agree_in_all_forms(variant):
    """A bar, a trade of either kind and the observation, compiled as one function."""
    device, rows = variant.device, 16
    chosen = MarketSettings(window=3)
    market = RegimeMarket(rows, chosen, torch.float32, device)
    state, price = market.draw()
    normal, uniform = torch.randn(2, rows, device=device), torch.rand(rows, device=device)
    action = torch.linspace(-1, 1, rows, device=device)
    owned = Portfolio.fresh(rows, torch.float32, device)._replace(
        cash=torch.full((rows,), 0.6, device=device), shares=torch.full((rows,), 0.004, device=device), entry=price
    )

    def parts(price, action, normal, uniform, *rest):
        state, owned = dict(zip(names, rest, strict=False)), Portfolio(*rest[len(names) :])
        wanted = target_trade(owned, price, action, chosen), rule_trade(owned, price, action, chosen)
        after, fill = execute(owned, price, sum(wanted) / 2, chosen.cost)
        following, next_price = market.step(state, price, normal, uniform)
        after, equity = marked(after, next_price)
        seen = market_parts(market.window(following), market.signal(following), after, next_price, equity)
        return following, next_price, equity, fill.fee, flatten(seen)

    names = list(state)  # a graph takes tensors alone
    args, run = (price, action, normal, uniform, *state.values(), *owned), variant(parts)
    for _ in range(4):  # a graph is recorded in the third call
        result = run(*args)
    expected = parts(*args)
    assert_close(TensorDict(result[0], [rows]), TensorDict(expected[0], [rows]), rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(result[1:], expected[1:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("compile_it", [False, True])
def test_a_captured_step_equals_eager_between_resets(compile_it, fresh_dynamo):
    options = {"max_episode_steps": 7, "observation": "both", "starts": "first"}
    env, other = make("given", 64, "cuda", **options), make("given", 64, "cuda", **options)
    action = 2 * torch.rand(64, 1, device="cuda") - 1
    root = env.reset().set("action", action)
    step = capture(lambda td: env.step_and_maybe_reset(td)[0].get("next"), compile=compile_it)
    ends = 0
    for _ in range(30):
        other.load_state_dict(env.state_dict())
        expected = other.step(root.clone())["next"]
        nxt = step(root)
        ends += int(nxt["done"].sum())
        for key in ("observation", "technical", "reward", "equity", "traded"):
            torch.testing.assert_close(nxt[key], expected[key], rtol=1e-4, atol=1e-4)
        for name, value in env._state().items():
            torch.testing.assert_close(value, other._state()[name], rtol=1e-4, atol=1e-4)
    assert ends == 4 * 64


@pytest.mark.gpu
def test_a_captured_market_keeps_its_facts(fresh_dynamo):
    env = make("synthetic", 4096, "cuda", max_episode_steps=50, window=2)
    root = env.reset().set("action", torch.zeros(4096, 1, device="cuda"))
    step = capture(lambda td: env.step_and_maybe_reset(td)[0].get("next").select("observation", "done"))
    returns = [step(root)["observation"][:, 23].double() / 100 for _ in range(200)][10:]
    squares = torch.stack(returns).square()
    assert float(squares.mean()) == pytest.approx(2.312e-6, rel=0.05)
    assert float(3.0 * squares.mean().square() / squares.square().mean()) == pytest.approx(3 / 9.28, rel=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_seed_gives_the_same_data_twice(kind, device):
    env = make(kind, 3, device, max_episode_steps=4)
    first = episodes(env.step_and_maybe_reset, env)
    assert_close(first, episodes(env.step_and_maybe_reset, env), rtol=0, atol=0)
    env.set_seed(12)
    assert not torch.equal(env._reset(None)["observation"], first["observation"][0])


@pytest.mark.parametrize("kind", KINDS)
def test_state_dict_resumes_bitwise(kind, tmp_path):
    env = make(kind, 4, seed=0, max_episode_steps=6)
    episodes(env.step_and_maybe_reset, env, 4)
    torch.save(env.state_dict(), tmp_path / "env.pt")
    other = make(kind, 4, seed=9, max_episode_steps=6)
    other.load_state_dict(torch.load(tmp_path / "env.pt", weights_only=True))
    assert all(name.startswith("state_") or name == "elapsed" for name in env.state_dict())
    logs = []
    for each in (env, other):
        each.set_seed(2)
        td, log = each._root(each._state()), []
        for _ in range(9):
            td, root = each.step_and_maybe_reset(td.set("action", torch.full((4, 1), 0.4)))
            log.append(td.clone())
            td = root
        logs.append(torch.stack(log))
    assert_close(*logs, rtol=0, atol=0)


def test_nothing_that_is_returned_changes_later():
    env = make("synthetic", 3, max_episode_steps=2, observation="both", seed=0)
    td = env.reset().set("action", torch.ones(3, 1))
    kept, copies = [], []
    for _ in range(4):
        stepped, td = env.step_and_maybe_reset(td.set("action", torch.ones(3, 1)))
        kept.append(stepped)
        copies.append(stepped.clone())
    for now, then in zip(kept, copies, strict=True):
        assert_close(now, then, rtol=0, atol=0)
    assert stepped["next", "technical"].data_ptr() != td["technical"].data_ptr() != env.state_window.data_ptr()


def test_in_the_device_collector():
    env = make("synthetic", 6, max_episode_steps=7, seed=0)
    data = DeviceCollector(env, None, frames_per_batch=120, mode="eager").collect()
    assert data.batch_size == (6, 20)
    done = data["next", "done"]
    assert torch.equal(data["is_init"][:, 1:], done[:, :-1])
    same = (data["observation"][:, 1:] == data["next", "observation"][:, :-1]).all(-1)
    assert torch.equal(same, ~done[:, :-1].squeeze(-1))
