"""Exploration that learns the latent dynamics of a field: a sequential VAE, a planner, an information reward."""

from torchrl_perf.systems.active_dynamics.config import ACTIVE_DYNAMICS_PRESETS, ActiveDynamicsConfig
from torchrl_perf.systems.active_dynamics.elbo import MultiStepELBOLoss
from torchrl_perf.systems.active_dynamics.evaluation import PredictionFigures
from torchrl_perf.systems.active_dynamics.information_reward import InformationReward
from torchrl_perf.systems.active_dynamics.latent_dynamics import LatentDynamics
from torchrl_perf.systems.active_dynamics.latent_maps import LatentDecoder, ObservationEncoder
from torchrl_perf.systems.active_dynamics.picture import PhasePortrait, draw_phase_portrait, draw_prediction_curves
from torchrl_perf.systems.active_dynamics.predictive_elbo import PredictiveELBOLoss
from torchrl_perf.systems.active_dynamics.seq_vae import BeliefFilter, FilteredPolicy, SeqVAE, UniformInputs
from torchrl_perf.systems.active_dynamics.trainer import ActiveDynamicsTrainer

__all__ = [
    "ACTIVE_DYNAMICS_PRESETS",
    "ActiveDynamicsConfig",
    "ActiveDynamicsTrainer",
    "BeliefFilter",
    "FilteredPolicy",
    "InformationReward",
    "LatentDecoder",
    "LatentDynamics",
    "MultiStepELBOLoss",
    "ObservationEncoder",
    "PhasePortrait",
    "PredictionFigures",
    "PredictiveELBOLoss",
    "SeqVAE",
    "UniformInputs",
    "draw_phase_portrait",
    "draw_prediction_curves",
]
