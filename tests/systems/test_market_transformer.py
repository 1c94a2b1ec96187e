"""Traders that read the bars of their window by attention, and options that are interrupted: runs, graphs, refusals."""

import pytest
import torch
from emulated_runs import emulate
from states import assert_graph_equals_compiled, assert_modes_agree, run
from torchrl.envs.utils import ExplorationType, set_exploration_type
from trading_runs import make, parameters

from torchrl_perf.modules import WindowEncoder
from torchrl_perf.systems.options_market.config import OF_TRANSFORMER, OptionsMarketConfig
from torchrl_perf.systems.options_market.networks import make_options_market_env
from torchrl_perf.trainers import load_policy, train
from torchrl_perf.trainers.config_checks import ConfigError

TRANSFORMER = {"network": "transformer", "transformer_size": 8, "transformer_layers": 1, "transformer_heads": 2}
PLAIN = {"options": "none", "max_option_share": 0.5, "min_options_used": 3, "option_capacity": 2_000}
INTERRUPTED = {"option_learning": "critic", "option_capacity": 2_000, "option_interrupt": True}
VARIANTS = {
    "transformer": TRANSFORMER,
    "without options": {**TRANSFORMER, **PLAIN},
    "decoupled decay": {**TRANSFORMER, "weight_decay": 0.01},
    "interrupted": INTERRUPTED,
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_a_graph_does_what_eager_iterations_do(options, monkeypatch):
    expected = parameters(run(make(**options, total_steps=640), 10))
    emulate(monkeypatch)
    trainer = run(make(**options, total_steps=640, mode="graph", compile_after=100), 10)
    assert trainer._captures.iterate.captured
    for name, value in parameters(trainer).items():
        assert torch.equal(value, expected[name]), name
    trainer.close()


@pytest.mark.slow  # nearly all of it tracing
# Adam makes steps of 3e-3 of gradients that are 0 but for rounding, as those of attention's keys' biases are
@pytest.mark.parametrize(
    ("options", "atol"), [(TRANSFORMER, 2e-4), (INTERRUPTED, 1e-5)], ids=["transformer", "interrupted"]
)
def test_compiled_iterations_equal_eager_ones(options, atol, backend):
    changes = {**options, "updates_per_iteration": 1}
    assert_modes_agree(lambda mode: make(**changes, mode=mode), parameters, 3, atol=atol)


@pytest.mark.gpu
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_a_graph_on_a_gpu_equals_compiled(options, fresh_dynamo):
    on_gpu = {**options, "device": "cuda", "total_steps": 640}
    assert_graph_equals_compiled(lambda mode: make(**on_gpu, mode=mode), parameters, 10).close()


@pytest.mark.parametrize(
    ("options", "encoders"),
    [
        (TRANSFORMER, 5),  # actor, critics and their targets; choice, and values of the options
        ({**TRANSFORMER, "option_learning": "critic", "option_capacity": 2_000}, 4),
        ({**TRANSFORMER, **PLAIN}, 3),
    ],
)
def test_actor_choice_and_critics_have_an_encoder_each(options, encoders):
    trainer = make(**options)
    found = [each for each in trainer.algorithm.loss.modules() if isinstance(each, WindowEncoder)]
    assert len({id(each) for each in found}) == encoders


@pytest.mark.parametrize("options", [TRANSFORMER, {**TRANSFORMER, **PLAIN}], ids=["options", "plain"])
def test_a_policy_is_made_again_from_a_run(options, tmp_path):
    trainer = make(**options, run_dir=str(tmp_path), logger="csv", log_interval=2)
    result = train(trainer, progress=False)
    trainer.close()
    policy = load_policy(result.run_dir)
    own = {} if "options" in options else {"options": trainer.options}
    seen = make_options_market_env(trainer.config, "cpu", num_envs=3, seed=4, **own).reset()
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        assert torch.equal(policy(seen.clone())["action"], trainer.policy(seen.clone())["action"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"window": 1}, "window: expected at least 2 bars with network='transformer', received 1"),
        ({"transformer_heads": 3}, "transformer_heads: expected a divisor of transformer_size = 8, received 3"),
        ({"transformer_layers": 0}, "transformer_layers: expected a positive integer"),
        ({"network": "recurrent"}, "network: expected"),
    ],
)
def test_refusals(options, words):
    with pytest.raises(ConfigError, match=words):
        make(**{**TRANSFORMER, **options})


@pytest.mark.parametrize("name", OF_TRANSFORMER)
def test_what_means_nothing_for_perceptrons_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name}: expected .* with network='perceptron', .*received 1"):
        OptionsMarketConfig.without_task(**{name: 1})


def test_no_interruption_where_the_choice_knows_no_values():
    with pytest.raises(ConfigError, match="option_interrupt: expected False with option_learning='returns'"):
        make(option_interrupt=True)
    with pytest.raises(ConfigError, match="option_learning: expected 'returns' with options='none'"):
        make(**{**PLAIN, "option_learning": "critic", "option_interrupt": True})
