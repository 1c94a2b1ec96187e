"""Small runs that place fuel breaks, and what can be seen of one."""

from torchrl_perf.systems.fuel_breaks import FuelBreaksConfig, FuelBreaksTrainer

SMALL = {
    **{"num_envs": 4, "num_steps": 4, "total_steps": 320, "device": "cpu", "mode": "eager", "logger": "none"},
    **{"size": 6, "budget": 0.12, "fires": 4, "hidden_size": 4, "blocks": 1, "capacity": 64, "minibatch_size": 16},
    **{"updates_per_iteration": 2, "learning_starts": 32, "target_interval": 2, "eps_frames": 64},
    **{"learning_rate": 1e-2, "demonstrations": 4, "line_exploration": 0.5},
}
"""Four breaks an episode, one episode an iteration; the first of two iterations that fill demonstrates."""


def make(parts=None, **options):
    return FuelBreaksTrainer(FuelBreaksConfig.without_task(**{**SMALL, **options}), **(parts or {}))


def parameters(trainer):
    """Copies of all parameters of both networks, by name."""
    return {
        f"{part}.{name}": param.detach().clone()
        for part in ("q_network", "target_network")
        for name, param in getattr(trainer, part).named_parameters()
    }
