"""Hooks around the optimiser's step, and parameters that no loss depends on, in eager and in compiled updates."""

import pytest
import torch
from torch import nn

from torchrl_perf.trainers import DDPGConfig, DDPGTrainer, GuardedAdam, PPOConfig, PPOTrainer, SACConfig, SACTrainer
from torchrl_perf.trainers.ddpg import DDPG
from torchrl_perf.trainers.sac import SAC

COMMON = {"num_envs": 4, "device": "cpu", "logger": "none", "hidden_size": 16}
ON = {**COMMON, "num_steps": 8, "epochs": 1, "minibatches": 2, "learning_rate": 1e-2}
OFF = {**COMMON, "num_steps": 2, "capacity": 200, "minibatch_size": 8, "learning_starts": 16}
OFF |= {"updates_per_iteration": 2}
KINDS = {"ppo": (PPOConfig, PPOTrainer), "sac": (SACConfig, SACTrainer), "ddpg": (DDPGConfig, DDPGTrainer)}


def run(trainer, iterations=4):
    for _ in range(iterations):
        trainer.step()
        trainer.iterations_done += 1
    return trainer


def make(name, mode, **changes):
    config, trainer = KINDS[name]
    settings = ON if name == "ppo" else OFF
    return trainer(config.without_task(**settings, mode=mode, **changes))


def optimizers(trainer):
    algorithm = getattr(trainer, "algorithm", None)
    if hasattr(algorithm, "critic_optimizer"):
        return [algorithm.critic_optimizer, algorithm.actor_optimizer]
    return [trainer.optimizer]


def values(trainer):
    return [param.detach().clone() for one in optimizers(trainer) for param in one.params]


class TestGivenGradients:
    def test_hooks_see_and_change_the_gradients(self):
        torch.manual_seed(0)
        nets = [nn.Linear(3, 2), nn.Linear(3, 2)]
        nets[1].load_state_dict(nets[0].state_dict())
        hooked, plain = (GuardedAdam(net.parameters(), lr=1e-2, eps=1e-2) for net in nets)
        seen = []

        def halve(optimizer, args, kwargs):
            for param in optimizer.params:
                param.grad.mul_(0.5)

        hooked.register_step_pre_hook(halve)
        hooked.register_step_post_hook(lambda optimizer, *_: seen.append(optimizer.params[0].detach().clone()))
        grads = [torch.randn_like(param) for param in hooked.params]
        hooked.apply_gradients([grad.clone() for grad in grads], torch.tensor(1.0))
        plain.apply_gradients([0.5 * grad for grad in grads], torch.tensor(1.0))
        assert all(torch.equal(one, other) for one, other in zip(hooked.params, plain.params, strict=True))
        assert torch.equal(seen[0], hooked.params[0])
        assert all(param.grad is None for param in hooked.params)

    def test_other_arguments_are_refused(self):
        optimizer = GuardedAdam(nn.Linear(3, 2).parameters(), lr=1e-2)
        optimizer.register_step_pre_hook(lambda *_: ((), {}))
        with pytest.raises(RuntimeError, match="step hook: expected None"):
            optimizer.apply_gradients([torch.ones_like(param) for param in optimizer.params], torch.tensor(1.0))
        assert all(param.grad is None for param in optimizer.params)


@pytest.mark.parametrize("mode", ["eager", "compile"])
@pytest.mark.parametrize("name", ["ppo", "sac", "ddpg"])
def test_hooks_are_called_at_each_step_and_what_they_do_counts(traced, name, mode):
    trainer, calls = run(make(name, mode), 3 if name != "ppo" else 1), []
    for one in optimizers(trainer):
        one.register_step_pre_hook(lambda *_: calls.append("before"))
        # keeps the parameters where they are, which a step would move
        kept = [param.detach().clone() for param in one.params]

        def put_back(optimizer, args, kwargs, kept=kept):
            calls.append("behind")
            torch._foreach_copy_([param.detach() for param in optimizer.params], kept)

        one.register_step_post_hook(put_back)
    before = values(trainer)
    run(trainer, 2)
    assert calls == ["before", "behind"] * (4 if name == "ppo" else 8)
    assert all(torch.equal(one, other) for one, other in zip(before, values(trainer), strict=True))


@pytest.mark.parametrize("mode", ["eager", "compile"])
@pytest.mark.parametrize("name", ["ppo", "sac", "ddpg"])
@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_gradients_are_called_at_each_step_and_what_they_do_counts(traced, name, mode, register):
    trainer, calls = run(make(name, mode), 3 if name != "ppo" else 1), []

    def none(given):
        calls.append(0)
        if register == "register_hook":
            return torch.zeros_like(given)
        given.grad.zero_()

    masked = [one.params[0] for one in optimizers(trainer)]
    for one, param in zip(optimizers(trainer), masked, strict=True):
        getattr(param, register)(none)
        one.state[param]["exp_avg"].zero_()  # what has been gathered would move it on
    before = [param.detach().clone() for param in masked]
    others = values(trainer)
    run(trainer, 2)
    assert len(calls) == (4 if name == "ppo" else 8)
    assert all(torch.equal(one, other) for one, other in zip(before, masked, strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(others, values(trainer), strict=True))


@pytest.mark.parametrize("mode", ["eager", "compile"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_parameter_that_the_loss_of_ppo_does_not_depend_on_stays(traced, mode, decay):
    trainer = make("ppo", mode)
    actor, critic = trainer.actor, trainer.critic
    trainer.close()
    extra = nn.Linear(2, 2)
    critic.register_module("extra", extra)
    trainer = PPOTrainer(PPOConfig.without_task(**ON, mode=mode, weight_decay=decay), actor=actor, critic=critic)
    assert any(param is extra.weight for param in trainer.optimizer.params)
    before = extra.weight.detach().clone()
    run(trainer, 2)
    assert torch.equal(extra.weight, before)


@pytest.mark.parametrize("mode", ["eager", "compile"])
@pytest.mark.parametrize(("name", "algorithm", "part"), [("sac", SAC, "critic"), ("ddpg", DDPG, "actor")])
def test_one_of_an_actor_critic_that_would_decay_is_refused_by_name(traced, monkeypatch, name, algorithm, part, mode):
    made = getattr(algorithm, f"make_{part}")

    def with_more(self, *specs):
        network = made(self, *specs)
        network.register_module("extra", nn.Linear(2, 2))
        return network

    monkeypatch.setattr(algorithm, f"make_{part}", with_more)
    trainer = run(make(name, mode), 8)
    (extra,) = [
        param
        for label, param in trainer.algorithm.loss.named_parameters()
        if label.endswith("extra.weight") and "target" not in label
    ]
    assert extra.grad is None
    with pytest.raises(
        ValueError, match=r"weight_decay: expected losses that depend on .*extra.weight, .*extra.bias. Remedy"
    ):
        run(make(name, mode, weight_decay=0.1), 20)


def test_a_decay_is_taken_where_all_are_depended_on(traced):
    numbers = []
    for decay in (0.0, 0.1):
        torch.manual_seed(0)
        numbers.append(values(run(make("sac", "eager", weight_decay=decay), 10)))
    assert not all(torch.equal(one, other) for one, other in zip(*numbers, strict=True))
