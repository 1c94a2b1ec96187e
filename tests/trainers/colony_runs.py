"""Small runs on colonies, and what can be seen of one."""

import torch

from torchrl_perf.trainers.durotaxis import DurotaxisTrainer
from torchrl_perf.trainers.durotaxis_config import DurotaxisConfig

SMALL = {
    **{"num_envs": 4, "num_steps": 4, "total_steps": 160, "device": "cpu", "mode": "eager", "hidden_size": 32},
    **{"epochs": 2, "minibatches": 2, "learning_rate": 1e-3, "critical_nodes": 12, "width": 60.0, "height": 60.0},
    **{"encoder_width": 8, "encoder_heads": 2, "simplex_groups": 2, "logger": "none"},
}


def make(parts=None, **options):
    return DurotaxisTrainer(DurotaxisConfig(**{**SMALL, **options}), **(parts or {}))


def run(trainer, iterations):
    for _ in range(iterations):
        trainer.step()
        trainer.iterations_done += 1
    return trainer


def parameters(trainer):
    return {
        f"{part}.{name}": param.detach().clone()
        for part in ("actor", "critic")
        for name, param in getattr(trainer, part).named_parameters()
    }


def flatten(state, prefix=""):
    """Every leaf of a nested state, by path."""
    if not isinstance(state, dict | list | tuple):
        return {prefix: state}
    items = state.items() if isinstance(state, dict) else enumerate(state)
    return {path: leaf for key, value in items for path, leaf in flatten(value, f"{prefix}/{key}").items()}


def assert_same_state(one, other):
    one, other = flatten(one), flatten(other)
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value.nan_to_num(-7.0), other[key].nan_to_num(-7.0)), key
        else:
            assert value == other[key] or (value != value and other[key] != other[key]), key
