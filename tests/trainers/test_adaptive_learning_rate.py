"""Learning rates that follow the KL divergence of the updates, on the device."""

import pytest
import torch
from config_runs import make
from states import assert_same_state, run

from torchrl_perf.functional.schedules import adaptive
from torchrl_perf.runtime import no_host_sync
from torchrl_perf.trainers import ConfigError

SETTINGS = {"learning_rate": 1e-3, "entropy_coeff": 0.0}
both = pytest.mark.parametrize("name", ["ppo", "hybrid-ppo"])


@both
def test_it_falls_and_rises_to_its_bounds_and_nothing_waits(name):
    for desired, bound in ((1e-12, 1e-5), (100.0, 1e-2)):
        trainer = run(make(name, {**SETTINGS, "desired_kl": desired, "kl_estimate": "closed_form"}), 4)
        with no_host_sync():
            run(trainer, 2)
        assert trainer.optimizer.learning_rate == torch.tensor(bound)
        assert trainer.metrics.flush(1)["train/learning_rate"] == pytest.approx(bound)
        trainer.close()


def test_each_minibatch_follows_the_rule():
    trainer = make("ppo", {**SETTINGS, "desired_kl": 1e-4, "epochs": 4})
    rate, seen, adapt = torch.tensor(1e-3), [], trainer.algorithm.adapt

    def adapt_and_note(statistics, learning_rate, due):
        seen.append(statistics["kl_approx"].clone())
        adapt(statistics, learning_rate, due)

    trainer.algorithm.adapt = adapt_and_note
    run(trainer, 4)
    for divergence in seen:
        rate = adaptive(rate, divergence, 1e-4, 1e-5, 1e-2)
    assert len(seen) == 4 * 4 * 2
    assert trainer.optimizer.learning_rate == rate
    assert rate != torch.tensor(1e-3)
    trainer.close()


def test_updates_that_were_stopped_do_not_count():
    trainer = make(
        "ppo", {**SETTINGS, "desired_kl": 1e-12, "target_kl": 0.0, "epochs": 8, "kl_estimate": "closed_form"}
    )
    run(trainer, 1)
    # the first update has no divergence, the second one stops all others
    assert trainer.optimizer.learning_rate == torch.tensor(1e-3) / 1.5
    trainer.close()


def test_four_save_two_is_load_two(tmp_path):
    options = {**SETTINGS, "desired_kl": 1e-3}
    trainer = run(make("ppo", options), 4)
    path = trainer.save(tmp_path / "checkpoint.pt")
    expected = run(trainer, 2).state_dict()
    resumed = run(make("ppo", {**options, "seed": 9}), 1)
    resumed.load(path)
    assert_same_state(expected, run(resumed, 2).state_dict())
    trainer.close()
    resumed.close()


def test_a_rate_out_of_its_bounds_is_refused():
    with pytest.raises(ConfigError, match="learning_rate: expected one from min_learning_rate"):
        make("ppo", {"learning_rate": 0.1, "desired_kl": 0.01})
    with pytest.raises(ConfigError, match="desired_kl: expected None or a positive number"):
        make("ppo", {"desired_kl": 0.0})
