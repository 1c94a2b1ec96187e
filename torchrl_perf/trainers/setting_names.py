"""The setting that was meant where an unknown one was given."""

from collections.abc import Sequence

from torchrl_perf.near_names import nearest_word

__all__ = ["nearest_setting"]

SYNONYMS: dict[str, tuple[str, ...]] = {
    "lr": ("learning_rate", "actor_learning_rate", "critic_learning_rate"),
    "learning_rate": ("actor_learning_rate", "critic_learning_rate"),
    "step_size": ("learning_rate", "actor_learning_rate", "critic_learning_rate"),
    "actor_lr": ("actor_learning_rate",),
    "policy_lr": ("actor_learning_rate", "learning_rate"),
    "pi_lr": ("actor_learning_rate", "learning_rate"),
    "critic_lr": ("critic_learning_rate",),
    "q_lr": ("critic_learning_rate", "learning_rate"),
    "alpha_lr": ("temperature_learning_rate",),
    "anneal_lr": ("anneal_learning_rate",),
    "env_id": ("env",),
    "env_name": ("env",),
    "task": ("env",),
    "n_envs": ("num_envs",),
    "envs": ("num_envs",),
    "n_steps": ("num_steps",),
    "horizon": ("num_steps",),
    "frames_per_batch": ("num_steps",),
    "total_timesteps": ("total_steps",),
    "total_frames": ("total_steps",),
    "timesteps": ("total_steps",),
    "frames": ("total_steps",),
    "steps": ("total_steps",),
    "batch_size": ("minibatch_size", "minibatches"),
    "minibatch_size": ("minibatches",),
    "minibatches": ("minibatch_size",),
    "num_minibatches": ("minibatches",),
    "n_epochs": ("epochs",),
    "num_epochs": ("epochs",),
    "update_epochs": ("epochs",),
    "buffer_size": ("capacity",),
    "replay_size": ("capacity",),
    "start_steps": ("learning_starts",),
    "init_random_frames": ("learning_starts",),
    "discount": ("gamma",),
    "lambda": ("lmbda",),
    "lam": ("lmbda",),
    "gae_lambda": ("lmbda",),
    "clip": ("clip_epsilon",),
    "clip_range": ("clip_epsilon",),
    "clip_coef": ("clip_epsilon",),
    "clip_range_vf": ("value_clip_epsilon",),
    "ent_coef": ("entropy_coeff", "initial_temperature"),
    "entropy_coef": ("entropy_coeff",),
    "vf_coef": ("critic_coeff",),
    "value_coef": ("critic_coeff",),
    "alpha_init": ("initial_temperature",),
    "grad_clip": ("max_grad_norm",),
    "clip_grad_norm": ("max_grad_norm",),
    "adam_epsilon": ("adam_eps",),
    "optimizer_eps": ("adam_eps",),
    "beta1": ("adam_beta1",),
    "beta2": ("adam_beta2",),
    "wd": ("weight_decay",),
    "norm_obs": ("normalize_observations",),
    "empirical_normalization": ("normalize_observations",),
    "norm_reward": ("normalize_rewards",),
    "clip_reward": ("reward_clip",),
    "width": ("hidden_size",),
    "num_cells": ("hidden_size",),
    "hidden_sizes": ("hidden_size",),
    "hidden_dim": ("hidden_size",),
    "polyak": ("tau",),
    "eps_init": ("eps_start",),
    "epsilon": ("eps_start",),
    "per": ("sampler",),
    "nstep": ("n_step",),
    "n_atoms": ("num_atoms",),
    "vmin": ("v_min",),
    "vmax": ("v_max",),
    "n_quantiles": ("num_quantiles",),
    "output_dir": ("run_dir",),
    "log_dir": ("run_dir",),
    "save_interval": ("checkpoint_interval",),
    "random_seed": ("seed",),
    # of a published trainer of fuel breaks
    "num_episodes": ("total_steps",),
    "num_parallel_envs": ("num_envs",),
    "steps_per_episode": ("num_steps",),
    "grid_size": ("size",),
    "num_landscapes": ("landscapes",),
    "memory_simulations": ("fires",),
    "percentage_increment": ("budget",),
    "pretrain_steps": ("demonstrations",),
    "experience_buffer_size": ("capacity",),
    "train_frequency": ("updates_per_iteration",),
    "initial_epsilon": ("eps_start",),
    "epsilon_min": ("eps_end",),
    "epsilon_decay": ("eps_frames",),
    "target_update_frequency": ("target_interval",),
    "checkpoint_frequency": ("checkpoint_interval",),
    "cleanup_frequency": ("gc_interval",),
    "memory_cleanup_frequency": ("memory_rule",),
}
"""Names that other libraries have for a setting; the first that an algorithm has is meant, or all of one rank."""
TOGETHER = ("actor_learning_rate", "critic_learning_rate")


def nearest_setting(name: str, known: Sequence[str]) -> list[str]:
    """The settings that an unknown name may mean: none, one, or two that belong together.

    Args:
        name: as it was given, with dashes or underscores.
        known: names of the settings that there are.
    """
    plain = name.lower().lstrip("-").replace("-", "_")
    found = [setting for setting in SYNONYMS.get(plain, ()) if setting in known]
    if found:
        return found if tuple(found) == TOGETHER else found[:1]
    near = nearest_word(plain, known)
    return [near] if near else []
