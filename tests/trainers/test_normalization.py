"""Normalisation in the trainers: statistics of all that was seen, rewards that are learnt from, no host waits."""

import pytest
import torch
from config_runs import KINDS, make
from states import assert_same_state, run
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from torchrl_perf.modules import EmpiricalNormalization, FusedMLP
from torchrl_perf.runtime import no_host_sync
from torchrl_perf.trainers import ConfigError

NORMALIZED = {"normalize_observations": True, "normalize_rewards": True}
NAMES = [name for name in KINDS if name != "sac-options"]
every = pytest.mark.parametrize("name", NAMES)


def observed(trainer, iterations):
    """All observations and rewards of some iterations, as they were collected."""
    collect, batches = trainer.collect, []

    def collect_and_note():
        batch = collect()
        batches.append(batch.select("observation", ("next", "reward"), ("next", "done")).clone())
        return batch

    trainer.collect = collect_and_note
    run(trainer, iterations)
    return batches


@every
def test_networks_have_the_statistics_of_all_that_was_seen(name):
    trainer = make(name, NORMALIZED)
    batches = observed(trainer, 4)
    rows = torch.cat([batch["observation"].flatten(0, -2) for batch in batches]).to(torch.float64)
    layers = trainer.normalization.layers
    of_policy = [layer for layer in trainer.policy.modules() if isinstance(layer, EmpiricalNormalization)]
    assert of_policy
    assert len(layers) >= 2 or name == "pqn"  # the critic's or the target's, too
    for layer in layers:
        assert layer.count == len(rows)
        torch.testing.assert_close(layer.mean.expand(rows.shape[-1:]), rows.mean(0))
        torch.testing.assert_close(layer.variance.expand(rows.shape[-1:]), rows.var(0, correction=0))
    assert trainer.normalization.rewards.statistics.count == len(rows)
    trainer.close()


@every
def test_nothing_waits_and_four_save_two_is_load_two(name, tmp_path):
    trainer = run(make(name, NORMALIZED), 4)
    path = trainer.save(tmp_path / "checkpoint.pt")
    with no_host_sync():
        run(trainer, 2)
    expected = trainer.state_dict()
    resumed = run(make(name, {**NORMALIZED, "seed": 9}), 1)
    resumed.load(path)
    assert_same_state(expected, run(resumed, 2).state_dict())
    trainer.close()
    resumed.close()


def test_the_ratio_begins_at_one():
    """Observations are read with the same statistics when acting and when learning."""
    trainer = run(make("ppo", {**NORMALIZED, "epochs": 1, "minibatches": 1}), 3)
    trainer.metrics.flush(0)
    run(trainer, 1)
    assert abs(trainer.metrics.flush(1)["train/kl_approx"]) < 1e-6
    trainer.close()


def test_fresh_rewards_are_learnt_from_normalised_and_counted_as_they_are():
    trainer = make("ppo", {"normalize_rewards": True, "reward_clip": 0.25})
    seen, estimate = [], trainer.algorithm.estimate

    def estimate_and_note(batch):
        seen.append(batch["next", "reward"].clone())
        return estimate(batch)

    trainer.algorithm.estimate = estimate_and_note
    batches = observed(trainer, 30)
    layer = trainer.normalization.rewards
    expected = layer(batches[-1]["next", "reward"]).clamp(-0.25, 0.25)
    assert torch.equal(seen[-1], expected)
    assert (expected != 1.0).all()
    assert trainer.episodes.count > 0
    assert trainer.episodes.mean_return == trainer.episodes.mean_length  # each step of CartPole gives 1
    trainer.close()


def test_stored_rewards_stay_raw_and_are_normalised_when_read():
    trainer = run(make("dqn", {"normalize_rewards": True, "capacity": 64}), 6)
    (stored,) = {float(x) for x in trainer.buffer.sample(64)["next", "reward"].flatten()}
    assert stored == 1.0
    (sample,) = list(trainer.samples())[:1]
    assert torch.equal(sample["next", "reward"], trainer.normalization.rewards(torch.ones(16, 1)))
    trainer.close()


def test_each_stored_reward_is_clipped_before_several_are_summed_up():
    trainer = run(make("dqn", {"reward_clip": 0.5, "n_step": 3, "gamma": 1.0}), 6)
    rewards = trainer.buffer.sample(64)["next", "reward"]
    steps = trainer.buffer.sample(64)["steps_to_next_obs"]
    assert rewards.max() == 1.5
    assert steps.max() == 3
    with pytest.raises(ConfigError, match="reward_clip: expected None with normalize_rewards"):
        make("dqn", {"reward_clip": 0.5, "n_step": 3, "normalize_rewards": True})
    trainer.close()


def test_a_network_of_ones_own_is_refused_without_a_layer_and_learnt_with_one():
    def critic(network):
        return TensorDictModule(network, in_keys=["observation"], out_keys=["state_value"])

    trainer = make("ppo", {})
    actor = trainer.actor
    trainer.close()
    with pytest.raises(ValueError, match="normalize_observations: expected networks with"):
        make("ppo", NORMALIZED, actor=actor, critic=critic(FusedMLP(4, 1)))
    layer = EmpiricalNormalization(4)
    trainer = make("ppo", {}, actor=actor, critic=critic(torch.nn.Sequential(layer, FusedMLP(4, 1))))
    run(trainer, 2)
    assert layer.count == 2 * trainer.config.batch_size
    trainer.close()


def test_options_refuse_it():
    with pytest.raises(ConfigError, match="normalize_observations: expected it left out for SACOptionsConfig"):
        make("sac-options", NORMALIZED)


@pytest.mark.parametrize("name", ["ppo", "dqn", "sac"])
def test_a_policy_carries_its_statistics(name):
    trainer = run(make(name, NORMALIZED), 6)
    fresh = make(name, {**NORMALIZED, "seed": 5})
    rows = TensorDict({"observation": 3 + torch.randn(5, trainer.normalization.layers[0].loc.shape[0])}, [5])
    fresh.policy.load_state_dict(trainer.policy.state_dict())
    torch.manual_seed(0)
    expected = trainer.policy(rows.clone())
    torch.manual_seed(0)
    received = fresh.policy(rows.clone())
    assert torch.equal(expected["action"], received["action"])
    trainer.close()
    fresh.close()


@pytest.mark.parametrize(
    ("name", "options"), [("ppo", {"desired_kl": 0.01}), ("iqn", {}), pytest.param("sac", {}, marks=pytest.mark.slow)]
)
def test_compiled_it_is_the_same(name, options, traced_only):
    eager, compiled = (run(make(name, {**NORMALIZED, **options, "mode": mode}), 5) for mode in ("eager", "compile"))
    for mine, theirs in zip(eager.normalization.layers, compiled.normalization.layers, strict=True):
        torch.testing.assert_close(mine.state_dict(), theirs.state_dict())
        assert theirs.count > 0
    for mine, theirs in zip(eager.policy.parameters(), compiled.policy.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    eager.close()
    compiled.close()
