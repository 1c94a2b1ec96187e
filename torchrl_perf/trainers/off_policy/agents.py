"""Off-policy trainers that make their algorithm of its class and of the networks that are given."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import nn
from torchrl.collectors import BaseCollector

from torchrl_perf.trainers.off_policy.algorithm import Algorithm
from torchrl_perf.trainers.off_policy.task import Task
from torchrl_perf.trainers.off_policy.trainer import OffPolicyTrainer

__all__ = ["AgentTrainer"]


class AgentTrainer(OffPolicyTrainer):
    """The loop of :class:`OffPolicyTrainer` on an algorithm that a subclass names.

    Args:
        config: every choice of the run.
        env: see :class:`OffPolicyTrainer`; by default the one that the config names.
        collector: likewise.
        **networks: the algorithm's own arguments: ``policy``, or ``actor`` and ``critic``.

    Attributes:
        algorithm_class: what learns.
        task_class: the task, of the class.
        made_by: functions that make networks in place of the algorithm's own, by the algorithm's argument.
    """

    algorithm_class: ClassVar[type[Algorithm]]
    task_class: ClassVar[type[Task]] = Task
    made_by: ClassVar[Mapping[str, Callable[..., nn.Module]]] = {}

    def __init__(
        self, config: Any, *, env: Any = None, collector: BaseCollector | None = None, **networks: nn.Module | None
    ) -> None:
        made: Any = self.algorithm_class
        task = self.task_class()
        super().__init__(config, made(config, **networks, **self.made_by), env=env, collector=collector, task=task)
