"""TorchRL's own PPOTrainer, SACTrainer and DQNTrainer on the device's parts, without a host read a batch.

Where TorchRL 0.14's trainers wait for the device, and what stands in for it here (lines of ``torchrl``):

* ``trainers/trainers.py:2204``: every batch is copied to the CPU, once an epoch. :class:`MinibatchHook`,
  :class:`DeviceReplayHook`.
* ``trainers/trainers.py:305`` and ``2293``: the gradient norm, at each step. :class:`GuardedStepper`.
* ``trainers/trainers.py:2516`` and ``2526``: one or two numbers for each ``LogScalar`` (4 to 6 of them) at each batch;
  ``2016``: one call of the logger for each metric; ``1996``: every value is kept. :class:`DeviceLogHook`.
* ``data/replay_buffers/storages/base.py:131``: the cursor, at each extend. ``DeviceStorage``.
* ``objectives/value/advantages.py:656``, ``objectives/ppo.py:763``: whether values and entropy are finite.
  ``GAETransform``, ``DeviceClipPPOLoss``.
* ``modules/distributions/continuous.py:427`` to ``471``: the bounds of ``TanhNormal``. ``SquashedNormal``.
* ``modules/tensordict_module/exploration.py:146``: no wait, but a Python step for each frame. ``EpsilonGreedy``.
* ``collectors/_single.py``, ``envs/common.py``: resets and trajectory ids. ``DeviceCollector``.

What stays is ``trainers/trainers.py:1687``: the size of each batch, read from a tensor that ``torch.tensor`` makes on
the CPU. Leave torch's default device alone, or that tensor is on CUDA and its read a wait.
"""

from typing import Literal, NamedTuple

import torch
from tensordict.nn import TensorDictParams
from torch import nn
from torchrl.data import ReplayBuffer
from torchrl.record.loggers import Logger
from torchrl.trainers import Trainer
from torchrl.trainers.algorithms.on_policy import OnPolicyTrainer

from torchrl_perf.metrics import DeviceMetrics
from torchrl_perf.trainers.optim.optimization import GuardedAdam
from torchrl_perf.trainers.recurrent import refuse_recurrent
from torchrl_perf.trainers.torchrl.log import DeviceLogHook
from torchrl_perf.trainers.torchrl.replay import DeviceReplayHook, MinibatchHook, draws_slices
from torchrl_perf.trainers.torchrl.stepper import GuardedStepper


class DeviceParts(NamedTuple):
    """What :func:`use_device_parts` has installed."""

    replay: DeviceReplayHook | MinibatchHook
    """Where minibatches come from."""
    stepper: GuardedStepper
    """The optimiser step."""
    log: DeviceLogHook
    """The metrics; ``log.row`` is the latest row."""


def use_device_parts(
    trainer: Trainer,
    optimizer: GuardedAdam,
    *,
    replay_buffer: ReplayBuffer | None = None,
    minibatch_size: int | None = None,
    logger: Logger | None = None,
    log_interval: int = 10_000,
    window: int = 100,
    mode: Literal["eager", "graph"] = "eager",
) -> DeviceParts:
    """Installs replay, optimiser step and logging on a TorchRL trainer through its public hooks.

    Construct the trainer with ``optimizer=None, replay_buffer=None, enable_logging=False`` on a
    :class:`~torchrl_perf.collectors.DeviceCollector` or :class:`~torchrl_perf.collectors.HostCollector`, PPO with
    ``gae=GAETransform(…)`` and a :class:`~torchrl_perf.objectives.DeviceClipPPOLoss`, DQN with
    ``greedy_module=EpsilonGreedy(…)``. Then a batch makes no host read, but for the row of metrics every
    ``log_interval`` frames. On-policy trainers need ``optim_steps_per_batch=None``, or the number of minibatches.

    Args:
        trainer: a ``PPOTrainer``, ``SACTrainer``, ``DQNTrainer`` or another with their hooks, not yet trained.
        optimizer: over ``loss_module.parameters()``.
        replay_buffer: on the device; off-policy trainers need one, on-policy ones may have one.
        minibatch_size: on-policy without a buffer: rows of a minibatch.
        logger: receives the rows; ``trainer.logger`` by default.
        log_interval: collected frames between two rows.
        window: finished episodes that the mean return and length run over.
        mode: of the optimiser step, see :class:`GuardedStepper`.

    Raises:
        ValueError: for a trainer with parts of its own that would wait, and for not exactly one of ``replay_buffer``
            and ``minibatch_size``.
    """
    _check(trainer, optimizer, replay_buffer, minibatch_size)
    device = optimizer.params[0].device
    if isinstance(trainer.loss_module, nn.Module):
        _move_buffers(trainer.loss_module, device)
    metrics = DeviceMetrics(device, logger=logger if logger is not None else trainer.logger)
    # The trainer would send and keep every mean loss at each batch, one by one.
    trainer.auto_log_optim_steps = False
    if replay_buffer is not None:
        replay = DeviceReplayHook(replay_buffer, on_policy=isinstance(trainer, OnPolicyTrainer))
    else:
        assert minibatch_size is not None
        replay = MinibatchHook(minibatch_size)
    replay.register(trainer)
    stepper = GuardedStepper(optimizer, metrics=metrics, mode=mode)
    trainer.optimization_stepper = stepper
    stepper.register(trainer)
    log = DeviceLogHook(
        metrics,
        interval=log_interval,
        show=("episode/mean_return",) if trainer.progress_bar else (),
        reward_key=getattr(trainer, "reward_key", "reward"),
        done_key=getattr(trainer, "done_key", "done"),
        window=window,
    )
    log.register(trainer)
    return DeviceParts(replay, stepper, log)


def _move_buffers(loss: nn.Module, device: torch.device) -> None:
    """Moves buffers that are still on the CPU to the device: one that a loss moves at its first use waits for it there.

    ``make_value_estimator(gamma=…)`` leaves the discount on the CPU, for one. Parameters stay the objects they are.
    """
    getattr(loss, "target_entropy_buffer", None)  # SACLoss makes it of Python data, at the first time it is asked for
    for part in loss.modules():
        for name, buffer in list(part.named_buffers(recurse=False)):
            if buffer.device != device and buffer.device.type == "cpu" and not isinstance(part, TensorDictParams):
                setattr(part, name, buffer.to(device))


def _check(
    trainer: Trainer, optimizer: GuardedAdam, replay_buffer: ReplayBuffer | None, minibatch_size: int | None
) -> None:
    """Refuses what cannot be taken out of a constructed trainer again."""
    name = type(trainer).__name__
    own = {
        "replay_buffer=None": trainer.replay_buffer is None,
        "optimizer=None": trainer.optimizer is None,
        "optimization_stepper=None": trainer.optimization_stepper is None,
        "enable_logging=False": not getattr(trainer, "enable_logging", False),
        "async_collection=False": not trainer.async_collection,
        "learner_backend='local'": trainer.learner_backend == "local",
    }
    if wrong := [option for option, is_met in own.items() if not is_met]:
        raise ValueError(
            f"trainer: expected a {name} constructed with {', '.join(own)}, received one without {', '.join(wrong)}. "
            f"Remedy: construct it with {', '.join(wrong)}; the parts that are installed here replace its own."
        )
    if trainer.clip_norm is not None and trainer.clip_norm != optimizer.max_grad_norm:
        raise ValueError(
            f"clip_norm: expected None or the optimizer's max_grad_norm {optimizer.max_grad_norm}, received "
            f"{trainer.clip_norm}. Remedy: GuardedAdam(…, max_grad_norm={trainer.clip_norm})."
        )
    if (replay_buffer is None) == (minibatch_size is None):
        raise ValueError(
            f"expected exactly one of replay_buffer and minibatch_size, received {replay_buffer!r} and "
            f"{minibatch_size}. Remedy: minibatch_size= for on-policy trainers, replay_buffer= for off-policy ones."
        )
    if replay_buffer is None and not isinstance(trainer, OnPolicyTrainer):
        raise ValueError(
            f"replay_buffer: expected a buffer for the off-policy {name}, received None. Remedy: "
            "make_replay_buffer(capacity, batch_size=…, device=…)."
        )
    if replay_buffer is None or not draws_slices(replay_buffer):
        refuse_recurrent(f"use_device_parts({name})", {"loss_module": trainer.loss_module})
