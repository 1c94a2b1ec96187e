"""OptionMarket as an env: specs, keys, columns, ends, starts, and what bad input gets."""

import gzip
import importlib
import math
import sys

import pytest
import torch
from torchrl.envs.utils import check_env_specs

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import OptionMarket, RegimeSettings
from torchrl_perf.envs.market import PARTS, column_names, flatten, reading, sp500
from torchrl_perf.envs.market.indicators import WARM_BARS


def series(bars=120, count=2, dtype=torch.float64):
    return (0.01 * torch.randn(count, bars, dtype=torch.float64)).cumsum(-1).exp().to(dtype) * 50


def hold(env, value=0.0):
    action = torch.full((env.num_envs, 1), value, dtype=env.dtype, device=env.device)
    return lambda td: td.set("action", action)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("observation", ["flat", "dict", "both"])
@pytest.mark.parametrize("given", [False, True])
def test_specs(observation, dtype, given, device):
    prices = series() if given else None
    limit = None if given else 672
    env = OptionMarket(
        3, prices=prices, observation=observation, dtype=dtype, max_episode_steps=limit, device=device, seed=0
    )
    check_env_specs(env)


def test_keys_and_columns():
    batch = OptionMarket(2, observation="both", seed=0).rollout(3, break_when_any_done=False)
    shapes = {key: tuple(value.shape) for key, value in batch.items(True, True)}
    assert shapes["observation"] == shapes["next", "observation"] == (2, 3, 578)
    assert shapes["technical"] == (2, 3, 24, 23)
    assert [shapes[name][-1] for name in ("sentiment", "position", "portfolio", "regime")] == [3, 5, 8, 10]
    assert shapes["equity"] == shapes["price"] == shapes["next", "reward"] == shapes["next", "traded"] == (2, 3, 1)
    flat = flatten({name: batch[name].flatten(0, 1) for name in PARTS})
    assert torch.equal(flat.view(2, 3, -1), batch["observation"])
    names = column_names()
    assert len(names) == len(set(names)) == 578
    assert names[:2] == ["technical/23/return_1", "technical/23/return_5"]
    last = names.index("technical/0/rsi14")
    assert torch.equal(batch["observation"][..., last], batch["technical"][..., -1, 12])
    size = names.index("position/size")
    assert torch.equal(batch["observation"][..., size], batch["position"][..., 4])
    assert names[-1] == "regime/downtrend"
    assert torch.equal(reading(batch).size, reading(batch.select("observation")).size)
    torch.testing.assert_close(batch["sentiment"].sum(-1), torch.ones(2, 3))
    assert len(column_names(10)) == 256 == OptionMarket(1, window=10).observation_spec["observation"].shape[-1]


def test_the_window_moves_by_one_bar():
    batch = OptionMarket(3, observation="dict", seed=0).rollout(5, break_when_any_done=False)
    assert torch.equal(batch["next", "technical"][:, :, :-1], batch["technical"][:, :, 1:])
    assert torch.equal(batch["technical"][:, 1:], batch["next", "technical"][:, :-1])


def test_time_limit_and_a_market_that_goes_on():
    env = OptionMarket(3, max_episode_steps=4, observation="dict", seed=0)
    batch = DeviceCollector(env, hold(env, 0.7), frames_per_batch=24, total_frames=24).collect()
    assert batch["next", "truncated"][..., 0].tolist() == [[False, False, False, True] * 2] * 3
    assert not batch["next", "terminated"].any()
    assert batch["is_init"][:, 4].all()
    # the final observation has the position, the next root the capital in cash at the price 100, in the same market
    assert (batch["next", "position"][:, 3, 0] == 1).all()
    assert not batch["position"][:, 4].any()
    assert (batch["price"][:, 4] == 100).all() and (batch["equity"][:, 4] == 1).all()
    assert torch.equal(batch["technical"][:, 4], batch["next", "technical"][:, 3])
    assert (batch["next", "portfolio"][:, 3, -1] == 1).all()
    assert not batch["portfolio"][:, 4, -1].any()
    # rows of one collector have markets of their own
    assert not torch.equal(batch["technical"][0], batch["technical"][1])


def test_a_masked_reset():
    env = OptionMarket(3, seed=0)
    td = env.reset()
    for _ in range(3):
        _, td = env.step_and_maybe_reset(td.set("action", torch.ones(3, 1)))
    before = {name: value.clone() for name, value in env._state().items()}
    td = env.reset(td.set("_reset", torch.tensor([[True], [False], [True]])))
    assert env.state_steps.tolist() == [0, 3, 0]
    assert env.state_shares.ne(0).tolist() == [False, True, False]
    for name, value in env._state().items():
        assert torch.equal(value[1], before[name][1]), name
    assert torch.equal(env.state_path, before["path"])
    assert (td["equity"][[0, 2]] == 1).all()


def test_rows_outside_a_partial_step_stay():
    env = OptionMarket(3, seed=0)
    td = env.reset().set("action", torch.ones(3, 1)).set("_step", torch.tensor([True, False, True]))
    before = {name: value.clone() for name, value in env._state().items()}
    env.step(td)
    for name, value in env._state().items():
        assert torch.equal(value[1], before[name][1]), name
    assert env.state_steps.tolist() == [1, 0, 1]


def test_starts_in_given_prices():
    prices = series(200, 3)
    env = OptionMarket(5, prices=prices, starts="first", max_episode_steps=10, dtype=torch.float64)
    first = WARM_BARS + 23
    assert torch.equal(env.reset()["price"].squeeze(-1), prices[[0, 1, 2, 0, 1], first])
    env = OptionMarket(600, prices=prices, max_episode_steps=10, dtype=torch.float64, seed=0)
    env.reset()
    bars = env.state_bar
    assert (bars // 200).bincount().tolist() == pytest.approx([200] * 3, abs=45)
    start = bars % 200
    assert int(start.min()) == first
    assert int(start.max()) == 199 - 10  # the last episode ends with the data
    batch = env.rollout(25, hold(env), break_when_any_done=False)
    assert (batch["next", "truncated"].squeeze(-1).sum(-1) == 2).all()
    whole = OptionMarket(1, prices=prices[0], max_episode_steps=None)
    assert whole.max_episode_steps == 199 - first
    batch = whole.rollout(500, hold(whole))
    assert batch.shape[1] == 199 - first
    assert batch["next", "price"][0, -1, 0] == prices[0, -1].float()


def test_a_given_sentiment():
    prices = series(80, 1)[0]
    sentiment = torch.linspace(0.0, 1.0, 80, dtype=torch.float64)
    options = {"starts": "first", "max_episode_steps": None, "observation": "dict", "dtype": torch.float64}
    env = OptionMarket(1, prices=prices, sentiment=sentiment, **options)
    batch = env.rollout(100, hold(env))
    seen = batch["next", "regime"][0, :, 0]
    torch.testing.assert_close(seen, sentiment[WARM_BARS + 24 :], rtol=0, atol=2e-6)
    assert batch["next", "sentiment"].isfinite().all()
    assert (OptionMarket(1, prices=prices, **options).reset()["regime"][..., :2] == torch.tensor([0.5, 0.0])).all()


@pytest.mark.parametrize("semantics", ["target", "rules"])
def test_an_action_that_is_not_a_number_and_one_beyond_the_bounds(semantics):
    env = OptionMarket(3, semantics=semantics, seed=0)
    td = env.reset().set("action", torch.tensor([[math.nan], [1.0], [math.inf]]))
    nxt = env.step(td)["next"]
    assert nxt["traded"][0] == 0
    assert nxt["traded"][1] == nxt["traded"][2] > 0.3
    assert all(value.isfinite().all() for value in nxt.values(True, True))


BAD_PRICES = [
    (torch.tensor([1.0, math.nan] * 60), r"received 60 others, the first one nan at series 0, bar 1"),
    (torch.full((2, 100), 5.0).index_fill(1, torch.tensor(7), 0.0), "received 2 others.* 0.0 at series 0, bar 7"),
    (torch.full((100,), math.inf), "expected finite closes > 0, received 100 others"),
    (torch.ones(2, 3, 100), r"expected closes \[T\] or \[S, T\] .* received \[2, 3, 100\]"),
    (torch.ones(0), r"received \[0\]"),
    (torch.ones(64), "expected at least 65 bars, 40 before the window of 24 and one after it, received 64"),
]


@pytest.mark.parametrize(("prices", "words"), BAD_PRICES)
def test_bad_prices(prices, words):
    with pytest.raises(ValueError, match=words):
        OptionMarket(2, prices=prices, max_episode_steps=None)


def test_prices_of_another_kind():
    with pytest.raises(TypeError, match=r"expected a float tensor .* received torch.int64 \[100\]"):
        OptionMarket(2, prices=torch.arange(1, 101))
    with pytest.raises(TypeError, match="received list"):
        OptionMarket(2, prices=[1.0] * 100)


def test_an_episode_or_a_window_longer_than_the_data():
    with pytest.raises(ValueError, match=r"expected at most 36, which 100 bars leave .* received 672.*steps=36"):
        OptionMarket(2, prices=torch.ones(100))
    with pytest.raises(ValueError, match=r"expected at least 241 bars, 40 before the window of 200 .*shorter window"):
        OptionMarket(2, prices=torch.ones(100), window=200, max_episode_steps=1)
    OptionMarket(2, prices=torch.ones(100), max_episode_steps=36)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"semantics": "order"}, r"semantics: expected one of \('target', 'rules'\), received 'order'"),
        ({"reward": "pnl"}, "reward: expected one of"),
        ({"observation": "pixels"}, "observation: expected one of"),
        ({"starts": "last"}, "starts: expected one of"),
        ({"window": 0}, "window: expected an int >= 1, received 0"),
        ({"commission": -0.1}, r"commission: expected a number in \[0, 1\)"),
        ({"max_weight": 0}, "max_weight: expected a number > 0"),
        ({"ruin": 1.0}, "ruin: expected less than 1"),
        ({"commission": 0.5, "max_weight": 2.0}, "expected costs below 1 / max_weight"),
        ({"sentiment": torch.ones(3)}, "sentiment: expected None without prices"),
        ({"prices": torch.ones(800), "sentiment": torch.ones(3)}, r"shape of the prices, \[800\]"),
        ({"regime": None}, "regime: expected a RegimeSettings"),
        ({"num_envs": 0}, "num_envs >= 1"),
    ],
)
def test_bad_settings(settings, words):
    with pytest.raises(ValueError, match=words):
        OptionMarket(**{"num_envs": 2, **settings})


def test_unknown_setting():
    with pytest.raises(TypeError, match=r"expected settings among .*'commission'.* received \['fee'\]"):
        OptionMarket(2, fee=0.1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"transition": ((0.5, 0.4), (0.5, 0.5))}, "rows of probabilities"),
        ({"transition": ((1.0,),)}, "one mean and one sigma for each row"),
        ({"sigma": (0.1, -0.1)}, "sigma: expected numbers >= 0"),
        ({"mean": (0.1, math.nan)}, "mean: expected finite"),
        ({"sentiment_decay": 1.0}, "sentiment_decay"),
        ({"sentiment_correlation": 1.1}, "sentiment_correlation"),
        ({"sentiment_correlation": 0.5, "mean": (0.0, 0.0)}, "expected 0 where all states have the same mean"),
    ],
)
def test_bad_regimes(settings, words):
    with pytest.raises(ValueError, match=words):
        RegimeSettings(**settings)


# -- the S&P 500 ------------------------------------------------------------------------------------------------------


def test_sp500_of_an_installed_package(tmp_path, monkeypatch):
    data = tmp_path / "skfolio" / "datasets" / "data"
    data.mkdir(parents=True)
    (tmp_path / "skfolio" / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    text = "Date,SP500\r\n" + "".join(f"1990-0{1 + bar // 28}-{1 + bar % 28:02},{359.5 + bar}\r\n" for bar in range(70))
    (data / "sp500_index.csv.gz").write_bytes(gzip.compress(text.encode()))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "skfolio", raising=False)
    importlib.invalidate_caches()
    read = sp500()
    assert "skfolio" not in sys.modules
    assert (read.dates[0], read.dates[-1]) == ("1990-01-01", "1990-03-14")
    assert read.prices.dtype == torch.float64
    assert read.prices.tolist() == [359.5 + bar for bar in range(70)]
    part = read.between("1990-01-28", "1990-02-02")
    assert part.dates == ["1990-01-28", "1990-02-01", "1990-02-02"]
    assert part.prices.tolist() == [386.5, 387.5, 388.5]
    with pytest.raises(ValueError, match="between: expected dates within 1990-01-01 to 1990-03-14"):
        read.between("2001-01-01", "2002-01-01")
    env = OptionMarket(2, prices=read.prices, bars_per_week=5, max_episode_steps=None)
    assert env.max_episode_steps == 6


def test_sp500_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'torchrl_perf\[data\]'"):
        sp500()
    with pytest.raises(FileNotFoundError, match="expected the file"):
        sp500(tmp_path / "none.csv.gz")
    for text, words in (("Date,SP500\na\n", "a date and a close"), ("Date,SP500\n2,1\n1,2\n", "in another order")):
        (tmp_path / "bad.csv.gz").write_bytes(gzip.compress(text.encode()))
        with pytest.raises(ValueError, match=words):
            sp500(tmp_path / "bad.csv.gz")


def test_the_real_sp500():
    if importlib.util.find_spec("skfolio") is None:
        pytest.skip("needs the extra data")
    read = sp500()
    assert len(read.dates) > 8000
    assert read.dates[0] == "1990-01-02"
    assert float(read.prices[0]) == 359.69
    env = OptionMarket(4, prices=read.prices, bars_per_week=5, seed=0)
    batch = env.rollout(20, hold(env, 1.0), break_when_any_done=False)
    assert batch["next", "observation"].isfinite().all()
