"""Metrics: accumulators on the device, one packed copy per interval, loggers, a progress line and pictures."""

from torchrl_perf.metrics.colony_picture import ColonyRecording, draw_colony, record_colony, recorded_colony
from torchrl_perf.metrics.device_metrics import DeviceMetrics, Reduce
from torchrl_perf.metrics.episodes import EpisodeStatistics
from torchrl_perf.metrics.equity_picture import EquityRecording, draw_equity, record_equity, recorded_equity
from torchrl_perf.metrics.fire_picture import FireMap, draw_fire_maps, fire_maps, record_breaks
from torchrl_perf.metrics.histogram import Histogram
from torchrl_perf.metrics.log_row import log_row
from torchrl_perf.metrics.logger_group import LoggerGroup
from torchrl_perf.metrics.loggers import make_loggers
from torchrl_perf.metrics.marine_picture import animate, draw_trajectories
from torchrl_perf.metrics.option_usage import OptionCollapseWarning, OptionUsage
from torchrl_perf.metrics.phase_picture import PhasePortrait, draw_phase_portrait, draw_prediction_curves
from torchrl_perf.metrics.phases import PhaseTimer
from torchrl_perf.metrics.plot import save_learning_curve
from torchrl_perf.metrics.progress import ProgressLine, format_progress
from torchrl_perf.metrics.progress_csv import ProgressCSVLogger

__all__ = [
    "ColonyRecording",
    "DeviceMetrics",
    "EpisodeStatistics",
    "EquityRecording",
    "FireMap",
    "Histogram",
    "LoggerGroup",
    "OptionCollapseWarning",
    "OptionUsage",
    "PhasePortrait",
    "PhaseTimer",
    "ProgressCSVLogger",
    "ProgressLine",
    "Reduce",
    "animate",
    "draw_colony",
    "draw_equity",
    "draw_fire_maps",
    "draw_phase_portrait",
    "draw_prediction_curves",
    "draw_trajectories",
    "fire_maps",
    "format_progress",
    "log_row",
    "make_loggers",
    "record_breaks",
    "record_colony",
    "record_equity",
    "recorded_colony",
    "recorded_equity",
    "save_learning_curve",
]
