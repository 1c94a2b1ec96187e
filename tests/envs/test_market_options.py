"""The six options of OptionMarket: every rule, how long they last, and in an OptionController."""

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.envs import TransformedEnv

from torchrl_perf.envs import OptionMarket
from torchrl_perf.envs.market import OPTION_NAMES, PARTS, OptionRules, flatten, option_set
from torchrl_perf.envs.market.options import TradingInitiation, TradingTermination
from torchrl_perf.modules import OptionController
from torchrl_perf.transforms import OptionState

NEUTRAL = {"size": 0.05, "sentiment": 0.5, "certainty": 0.4, "rsi": 0.5, "gap": 0.001, "divergence": 0.02, "age": 5}
VOLATILITY = 0.01  # with which trends of 1.5 volatilities are trends of 1.5 %


def observed(form="dict", **values):
    """One row of a market that is neutral except for the given entries."""
    now = NEUTRAL | values
    parts = {name: torch.zeros(1, len(columns)) for name, columns in PARTS.items()}
    parts["technical"] = torch.zeros(1, 24, len(PARTS["technical"]))

    def put(part, column, value):
        parts[part][..., -1, PARTS[part].index(column)] = value

    put("technical", "rsi14", now["rsi"])
    put("technical", "sma10_gap", 100 * now["gap"])
    put("technical", "sma_divergence", 100 * now["divergence"])
    put("technical", "volatility_20", 100 * now.get("volatility", VOLATILITY))
    put("regime", "sentiment", now["sentiment"])
    put("position", "size", now["size"])
    put("position", "open", float(now["size"] != 0))
    rest = (1.0 - now["certainty"]) / 2
    parts["sentiment"] = torch.tensor([[rest, rest, now["certainty"]]])
    entries = parts if form == "dict" else {"observation": flatten(parts)}
    return TensorDict({**entries, "option_age": torch.tensor([now["age"]])}, [1])


# what is given, and whether the option may begin
INITIATION = {
    "open_long": [
        ({"size": 0.0, "sentiment": 0.36}, True),
        ({"size": 0.0, "sentiment": 0.34}, False),
        ({"size": 0.019, "sentiment": 0.5}, True),
        ({"size": -0.021, "sentiment": 0.5}, False),
    ],
    "open_short": [
        ({"size": 0.0, "gap": -0.001}, True),
        ({"size": 0.0, "divergence": -0.001}, True),
        ({"size": 0.0, "rsi": 0.66}, True),
        ({"size": 0.0, "rsi": 0.64}, False),
        ({"size": 0.0, "gap": -0.001, "sentiment": 0.66}, False),
        ({"size": 0.0, "gap": -0.001, "sentiment": 0.64}, True),
        ({"size": 0.03, "gap": -0.001}, False),
    ],
    "close": [({"size": 0.0}, False), ({"size": 1e-3}, True), ({"size": -0.4}, True)],
    "trend": [
        ({"divergence": 0.0151}, True),
        ({"divergence": 0.0149}, False),
        ({"divergence": -0.0151}, True),
        ({"divergence": 0.02, "sentiment": 0.34}, False),
        ({"divergence": 0.02, "sentiment": 0.9}, True),
        ({"divergence": -0.02, "sentiment": 0.66}, False),
        ({"divergence": -0.02, "sentiment": 0.1}, True),
    ],
    "scalp": [
        ({"size": 0.0, "rsi": 0.34}, True),
        ({"size": 0.0, "rsi": 0.36}, False),
        ({"size": 0.02, "rsi": 0.34}, False),
        ({"size": 0.0, "rsi": 0.34, "sentiment": 0.34}, False),
    ],
    "wait": [({"size": size, "sentiment": level}, True) for size in (0.0, 0.5) for level in (0.0, 1.0)],
}
# what is given, and the probability that the option ends; None: that of the time alone
TERMINATION = {
    "open_long": [({"size": 0.1351}, 1.0), ({"size": -0.2}, 1.0), ({"size": 0.134}, None), ({"age": 20}, 1.0)],
    "open_short": [
        ({"size": -0.1351}, 1.0),
        ({"sentiment": 0.61}, 0.8),
        ({"sentiment": 0.61, "size": 0.2}, 1.0),
        ({"sentiment": 0.59}, None),
    ],
    "close": [({"size": 0.009}, 1.0), ({"size": -0.011}, 0.02), ({"age": 500}, 0.02)],
    "trend": [
        ({"divergence": 0.0074}, 0.85),
        ({"divergence": -0.0074}, 0.85),
        ({"divergence": -0.0076, "age": 200}, 0.15),
        ({"divergence": 0.0076, "age": 10}, None),
    ],
    "scalp": [({"size": 0.0}, 1.0), ({"size": 0.05}, None), ({"size": 0.05, "age": 15}, 1.0)],
    "wait": [
        ({"age": 30, "sentiment": 0.9}, 1.0),
        ({"sentiment": 0.76, "certainty": 0.9, "divergence": 0.04}, 0.85),
        ({"sentiment": 0.29}, 0.85),
        ({"sentiment": 0.7, "certainty": 0.76, "divergence": 0.04}, 0.65),
        ({"divergence": -0.031}, 0.75),
        ({"age": 29}, 0.5),
        ({"age": 6}, None),
    ],
}


RULES = [OptionRules(), OptionRules.of_price()]


@pytest.mark.parametrize("rules", RULES, ids=["volatility", "price"])
@pytest.mark.parametrize("form", ["dict", "flat"])
@pytest.mark.parametrize("name", OPTION_NAMES)
def test_where_options_begin(name, form, rules):
    rule, option = TradingInitiation(rules), OPTION_NAMES.index(name)
    for values, expected in INITIATION[name]:
        allowed = rule(observed(form, **values))
        assert allowed.shape == (1, 6)
        assert allowed.dtype == torch.bool
        assert allowed[0, option].item() is expected, (name, values)


@pytest.mark.parametrize("rules", RULES, ids=["volatility", "price"])
@pytest.mark.parametrize("form", ["dict", "flat"])
@pytest.mark.parametrize("name", OPTION_NAMES)
def test_where_options_end(name, form, rules):
    rule, option = TradingTermination(rules), OPTION_NAMES.index(name)
    for values, expected in TERMINATION[name]:
        td = observed(form, **values)
        prob = rule(td)
        assert prob.shape == (1, 6)
        by_time = rule.hazard(td)[0, option]
        assert prob[0, option].item() == pytest.approx(by_time.item() if expected is None else expected), values


def test_a_trend_is_one_at_every_volatility():
    trend = OPTION_NAMES.index("trend")
    for volatility in (1e-4, 1e-3, 1e-2):
        for distance, expected in ((1.51, True), (1.49, False), (-1.51, True)):
            row = observed(divergence=distance * volatility, volatility=volatility)
            assert TradingInitiation()(row)[0, trend].item() is expected
            assert TradingInitiation(OptionRules.of_price())(row)[0, trend].item() is (expected and volatility == 1e-2)
    assert not TradingInitiation()(observed(divergence=0.0, volatility=0.0))[0, trend]  # nothing has moved
    assert TradingTermination()(observed(divergence=0.0, volatility=0.0))[0, trend] == pytest.approx(0.85)


def test_durations_by_time_alone():
    # n counts executed steps, and is tested after each from the minimum duration on
    options = option_set(OptionMarket(2))
    expected = {"open_long": 7.50, "open_short": 7.50, "close": 52.0, "trend": 15.67, "scalp": 7.07, "wait": 9.06}
    ages = torch.arange(1, 3000)
    td = observed().expand(len(ages)).clone().set("option_age", ages)
    ends = options.termination(td)
    for option, name in enumerate(OPTION_NAMES):
        stop = torch.where(ages >= options.min_durations[option], ends[:, option], 0.0).double()
        alive = torch.cat((torch.ones(1).double(), (1.0 - stop).cumprod(0)[:-1]))
        assert float(alive.sum()) == pytest.approx(expected[name], abs=0.006), name


def test_the_set():
    env = OptionMarket(4, semantics="rules")
    options = option_set(env)
    assert options.names == ("open_long", "open_short", "close", "trend", "scalp", "wait")
    assert options.min_durations == [5, 5, 3, 10, 5, 5]
    assert options.action_ranges == [(-s, s) for s in (0.8, 0.8, 1.0, 0.6, 1.0, 0.05)]
    assert options.fallback_index == 5
    directed = option_set(env, directed=True)
    assert directed.action_ranges[:3] == [(0.0, 0.8), (-0.8, 0.0), (-1.0, 0.0)]
    strict = option_set(env, rules=OptionRules(bearish=0.6))
    assert not strict.initiation(observed(size=0.0))[0, 0]
    with pytest.raises(ValueError, match=r"oversold: expected a number in \[0, 1\], received 35"):
        OptionRules(oversold=35)
    with pytest.raises(ValueError, match=r"trending: expected a number >= 0, received -1.0. Remedy: multiples"):
        OptionRules(trending=-1.0)
    with pytest.raises(ValueError, match=r"moving: expected a number in \[0, 1\], received 3"):
        OptionRules(in_price=True, trending=0.015)


@pytest.mark.parametrize("form", ["flat", "dict", "both"])
def test_in_a_controller(form):
    inner = OptionMarket(8, semantics="rules", observation=form, max_episode_steps=60, seed=0)
    env = TransformedEnv(inner, OptionState(6))
    options, key = option_set(inner), "portfolio" if form == "dict" else "observation"
    selector = nn.Linear(env.observation_spec[key].shape[-1], 6)
    controller = OptionController(selector, options, example=env.reset(), in_keys=[key])

    def policy(td):
        td = controller(td)
        scale = torch.tensor([0.8, 0.8, 1.0, 0.6, 1.0, 0.05])[td["active_option"]]
        return td.set("action", (scale * (2 * torch.rand(8) - 1)).unsqueeze(-1))

    batch = env.rollout(80, policy, break_when_any_done=False)
    chosen, start, age = batch["active_option"], batch["option_start"], batch["next", "option_age"]
    available = options.initiation(batch)
    assert (available.gather(-1, chosen.unsqueeze(-1)).squeeze(-1) | ~start).all()
    shortest = torch.tensor(options.min_durations)[chosen]
    ended = start[:, 1:] & ~batch["next", "done"][:, :-1, 0]
    assert (age[:, :-1][ended] >= shortest[:, :-1][ended]).all()
    assert ended.sum() > 20


@pytest.mark.parametrize(
    ("rule", "answer", "received"),
    [
        ("initiation", lambda td: torch.ones(*td.shape, 5, dtype=torch.bool), r"torch.bool \[2, 5\]"),
        ("initiation", lambda td: torch.ones(*td.shape, 6), r"torch.float32 \[2, 6\]"),
        ("initiation", lambda td: [True] * 6, "list"),
        ("termination", lambda td: torch.ones(6), r"torch.float32 \[6\]"),
        ("termination", lambda td: torch.ones(*td.shape, 6, dtype=torch.bool), r"torch.bool \[2, 6\]"),
    ],
)
def test_rules_of_a_wrong_shape(rule, answer, received):
    with pytest.raises(ValueError, match=f"{rule}: expected a function .* received {received} for B = 2. Remedy"):
        option_set(OptionMarket(6), **{rule: answer})


def test_own_rules():
    options = option_set(OptionMarket(2), initiation=lambda td: torch.ones(*td.shape, 6, dtype=torch.bool))
    assert options.initiation(observed(sentiment=0.0)).all()


def test_rules_without_a_market():
    with pytest.raises(KeyError, match=r"expected 'technical' .* received .*pixels"):
        TradingInitiation()(TensorDict({"pixels": torch.zeros(1, 2)}, [1]))


def test_rules_on_the_device(device):
    env = OptionMarket(4, device=device)
    options = option_set(env)
    td = env.reset().set("option_age", torch.full((4,), 7, device=device))
    assert options.termination(td).device == env.device
    assert options.initiation(td).device == env.device
