"""What ``precision`` and ``compile_mode`` of a config change in PPO, DQN and SAC, and that learning is not hurt."""

import dataclasses

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import ProbabilisticActor, ValueOperator

from torchrl_perf.envs import CartPole
from torchrl_perf.modules import GumbelCategorical
from torchrl_perf.trainers import (
    DQNConfig,
    DQNTrainer,
    PPOConfig,
    PPOTrainer,
    SACConfig,
    SACTrainer,
)

TINY = {"num_envs": 8, "num_steps": 8, "hidden_size": 32, "logger": "none", "total_steps": 10_000, "device": "cpu"}
REPLAY = {"capacity": 1024, "learning_starts": 64, "minibatch_size": 32, "updates_per_iteration": 2}
MAKE = {
    "ppo": lambda **kw: PPOTrainer(PPOConfig(**(TINY | {"epochs": 2, "minibatches": 2} | kw))),
    "dqn": lambda **kw: DQNTrainer(DQNConfig.without_task(**(TINY | REPLAY | kw))),
    "sac": lambda **kw: SACTrainer(SACConfig.without_task(**(TINY | REPLAY | kw))),
}
LOSSES = {"ppo": "train/loss_critic", "dqn": "train/loss", "sac": "train/loss_critic"}


def run(name, steps=4, **options):
    """Metrics of a few iterations with updates."""
    trainer = MAKE[name](**options)
    for _ in range(steps + getattr(trainer.config, "fill_iterations", 0)):
        trainer.step()
    row = trainer.metrics.flush(1)
    trainer.close()
    return trainer, row


@pytest.mark.parametrize("name", list(MAKE))
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_rounded_and_near_and_never_a_fault(name, precision):
    _, exact = run(name)
    trainer, row = run(name, precision=precision)
    loss, expected = row[LOSSES[name]], exact[LOSSES[name]]
    assert loss != expected
    assert loss == pytest.approx(expected, rel=0.1)
    assert float(trainer.first_bad_iteration) == -1


@pytest.mark.parametrize("name", list(MAKE))
def test_tf32_and_ieee_are_one_on_a_cpu(name):
    assert run(name, steps=2)[1] == pytest.approx(run(name, steps=2, precision="ieee")[1], rel=0, abs=0, nan_ok=True)


@pytest.mark.parametrize("name", list(MAKE))
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_what_is_stored_and_learnt_from_is_float32(name, precision):
    trainer = MAKE[name](precision=precision)
    batch = trainer.collect()
    narrow = [key for key in batch.keys(True, True) if batch.get(key).dtype in (torch.bfloat16, torch.float16)]
    assert not narrow
    if isinstance(trainer, PPOTrainer):
        batch = trainer.advantage(batch.copy())
        assert {batch.get(key).dtype for key in ("advantage", "value_target", "state_value")} == {torch.float32}
    trainer.close()


def plain_networks():
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    env = CartPole(8)
    actor = ProbabilisticActor(
        TensorDictModule(net, in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        spec=env.full_action_spec,
        distribution_class=GumbelCategorical,
        return_log_prob=True,
    )
    critic = ValueOperator(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)), in_keys=["observation"])
    return env, actor, critic


@pytest.mark.parametrize("loss", ["device", "torchrl"])
def test_networks_that_are_given_run_in_the_precision_too(loss):
    values = {}
    for precision in ("ieee", "bf16"):
        env, actor, critic = plain_networks()
        config = PPOConfig(**(TINY | {"precision": precision, "loss": loss, "epochs": 1, "minibatches": 2}))
        trainer = PPOTrainer(config, env=env, actor=actor, critic=critic)
        values[precision] = critic.module(torch.ones(1, 4))
        for _ in range(2):
            trainer.step()
        assert float(trainer.first_bad_iteration) == -1
        trainer.close()
    assert values["bf16"].dtype == torch.float32
    assert not torch.equal(values["bf16"], values["ieee"])
    torch.testing.assert_close(values["bf16"], values["ieee"], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", list(MAKE))
def test_the_loss_scale_is_in_the_checkpoint(name):
    trainer = MAKE[name](precision="fp16")
    other = MAKE[name](precision="fp16")
    part = "actor_optimizer" if isinstance(trainer, SACTrainer) else "optimizer"
    getattr(trainer, part).loss_scale.scale.fill_(128.0)
    other.load_state_dict(trainer.state_dict())
    assert float(getattr(other, part).loss_scale.scale) == 128.0


@pytest.mark.parametrize("name", list(MAKE))
def test_the_compile_mode_reaches_every_compiled_function(name, monkeypatch):
    seen = []

    def spy(fn, **options):
        seen.append(options.get("mode"))
        return fn

    for module in ("runtime.precision", "collectors.device_collector"):
        monkeypatch.setattr(f"torchrl_perf.{module}.compiled", spy)
    MAKE[name](mode="compile", compile_mode="max-autotune-no-cudagraphs").close()
    assert len(seen) >= 3
    assert set(seen) == {"max-autotune-no-cudagraphs"}


def test_ppo_learns_cart_pole_in_bf16():
    trainer = PPOTrainer(dataclasses.replace(PPOConfig(), precision="bf16", device="cpu", logger="none", mode="eager"))
    best = 0.0
    for _ in range(40):
        trainer.step()
        best = max(best, float(trainer.episodes.mean_return))
        if best >= 100:  # a random policy gets 22
            break
    trainer.close()
    assert best >= 100


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(MAKE))
@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16", "ieee"])
def test_captured_in_each_precision(name, precision):
    trainer, row = run(name, steps=6, device="cuda", mode="graph", precision=precision)
    _, exact = run(name, steps=6, device="cuda", mode="eager", precision="ieee")
    assert float(trainer.first_bad_iteration) == -1
    assert row[LOSSES[name]] == pytest.approx(exact[LOSSES[name]], rel=0.2)
    assert not torch.backends.cuda.matmul.allow_tf32
