"""Flashbax's flat and prioritised buffers (JAX) on the same rows, where it is installed."""

import importlib.util
import time
from collections.abc import Callable, Iterator
from typing import Any

OBSERVATION, ACTION = 376, 17


def available() -> bool:
    """Whether JAX and Flashbax can be imported."""
    return all(importlib.util.find_spec(name) is not None for name in ("jax", "flashbax"))


def measure(capacity: int, batches: tuple[int, ...], extend: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Yields rows like those of :mod:`torchrl_perf.bench.replay`: jitted calls from Python, the state donated.

    Args:
        capacity: rows of the buffer.
        batches: rows of a sample.
        extend: rows of a write.
        repeats: timed calls.
    """
    import flashbax
    import jax

    for batch in batches:
        for kind in ("sample", "prioritised sample + update"):
            make = flashbax.make_flat_buffer if kind == "sample" else flashbax.make_prioritised_flat_buffer
            options = {} if kind == "sample" else {"priority_exponent": 0.6}
            # flat buffers hold pairs of consecutive observations, so the next observation is stored once
            buffer = make(capacity, 1, batch, add_sequences=True, **options)
            state = jax.jit(buffer.init)(_step(jax))
            add = jax.jit(buffer.add, donate_argnums=0)
            data = _steps(jax, extend)
            for _ in range(capacity // extend):
                state = add(state, data)
            sample, update = jax.jit(buffer.sample), None
            if kind != "sample":
                update = jax.jit(buffer.set_priorities, donate_argnums=0)
            us, state = _time(jax, _call(jax, sample, update), state, repeats)
            yield {"operation": kind, "batch": batch, "variant": "flashbax", "us": us}
            if batch == batches[0]:
                us, state = _time(jax, lambda s, _, add=add, data=data: (add(s, data), None), state, repeats)
                name = "extend" if kind == "sample" else "prioritised extend"
                yield {"operation": name, "batch": extend, "variant": "flashbax", "us": us}
            del state


def _step(jax: Any) -> dict[str, Any]:
    numpy = jax.numpy
    return {"observation": numpy.zeros(OBSERVATION), "action": numpy.zeros(ACTION), "reward": numpy.zeros(())}


def _steps(jax: Any, rows: int) -> dict[str, Any]:
    key = jax.random.PRNGKey(0)
    return jax.tree.map(lambda leaf: jax.random.normal(key, (rows, *leaf.shape)), _step(jax))


def _call(jax: Any, sample: Callable[..., Any], update: Callable[..., Any] | None) -> Callable[..., Any]:
    def call(state: Any, key: Any) -> tuple[Any, Any]:
        out = sample(state, key)
        if update is not None:
            state = update(state, out.indices, out.probabilities)
        return state, out

    return call


def _time(jax: Any, call: Callable[..., Any], state: Any, repeats: int) -> tuple[float, Any]:
    """Microseconds of one call, queued back to back."""
    keys = jax.random.split(jax.random.PRNGKey(1), repeats + 3)
    for key in keys[:3]:
        state, out = call(state, key)
    jax.block_until_ready((state, out))
    start = time.perf_counter()
    for key in keys[3:]:
        state, out = call(state, key)
    jax.block_until_ready((state, out))
    return (time.perf_counter() - start) / repeats * 1e6, state
