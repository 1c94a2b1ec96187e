"""Recordings of a trader, its baselines, and pictures of it."""

import dataclasses

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import TransformedEnv

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import CartPole, OptionMarket, RegimeSettings
from torchrl_perf.systems.options_market import EquityRecording, draw_equity, record_equity, recorded_equity
from torchrl_perf.transforms import OptionState


def weights(env, value=0.5):
    return lambda td: td.set("action", torch.full((env.num_envs, 1), value, dtype=env.dtype))


def recording(option=None, rows=3, steps=8):
    grid = torch.arange(rows * (steps + 1), dtype=torch.float64).view(rows, -1) / 100
    return EquityRecording(
        equity=1.0 + grid,
        price=50.0 + grid,
        size=grid,
        cost=torch.full((rows, steps), 1e-3, dtype=torch.float64),
        option=torch.full((rows, steps), -1) if option is None else option,
        steps=torch.full((rows,), steps),
        cost_rate=0.01,
    )


@pytest.mark.parametrize("observation", ["flat", "dict"])
def test_an_episode_is_recorded_to_its_end(observation):
    env = OptionMarket(4, max_episode_steps=6, observation=observation, dtype=torch.float64, seed=0)
    seen = record_equity(env, weights(env))
    assert seen.equity.shape == seen.price.shape == seen.size.shape == (4, 7)
    assert seen.cost.shape == seen.option.shape == (4, 6)
    assert seen.steps.tolist() == [6] * 4
    assert (seen.equity[:, 0] == 1).all() and (seen.price[:, 0] == 100).all() and not seen.size[:, 0].any()
    assert (seen.option == -1).all()
    moved = 0.5 * (seen.equity[:, 0] - seen.cost[:, 0]) * (seen.price[:, 1] / seen.price[:, 0] - 1)
    torch.testing.assert_close(seen.equity[:, 1], 1 - seen.cost[:, 0] + moved)
    assert seen.cost_rate == env.settings.cost
    assert record_equity(env, weights(env), max_steps=2).equity.shape == (4, 3)


def test_what_follows_an_end_repeats_the_last_value():
    batch = TensorDict(
        {
            "equity": torch.tensor([[1.0, 1.1, 1.0, 1.3]]).unsqueeze(-1),
            "price": torch.tensor([[10.0, 11.0, 100.0, 101.0]]).unsqueeze(-1),
            "position": torch.zeros(1, 4, 5),
            "technical": torch.zeros(1, 4, 24, 23),
            "sentiment": torch.zeros(1, 4, 3),
            "regime": torch.zeros(1, 4, 10),
            "active_option": torch.tensor([[2, 3, 4, 4]]),
            "next": {
                "equity": torch.tensor([[1.1, 1.2, 1.3, 1.4]]).unsqueeze(-1),
                "price": torch.tensor([[11.0, 12.0, 101.0, 102.0]]).unsqueeze(-1),
                "position": torch.zeros(1, 4, 5),
                "technical": torch.zeros(1, 4, 24, 23),
                "sentiment": torch.zeros(1, 4, 3),
                "regime": torch.zeros(1, 4, 10),
                "cost": torch.full((1, 4, 1), 0.01),
                "done": torch.tensor([[False, True, False, False]]).unsqueeze(-1),
            },
        },
        [1, 4],
    )
    seen = recorded_equity(batch, OptionMarket(1))
    assert seen.steps.tolist() == [2]
    assert seen.equity[0].tolist() == pytest.approx([1.0, 1.1, 1.2, 1.2, 1.2])
    assert seen.price[0].tolist() == pytest.approx([10.0, 11.0, 12.0, 12.0, 12.0])
    assert seen.cost[0].tolist() == pytest.approx([0.01, 0.01, 0.0, 0.0])
    assert seen.option[0].tolist() == [2, 3, -1, -1]
    assert seen.option_shares(6).tolist() == [0.0, 0.0, 0.5, 0.5, 0.0, 0.0]
    cost = 1.0 + OptionMarket(1).settings.cost
    assert seen.buy_and_hold[0].tolist() == pytest.approx([1.0, 1.1 / cost, 1.2 / cost, 1.2 / cost, 1.2 / cost])


def test_a_collected_batch():
    env = OptionMarket(3, max_episode_steps=5, seed=0)
    batch = DeviceCollector(env, weights(env), frames_per_batch=24, total_frames=24).collect()
    seen = recorded_equity(batch, env)
    assert seen.steps.tolist() == [5] * 3
    assert torch.equal(seen.equity[:, 1:6].float(), batch["next", "equity"][:, :5, 0])
    assert torch.equal(seen.equity[:, 6:], seen.equity[:, 5:6].expand(3, 3))


def test_below_a_transform_with_options():
    market = OptionMarket(2, max_episode_steps=4, seed=0)
    env = TransformedEnv(market, OptionState(6))

    def policy(td):
        return weights(market)(td).set("active_option", torch.tensor([1, 5]))

    seen = record_equity(env, policy)
    assert seen.option.tolist() == [[1] * 4, [5] * 4]
    assert seen.option_shares(6).tolist() == [0.0, 0.5, 0.0, 0.0, 0.0, 0.5]


def test_bad_arguments():
    env = OptionMarket(2, max_episode_steps=None)
    with pytest.raises(ValueError, match="max_steps: expected an int >= 1, received None with max_episode_steps=None"):
        record_equity(env, weights(env))
    with pytest.raises(ValueError, match="max_steps"):
        record_equity(env, weights(env), max_steps=0)
    with pytest.raises(TypeError, match=r"expected an OptionMarket.* received .*CartPole"):
        record_equity(CartPole(2), weights(env), max_steps=1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(KeyError, match="which an OptionMarket writes"):
        recorded_equity(TensorDict({}, [2, 3]), env)
    with pytest.raises(ValueError, match=r"expected a batch \[N, T\], received \[2\]"):
        recorded_equity(TensorDict({}, [2]), env)


# -- pictures ---------------------------------------------------------------------------------------------------------


def colors_of(path):
    from matplotlib.image import imread

    picture = imread(path)[..., :3]
    return picture, lambda red, green, blue: bool(
        (abs(picture - [red / 255, green / 255, blue / 255]).sum(-1) < 0.02).any()
    )


BLUE, ORANGE, GREEN, BROWN = (31, 119, 180), (255, 127, 14), (44, 160, 44), (140, 86, 75)


def test_pictures(tmp_path):
    plain, has = colors_of(draw_equity(recording(), tmp_path / "plain.png"))
    assert has(*BLUE) and has(*ORANGE) and has(*GREEN) and not has(*BROWN)
    option = torch.tensor([[0, 0, 1, 1, 2, 2, -1, -1], [5] * 8, [5] * 8])
    with_options, has = colors_of(draw_equity(recording(option), tmp_path / "options.png", title="a title"))
    assert has(*BROWN)
    assert with_options.shape[0] > plain.shape[0]
    _, has = colors_of(draw_equity(recording(option), tmp_path / "row.png", row=0))
    assert has(*GREEN)
    names = ["left", "right", "up", "down", "in", "out"]
    assert draw_equity(recording(option), tmp_path / "names.svg", names=names).stat().st_size > 0


def test_the_shares_that_are_drawn():
    from matplotlib.figure import Figure

    from torchrl_perf.systems.options_market import picture as equity_picture

    option = torch.tensor([[0, 0, 1, -1], [0, 1, 1, -1]])
    axes = Figure().subplots()
    equity_picture._draw_options(axes, recording(option, rows=2, steps=4), ["first", "second"])
    tops = [patch.get_data().values.tolist() for patch in axes.patches]
    assert tops == [[1.0, 0.5, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["first 50%", "second 50%"]


def test_the_curves_that_are_drawn():
    from matplotlib.figure import Figure

    from torchrl_perf.systems.options_market import picture as equity_picture

    axes, seen = Figure().subplots(), recording()
    equity_picture._draw_equity(axes, seen)
    held, policy, idle = axes.lines
    assert policy.get_ydata().tolist() == seen.equity[1].tolist()  # the median of three rising rows
    assert held.get_ydata().tolist() == pytest.approx(seen.buy_and_hold.median(0).values.tolist())
    assert set(idle.get_ydata()) == {1.0}
    assert axes.get_legend().get_title().get_text() == "costs paid: 0.80% of the capital"


def test_refused_pictures(tmp_path):
    with pytest.raises(IndexError, match="row: expected one of the recording's 3, received 3"):
        draw_equity(recording(), tmp_path / "x.png", row=3)
    with pytest.raises(IndexError, match="names: expected one for each of the 6 options"):
        draw_equity(recording(torch.full((3, 8), 5)), tmp_path / "x.png", names=["a", "b"])


def test_regimes_are_recorded_and_gains_told_by_them(tmp_path):
    env = OptionMarket(3, max_episode_steps=5, regime=RegimeSettings.five(), window=1, seed=0)
    state = [env.get_buffer("state_regime").clone()]

    def hold(td):
        state.append(env.get_buffer("state_regime").clone())
        return weights(env)(td)

    seen = record_equity(env, hold)
    assert torch.equal(seen.regime, torch.stack(state[-5:], 1))
    option = torch.tensor([[0, 0, 1, 1, 1]]).expand(3, 5)
    regime = torch.tensor([[0, 1, 1, 4, 4]]).expand(3, 5).clone()
    regime[2, 3:] = -1
    gains = dataclasses.replace(seen, option=option, regime=regime).gains(5, 2)
    growth = seen.equity.log().diff(dim=-1)
    assert float(gains[1, 1]) == pytest.approx(float(growth[:, 2].mean()))
    assert float(gains[4, 1]) == pytest.approx(float(growth[:2, 3:].sum() / 3))
    assert float(gains[0, 0]) == pytest.approx(float(growth[:, 0].mean()))
    assert gains.shape == (5, 2) and not gains[2:4].any()
    path = draw_equity(dataclasses.replace(seen, option=option), tmp_path / "one.png", row=0)
    plain = draw_equity(dataclasses.replace(seen, option=option, regime=None), tmp_path / "two.png", row=0)
    assert path.read_bytes() != plain.read_bytes()
    steady = OptionMarket(2, max_episode_steps=3, regime=RegimeSettings(((1.0,),), (0.0,), (0.01,)))
    with pytest.raises(ValueError, match="gains: expected a recording with regimes, received one without"):
        record_equity(steady, weights(steady)).gains(1, 1)
