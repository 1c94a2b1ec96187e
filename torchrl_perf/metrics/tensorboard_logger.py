"""TorchRL's TensorBoard logger, continued after a resume."""

from __future__ import annotations

import os
from typing import Any

from torchrl.record.loggers.tensorboard import TensorboardLogger


class PurgingTensorboardLogger(TensorboardLogger):
    """Event files in ``run_dir/tensorboard``; a new one hides events of earlier ones from ``purge_step`` on.

    Args:
        run_dir: folder of the run.
        purge_step: first step that is written again; ``None`` hides nothing.
    """

    def __init__(self, run_dir: str, *, purge_step: int | None = None) -> None:
        self._purge_step = purge_step
        super().__init__(exp_name="tensorboard", log_dir=run_dir)

    def _create_experiment(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(log_dir=os.path.join(self.log_dir, self.exp_name), purge_step=self._purge_step)
