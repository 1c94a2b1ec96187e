"""The same PPO as one JAX program, a peer to compare with if JAX is installed.

Written for this comparison in the form that JAX end-to-end systems have (PureJaxRL, arXiv:2210.05639): the iteration is
one jitted function, envs are ``vmap``-ped, time is a ``scan``, and nothing leaves the device. Same networks, sizes,
coefficients and number of updates.
"""

import os
import time
from functools import partial
from typing import Any, NamedTuple

from torchrl_perf.bench.peers.jax_tasks import TASKS, Task
from torchrl_perf.trainers.ppo import PPOConfig


class Rollout(NamedTuple):
    """Fields of a batch, time first."""

    observation: Any
    action: Any
    log_prob: Any
    value: Any
    reward: Any
    terminated: Any
    done: Any
    next_value: Any


def init_network(jax: Any, key: Any, sizes: tuple[int, ...], output_gain: float) -> list[tuple[Any, Any]]:
    """Orthogonal weights and zero biases of a perceptron."""
    keys = jax.random.split(key, len(sizes) - 1)
    gains = [2**0.5] * (len(sizes) - 2) + [output_gain]
    return [
        (jax.nn.initializers.orthogonal(gain)(k, (a, b)), jax.numpy.zeros(b))
        for k, a, b, gain in zip(keys, sizes[:-1], sizes[1:], gains, strict=True)
    ]


def apply_network(jax: Any, activation: str, params: list[tuple[Any, Any]], x: Any) -> Any:
    """Outputs of a perceptron."""
    act = jax.numpy.tanh if activation == "tanh" else getattr(jax.nn, activation)
    for weight, bias in params[:-1]:
        x = act(x @ weight + bias)
    weight, bias = params[-1]
    return x @ weight + bias


def _rollout(jax: Any, config: PPOConfig, task: Task, params: dict[str, Any], carry: Any) -> tuple[Any, Rollout]:
    """T steps of N envs; the true next observation's value is kept for the bootstrap."""
    jnp, apply = jax.numpy, partial(apply_network, jax, config.activation)

    def step(carry: Any, _: None) -> tuple[Any, Rollout]:
        state, elapsed, key, episode, best = carry
        key, act_key, reset_key = jax.random.split(key, 3)
        outputs = apply(params["actor"], state)
        action = task.sample(jax, act_key, outputs, params["policy"])
        new, reward, terminated, done = jax.vmap(partial(task.step, jnp))(state, elapsed, action)
        fresh = jax.random.uniform(reset_key, state.shape, minval=-task.reset_bound, maxval=task.reset_bound)
        length = episode + 1.0
        best = (best[0] + jnp.sum(jnp.where(done, length, 0.0)), best[1] + jnp.sum(done))
        row = Rollout(
            state,
            action,
            task.log_prob(jax, outputs, params["policy"], action),
            apply(params["critic"], state)[:, 0],
            reward,
            terminated,
            done,
            apply(params["critic"], new)[:, 0],
        )
        carry = (
            jnp.where(done[:, None], fresh, new),
            jnp.where(done, 0, elapsed + 1),
            key,
            jnp.where(done, 0.0, length),
            best,
        )
        return carry, row

    return jax.lax.scan(step, carry, None, config.num_steps)


def advantages_of(jax: Any, config: PPOConfig, batch: Rollout) -> tuple[Any, Any]:
    """Generalised advantages and the targets of the values."""
    jnp = jax.numpy

    def back(following: Any, row: Rollout) -> tuple[Any, Any]:
        delta = row.reward + config.gamma * jnp.where(row.terminated, 0.0, row.next_value) - row.value
        advantage = delta + config.gamma * config.lmbda * jnp.where(row.done, 0.0, following)
        return advantage, advantage

    _, advantage = jax.lax.scan(back, jnp.zeros_like(batch.value[0]), batch, reverse=True)
    return advantage, advantage + batch.value


def _loss(jax: Any, config: PPOConfig, task: Task, params: dict[str, Any], rows: tuple[Any, ...]) -> Any:
    jnp, apply = jax.numpy, partial(apply_network, jax, config.activation)
    observation, action, old_log_prob, old_value, advantage, target = rows
    outputs = apply(params["actor"], observation)
    log_prob = task.log_prob(jax, outputs, params["policy"], action)
    value = apply(params["critic"], observation)[:, 0]
    value_loss = (value - target) ** 2
    if config.clip_value:
        clipped_value = old_value + jnp.clip(value - old_value, -config.clip_epsilon, config.clip_epsilon)
        value_loss = jnp.maximum(value_loss, (clipped_value - target) ** 2)
    entropy = task.entropy(jax, outputs, params["policy"])
    objective = clipped_loss(jnp, config, log_prob - old_log_prob, advantage, entropy)
    return objective + config.critic_coeff * value_loss.mean()


def clipped_loss(jnp: Any, config: PPOConfig, log_ratio: Any, advantage: Any, entropy: Any) -> Any:
    """PPO's objective and the bonus of the mean entropy."""
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1 - config.clip_epsilon, 1 + config.clip_epsilon)
    policy_loss = -jnp.minimum(ratio * advantage, clipped * advantage).mean()
    return policy_loss - config.entropy_coeff * entropy


def make_update(config: PPOConfig, loss: Any) -> tuple[Any, Any]:
    """The optimiser, and a step of a scan over minibatches: ``update((params, moments), rows)``."""
    import jax
    import optax

    optimizer = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.adam(config.learning_rate, eps=1e-5))

    def update(carry: Any, rows: tuple[Any, ...]) -> tuple[Any, None]:
        params, moments = carry
        gradient = jax.grad(loss)(params, rows)
        change, moments = optimizer.update(gradient, moments)
        return (optax.apply_updates(params, change), moments), None

    return optimizer, update


def make_iteration(config: PPOConfig, name: str = "CartPole") -> tuple[Any, Any]:
    """The jitted iteration and its initial state; ``state[-1]`` is the length sum and count of finished episodes.

    Args:
        config: sizes, coefficients, widths and activation.
        name: one of :data:`~torchrl_perf.bench.peers.jax_tasks.TASKS`.
    """
    # JAX would otherwise take most of the device's memory from PyTorch, which runs in the same process
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    jnp, task = jax.numpy, TASKS[name]
    optimizer, update = make_update(config, partial(_loss, jax, config, task))

    def iteration(state: Any) -> Any:
        params, moments, (env_state, elapsed, key, episode), _ = state
        key, shuffle_key = jax.random.split(key)
        zero = (jnp.zeros(()), jnp.zeros((), jnp.int32))
        (env_state, elapsed, key, episode, finished), batch = _rollout(
            jax, config, task, params, (env_state, elapsed, key, episode, zero)
        )
        advantage, target = advantages_of(jax, config, batch)
        fields = (batch.observation, batch.action, batch.log_prob, batch.value, advantage, target)
        flat = jax.tree.map(lambda x: x.reshape((config.batch_size, *x.shape[2:])), fields)

        def epoch(carry: Any, epoch_key: Any) -> tuple[Any, None]:
            order = jax.random.permutation(epoch_key, config.batch_size)
            parts = jax.tree.map(lambda x: x[order].reshape((config.minibatches, -1, *x.shape[1:])), flat)
            return jax.lax.scan(update, carry, parts)

        (params, moments), _ = jax.lax.scan(epoch, (params, moments), jax.random.split(shuffle_key, config.epochs))
        return params, moments, (env_state, elapsed, key, episode), finished

    key = jax.random.PRNGKey(config.seed)
    key, actor_key, critic_key, env_key = jax.random.split(key, 4)
    params = {
        "actor": init_network(jax, actor_key, (task.observations, *config.widths, task.outputs), 0.01),
        "critic": init_network(jax, critic_key, (task.observations, *config.critic_widths, 1), 1.0),
        "policy": task.params(jnp),
    }
    n, bound = config.num_envs, task.reset_bound
    start = jax.random.uniform(env_key, (n, task.observations), minval=-bound, maxval=bound)
    env = (start, jnp.zeros(n, jnp.int32), key, jnp.zeros(n))
    state = (params, optimizer.init(params), env, (jnp.zeros(()), jnp.zeros((), jnp.int32)))
    return jax.jit(iteration, donate_argnums=0), state


def measure(config: PPOConfig, repeats: int, name: str = "CartPole") -> dict[str, Any]:
    """Row of the PPO table: median and spread of an iteration, after compilation."""
    row, _ = timed(*make_iteration(config, name), config, repeats)
    return row


def timed(iteration: Any, state: Any, config: PPOConfig, repeats: int) -> tuple[dict[str, Any], Any]:
    """Median and spread of an iteration, after compilation; and the last state."""
    import jax

    start = time.perf_counter()
    for _ in range(2):
        state = jax.block_until_ready(iteration(state))
    started = time.perf_counter() - start
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        state = jax.block_until_ready(iteration(state))
        seconds.append(time.perf_counter() - begin)
    seconds.sort()
    median = seconds[len(seconds) // 2]
    row = {
        "variant": "jax",
        "N x T": f"{config.num_envs}x{config.num_steps}",
        "steps_per_second": config.batch_size / median,
        "ms": median * 1e3,
        "p10_ms": seconds[len(seconds) // 10] * 1e3,
        "p90_ms": seconds[-1 - len(seconds) // 10] * 1e3,
        "repeats": repeats,
        "start_s": started,
    }
    return row, state


def time_to_solve(config: PPOConfig, target: float = 475.0) -> dict[str, Any]:
    """Wall time after compilation until the episodes finished in an iteration have a mean return of ``target``."""
    iteration, state = make_iteration(config)
    import jax

    start = time.perf_counter()
    jax.block_until_ready(iteration(state))
    started = time.perf_counter() - start
    _, state = make_iteration(config)
    begin = time.perf_counter()
    mean = 0.0
    for done in range(1, config.iterations + 1):  # noqa: B007 (read after the loop)
        state = iteration(state)
        total, count = state[-1]
        mean = float(total) / max(int(count), 1)
        if mean >= target:
            break
    return {
        "variant": f"jax, time to {target:.0f}",
        "learns": "jax",
        "seed": config.seed,
        "seconds": time.perf_counter() - begin if mean >= target else float("inf"),
        "steps": done * config.batch_size,
        "mean_return": mean,
        "start_s": started,
    }
