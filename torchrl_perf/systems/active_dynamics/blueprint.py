"""What acts in a run that learns latent dynamics, made of its settings: a filter, and a planner or random inputs."""

from typing import Any

import torch
from torchrl.data import TensorSpec
from torchrl.envs import EnvBase, TransformedEnv

from torchrl_perf.modules.icem import ICEMPlanner, ICEMSettings
from torchrl_perf.systems.active_dynamics.config import ActiveDynamicsConfig
from torchrl_perf.systems.active_dynamics.information_reward import InformationReward
from torchrl_perf.systems.active_dynamics.networks import make_field_env, make_seq_vae
from torchrl_perf.systems.active_dynamics.seq_vae import BeliefFilter, FilteredPolicy, SeqVAE, UniformInputs
from torchrl_perf.trainers.blueprints import Blueprint

__all__ = ["ACTIVE_DYNAMICS", "PredictionEvaluation", "make_filtered_policy", "make_reward"]

FEWEST_ENVS = 4  # half of them are predicted, after a map was fitted to the others


def make_reward(config: ActiveDynamicsConfig, model: SeqVAE) -> InformationReward | None:
    """The planner's objective; None for random inputs."""
    if config.inputs == "random":
        return None
    # by the diagonal an input's effect would be known best from one that never changes
    whole = config.inputs == "embedding"
    return InformationReward(
        model.dynamics,
        config.inputs,
        discount=config.gamma,
        inputs=whole,
        input_cost=config.input_cost,
        goal=config.goal or None,
        goal_weight=config.goal_weight,
        region=config.region,
        region_weight=config.region_weight,
    )


def make_filtered_policy(
    config: ActiveDynamicsConfig, model: SeqVAE, reward: InformationReward | None, spec: TensorSpec
) -> FilteredPolicy:
    """The filter of a model, and a planner of its dynamics or random inputs.

    Args:
        config: gives the planner's settings.
        model: the autoencoder.
        reward: the planner's objective; None for random inputs.
        spec: the action's.
    """
    beliefs = BeliefFilter(model.encoder)
    if reward is None:
        return FilteredPolicy(beliefs, UniformInputs(spec))
    settings = ICEMSettings(
        horizon=config.plan_horizon,
        candidates=config.candidates,
        iterations=config.plan_rounds,
        elites=config.elites,
        discount=config.gamma,
    )
    return FilteredPolicy(
        beliefs, ICEMPlanner(model.dynamics, reward, spec=spec, settings=settings, state_key="belief")
    )


def _policy(specs: Any, config: ActiveDynamicsConfig) -> FilteredPolicy:
    # the time step of the field is a setting of the world, which no spec tells
    field = make_field_env(config, specs.device, 1)
    model = make_seq_vae(config, field)
    return make_filtered_policy(config, model, make_reward(config, model), field.action_spec)


def _field_env(config: ActiveDynamicsConfig, device: torch.device, **options: Any) -> EnvBase:
    """The field, with the state of filter and planner."""
    field = make_field_env(config, device, **options)
    state = _policy(field, config).make_state()
    return TransformedEnv(field, state) if state.shapes else field


class PredictionEvaluation:
    """Predictions of a trainer's model on fresh data; the reward of the field, 0 throughout, says nothing of them.

    Args:
        trainer: an ``ActiveDynamicsTrainer``.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def row(self) -> dict[str, float]:
        """R^2 ``prediction_horizon`` steps ahead, of the model and as if nothing moved; the error over the region."""
        figures = self.trainer.evaluate(envs=max(FEWEST_ENVS, self.trainer.config.eval_episodes))
        error = self.trainer.region_error(figures.alignment)
        return {"eval/r2": figures.r2[-1], "eval/persistence": figures.persistence[-1], "eval/error": error}

    def close(self) -> None:
        """Nothing is held."""


ACTIVE_DYNAMICS = Blueprint(
    _policy,
    {"filter.encoder": ("model", "encoder"), "inputs.metric": ("reward", "")},
    _field_env,
    PredictionEvaluation,
)
