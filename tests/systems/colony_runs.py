"""Small runs on colonies, and what can be seen of one."""

from torchrl_perf.systems.durotaxis.config import DurotaxisConfig
from torchrl_perf.systems.durotaxis.trainer import DurotaxisTrainer

SMALL = {
    **{"num_envs": 4, "num_steps": 4, "total_steps": 160, "device": "cpu", "mode": "eager", "hidden_size": 32},
    **{"epochs": 2, "minibatches": 2, "learning_rate": 1e-3, "critical_nodes": 12, "width": 60.0, "height": 60.0},
    **{"encoder_width": 8, "encoder_heads": 2, "simplex_groups": 2, "logger": "none"},
}


def make(parts=None, **options):
    return DurotaxisTrainer(DurotaxisConfig(**{**SMALL, **options}), **(parts or {}))


def parameters(trainer):
    return {
        f"{part}.{name}": param.detach().clone()
        for part in ("actor", "critic")
        for name, param in getattr(trainer, part).named_parameters()
    }
