"""Small navigation runs of each agent."""

from torchrl_perf.registry import MARINE_AGENTS, SYSTEMS

AGENTS = list(MARINE_AGENTS)
KINDS = {agent: SYSTEMS[f"marine-{agent}"].load("config") for agent in AGENTS}
TRAINERS = {agent: SYSTEMS[f"marine-{agent}"].load("trainer") for agent in AGENTS}
PRESETS = {agent: SYSTEMS[f"marine-{agent}"].load("presets") for agent in AGENTS}

WORLD = {
    "max_robots": 2,
    "max_obstacles": 1,
    "stage_frames": "0, 48",
    "stage_robots": "1, 2",
    "stage_obstacles": "0, 1",
    "stage_distance": "10",
    "max_episode_steps": 12,
    "self_size": 8,
    "object_size": 20,
}
ALL = {
    **{"num_envs": 3, "num_steps": 4, "total_steps": 240, "device": "cpu", "mode": "eager", "logger": "csv"},
    **{"hidden_size": 16, "capacity": 240, "minibatch_size": 16, "updates_per_iteration": 2, "learning_starts": 24},
}
OWN = {
    "dqn": {"target_interval": 2, "eps_frames": 64, "learning_rate": 1e-2},
    "iqn": {"target_interval": 2, "eps_frames": 64, "num_cosines": 8, "n_step": 3},
    "rainbow": {"target_interval": 2, "eps_frames": 64, "num_atoms": 11, "v_min": -20.0, "v_max": 60.0},
    "ddpg": {"noise_frames": 64},
    "ac-iqn": {"noise_frames": 64, "num_cosines": 8, "sampler": "prioritized"},
    "sac": {"compact": True},
}


def settings(agent, **options):
    return {**ALL, **WORLD, **OWN[agent], **options}


def make(agent, **options):
    return TRAINERS[agent](KINDS[agent](**settings(agent, **options)))


def parameters(trainer):
    """Copies of all parameters of networks and targets, by name."""
    return {
        f"{part}.{name}": param.detach().clone()
        for part, module in trainer.parts().items()
        if hasattr(module, "named_parameters")
        for name, param in module.named_parameters()
    }
