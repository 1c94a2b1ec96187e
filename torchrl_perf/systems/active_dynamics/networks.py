"""The default env and model of a run that learns latent dynamics."""

import torch

from torchrl_perf.envs.latent_field import LatentField
from torchrl_perf.systems.active_dynamics.config import ActiveDynamicsConfig
from torchrl_perf.systems.active_dynamics.latent_dynamics import LatentDynamics
from torchrl_perf.systems.active_dynamics.latent_maps import LatentDecoder, ObservationEncoder
from torchrl_perf.systems.active_dynamics.seq_vae import SeqVAE

__all__ = ["make_field_env", "make_seq_vae"]


def make_field_env(
    config: ActiveDynamicsConfig,
    device: torch.device,
    num_envs: int | None = None,
    max_episode_steps: int | None = None,
    region: bool = False,
) -> LatentField:
    """The env that the config names; the field and the observation map are the same for each seed.

    Args:
        config: settings.
        device: of the env.
        num_envs: instead of the config's.
        max_episode_steps: likewise.
        region: whether points begin all over the region that predictions are judged on, and nowhere end.
    """
    limit = config.max_episode_steps if max_episode_steps is None else max_episode_steps
    return LatentField(
        config.num_envs if num_envs is None else num_envs,
        field=config.env,
        observation=config.observation,
        observation_size=config.observation_size,
        action_max=config.action_max,
        process_noise=config.process_noise,
        integrator=config.integrator,
        substeps=config.substeps,
        max_episode_steps=limit or None,
        extent=None if region else config.extent or None,
        initial_range=config.region if region else config.start_range,
        initial_place=(0.0, 0.0) if region else config.start,
        goal=config.goal or None,
        action_encoder=config.action_encoder,
        device=device,
    )


def make_seq_vae(config: ActiveDynamicsConfig, env: LatentField) -> SeqVAE:
    """The default model of the config, for the channels and inputs of an env."""
    channels, inputs = env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]
    size, device, width = config.latent_size, env.device, config.encoder_size
    counts = config.likelihood == "poisson"
    encoder = ObservationEncoder(
        channels, size, inputs, kind=config.encoder, hidden_size=width, counts=counts, device=device
    )
    dynamics = LatentDynamics(
        size,
        inputs,
        kind=config.dynamics,
        dt=env.dt,
        hidden_size=config.dynamics_size,
        num_members=config.members,
        rbf_range=config.centres_range,
        centres=config.centres,
        device=device,
    )
    decoder = LatentDecoder(
        channels, size, kind=config.decoder, likelihood=config.likelihood, hidden_size=width, device=device
    )
    if config.known_map:
        decoder.be(env.observation_map)
    return SeqVAE(encoder, dynamics, decoder)
