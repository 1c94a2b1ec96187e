"""Scripts in TorchRL's own style, and the same with one line of ours: the same numbers, or what each row has to be.

The rows are those of README's table; ``tests/examples/test_one_line_on_policy.py`` has its on-policy part.
"""

import pytest
import torch

IMPORTS = """
import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import (
    LazyTensorStorage, SamplerWithoutReplacement, SliceSampler, TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from torchrl.envs import GymEnv, MultiStepTransform
from torchrl.modules import (
    MLP, DistributionalQValueActor, EGreedyModule, ProbabilisticActor, QValueActor, TanhNormal,
    ValueOperator,
)
from torchrl.objectives import DistributionalDQNLoss, DQNLoss, SACLoss, SoftUpdate, TD3Loss
"""
OURS = """
from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import CartPole
from torchrl_perf.modules import DeviceActor, EpsilonGreedy, FusedMLP, SquashedNormal
from torchrl_perf.objectives import DeviceC51Loss, DeviceDQNLoss, DeviceSACLoss, DeviceSoftUpdate, DeviceTD3Loss
from torchrl_perf.replay import (
    DevicePrioritizedSampler, DeviceRandomSampler, DeviceSamplerWithoutReplacement, DeviceSliceSampler, DeviceStorage,
    DeviceWriter, make_replay_buffer,
)
from torchrl_perf.runtime import capture
from torchrl_perf.trainers import GuardedAdam
from torchrl_perf.transforms import NStepTransform
"""
TARGET = "target = SoftUpdate(loss, tau=0.1)"
LOOP = """
loss.make_value_estimator(gamma=0.9)
target = SoftUpdate(loss, tau=0.1)
optim = torch.optim.Adam(loss.parameters(), lr=1e-2)
def step(sample):
    values = loss(sample)
    sum(value for key, value in values.items() if key.startswith("loss")).backward()
    torch.nn.utils.clip_grad_norm_(loss.parameters(), 1.0)
    optim.step()
    optim.zero_grad()
    target.step()
    return values.detach()
update = step
batches, samples, losses = [], [], []
for batch in collector:
    batches.append(batch.clone())
    buffer.extend(batch.reshape(-1))
    for _ in range(2):
        torch.manual_seed(len(losses))
        sample = buffer.sample()
        samples.append(sample.clone())
        losses.append(update(sample).clone())
        torch.manual_seed(len(losses))
collector.shutdown()
"""
DQN = (
    """
torch.manual_seed(0)
env = GymEnv("CartPole-v1", categorical_action_encoding=True)
env.set_seed(0)
value = QValueActor(MLP(4, 2, num_cells=[16]), in_keys=["observation"], spec=env.action_spec_unbatched)
explore = EGreedyModule(env.action_spec_unbatched, eps_init=0.0, eps_end=0.0)
policy = TensorDictSequential(value, explore)
collector = Collector(env, policy, frames_per_batch=32, total_frames=64, auto_register_policy_transforms=False)
buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(64), batch_size=16)
loss = DQNLoss(value, delay_value=True)
"""
    + LOOP
)
ENV = 'env = GymEnv("CartPole-v1", categorical_action_encoding=True)'
VALUE = next(line for line in DQN.splitlines() if line.startswith("value = "))
C51 = "loss = DistributionalDQNLoss(value, gamma=0.9, delay_value=True)"
ATOMS = (
    DQN.replace(ENV, 'env = GymEnv("CartPole-v1"); support = torch.linspace(0, 10, 5)')
    .replace("QValueActor(MLP(4, 2, ", "DistributionalQValueActor(MLP(4, (5, 2), ")
    .replace('in_keys=["observation"], spec', 'support=support, in_keys=["observation"], spec')
    .replace("loss = DQNLoss(value, delay_value=True)", C51)
    .replace("loss.make_value_estimator(gamma=0.9)", "")
)
BUFFER = "buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(64), batch_size=16)"
PENDULUM = (
    """
torch.manual_seed(0)
env = GymEnv("Pendulum-v1")
env.set_seed(0)
bounds = {"low": env.action_spec.space.low, "high": env.action_spec.space.high}
core = nn.Sequential(MLP(3, 2, num_cells=[16]), NormalParamExtractor())
net = TensorDictModule(core, ["observation"], ["loc", "scale"])
kind = TanhNormal
common = {"spec": env.action_spec, "distribution_class": kind, "distribution_kwargs": bounds, "return_log_prob": True}
actor = ProbabilisticActor(net, in_keys=["loc", "scale"], **common)
policy = TensorDictModule(nn.Sequential(MLP(3, 1, num_cells=[16]), nn.Tanh()), ["observation"], ["action"])
critic = ValueOperator(MLP(4, 1, num_cells=[16]), in_keys=["observation", "action"])
collector = Collector(env, actor, frames_per_batch=32, total_frames=64, auto_register_policy_transforms=False)
buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(64), batch_size=16)
loss = SACLoss(actor, critic, action_spec=env.action_spec)
"""
    + LOOP
)
SAC = "loss = SACLoss(actor, critic, action_spec=env.action_spec)"
TD3 = "loss = TD3Loss(policy, critic, action_spec=env.action_spec, policy_noise=0.0)"


def run(script, *changes):
    for old, new in changes:
        assert script.count(f"{old}\n") == 1, old
        script = script.replace(f"{old}\n", f"{new}\n")
    scope = {}
    exec(compile(IMPORTS + OURS + script, "script", "exec"), scope)
    return scope


def close(one, other, **options):
    torch.testing.assert_close(one, other, **{"rtol": 1e-4, "atol": 1e-5, **options})


def same(ours, stock):
    """Equal batches, samples, losses and parameters."""
    for name in ("batches", "samples", "losses"):
        assert len(ours[name]) == len(stock[name]) > 0
        for one, other in zip(ours[name], stock[name], strict=True):
            for key in other.keys(True, True):
                if key not in ("td_error", "index", ("collector", "traj_ids")):
                    close(one[key], other[key], msg=lambda text, key=key: f"{key}: {text}")
    same_parameters(ours, stock)


def same_parameters(ours, stock):
    mine, theirs = (dict(scope["loss"].named_parameters()) for scope in (ours, stock))
    assert len(mine) == len(theirs)
    for one, other in zip(mine.values(), theirs.values(), strict=True):
        close(one, other, rtol=1e-3)


def same_losses(ours, stock):
    """The losses of each step and the parameters in the end, under TorchRL's names."""
    for one, other in zip(ours["losses"], stock["losses"], strict=True):
        for key in other.keys():
            if key.startswith("loss"):
                close(one[key], other[key])
    same_parameters(ours, stock)


def alike(ours, stock):
    """The same keys, shapes and dtypes, in numbers that are finite."""
    for name in ("batches", "samples"):
        one, other = ours[name][-1], stock[name][-1]
        missing = set(map(str, other.keys(True, True))) - set(map(str, one.keys(True, True)))
        assert not missing - {"index", "truncated"}, missing
        for key in other.keys(True, True):
            if key != "index" and key in one.keys(True, True):
                assert (one[key].numel(), one[key].dtype) == (other[key].numel(), other[key].dtype), key
    assert all(value.isfinite().all() for out in ours["losses"] for value in out.values())
    assert [sorted(out.keys()) for out in ours["losses"]] == [sorted(out.keys()) for out in stock["losses"]]


def rows_of_the_batches(ours, stock):
    """Samples are rows that the collector gave."""
    alike(ours, stock)
    given = {tuple(row.tolist()) for batch in ours["batches"] for row in batch["observation"].reshape(-1, 4)}
    assert {tuple(row.tolist()) for sample in ours["samples"] for row in sample["observation"]} <= given


def every_row_once(ours, stock):
    rows_of_the_batches(ours, stock)
    drawn = [tuple(row.tolist()) for sample in ours["samples"][:2] for row in sample["observation"]]
    assert len(set(drawn)) == len(drawn) == 32


def slices(ours, stock):
    """Windows of four steps in a row."""
    rows_of_the_batches(ours, stock)
    for scope in (ours, stock):
        for sample in scope["samples"]:
            window = sample.reshape(4, 4)
            close(window["next", "observation"][:, :-1], window["observation"][:, 1:])


def several_steps(ours, stock):
    """The reward of three steps, less at the end of an episode: CartPole pays 1 a step."""
    for scope in (ours, stock):
        assert {"steps_to_next_obs", "gamma"} <= set(scope["samples"][0].keys())
        rewards = torch.cat([sample["next", "reward"].flatten() for sample in scope["samples"]])
        possible = torch.tensor([1.0, 1.9, 2.71])
        assert ((rewards[:, None] - possible).abs().amin(-1) < 1e-5).all()
        assert rewards.max() > 2.7


def of_ours(**parts):
    inside = ", ".join(f"{name}={part}" for name, part in {"storage": "DeviceStorage(64)", **parts}.items())
    return f"buffer = TensorDictReplayBuffer({inside}, batch_size=16)"


def of_theirs(**parts):
    inside = ", ".join(f"{name}={part}" for name, part in {"storage": "LazyTensorStorage(64)", **parts}.items())
    return f"buffer = TensorDictReplayBuffer({inside}, batch_size=16)"


COLLECT = next(line for line in DQN.splitlines() if line.startswith("collector = "))
OUR_COLLECT = COLLECT.replace("= Collector(env, policy,", '= DeviceCollector(env, policy, mode="eager",')
ADAM = "optim = torch.optim.Adam(loss.parameters(), lr=1e-2)"
GREEDY = "explore = EGreedyModule(env.action_spec_unbatched, eps_init=0.0, eps_end=0.0)"
WITH_STEPS = "; buffer.append_transform({}(n_steps=3, gamma=0.9))"
TRAJ = 'slice_len=4, traj_key=("collector", "traj_ids")'
KIND, ACTOR = "kind = TanhNormal", 'actor = ProbabilisticActor(net, in_keys=["loc", "scale"], **common)'

# the class of TorchRL that the row replaces: the script, its line, that line for this row, ours, what has to hold
ROWS = {
    "GymEnv": (DQN, ENV, ENV, "env = CartPole(1)", alike),
    "Collector": (
        DQN,
        COLLECT,
        COLLECT,
        OUR_COLLECT,
        same,
    ),
    "LazyTensorStorage": (DQN, BUFFER, BUFFER, of_ours(), rows_of_the_batches),
    "LazyTensorStorage, make_replay_buffer": (
        DQN,
        BUFFER,
        BUFFER,
        "buffer = make_replay_buffer(64, batch_size=16)",
        rows_of_the_batches,
    ),
    "RandomSampler": (DQN, BUFFER, BUFFER, of_ours(sampler="DeviceRandomSampler()"), rows_of_the_batches),
    "SamplerWithoutReplacement": (
        DQN,
        BUFFER,
        of_theirs(sampler="SamplerWithoutReplacement()"),
        of_ours(sampler="DeviceSamplerWithoutReplacement()"),
        every_row_once,
    ),
    "PrioritizedSampler": (DQN, BUFFER, BUFFER, of_ours(sampler="DevicePrioritizedSampler()"), rows_of_the_batches),
    "SliceSampler": (
        DQN,
        BUFFER,
        of_theirs(sampler=f"SliceSampler({TRAJ})"),
        of_ours(sampler="DeviceSliceSampler(slice_len=4)"),
        slices,
    ),
    "TensorDictRoundRobinWriter": (
        DQN,
        BUFFER,
        of_theirs(writer="TensorDictRoundRobinWriter()"),
        of_ours(writer="DeviceWriter()"),
        rows_of_the_batches,
    ),
    "MultiStepTransform": (
        DQN.replace("extend(batch.reshape(-1))", "extend(batch)"),
        BUFFER,
        BUFFER + WITH_STEPS.format("MultiStepTransform"),
        BUFFER + WITH_STEPS.format("NStepTransform"),
        several_steps,
    ),
    "DQNLoss": (
        DQN,
        "loss = DQNLoss(value, delay_value=True)",
        "loss = DQNLoss(value, delay_value=True)",
        "loss = DeviceDQNLoss(value, delay_value=True)",
        same_losses,
    ),
    "EGreedyModule": (DQN, GREEDY, GREEDY, GREEDY.replace("EGreedyModule", "EpsilonGreedy"), same),
    "clip_grad_norm_ and Adam": (
        DQN,
        ADAM,
        ADAM,
        "optim = GuardedAdam(loss.parameters(), lr=1e-2, eps=1e-8, max_grad_norm=1.0)",
        same,
    ),
    "CudaGraphModule": (DQN, "update = step", "update = step", "update = capture(step)", same),
    "SACLoss": (PENDULUM, SAC, SAC, SAC.replace("SACLoss", "DeviceSACLoss"), alike),
    "TD3Loss": (PENDULUM, SAC, TD3, TD3.replace("TD3Loss", "DeviceTD3Loss"), same_losses),
    "SoftUpdate": (DQN, TARGET, TARGET, TARGET.replace("SoftUpdate", "DeviceSoftUpdate"), same),
    "TanhNormal": (PENDULUM, KIND, KIND, "kind = SquashedNormal", alike),
    "ProbabilisticActor": (
        PENDULUM.replace('"return_log_prob": True', ""),
        ACTOR,
        ACTOR.replace("**common", "return_log_prob=True, **common"),
        'actor = DeviceActor(core, param_keys=["loc", "scale"], **common)',
        same,
    ),
    "MLP": (DQN, VALUE, VALUE, VALUE.replace("MLP(4, 2, num_cells=[16])", "FusedMLP(4, 2)"), alike),
    "DistributionalDQNLoss": (ATOMS, C51, C51, C51.replace("DistributionalDQNLoss", "DeviceC51Loss"), same_losses),
}


@pytest.mark.parametrize("name", ROWS)
def test_one_line(name):
    script, line, stock, ours, holds = ROWS[name]
    holds(run(script, (line, ours)), run(script, (line, stock)))
