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


def assert_close_states(one, other, *, rtol, atol):
    """Two dicts of tensors that have the same names and about the same numbers."""
    assert one.keys() == other.keys()
    for key, value in one.items():
        torch.testing.assert_close(other[key], value, rtol=rtol, atol=atol, msg=lambda text, key=key: f"{key}: {text}")


def assert_modes_agree(make, parameters, iterations, modes=("eager", "compile"), *, rtol=1e-3, atol=1e-5):
    """That trainers of two modes learn the same.

    Args:
        make: gives a trainer of a mode.
        parameters: gives those of a trainer by name, as copies.
        iterations: how many each makes.
        modes: of which two.
        rtol: how far the second's parameters may be off.
        atol: the same.

    Returns:
        The trainer of the second mode, open.
    """
    first, second = (run(make(mode), iterations) for mode in modes)
    assert_close_states(parameters(first), parameters(second), rtol=rtol, atol=atol)
    first.close()
    return second


def assert_graph_equals_compiled(make, parameters, iterations):
    """:func:`assert_modes_agree` of a captured iteration and a compiled one, whose sums come in another order."""
    return assert_modes_agree(make, parameters, iterations, ("compile", "graph"), rtol=1e-2, atol=1e-3)
