"""SAC, TD3 and DDPG in few launches: equal to the plain update, and left to it where networks are of another form."""

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from tests.kernels.interpreted import kernel_device, tries_kernels
from torchrl_perf.bench.offpolicy import Locomotion
from torchrl_perf.modules import DeterministicActor
from torchrl_perf.modules.ensemble import EnsembleQ
from torchrl_perf.trainers import SACConfig, SACTrainer
from torchrl_perf.trainers.ddpg import DDPGConfig, DDPGTrainer, TD3Config
from torchrl_perf.trainers.off_policy.chained_deterministic import chained_deterministic
from torchrl_perf.trainers.off_policy.chained_sac import chained_sac

KINDS = {
    "sac": (SACConfig, SACTrainer, chained_sac),
    "td3": (TD3Config, DDPGTrainer, chained_deterministic),
    "ddpg": (DDPGConfig, DDPGTrainer, chained_deterministic),
}
CASES = [
    ("sac", {}),
    ("sac", {"activation": "elu", "layer_norm": True, "num_critics": 3, "normalize_observations": True}),
    ("sac", {"target_interval": 2, "weight_decay": 0.01, "max_grad_norm": 0.5, "loss_function": "smooth_l1"}),
    ("sac", {"learn_temperature": False, "activation": "tanh", "n_step": 3}),
    ("td3", {}),
    ("td3", {"activation": "silu", "normalize_observations": True, "loss_function": "smooth_l1", "num_critics": 1}),
    ("ddpg", {"activation": "mish", "layer_norm": True, "max_grad_norm": 0.1}),
]


def make(kind, device="cpu", actor=None, critic=None, **options):
    config, trainer, chained = KINDS[kind]
    settings = {
        "num_envs": 4, "num_steps": 4, "learning_starts": 64, "updates_per_iteration": 2, "capacity": 1000,
        "mode": "eager", "device": device, "logger": "none", "total_steps": 10**6, "minibatch_size": 24,
        "hidden_sizes": (20, 33), **options,
    }  # fmt: skip
    env = Locomotion(4, device=device)
    return trainer(config.without_task(**settings), env=env, actor=actor, critic=critic), chained


def outcome(algorithm, update, sample, due, before):
    """What an update does from a state: what it tells, and the state after it."""
    for value, old in zip(algorithm._state(), before, strict=True):
        value.copy_(old)
    torch.manual_seed(7)
    with torch.no_grad(), algorithm.setup.acceleration.active(sample.device):
        found = update(sample, due)
    norms = [algorithm.critic_optimizer.grad_norms, algorithm.actor_optimizer.grad_norms]
    state = [value.detach().clone() for value in [*algorithm._state(), *norms]]
    return [*found.statistics.values(), found.priority, found.critic_taken, found.actor_taken], state


@tries_kernels
@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
def test_equal_to_the_plain_update(kind, options):
    trainer, make_chained = make(kind, kernel_device(), **options)
    for _ in range(trainer.config.fill_iterations + 1):
        trainer.step()
    algorithm, sample = trainer.algorithm, trainer.buffer.sample().clone()
    chained = make_chained(algorithm)
    before = [value.detach().clone() for value in algorithm._state()]
    on_cuda = kernel_device() == "cuda"  # the kernels' TF32 against eager products
    limits = {"atol": 2e-2, "rtol": 2e-2} if on_cuda else {"atol": 2e-5, "rtol": 2e-5}
    for due in (False, True) if kind == "td3" else (True,):
        plain, chain = (outcome(algorithm, fn, sample, due, before) for fn in (algorithm._update, chained))
        for found, expected in zip((*chain[0], *chain[1]), (*plain[0], *plain[1]), strict=True):
            torch.testing.assert_close(found, expected, **limits)
    trainer.close()


@tries_kernels
def test_a_bad_sample_changes_nothing_but_targets():
    trainer, make_chained = make("sac", kernel_device())
    for _ in range(trainer.config.fill_iterations + 1):
        trainer.step()
    algorithm, sample = trainer.algorithm, trainer.buffer.sample().clone()
    chained = make_chained(algorithm)
    sample["next", "reward"][3] = torch.nan
    own = [value for part in (algorithm.loss.critic, algorithm.loss.actor) for value in part.parameters()]
    before = [value.detach().clone() for value in own]
    with torch.no_grad():
        found = chained(sample)
    assert not found.critic_taken and found.actor_taken
    for value, old in list(zip(own, before, strict=True))[: len(list(algorithm.loss.critic.parameters()))]:
        assert torch.equal(value, old)
    trainer.close()


def test_the_default_networks_are_of_this_form():
    for kind in KINDS:
        for options in ({}, {"normalize_observations": True}, {"layer_norm": True, "precision": "bf16"}):
            trainer, make_chained = make(kind, **options)
            assert trainer.algorithm._chained is None  # on a CPU
            pytest.importorskip("triton")
            assert make_chained(trainer.algorithm) is not None
            trainer.close()


class OwnCritic(EnsembleQ):
    """Another class, whose forward may do anything."""


def test_other_networks_are_left_alone():
    for options in ({"precision": "ieee"}, {"precision": "fp16"}, {"hidden_sizes": (1500, 20)}):
        trainer, make_chained = make("sac", **options)
        assert make_chained(trainer.algorithm) is None
        trainer.close()
    critic = TensorDictModule(OwnCritic(2, 23), in_keys=["observation", "action"], out_keys=["state_action_value"])
    trainer, make_chained = make("sac", critic=critic)
    assert make_chained(trainer.algorithm) is None
    trainer.close()


PLACES = {
    "critic": lambda loss: loss.critic,
    "critic's network": lambda loss: loss.critic.module,
    "perceptrons": lambda loss: loss.critic.module.net,
    "target": lambda loss: loss.target_critic.module,
    "actor": lambda loss: loss.actor,
    "actor's network": lambda loss: loss.actor.module,
    "layer": lambda loss: loss.actor.module[0],
    "activation": lambda loss: loss.actor.module[1],
    "target actor": lambda loss: loss.target_actor,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("hook", ["register_forward_hook", "register_full_backward_hook"])
def test_a_hook_is_not_left_out(place, hook):
    trainer, make_chained = make("td3")
    handle = getattr(PLACES[place](trainer.algorithm.loss), hook)(lambda *_: None)
    assert make_chained(trainer.algorithm) is None
    handle.remove()
    PLACES[place](trainer.algorithm.loss).forward = lambda *_: None
    assert make_chained(trainer.algorithm) is None
    trainer.close()


def test_layers_that_share_a_weight_are_left_alone():
    trainer, make_chained = make("td3", hidden_sizes=(20, 20, 20))
    network = trainer.algorithm.loss.actor.module
    trainer.close()
    network[4] = network[2]
    actor = DeterministicActor(network, spec=trainer.env.action_spec)
    trainer, make_chained = make("td3", actor=actor)
    assert make_chained(trainer.algorithm) is None
    trainer.close()


def freeze(algorithm):
    next(algorithm.loss.critic.parameters()).requires_grad_(False)


def set_apart(algorithm):
    algorithm.actor_optimizer.param_groups[1]["betas"] = (0.5, 0.9)


def give_all_modules_a_hook(algorithm):
    return nn.modules.module.register_module_forward_hook(lambda *_: None)


def give_a_hook(place):
    def change(algorithm):
        return PLACES[place](algorithm.loss).register_full_backward_hook(lambda *_: None)

    return change


HOOKED = [give_a_hook(place) for place in ("critic", "critic's network", "perceptrons", "target", "actor")]


@pytest.mark.parametrize("change", [freeze, set_apart, give_all_modules_a_hook, *HOOKED])
def test_what_changes_later_is_left_to_the_plain_update(change):
    pytest.importorskip("triton")
    trainer, make_chained = make("sac")
    for _ in range(trainer.config.fill_iterations + 1):
        trainer.step()
    chained, sample = make_chained(trainer.algorithm), trainer.buffer.sample()
    assert chained.takes(sample)
    assert not chained.takes(sample.expand(2, *sample.shape).transpose(0, 1))
    handle = change(trainer.algorithm)
    assert not chained.takes(sample)
    if handle is not None:
        handle.remove()
        assert chained.takes(sample)
    trainer.close()
