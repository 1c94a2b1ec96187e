"""Step sizes of actors and critics that fall over the run: of all groups, by iterations, from what the settings say."""

import dataclasses

import pytest
from config_runs import KINDS, SMALL, TRAINERS

from torchrl_perf.trainers.sac import SACTrainer

ACTOR_CRITICS = ("sac", "td3", "ddpg", "ac-iqn", "sac-options")
RATES = {"actor_learning_rate": 0.01, "critic_learning_rate": 0.02}


def make(name, **options):
    config = KINDS[name].without_task(**{**SMALL[name], **RATES, "anneal_learning_rate": True, **options})
    return TRAINERS[name](dataclasses.replace(config, total_steps=10 * config.batch_size))


def rates_of(trainer):
    return [rate for one in (trainer.critic_optimizer, trainer.actor_optimizer) for rate in one.learning_rates]


def steps(trainer, count):
    for _ in range(count):
        trainer.step()
        trainer.iterations_done += 1
    return [float(rate) for rate in rates_of(trainer)]


@pytest.mark.parametrize("name", ACTOR_CRITICS)
def test_all_step_sizes_fall_by_the_iterations_that_are_left(name):
    trainer = make(name)
    first = [float(rate) for rate in rates_of(trainer)]
    assert first[:2] == pytest.approx([0.02, 0.01])
    held = rates_of(trainer)
    schedule = trainer.algorithm.schedule
    seen = []

    def scheduled():
        told = schedule()
        seen.append([float(rate) for rate in held])
        return told

    trainer.algorithm.schedule = scheduled
    steps(trainer, 10)
    for done, rates in enumerate(seen):
        assert rates == pytest.approx([rate * (1 - done / 10) for rate in first])
    assert all(rate is same for rate, same in zip(rates_of(trainer), held, strict=True))  # a graph has recorded them
    trainer.close()


def test_without_it_they_stay():
    trainer = make("sac", anneal_learning_rate=False)
    assert steps(trainer, 3)[:2] == pytest.approx([0.02, 0.01])
    trainer.close()


def test_they_go_on_from_a_checkpoint():
    trainer = make("sac")
    steps(trainer, 4)
    other = make("sac")
    other.load_state_dict(trainer.state_dict())
    assert steps(other, 6) == pytest.approx(steps(trainer, 6))
    trainer.close()
    other.close()


def test_a_run_that_goes_on_without_it_has_whole_step_sizes_again(tmp_path):
    from torchrl_perf.trainers import train
    from torchrl_perf.trainers.run.schedules import describe_changes

    trainer = make("sac")
    config = dataclasses.replace(trainer.config, total_steps=5 * trainer.config.batch_size, schedule_steps=320)
    first = SACTrainer(config)
    train(first, tmp_path, progress=False)
    later = dataclasses.replace(
        config, total_steps=10 * config.batch_size, anneal_learning_rate=False, schedule_steps=None
    )
    second = SACTrainer(later)
    second.load_state_dict(first.state_dict())
    assert "critic_learning_rate is 0.02" in describe_changes(config, later, 5)
    train(second, tmp_path, progress=False)
    assert [float(rate) for rate in rates_of(second)][:2] == pytest.approx([0.02, 0.01])
    for one in (trainer, first, second):
        one.close()
