"""The rest of TorchRL's collector interface: weights, versions, a thread, and attributes that others read."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from tensordict import TensorDict, TensorDictBase
from torchrl.collectors import BaseCollector
from torchrl.data import ReplayBuffer
from torchrl.envs import EnvBase

from torchrl_perf.collectors.arguments import weights_of
from torchrl_perf.collectors.background import Background
from torchrl_perf.collectors.delivery import Delivery, Postproc


def update_policy(policy: Any, source: Any, model_id: str | None) -> None:
    """The one rule of the collectors: given weights are copied into the policy in place; one that is shared needs none.

    Args:
        policy: that acts.
        source: a module, a TensorDict or a ``state_dict``; None, or the policy itself, where there is nothing to copy.
        model_id: TorchRL's name of what the weights are for.

    Raises:
        KeyError: for a ``model_id`` that is not ``"policy"``.
    """
    if model_id not in (None, "policy"):
        raise KeyError(f"model_id: expected 'policy', received {model_id!r}. Remedy: leave it out.")
    if source is None or source is policy:
        return
    params: Any = TensorDict.from_module(policy)
    params.data.update_(weights_of(source))


class SharedPolicyCollector(BaseCollector):
    """A collector in one process, whose policy is the trainer's own object, or a copy on another device.

    A subclass sets the attributes below at construction, and collects: ``collect()`` returns a batch.
    """

    env: EnvBase
    policy: Any
    mode: str
    _original_policy: Any
    _delivery: Delivery
    _background: Background
    total_frames: int
    _frames: int
    policy_version_tracker: Any = None
    reset_when_done = True
    interruptor = None
    _iterator = None
    _ignore_rb = False

    @property
    def replay_buffer(self) -> ReplayBuffer | None:
        """Where iteration writes batches, or None."""
        return self._delivery.replay_buffer

    @property
    def postproc(self) -> Postproc | None:
        """What is called on each batch that iteration yields, or None."""
        return self._delivery.postproc

    @property
    def return_same_td(self) -> bool:
        """Whether iteration yields the one batch that the next one overwrites."""
        return self._delivery.return_same_td

    @property
    def extend_buffer(self) -> bool:
        """Whether batches are written as a whole."""
        return self._delivery.extend_buffer

    @property
    def split_trajs(self) -> bool:
        """Whether iteration yields one row for each episode."""
        return self._delivery.split_trajs

    def __repr__(self) -> str:
        """The collector with its env and policy."""
        return f"{type(self).__name__}(env={self.env}, policy={self.policy}, mode={self.mode!r})"

    def update_policy_weights_(self, policy_or_weights: Any = None, **kwargs: Any) -> None:
        """Copies weights into the policy, in place; None brings the copy on a policy device up to date.

        Args:
            policy_or_weights: a module, a TensorDict or a ``state_dict``; None where the policy is shared.
            **kwargs: of TorchRL: ``worker_ids`` for a ``weight_updater``, ``model_id``, ``weights_dict``.
        """
        super().update_policy_weights_(policy_or_weights, **kwargs)
        self.increment_version()

    def _maybe_fallback_update(self, policy_or_weights: Any = None, *, model_id: str | None = None) -> None:
        """A shared policy needs no update; given weights, or those of the original, are copied in place."""
        update_policy(self.policy, self._original_policy if policy_or_weights is None else policy_or_weights, model_id)

    def start(self) -> None:
        """Collects in a separate thread, into the replay buffer, until ``total_frames`` or :meth:`async_shutdown`.

        Raises:
            RuntimeError: without a replay buffer, or under mode ``"graph"``, whose recording other work would disturb.
        """
        if self.replay_buffer is None:
            raise RuntimeError("start(): expected a replay_buffer, received None. Remedy: replay_buffer=….")
        if self.mode in ("graph", "auto"):
            raise RuntimeError(
                f"start(): expected mode 'eager' or 'compile', received {self.mode!r}, whose recording the work of "
                "another thread would disturb. Remedy: mode='eager', or iterate in turn with the training."
            )
        self._background.start()

    def iterator(self) -> Iterator[TensorDictBase]:
        """Yields batches ``[N, T]`` that own their data (copies of the preallocated one), until ``total_frames``.

        With a replay buffer each batch is written there, and None is yielded.
        """
        while self.total_frames < 0 or self._frames < self.total_frames:
            yield self._deliver(self.collect())

    def _deliver(self, batch: TensorDictBase) -> TensorDictBase | None:
        if self.replay_buffer is None or self._ignore_rb:
            batch = self._delivery.processed(self._delivery.owned(batch))
            if self.post_collect_hook is not None:
                self.post_collect_hook(batch)
            return batch
        batch = self._delivery.processed(batch.copy())
        if self.post_collect_hook is not None:
            self.post_collect_hook(batch)
        self._delivery.write(batch)
        return None

    def _write_next(self) -> bool:
        if self._iterator is None:
            self._iterator = iter(self)
        return next(self._iterator, self) is not self

    def pause(self) -> AbstractContextManager[None]:
        """A context inside which a collector that was started takes no step."""
        return self._background.paused()

    def is_running(self) -> bool:
        """Whether the thread of :meth:`start` is at work."""
        return self._background.running

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """Ends the thread of :meth:`start`, then :meth:`shutdown`; raises the error that the thread failed with."""
        self._background.stop(timeout)
        self.shutdown(close_env=close_env)

    @property
    def policy_version(self) -> str | int | None:
        """Number of weight updates so far, None without ``track_policy_version``."""
        return None if self.policy_version_tracker is None else self.policy_version_tracker.version

    def get_policy_version(self) -> str | int | None:
        """:attr:`policy_version`, as a method."""
        return self.policy_version

    def increment_version(self) -> None:
        """Count one more weight update, if versions are tracked."""
        if self.policy_version_tracker is not None:
            self.policy_version_tracker.increment_version()

    def getattr_policy(self, attr: str) -> Any:
        """An attribute of the policy."""
        return getattr(self.policy, attr)

    def getattr_env(self, attr: str) -> Any:
        """An attribute of the env."""
        return getattr(self.env, attr)

    def getattr_rb(self, attr: str) -> Any:
        """An attribute of the replay buffer."""
        return getattr(self.replay_buffer, attr)

    def get_model(self, model_id: str) -> Any:
        """The policy, for ``"policy"``."""
        if model_id != "policy":
            raise ValueError(f"model_id: expected 'policy', received {model_id!r}. Remedy: 'policy'.")
        return self.policy
