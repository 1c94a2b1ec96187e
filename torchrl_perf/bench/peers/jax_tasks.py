"""Tasks of the JAX peer: dynamics of one env, and the distribution of its actions. JAX is an argument throughout."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

__all__ = ["TASKS", "Task"]


class Task(NamedTuple):
    """What differs between the tasks of the peer; ``params`` are those of the policy beside its network."""

    observations: int
    """Numbers of a state, which is observed as it is."""
    outputs: int
    """Of the actor's network."""
    reset_bound: float
    """Initial states are uniform between it and its negative."""
    step: Callable[[Any, Any, Any, Any], tuple[Any, Any, Any, Any]]
    """(jnp, state, elapsed, action) to (next state, reward, terminated, done) of one env."""
    params: Callable[[Any], Any]
    """jnp to the initial ``params``."""
    sample: Callable[[Any, Any, Any, Any], Any]
    """(jax, key, outputs, params) to actions."""
    log_prob: Callable[[Any, Any, Any, Any], Any]
    """(jax, outputs, params, action) to log-probabilities."""
    entropy: Callable[[Any, Any, Any], Any]
    """(jax, outputs, params) to the mean entropy."""


def _cartpole(jnp: Any, state: Any, elapsed: Any, action: Any) -> tuple[Any, Any, Any, Any]:
    """Gymnasium's CartPole-v1."""
    x, x_dot, theta, theta_dot = state
    force = jnp.where(action == 1, 10.0, -10.0)
    cos, sin = jnp.cos(theta), jnp.sin(theta)
    temp = (force + 0.05 * theta_dot**2 * sin) / 1.1
    theta_acc = (9.8 * sin - cos * temp) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
    x_acc = temp - 0.05 * theta_acc * cos / 1.1
    new = jnp.stack([x + 0.02 * x_dot, x_dot + 0.02 * x_acc, theta + 0.02 * theta_dot, theta_dot + 0.02 * theta_acc])
    terminated = (jnp.abs(new[0]) > 2.4) | (jnp.abs(new[2]) > 12 * 2 * jnp.pi / 360)
    return new, jnp.ones(()), terminated, terminated | (elapsed + 1 >= 500)


def _robot(jnp: Any, state: Any, elapsed: Any, action: Any) -> tuple[Any, Any, Any, Any]:
    """:class:`torchrl_perf.bench.robot.Robot`."""
    action = jnp.clip(action, -1.0, 1.0)
    new = 0.95 * state + 0.05 * jnp.pad(action, (0, state.shape[0] - action.shape[0]))
    terminated = state[0] > 10.0
    return new, new[0] - 0.1 * jnp.sum(action**2), terminated, terminated | (elapsed + 1 >= 1000)


def _log_prob_of_choice(jax: Any, outputs: Any, params: Any, action: Any) -> Any:
    return jax.numpy.take_along_axis(jax.nn.log_softmax(outputs), action[:, None], 1)[:, 0]


def _entropy_of_choice(jax: Any, outputs: Any, params: Any) -> Any:
    log_probs = jax.nn.log_softmax(outputs)
    return -(jax.numpy.exp(log_probs) * log_probs).sum(-1).mean()


def _sample_normal(jax: Any, key: Any, outputs: Any, params: Any) -> Any:
    return outputs + jax.numpy.exp(params) * jax.random.normal(key, outputs.shape)


def _log_prob_of_normal(jax: Any, outputs: Any, params: Any, action: Any) -> Any:
    z = (action - outputs) / jax.numpy.exp(params)
    return (-0.5 * z**2 - params - 0.5 * math.log(2 * math.pi)).sum(-1)


def _entropy_of_normal(jax: Any, outputs: Any, params: Any) -> Any:
    return (params + 0.5 * math.log(2 * math.pi * math.e)).sum()


_CHOICES: dict[str, Any] = {
    "params": lambda jnp: jnp.zeros(()),
    "sample": lambda jax, key, outputs, params: jax.random.categorical(key, outputs),
    "log_prob": _log_prob_of_choice,
    "entropy": _entropy_of_choice,
}


def _normal(size: int) -> dict[str, Any]:
    """A normal of D actions whose log-scales do not depend on the state."""
    return {
        "params": partial(_zeros, size=size),
        "sample": _sample_normal,
        "log_prob": _log_prob_of_normal,
        "entropy": _entropy_of_normal,
    }


def _zeros(jnp: Any, size: int) -> Any:
    return jnp.zeros(size)


TASKS = {
    "CartPole": Task(observations=4, outputs=2, reset_bound=0.05, step=_cartpole, **_CHOICES),
    "robot": Task(observations=48, outputs=12, reset_bound=0.1, step=_robot, **_normal(12)),
}
"""By the name of the benchmark's task."""
