"""Rows of several ranks as one, and a rank's part of the settings."""

import math

import pytest

from torchrl_perf.parallel import Ranks
from torchrl_perf.systems.durotaxis import DurotaxisConfig
from torchrl_perf.systems.marine import MarineIQNConfig
from torchrl_perf.trainers import DQNConfig, PPOConfig
from torchrl_perf.trainers.config import RunConfig
from torchrl_perf.trainers.config_checks import ConfigError
from torchrl_perf.trainers.run.joint_rows import joint_row, rank_of_fault, window_of
from torchrl_perf.trainers.shards import config_of_rank, config_per_rank, seeds_of, shard_problems


class OwnConfig(RunConfig):
    """Settings of a loop of a user's own."""


def as_rank(rank, size):
    """A rank among others, without a process group."""
    ranks = Ranks.alone()
    ranks.rank, ranks.size = rank, size
    return ranks


def test_each_metric_is_combined_as_its_reduction_says():
    reductions = {
        **{"train/loss": "mean", "nonfinite/reward": "sum", "nonfinite/loss": "sum", "fault/row": "max"},
        **{"episode/count": "last", "episode/mean_return": "last", "train/first_bad_iteration": "last"},
    }
    first = {"train/loss": 1.0, "nonfinite/reward": 2.0, "nonfinite/loss": 1.0, "episode/count": 1.0}
    second = {"train/loss": 3.0, "nonfinite/reward": 1.0, "nonfinite/loss": 1.0, "episode/count": 400.0}
    first |= {"episode/mean_return": 10.0, "train/first_bad_iteration": -1.0, "time/total_seconds": 5.0}
    second |= {"episode/mean_return": 111.0, "train/first_bad_iteration": 7.0, "time/total_seconds": 6.0}
    second["fault/row"] = -20.0
    assert joint_row([first, second], reductions) == {
        **{"train/loss": 2.0, "nonfinite/reward": 3.0, "nonfinite/loss": 1.0, "fault/row": -20.0},
        **{"episode/count": 401.0, "train/first_bad_iteration": 7.0, "time/total_seconds": 5.0},
        "episode/mean_return": pytest.approx((10.0 + 50 * 111.0) / 51),  # a rank's window holds 50 of 100 episodes
    }
    assert rank_of_fault([first, second]) == 1
    assert rank_of_fault([first, first]) is None


def test_the_windows_of_ranks_are_that_of_the_run():
    assert [window_of(ranks) for ranks in (1, 2, 3, 64, 1_000)] == [100, 50, 34, 2, 1]


def test_the_rank_whose_part_of_a_loss_came_first_is_the_one():
    update = {"fault/update": -90.0}
    # the first place is the greatest; its kind, NaN or infinite, does not count
    assert rank_of_fault([update, update | {"fault/own": -90.0}]) == 1
    assert rank_of_fault([update | {"fault/own": -87.0}, update | {"fault/own": -90.0}]) == 0
    assert rank_of_fault([update | {"fault/own": -89.0}, update | {"fault/own": -88.0}]) is None
    assert rank_of_fault([update | {"fault/own": -80.0}, update | {"fault/own": -90.0, "fault/row": -80.0}]) == 1
    assert rank_of_fault([update, update]) is None


def test_a_mean_that_is_nan_on_one_rank_is_nan():
    rows = [{"train/loss": math.nan}, {"train/loss": 1.0}]
    assert math.isnan(joint_row(rows, {"train/loss": "mean"})["train/loss"])


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_rank_has_its_part_and_the_schedules_of_the_whole(ranks):
    config = DQNConfig(num_envs=24, minibatch_size=48, total_steps=10_001, eps_frames=4_800, learning_starts=1_000)
    own = config_of_rank(config, as_rank(1, ranks))
    assert (own.num_envs, own.minibatch_size, own.capacity) == (24 // ranks, 48 // ranks, -(-config.capacity // ranks))
    assert (own.iterations, own.fill_iterations) == (config.iterations, config.fill_iterations)
    assert own.eps_frames / own.batch_size == config.eps_frames / config.batch_size
    assert own.whole is config
    assert config.whole is config
    assert config_per_rank(config, ranks).num_envs == 24 * ranks


def test_seeds_of_ranks_differ():
    assert seeds_of(5, 8)[0] == 5
    assert len({seed for run in range(4) for seed in seeds_of(run, 8)}) > 4 * 8 - 3
    assert len(set(seeds_of(5, 64))) == 64


def test_stages_of_a_curriculum_begin_with_a_ranks_part_of_the_steps():
    config = config_of_rank(MarineIQNConfig(stage_frames="0, 1e6, 2000001, 3e6, 4e6, 5e6"), as_rank(1, 2))
    assert config.stages()["frames"] == (0, 500_000, 1_000_001, 1_500_000, 2_000_000, 2_500_000)
    assert config.whole.stages()["frames"][1] == 1_000_000


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (PPOConfig(num_envs=7, num_steps=8, minibatches=4), "num_envs: expected a multiple of the 2 ranks, received 7"),
        (
            PPOConfig(num_envs=4, minibatches=4, memory="gru"),
            "num_envs: expected a multiple of minibatches = 4 on each",
        ),
        (DQNConfig.without_task(memory="gru"), "memory: expected 'none' on several ranks for dqn"),
        (PPOConfig(num_envs=6, num_steps=2, minibatches=4), "to be a multiple of minibatches = 4, received 6"),
        (DQNConfig(minibatch_size=33), "minibatch_size: expected a multiple of the 2 ranks, received 33"),
        (DurotaxisConfig(standardize_components=True), "standardize_components: expected False with 2 ranks"),
        (OwnConfig(), "ranks: expected 1 for OwnConfig, whose loop is not known to agree on gradients, received 2"),
    ],
    ids=["envs", "streams", "slices", "minibatches", "rows", "components", "algorithm"],
)
def test_what_ranks_cannot_share_is_refused_by_name(config, words):
    assert words in " ".join(shard_problems(config, 2))
    with pytest.raises(ConfigError, match="Remedy"):
        config_of_rank(config, as_rank(0, 2))
