"""Small runs that learn latent dynamics."""

import torch

from torchrl_perf.systems.active_dynamics import ActiveDynamicsConfig, ActiveDynamicsTrainer

SMALL = {
    **{"num_envs": 3, "num_steps": 8, "total_steps": 240, "device": "cpu", "mode": "eager", "logger": "none"},
    **{"encoder_size": 8, "dynamics_size": 32, "members": 2, "max_episode_steps": 11, "random_steps": 24},
    **{"window": 6, "history": 20, "minibatch_size": 4, "updates": 2, "samples": 2, "prediction_horizon": 3},
    **{"plan_horizon": 3, "candidates": 6, "plan_rounds": 2, "elites": 3},
}


def make(field_env=None, **options):
    return ActiveDynamicsTrainer(ActiveDynamicsConfig.without_task(**{**SMALL, **options}), env=field_env)


def learnt(trainer):
    return torch.cat([value.detach().flatten() for value in trainer.model.parameters()])
