"""PPO with a GRU on CartPole without velocities as one JAX program, a peer to compare with if JAX is installed.

Written for this comparison in the form of PureJaxRL's recurrent PPO (arXiv:2210.05639): a scan over time, resets by a
``where`` in it, minibatches of whole streams that are read again from the state that each starts from. Sizes, losses
and number of updates are those of this package's PPO; the value of a next state is a step from the state after it.
"""

import os
from functools import partial
from typing import Any, NamedTuple

from torchrl_perf.bench.peers.jax import (
    Rollout,
    advantages_of,
    apply_network,
    clipped_loss,
    init_network,
    make_update,
    timed,
)
from torchrl_perf.bench.peers.jax_tasks import TASKS
from torchrl_perf.trainers.ppo import PPOConfig

__all__ = ["make_iteration", "measure"]


class Carry(NamedTuple):
    """What goes on from step to step."""

    state: Any
    elapsed: Any
    key: Any
    episode: Any
    hidden: Any
    begins: Any


def _gru(jax: Any, params: dict[str, Any], hidden: Any, features: Any) -> Any:
    """One step of a GRU in the form of ``torch.nn.GRU``."""
    weight_in, bias_in, weight, bias = params["gru"]
    in_reset, in_update, in_new = jax.numpy.split(features @ weight_in + bias_in, 3, -1)
    of_reset, of_update, of_new = jax.numpy.split(hidden @ weight + bias, 3, -1)
    reset, update = jax.nn.sigmoid(in_reset + of_reset), jax.nn.sigmoid(in_update + of_update)
    new = jax.numpy.tanh(in_new + reset * of_new)
    return new + update * (hidden - new)


def _remember(jax: Any, params: dict[str, Any], hidden: Any, observation: Any, begins: Any) -> Any:
    """The next state of the memory, 0 before a step that begins an episode."""
    hidden = jax.numpy.where(begins[:, None], 0.0, hidden)
    weight, bias = params["encoder"]
    return _gru(jax, params, hidden, jax.numpy.tanh(observation @ weight + bias))


def _rollout(jax: Any, config: PPOConfig, params: dict[str, Any], carry: Carry) -> tuple[Carry, Rollout]:
    jnp = jax.numpy
    visible = jnp.array([0, 2])

    def step(carry: Carry, _: None) -> tuple[Carry, Rollout]:
        key, act_key, reset_key = jax.random.split(carry.key, 3)
        observation = carry.state[:, visible]
        hidden = _remember(jax, params, carry.hidden, observation, carry.begins)
        logits = jax.nn.log_softmax(apply_network(jax, config.activation, params["actor"], hidden))
        action = jax.random.categorical(act_key, logits)
        new, reward, terminated, done = jax.vmap(partial(TASKS["CartPole"].step, jnp))(
            carry.state, carry.elapsed, action
        )
        following = _remember(jax, params, hidden, new[:, visible], jnp.zeros_like(done))
        row = Rollout(
            (observation, carry.begins),
            action,
            jnp.take_along_axis(logits, action[:, None], 1)[:, 0],
            apply_network(jax, config.activation, params["critic"], hidden)[:, 0],
            reward,
            terminated,
            done,
            apply_network(jax, config.activation, params["critic"], following)[:, 0],
        )
        fresh = jax.random.uniform(reset_key, new.shape, minval=-0.05, maxval=0.05)
        state = jnp.where(done[:, None], fresh, new)
        elapsed, episode = jnp.where(done, 0, carry.elapsed + 1), jnp.where(done, 0.0, carry.episode + 1.0)
        return Carry(state, elapsed, key, episode, hidden, done), row

    return jax.lax.scan(step, carry, None, config.num_steps)


def _time_first(jax: Any, fields: Any) -> Any:
    """Fields with time and envs in exchanged order."""
    return jax.tree.map(lambda field: field.swapaxes(0, 1), fields)


def _loss(jax: Any, config: PPOConfig, params: dict[str, Any], streams: tuple[Any, ...]) -> Any:
    """The loss of streams ``[n, T, *]`` that start from stored states."""
    jnp = jax.numpy
    hidden, *fields = streams
    (observation, begins), action, old_log_prob, advantage, target = _time_first(jax, fields)

    def step(hidden: Any, row: tuple[Any, Any]) -> tuple[Any, Any]:
        hidden = _remember(jax, params, hidden, *row)
        return hidden, hidden

    _, features = jax.lax.scan(step, hidden, (observation, begins))
    logits = jax.nn.log_softmax(apply_network(jax, config.activation, params["actor"], features))
    log_prob = jnp.take_along_axis(logits, action[..., None], -1)[..., 0]
    value_loss = (apply_network(jax, config.activation, params["critic"], features)[..., 0] - target) ** 2
    entropy = -(jnp.exp(logits) * logits).sum(-1).mean()
    objective = clipped_loss(jnp, config, log_prob - old_log_prob, advantage, entropy)
    return objective + config.critic_coeff * value_loss.mean()


def _parameters(jax: Any, config: PPOConfig, key: Any) -> dict[str, Any]:
    size, width = config.memory_size, config.hidden_size
    encoder, gru_in, gru, actor, critic = jax.random.split(key, 5)
    uniform = jax.nn.initializers.uniform(2 * size**-0.5)
    shape, zeros = (size, 3 * size), partial(jax.numpy.zeros, 3 * size)
    centre = size**-0.5
    return {
        "encoder": init_network(jax, encoder, (2, size), 2**0.5)[0],
        "gru": (uniform(gru_in, shape) - centre, zeros(), uniform(gru, shape) - centre, zeros()),
        "actor": init_network(jax, actor, (size, width, width, 2), 0.01),
        "critic": init_network(jax, critic, (size, width, width, 1), 1.0),
    }


def make_iteration(config: PPOConfig) -> tuple[Any, Any]:
    """The jitted iteration and its initial state; the last entry is the mean length of the running episodes."""
    # JAX would otherwise take most of the device's memory from PyTorch, which runs in the same process
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    jnp = jax.numpy
    optimizer, update = make_update(config, partial(_loss, jax, config))

    def iteration(state: Any) -> Any:
        params, moments, carry, _ = state
        key, shuffle_key = jax.random.split(carry.key)
        first = carry.hidden
        carry, batch = _rollout(jax, config, params, carry._replace(key=key))
        advantage, target = advantages_of(jax, config, batch)  # pyright: ignore[reportArgumentType]
        fields = (batch.observation, batch.action, batch.log_prob, advantage, target)
        streams = (first, *_time_first(jax, fields))

        def epoch(carry: Any, epoch_key: Any) -> tuple[Any, None]:
            order = jax.random.permutation(epoch_key, config.num_envs)
            parts = jax.tree.map(lambda x: x[order].reshape((config.minibatches, -1, *x.shape[1:])), streams)
            return jax.lax.scan(update, carry, parts)

        (params, moments), _ = jax.lax.scan(epoch, (params, moments), jax.random.split(shuffle_key, config.epochs))
        return params, moments, carry, carry.episode.mean()

    params_key, env_key, key = jax.random.split(jax.random.PRNGKey(config.seed), 3)
    params = _parameters(jax, config, params_key)
    n = config.num_envs
    start = jax.random.uniform(env_key, (n, 4), minval=-0.05, maxval=0.05)
    hidden = jnp.zeros((n, config.memory_size))
    carry = Carry(start, jnp.zeros(n, jnp.int32), key, jnp.zeros(n), hidden, jnp.ones(n, bool))
    return jax.jit(iteration, donate_argnums=0), (params, optimizer.init(params), carry, jnp.zeros(()))


def measure(config: PPOConfig, repeats: int) -> dict[str, Any]:
    """Median and spread of an iteration, after compilation."""
    row, state = timed(*make_iteration(config), config, repeats)
    return {"part": "training", **row, "hidden": config.memory_size, "mean_return": float(state[-1])}
