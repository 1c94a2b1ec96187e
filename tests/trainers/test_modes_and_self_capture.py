"""In the modes "eager" and "compile" a trainer's parts run as they are, on a device that has graphs as well."""

import pytest
from recording_device import recording_device

from torchrl_perf.runtime.self_capture import conditions, is_recorded
from torchrl_perf.trainers import DQNConfig, DQNTrainer, PPOConfig, PPOTrainer
from torchrl_perf.trainers.device import as_in_mode

device = recording_device


def trainers(device, tmp_path):
    options = {"device": device, "mode": "eager", "num_envs": 4, "logger": "none", "run_dir": str(tmp_path)}
    yield PPOTrainer(PPOConfig(num_steps=8, epochs=1, minibatches=4, **options))
    yield DQNTrainer(DQNConfig(num_steps=1, minibatch_size=8, capacity=256, **options))


def test_nothing_records_itself(device, tmp_path):
    for trainer in trainers(device, tmp_path):
        for _ in range(5):
            trainer.step()
        for part in (trainer.loss, trainer.policy):
            assert not is_recorded(part)
        for part in (trainer.optimizer, trainer.metrics, trainer.episodes):
            assert not part._replays.recorded
        trainer.close()


@pytest.mark.parametrize(("mode", "records"), [("eager", False), ("compile", False), ("graph", True)])
def test_what_is_left_outside_of_a_captured_iteration_may(mode, records, device):
    with as_in_mode(mode):
        assert conditions.may_record() is records
    assert conditions.may_record()
