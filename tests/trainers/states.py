"""What tests of all trainers do: iterations, and states compared leaf by leaf."""

import torch


def run(trainer, iterations):
    for _ in range(iterations):
        trainer.step()
        trainer.iterations_done += 1
    return trainer


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
