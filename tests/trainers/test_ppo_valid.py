"""PPO on rows of agents: what is learnt from, normalised, measured, and split for want of memory."""

import sys
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from torchrl_perf.envs import CartPole, Curriculum, MarineNavigation
from torchrl_perf.envs.agent_streams import AgentStreams
from torchrl_perf.objectives import DeviceClipPPOLoss
from torchrl_perf.trainers import PPOConfig, PPOTrainer
from torchrl_perf.trainers.on_policy.minibatches import flat_rows

sys.path.append(str(Path(__file__).resolve().parents[1] / "envs"))
from walkers import Walkers

OPTIONS = {"num_envs": 6, "num_steps": 8, "total_steps": 960, "epochs": 1, "minibatches": 1, "mode": "eager"}
OPTIONS |= {"device": "cpu", "logger": "none", "hidden_size": 32}


def make(**options):
    config = PPOConfig(**{**OPTIONS, **options})
    return PPOTrainer(config, env=AgentStreams(Walkers(2, 3, discrete=True)))


def minibatch(trainer):
    batch = trainer.advantage(trainer.collect())
    while batch["valid"].all():
        batch = trainer.advantage(trainer.collect())
    return batch, flat_rows(batch, trainer.algorithm.row_keys)


@pytest.mark.parametrize("normalize", [False, True])
def test_the_gradient_is_that_of_the_rows_that_count(normalize):
    trainer = make(normalize_advantage=normalize)
    assert trainer.valid_key == trainer.loss.valid_key == "valid"
    _, rows = minibatch(trainer)
    alone = rows[rows["valid"].squeeze(-1)]
    loss = DeviceClipPPOLoss(
        trainer.actor, trainer.critic, clip_epsilon=trainer.config.clip_epsilon, loss_critic_type="l2",
        clip_value=trainer.config.clip_epsilon if trainer.config.clip_value else False, functional=False,
        normalize_advantage=normalize, entropy_coeff=trainer.config.entropy_coeff,
        critic_coeff=trainer.config.critic_coeff,
    )  # fmt: skip
    out = loss(alone)
    want = torch.autograd.grad(
        out["loss_objective"] + out["loss_critic"] + out["loss_entropy"], list(loss.parameters())
    )
    grads = []
    for parts in (1, 4):
        _, statistics = trainer._gradients(rows, torch.arange(len(rows)), parts)
        grads.append([p.grad.clone() for p in loss.parameters()])
        for name, value in zip(trainer.statistics, statistics, strict=True):
            torch.testing.assert_close(value, out[name].detach(), rtol=1e-4, atol=1e-5)
    for got in grads:
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    trainer.close()


def streams_with_gaps(**options):
    trainer = make(memory="gru", memory_size=8, minibatches=2, **options)
    batch, _ = minibatch(trainer)
    return trainer, trainer.algorithm.rows(batch)


@pytest.mark.parametrize("burn_in", [0, 3])
def test_of_the_streams_of_a_memory_the_same_rows_count(burn_in):
    trainer, streams = streams_with_gaps(burn_in=burn_in)
    out = trainer.algorithm.minibatch_loss(streams)[1]
    features = trainer.algorithm.streams.read(streams)
    alone = features.reshape(-1)[features["valid"].reshape(-1)]  # rows of features stand alone
    for name, value in trainer.loss(alone).items():
        torch.testing.assert_close(out[name], value, rtol=1e-4, atol=1e-6)
    gradients = []
    for parts in (1, 3):
        trainer._gradients(streams, torch.arange(len(streams)), parts)
        gradients.append([p.grad.clone() for p in trainer.loss.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
    trainer.close()


def test_what_an_agent_that_is_gone_sees_changes_nothing_that_is_learnt():
    trainer, streams = streams_with_gaps()
    changed, gradients = streams.clone(), []
    changed["observation"] = torch.where(streams["valid"], streams["observation"], 9.0)
    changed["advantage"] = torch.where(streams["valid"], streams["advantage"], -7.0)
    for each in (streams, changed):
        trainer._gradients(each, torch.arange(len(each)), 1)
        gradients.append([p.grad.clone() for p in trainer.loss.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)
    trainer.close()


def test_a_run_of_vessels_with_a_memory_resumes_bitwise(tmp_path):
    """Vessels do not see the currents that move them."""
    currents = Curriculum(frames=(0,), robots=(3,), obstacles=(0,), cores=(4,), distance=(30.0,))

    def vessels(seed):
        env = AgentStreams(MarineNavigation(2, action="discrete", curriculum=currents, device="cpu"))
        return PPOTrainer(PPOConfig(**OPTIONS, memory="gru", memory_size=8, burn_in=2, seed=seed), env=env)

    one, other = vessels(0), vessels(9)
    for _ in range(2):
        one.step()
    path = one.save(tmp_path / "checkpoint.pt")
    one.step()
    other.load(path)
    other.step()
    for mine, theirs in zip(one.loss.parameters(), other.loss.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    one.close()
    other.close()


def test_episodes_are_those_of_the_rows_that_count():
    trainer = make()
    measured, measure = [], trainer.measure

    def watch(batch):
        measured.append((batch["valid"].clone(), batch["next", "done"].clone()))
        measure(batch)

    trainer.measure = watch
    for _ in range(6):
        trainer.step()
    valid, done = (torch.cat(parts) for parts in zip(*measured, strict=True))
    assert not valid.all()
    assert int(trainer.episodes.count) == int((valid & done).sum()) < int(done.sum())
    trainer.close()


def test_a_loss_that_cannot_leave_rows_out_is_refused():
    with pytest.raises(ValueError, match=r"loss: expected 'device'.*received 'torchrl'"):
        make(loss="torchrl")


def test_final_observations_that_are_missing_are_no_fault():
    trainer = PPOTrainer(PPOConfig(**OPTIONS), env=CartPole(6, device="cpu"))
    batch = trainer.collect()
    batch["next", "done"][:, 3] = True
    batch["next", "observation"][:, 3] = torch.nan
    assert trainer.watched(batch) is batch
    trainer._lacks_final_observations = True  # what the mark of an env that resets itself says
    seen = trainer.watched(batch)
    assert seen["next", "observation"].isfinite().all()
    assert batch["next", "observation"][:, 3].isnan().all()
    batch["next", "done"][2, 3] = False
    assert trainer.watched(batch)["next", "observation"].isnan().sum() == 4
    trainer.close()


def test_an_observation_of_that_name_and_another_kind_is_no_flag():
    class Named(CartPole):
        pass

    env = Named(6, device="cpu")
    trainer = PPOTrainer(PPOConfig(**OPTIONS), env=env)
    assert trainer.valid_key is None
    rows = TensorDict({"advantage": torch.zeros(4, 1)}, [4])
    assert trainer.algorithm.whole(rows, torch.arange(4)).counts is None
    trainer.close()
