"""PPO with networks from Python that stand on a memory: TorchRL's modules, the package's, and what is refused."""

import dataclasses

import pytest
import torch
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.envs import Compose, InitTracker, TransformedEnv
from torchrl.modules import GRUModule, LSTMModule, ProbabilisticActor, ValueOperator

from torchrl_perf.envs import StatelessCartPole
from torchrl_perf.modules import LRU, DeviceGRU, DeviceLSTM, GumbelCategorical, MinGRU
from torchrl_perf.runtime import host_syncs
from torchrl_perf.trainers import PPOConfig, PPOTrainer

TINY = PPOConfig.without_task(
    env="StatelessCartPole", num_envs=4, num_steps=12, total_steps=4_800, minibatches=2, epochs=2, device="cpu",
    mode="eager", logger="none",
)  # fmt: skip
KEYS = {"in_key": "features", "out_key": "memory"}
KINDS = [GRUModule, LSTMModule, DeviceGRU, DeviceLSTM, MinGRU, LRU]


def networks(kind, seed=0):
    """Actor and critic above an encoder and a memory."""
    torch.manual_seed(seed)
    encoder = TensorDictModule(nn.Linear(2, 8), in_keys=["observation"], out_keys=["features"])
    memory = kind(8, 8, **KEYS)
    logits = TensorDictModule(nn.Linear(8, 2), in_keys=["memory"], out_keys=["logits"])
    head = ProbabilisticActor(logits, in_keys=["logits"], distribution_class=GumbelCategorical, return_log_prob=True)
    value = ValueOperator(nn.Linear(8, 1), in_keys=["memory"])
    return {
        "actor": TensorDictSequential(encoder, memory, head),
        "critic": TensorDictSequential(encoder, memory, value),
    }


def make(kind, env=None, **options):
    return PPOTrainer(dataclasses.replace(TINY, **options), env=env, **networks(kind))


def state_after(trainer, steps=2):
    for _ in range(steps):
        trainer.step()
    return [p.detach().clone() for p in trainer.loss.parameters()]


@pytest.mark.parametrize("kind", KINDS)
def test_given_modules_learn(kind):
    parts = networks(kind)
    before = [p.detach().clone() for p in parts["actor"].parameters()]
    trainer = PPOTrainer(TINY, **parts)
    for _ in range(2):
        trainer.step()
    # the modules that were given are those that learn
    assert all(not torch.equal(p, q) for p, q in zip(parts["actor"].parameters(), before, strict=True))
    assert trainer.algorithm.streams is not None
    trainer.close()


@pytest.mark.parametrize(("theirs", "ours"), [(GRUModule, DeviceGRU), (LSTMModule, DeviceLSTM)])
def test_torchrls_modules_learn_what_ours_do(theirs, ours):
    found, expected = (state_after(make(kind)) for kind in (theirs, ours))
    assert all(map(torch.equal, found, expected))


def test_torchrls_transforms_are_accepted():
    parts = networks(GRUModule)
    memory = parts["actor"][1]
    transforms = Compose(InitTracker(), memory.make_tensordict_primer())
    trainer = PPOTrainer(TINY, env=TransformedEnv(StatelessCartPole(4, device="cpu"), transforms), **parts)
    for mine, its in zip(state_after(trainer), state_after(make(GRUModule)), strict=True):
        assert mine.shape == its.shape
    assert trainer.collector.batch["recurrent_state"].abs().sum() > 0
    trainer.close()


def test_what_lies_above_may_be_several_modules():
    """The form of TorchRL's own scripts."""
    parts = networks(GRUModule)
    encoder, memory, head = parts["actor"]
    parts["actor"] = ProbabilisticTensorDictSequential(encoder, memory, *head)
    found, expected = (state_after(PPOTrainer(TINY, **each)) for each in (parts, networks(GRUModule)))
    assert all(map(torch.equal, found, expected))


def test_host_is_never_asked():
    trainer = make(LSTMModule, burn_in=2)
    trainer.step()
    with host_syncs() as report:
        trainer.step()
    assert not report.rows


def test_resume_is_bitwise(tmp_path):
    one, other = make(GRUModule, burn_in=3), make(GRUModule, burn_in=3, seed=5)
    one.step()
    path = one.save(tmp_path / "checkpoint.pt")
    expected = state_after(one, 1)
    other.load(path)
    assert all(map(torch.equal, expected, state_after(other, 1)))


class TestRefused:
    def test_a_memory_in_one_of_them(self):
        parts = networks(GRUModule)
        value = ValueOperator(nn.Linear(2, 1), in_keys=["observation"])
        for critic in (None, value):
            with pytest.raises(ValueError, match=r"actor: expected a network without memory.*on one recurrent module"):
                PPOTrainer(TINY, actor=parts["actor"], critic=critic)

    def test_a_memory_of_its_own_in_each(self):
        one, other = networks(GRUModule), networks(GRUModule, seed=1)
        with pytest.raises(ValueError, match=r"critic: expected the modules that the actor stands on.*Remedy"):
            PPOTrainer(TINY, actor=one["actor"], critic=other["critic"])

    def test_two_memories(self):
        parts = {name: list(network) for name, network in networks(DeviceGRU).items()}
        first = DeviceGRU(2, 8, in_keys=["observation", "first"], out_keys=["features", ("next", "first")])
        made = {name: TensorDictSequential(first, *network[1:]) for name, network in parts.items()}
        with pytest.raises(ValueError, match=r"actor: expected TensorDict.*one memory for actor and critic"):
            PPOTrainer(TINY, **made)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"minibatches": 3}, r"minibatches: expected a divisor of num_envs = 4 with a memory.*received 3"),
            ({"burn_in": 12}, r"burn_in: expected fewer steps than num_steps = 12.*received 12"),
            ({"memory_size": 16}, r"memory_size: expected 64 without a memory that reads it, received 16.*Remedy"),
            ({"memory": "gru"}, r"memory: expected with 'gru' networks of the trainer's own.*Remedy: memory='none'"),
        ],
    )
    def test_settings(self, options, message):
        with pytest.raises(ValueError, match=f"(?s){message}"):
            make(GRUModule, **options)
