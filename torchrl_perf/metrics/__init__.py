"""Metrics: accumulators on the device, one packed copy per interval, loggers, a progress line and pictures."""

from torchrl_perf.metrics.device_metrics import DeviceMetrics, Reduce
from torchrl_perf.metrics.episodes import EpisodeStatistics
from torchrl_perf.metrics.histogram import Histogram
from torchrl_perf.metrics.log_row import log_row
from torchrl_perf.metrics.logger_group import LoggerGroup
from torchrl_perf.metrics.loggers import make_loggers
from torchrl_perf.metrics.option_usage import OptionCollapseWarning, OptionUsage
from torchrl_perf.metrics.phases import PhaseTimer
from torchrl_perf.metrics.plot import save_learning_curve
from torchrl_perf.metrics.progress import ProgressLine, format_progress
from torchrl_perf.metrics.progress_csv import ProgressCSVLogger
from torchrl_perf.metrics.wandb_settings import WandbSettings
from torchrl_perf.moved import moved_from as _moved_from

__all__ = [
    "DeviceMetrics",
    "EpisodeStatistics",
    "Histogram",
    "LoggerGroup",
    "OptionCollapseWarning",
    "OptionUsage",
    "PhaseTimer",
    "ProgressCSVLogger",
    "ProgressLine",
    "Reduce",
    "WandbSettings",
    "format_progress",
    "log_row",
    "make_loggers",
    "save_learning_curve",
]

__getattr__ = _moved_from(__name__)
