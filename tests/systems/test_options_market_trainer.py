"""OptionsMarketTrainer: the loop, what is stored and measured, usage and its warning, resume, modes, refusals."""

import dataclasses
import json

import pytest
import torch
from config_runs import TRAINERS
from states import assert_graph_equals_compiled, assert_modes_agree, assert_same_state, run
from torchrl.envs import TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type
from trading_runs import EXPOSURE, SMALL, make, parameters, write_prices

from torchrl_perf.cli import main
from torchrl_perf.envs import Ferry, OptionMarket
from torchrl_perf.envs.market import OPTION_NAMES, OptionRules, option_set, reading
from torchrl_perf.metrics import OptionCollapseWarning
from torchrl_perf.modules import OptionSet
from torchrl_perf.runtime import no_host_sync
from torchrl_perf.systems.options_market.config import OF_OPTIONS, OPTIONS_MARKET_PRESETS, OptionsMarketConfig
from torchrl_perf.systems.options_market.evaluation import evaluate
from torchrl_perf.systems.options_market.networks import (
    EXPOSURES,
    Compressed,
    SymmetricLog,
    make_market,
    make_options_market_env,
    market_of,
    recorded_prices,
)
from torchrl_perf.systems.options_market.trainer import OptionsMarketTrainer
from torchrl_perf.trainers import load_policy, train
from torchrl_perf.trainers.config_checks import ConfigError
from torchrl_perf.transforms import OptionState

VARIANTS = {
    "trading": {},
    "exposure": EXPOSURE,
    "sides": {**EXPOSURE, "options": "sides"},
    "positions": {"options": "positions", "semantics": "target", "market": "five_regimes"},
    "transformer": {"network": "transformer", "transformer_size": 8, "transformer_layers": 2, "transformer_heads": 2},
    "directed": {"directed": True, "reward": "realised_pnl", "option_temperature_final": 0.1},
    "brownian": {**EXPOSURE, "market": "brownian", "drift": 0.02, "volatility": 0.1, "commission": 0.0, "gamma": 0.0},
}
variants = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())

RETURNS = ("--option-learning=returns", "--no-option-interrupt")


@variants
def test_both_halves_of_the_loop_wait_for_nothing_and_all_networks_learn(options):
    trainer = run(make(**options), 3)
    before = parameters(trainer)
    with no_host_sync():
        batch = trainer.collect()
    with no_host_sync():
        trainer.digest(batch)
        run(trainer, 2)
    still = [name for name, value in parameters(trainer).items() if torch.equal(value, before[name])]
    assert still == [] if trainer.config.learn_temperature else still == ["log_alpha"]
    row = trainer.metrics.flush(80)
    assert row["train/first_bad_iteration"] == -1
    assert sum(row[name] for name in trainer.usage.columns()) == pytest.approx(1.0)
    trainer.close()


@variants
def test_four_save_two_is_load_two(options, tmp_path):
    trainer = run(make(**options), 4)
    path = trainer.save(tmp_path / "checkpoint.pt")
    expected = run(trainer, 2).state_dict()
    resumed = run(make(**{**options, "seed": 9}), 1)
    resumed.load(path)
    assert_same_state(expected, run(resumed, 2).state_dict())


@pytest.mark.slow  # half a minute, nearly all of it tracing
def test_compiled_iterations_equal_eager(backend):
    assert_modes_agree(lambda mode: make(updates_per_iteration=1, mode=mode), parameters, 3)


@pytest.mark.gpu
@variants
def test_a_graph_equals_compiled(options, fresh_dynamo):
    on_gpu = {**options, "device": "cuda", "total_steps": 640}
    assert_graph_equals_compiled(lambda mode: make(**on_gpu, mode=mode), parameters, 10).close()


class TestLoop:
    def test_rewards_are_learnt_from_in_per_cent_and_reported_as_they_are(self):
        stored = []
        for scale in (1.0, 100.0):
            trainer = make(reward_scale=scale)
            batch = trainer.collect()
            reward = batch["next", "reward"].clone()
            trainer.store(batch)
            assert torch.equal(batch["next", "reward"], reward)
            stored.append(trainer.buffer[:]["next", "reward"])
        torch.testing.assert_close(100 * stored[0], stored[1])
        assert stored[0].abs().sum() > 0

    def test_metrics_by_hand(self):
        trainer = run(make(num_steps=5, commission=0.01, option_capacity=20), 1)
        trainer.metrics.reset()
        batch = trainer.collect()
        weights, turnover, trades = [], [], []
        for n in range(4):
            for t in range(5):
                step = batch[n, t]
                equity, size = float(step["equity"]), float(reading(step).size)
                traded, cost = float(step["next", "traded"]), float(step["next", "cost"])
                assert cost == pytest.approx((0.01 + 0.00055) * abs(traded), rel=1e-4)
                weights.append((size * equity + traded) / (equity - cost))
                turnover.append(abs(traded) / equity)
                trades.append(traded != 0)
        trainer.measure(batch)
        row = trainer.metrics.flush(1)
        assert row["market/weight"] == pytest.approx(sum(weights) / 20, rel=1e-4)
        assert row["market/exposure"] == pytest.approx(sum(map(abs, weights)) / 20, rel=1e-4)
        assert row["market/turnover"] == pytest.approx(sum(turnover) / 20, rel=1e-4)
        assert row["market/cost"] == pytest.approx(0.01055 * sum(turnover) / 20, rel=1e-4)
        assert row["market/trades"] == pytest.approx(sum(trades) / 20)

    def test_the_temperature_of_the_choice_falls_with_the_frames(self):
        trainer = make(option_temperature_final=0.25, option_temperature_frames=64, learning_starts=32)
        found = []
        for _ in range(6):
            run(trainer, 1)
            found.append(trainer.metrics.flush(1)["option/temperature"])
        expected = [0.25 ** (min(16 * (i + 1), 64) / 64) for i in range(6)]
        assert found == pytest.approx(expected)

    def test_actions_stay_in_the_range_of_the_option(self):
        trainer = make(**EXPOSURE, num_steps=25, option_capacity=200, capacity=400)
        batch = trainer.collect()
        bounds = torch.tensor(list(EXPOSURES.values()))[batch["active_option"]]
        action = batch["action"].squeeze(-1)
        assert ((action >= bounds[..., 0] - 1e-6) & (action <= bounds[..., 1] + 1e-6)).all()


class TestUsage:
    def test_a_row_says_how_options_are_used_in_the_file_too(self, tmp_path):
        arguments = [f"--{key.replace('_', '-')}={value}" for key, value in SMALL.items() if key != "logger"]
        found = main(
            [
                *("train", "options-market", *arguments, *RETURNS, "--log-interval=1"),
                *("--no-progress", f"--run-dir={tmp_path}"),
            ]
        )
        assert found == 0
        (run_dir,) = tmp_path.iterdir()
        header = (run_dir / "progress.csv").read_text(encoding="utf-8").splitlines()[0].split(",")
        wanted = {"option/max_usage", "option/num_used", "option/duration", "market/weight", "option/usage_wait"}
        assert wanted <= set(header)

    @pytest.mark.parametrize("warned", [True, False])
    def test_a_collapse_is_told_with_the_row_by_the_limits(self, warned, recwarn):
        limits = {"max_option_share": 0.5, "min_options_used": 3} if warned else {}
        trainer = make(**EXPOSURE, total_steps=640, num_steps=16, option_capacity=64, **limits)
        with torch.no_grad():
            trainer.controller.selector[-1].bias.copy_(torch.tensor([0.0, 0.0, 100.0, 0.0, 0.0]))
        trainer.store(trainer.collect())
        row = trainer.summarise(trainer.metrics.flush(1))
        collapsed = [entry for entry in recwarn if entry.category is OptionCollapseWarning]
        assert len(collapsed) == warned
        assert (row["option/max_usage"], row["option/num_used"]) == (1.0, 1.0)
        assert row["option/duration"] >= 3


class TestParts:
    def test_symmetric_log(self):
        x = torch.tensor([-100.0, -0.01, 0.0, 0.01, 100.0])
        expected = torch.tensor([-4.6151, -0.00995, 0.0, 0.00995, 4.6151])
        torch.testing.assert_close(SymmetricLog()(x), expected, rtol=1e-4, atol=1e-6)

        def paired(first, second):
            return first + second

        torch.testing.assert_close(Compressed(paired)(x, x), expected + x, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("name", OPTIONS_MARKET_PRESETS)
    def test_presets(self, name, tmp_path):
        config = OPTIONS_MARKET_PRESETS[name]
        assert config.env == name
        prices = {}
        if config.market == "recorded":
            prices["prices"] = torch.linspace(1.0, 2.0, 400)
        env = make_options_market_env(config, "cpu", num_envs=3, **prices)
        assert env.reset()["observation"].shape == (3, 23 * config.window + 26)
        market = market_of(env)
        assert market.settings.cost == pytest.approx(config.cost)
        assert (market.max_episode_steps, market.semantics) == (config.max_episode_steps, config.semantics)
        assert OPTIONS_MARKET_PRESETS["OptionMarketOriginal"].num_envs == 16

    def test_options_of_a_config(self):
        assert make().options.names == OPTION_NAMES
        trainer = make(**EXPOSURE)
        assert trainer.options.names == tuple(EXPOSURES)
        assert len(trainer.controller.fallback) == 5
        assert make(**{**EXPOSURE, "options": "sides"}).options.names == ("flat", "long", "short")
        assert make(**{**EXPOSURE, "options": "positions"}).options.action_ranges[1] == (-1.0, 0.0)
        assert make(trend_unit="price").options.initiation.rules == OptionRules.of_price()
        assert make().options.initiation.rules == OptionRules()

    def test_own_env_and_options(self):
        options = OptionSet(("low", "high"), action_range=((0.0, 0.3), (0.3, 1.0)), termination=_half)
        env = TransformedEnv(OptionMarket(4, window=3, max_episode_steps=5), OptionState(2))
        trainer = run(make({"env": env, "options": options}), 3)
        assert trainer.options is options
        assert make({"options": options}).env.observation_spec["option"].n == 2
        assert {"option/usage_low", "option/usage_high"} <= set(trainer.metrics.flush(1))

    def test_brownian_prices_have_the_drift_and_the_volatility(self):
        config = OptionsMarketConfig.without_task(**{**SMALL, "market": "brownian", "drift": 0.02, "volatility": 0.1})
        market = make_market(config, "cpu")
        assert market.settings.regime.mean == pytest.approx((0.015,))
        assert market.settings.regime.sigma == (0.1,)
        assert market.settings.regime.transition == ((1.0,),)

    def test_recorded_prices_between_dates(self, tmp_path):
        file = str(write_prices(tmp_path / "closes.csv.gz"))
        config = OptionsMarketConfig.without_task(
            **{
                **SMALL,
                "market": "recorded",
                "prices_file": file,
                "first_date": "2001-02-03",
                "last_date": "2001-05-01",
            }
        )
        series = recorded_prices(config)
        assert (series.dates[0], series.dates[-1]) == ("2001-02-03", "2001-05-01")
        assert make_market(config, "cpu").market.bars == len(series.dates)


def _half(tensordict):
    return torch.full((*tensordict.shape, 2), 0.5)


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"market": "options"}, "market: expected one of"),
            ({"volatility": 0.0}, "volatility: expected a positive number"),
            ({"sentiment_correlation": 2.0}, r"sentiment_correlation: expected a number in \[-1, 1\]"),
            ({"ruin": 1.0}, r"ruin: expected a number in \(0, 1\)"),
            ({"first_date": "1.1.2001"}, "first_date: expected '' or an ISO 8601 date"),
            ({"first_date": "2002-01-01", "last_date": "2001-01-01"}, "last_date: expected a date from first_date"),
            ({"options": "exposure"}, "semantics: expected 'target' with options='exposure'"),
            ({**EXPOSURE, "directed": True}, "directed: expected False with options='exposure'"),
            ({"commission": 0.6, "max_weight": 2.0}, "commission: expected commission"),
            ({"window": 0}, "window: expected a positive integer"),
            ({"reward_scale": -1.0}, "reward_scale: expected a positive number"),
        ],
    )
    def test_settings(self, options, message):
        with pytest.raises(ConfigError, match=message):
            OptionsMarketConfig.without_task(**{**SMALL, **options})

    def test_envs_that_are_no_market(self):
        for env in (TransformedEnv(Ferry(4), OptionState(2)), TransformedEnv(OptionMarket(4, observation="dict"))):
            with pytest.raises(ValueError, match="env: expected an OptionMarket with a flat observation, received"):
                make({"env": env})

    def test_a_window_longer_than_the_data(self, tmp_path):
        file = str(write_prices(tmp_path / "closes.csv.gz", bars=60))
        with pytest.raises(ValueError, match=r"prices: expected at least .* bars, .* received 60. Remedy: a longer"):
            make(market="recorded", prices_file=file, window=100)
        with pytest.raises(FileNotFoundError, match="sp500: expected the file"):
            make(market="recorded", prices_file=str(tmp_path / "none.csv.gz"))

    def test_a_rule_of_another_shape(self):
        options = OptionSet(OPTION_NAMES, termination=_half)
        with pytest.raises(ValueError, match=r"termination: expected a function .* received torch.float32 \[2, 2\]"):
            make({"options": options})
        with pytest.raises(ValueError, match=r"initiation: expected a function of a TensorDict \[B\]"):
            option_set(OptionMarket(2), initiation=lambda td: td["equity"])


def test_a_run_from_the_command_line_resumes(tmp_path, capsys):
    arguments = [f"--{key.replace('_', '-')}={value}" for key, value in SMALL.items() if key != "total_steps"]
    arguments += ["--log-interval=1", "--no-progress", f"--run-dir={tmp_path}", "--options=exposure"]
    arguments += RETURNS  # the preset learns from the critics, and keeps no choices
    assert main(["train", "options-market", *arguments, "--semantics=target", "--total-steps=80"]) == 0
    (run_dir,) = tmp_path.iterdir()
    assert json.loads((run_dir / "config.json").read_text(encoding="utf-8"))["options"] == "exposure"
    command = ["train", "options-market", "--resume", str(run_dir), "--no-progress"]
    assert main([*command, "--total-steps", "112"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("112 steps in ")
    assert main([*command, "--window", "3"]) == 1
    assert "--resume: expected the checkpoint's own" in capsys.readouterr().err
    assert "options-market" not in TRAINERS  # a system, not an algorithm


class TestWithoutOptions:
    def test_it_learns_saves_and_trades(self, tmp_path):
        usual = {"max_option_share": 0.5, "min_options_used": 3, "option_capacity": 2_000}
        trainer = make(options="none", **usual, run_dir=str(tmp_path), logger="csv", log_interval=2)
        result = train(trainer, progress=False)
        trainer.close()
        row = (result.run_dir / "progress.csv").read_text(encoding="utf-8").splitlines()[0]
        assert "market/weight" in row and "option/" not in row
        policy = load_policy(result.run_dir)
        env = make_options_market_env(trainer.config, "cpu", num_envs=3)
        figures, recording = evaluate(policy, env, seed=1)
        assert figures.options == {} and (recording.option == -1).all()
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            seen = env.reset()
            assert torch.equal(policy(seen)["action"], trainer.policy(seen)["action"])

    def test_what_means_nothing_without_options_is_refused(self):
        with pytest.raises(ConfigError, match="option_learning: expected 'returns' with options='none'"):
            OptionsMarketConfig.without_task(options="none", option_learning="critic")
        with pytest.raises(ValueError, match="options: expected None with options='none'"):
            config = OptionsMarketConfig(env="OptionMarketPlain", device="cpu")
            OptionsMarketTrainer(config, options=object())

    def test_the_preset_is_the_other_ones_market(self):
        plain, other = OptionsMarketConfig(env="OptionMarketPlain"), OptionsMarketConfig(env="OptionMarket")
        differing = {
            field.name
            for field in dataclasses.fields(plain)
            if getattr(plain, field.name) != getattr(other, field.name)
        }
        assert differing <= {"env", "options", *OF_OPTIONS}
