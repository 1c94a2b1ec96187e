"""Deferred logging of TorchRL's trainers: sums on the device, and one copy to the host per interval."""

from collections.abc import Sequence
from typing import Any

from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torchrl.trainers import Trainer
from torchrl.trainers.trainers import TrainerHookBase

from torchrl_perf.metrics import DeviceMetrics, EpisodeStatistics
from torchrl_perf.runtime import Stopwatch

EPISODE_NAMES = ("episode/mean_return", "episode/mean_length", "episode/count")
"""Names of a row that episodes fill; absent before the first episode of the run has finished."""


class DeviceLogHook(TrainerHookBase):
    """One row of metrics every ``interval`` frames, in place of the trainers' ``LogScalar`` hooks.

    Those read two numbers each from the device at every batch, whatever the log interval, and keep every value for
    good. Construct the trainer with ``enable_logging=False`` and set ``auto_log_optim_steps=False``. Here the rewards
    and episodes of each ``[N, T]`` batch are added up on the device, and ``metrics.flush`` makes the one copy.

    Rows: ``batch/reward`` (mean), ``batch/reward_max``, ``episode/mean_return``, ``episode/mean_length`` (of the last
    ``window`` finished episodes), ``episode/count``, ``time/frames_per_second``, and what others add to ``metrics``,
    such as :class:`~torchrl_perf.trainers.GuardedStepper`.

    Reads ``("next", reward_key)``: ``[N, T, 1]``, and ``("next", done_key)``: bool ``[N, T, 1]``.

    Args:
        metrics: where values are added up; its logger receives the rows.
        interval: collected frames between two rows.
        show: names of a row that are handed to the trainer as well, for its progress bar and for ``EarlyStopping``; it
            keeps those, one number an interval.
        reward_key: under "next".
        done_key: under "next".
        window: finished episodes that the means run over.

    Attributes:
        row: the latest row; empty before the first.

    Raises:
        ValueError: for an interval below 1.
    """

    def __init__(
        self,
        metrics: DeviceMetrics,
        *,
        interval: int = 10_000,
        show: Sequence[str] = (),
        reward_key: NestedKey = "reward",
        done_key: NestedKey = "done",
        window: int = 100,
    ) -> None:
        if interval < 1:
            raise ValueError(f"interval: expected at least 1 frame, received {interval}. Remedy: interval=1 or more.")
        self.metrics = metrics
        self.interval = interval
        self.show = tuple(show)
        self.reward_key = ("next", reward_key)
        self.done_key = ("next", done_key)
        self.window = window
        self.episodes: EpisodeStatistics | None = None
        self.row: dict[str, float] = {}
        self._trainer: Trainer | None = None
        self._logged_at = 0
        self._saved_episodes: dict[str, Any] | None = None
        self._watch = Stopwatch("cpu").start()

    def __call__(self, batch: TensorDictBase) -> dict[str, Any] | None:
        """Adds a batch ``[N, T]``; writes a row where one is due."""
        self.add(batch)
        trainer = self._registered()
        if trainer.collected_frames - self._logged_at < self.interval:
            return None
        return self.flush()

    def add(self, batch: TensorDictBase) -> None:
        """Adds the rewards and episodes of ``batch [N, T]``, or ``[T]``, on the device, without a host read."""
        reward, done = batch.get(self.reward_key), batch.get(self.done_key)
        if self.episodes is None:
            # one stream for each env, and for each agent whose rewards are its own
            streams = reward.numel() // batch.shape[-1]
            self.episodes = EpisodeStatistics(streams, reward.device, window=self.window)
            if self._saved_episodes is not None:
                self.episodes.load_state_dict(self._saved_episodes)
        self.metrics.add("batch/reward", reward)
        self.metrics.add("batch/reward_max", reward, reduce="max")
        self.episodes.update(reward, done, time_dim=batch.ndim - 1)
        count = self.episodes.count
        values = (self.episodes.mean_return, self.episodes.mean_length, count)
        for name, value in zip(EPISODE_NAMES, values, strict=True):
            self.metrics.add(name, value, reduce="last", mask=count > 0)

    def flush(self) -> dict[str, Any] | None:
        """Writes what the interval holds as one row: the one wait for the device.

        Returns:
            The names in ``show`` that the row holds, for the trainer; None if there are none.
        """
        trainer = self._registered()
        self._watch.stop()
        frames = trainer.collected_frames - self._logged_at
        speed = frames / max(self._watch.seconds, 1e-9)
        self.row = self.metrics.flush(trainer.collected_frames, extra={"time/frames_per_second": speed})
        self._logged_at = trainer.collected_frames
        self._watch.start()
        shown = {name: self.row[name] for name in self.show if name in self.row}
        return {**shown, "log_pbar": True} if shown else None

    def finish(self) -> None:
        """Writes the last interval, if it holds a frame."""
        if self._registered().collected_frames > self._logged_at:
            self.flush()

    def register(self, trainer: Trainer, name: str = "device_log") -> None:
        """Registers the hook after each batch's optimisation, and the last row at the end of training."""
        self._trainer = trainer
        trainer.register_op("post_steps_log", self)
        trainer.register_op("shutdown", self.finish)
        trainer.register_module(name, self)

    def state_dict(self) -> dict[str, Any]:
        """The interval so far, running episodes, and the frame of the latest row."""
        return {
            "metrics": self.metrics.state_dict(),
            "episodes": None if self.episodes is None else self.episodes.state_dict(),
            "logged_at": self._logged_at,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`."""
        self.metrics.load_state_dict(state_dict["metrics"])
        self._saved_episodes = state_dict["episodes"]
        self._logged_at = state_dict["logged_at"]
        if self.episodes is not None and self._saved_episodes is not None:
            self.episodes.load_state_dict(self._saved_episodes)

    def _registered(self) -> Trainer:
        if self._trainer is None:
            raise RuntimeError("DeviceLogHook: expected a trainer, received none. Remedy: hook.register(trainer).")
        return self._trainer
