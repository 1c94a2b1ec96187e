"""Recurrent policies in every collector: states from step to step, new with each episode, equal to the whole again."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from host_oracle import MODES, PackedCollector, collector, vector
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.modules import GRUModule, LSTMModule, set_recurrent_mode

from torchrl_perf.collectors import DeviceCollector, HostCollector, device_collector, stepping
from torchrl_perf.envs import CartPole
from torchrl_perf.modules import LRU, DeviceGRU, DeviceLSTM, MinGRU

N, T, H = 3, 12, 4
KINDS = {"gru": DeviceGRU, "lstm": DeviceLSTM, "min_gru": MinGRU, "lru": LRU}


def policy_of(kind):
    torch.manual_seed(0)
    memory = kind(4, H, 2, in_key="observation", out_key="features")
    # an action that ends episodes soon, and depends on the state
    head = TensorDictModule(lambda y: (y.sum(-1) > 0).long(), ["features"], ["action"])
    return TensorDictSequential(memory, head), memory


def check(data, memory, key="features"):
    """States begin at 0 with each episode, are passed on, and the whole batch read again gives the same outputs."""
    for state in memory.in_keys[1:-1]:
        begins = data["is_init"].squeeze(-1)
        assert begins[:, 1:].any()
        assert (data[state][begins] == 0).all()
        assert (data[state][~begins] != 0).any()
        after, root = data["next", state][:, :-1], data[state][:, 1:]
        assert torch.equal(root[~begins[:, 1:]], after[~begins[:, 1:]])
    again = memory(data.exclude("next", key).clone())
    # the kernels of sequences round their operands to TF32's ten bits
    limits = {"rtol": 1e-3, "atol": 1e-3} if data[key].is_cuda else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(again[key], data[key], **limits)


@pytest.mark.parametrize("kind", KINDS)
class TestOurModules:
    def test_device_collector(self, kind, device):
        policy, memory = policy_of(KINDS[kind])
        policy = policy.to(device)
        collecting = DeviceCollector(
            CartPole(N, device=device, seed=0),
            policy,
            frames_per_batch=N * T,
            auto_register_policy_transforms=True,
            mode="eager",
        )
        check(torch.cat([collecting.collect().clone() for _ in range(3)], 1), memory)

    def test_host_collector_on_arrays(self, kind):
        policy, memory = policy_of(KINDS[kind])
        collecting = HostCollector(vector("CartPole-v1", N, "SameStep"), policy, frames_per_batch=N * T, seed=0)
        check(torch.cat([collecting.collect().clone() for _ in range(3)], 1), memory)
        collecting.shutdown()

    def test_torchrls_collector(self, kind):
        policy, memory = policy_of(KINDS[kind])
        env = CartPole(N, device="cpu", seed=0)
        collecting = Collector(
            env, policy, frames_per_batch=N * T, total_frames=3 * N * T, auto_register_policy_transforms=True
        )
        check(torch.cat([data.clone() for data in collecting], 1), memory)
        collecting.shutdown()


@pytest.mark.parametrize("path", ["direct", "packed"])
@pytest.mark.parametrize("mode", MODES)
def test_host_groups_in_every_mode(mode, path):
    policy, memory = policy_of(DeviceGRU)
    envs = [vector("CartPole-v1", n, mode) for n in (2, 1)]
    collecting = collector(path, envs, policy, frames_per_batch=3 * T, seed=1)
    if path == "packed":
        assert isinstance(collecting, PackedCollector)
    check(torch.cat([collecting.collect().clone() for _ in range(4)], 1), memory)
    collecting.shutdown()


@pytest.mark.parametrize("kind", [GRUModule, LSTMModule])
def test_torchrls_modules_in_the_host_collector(kind):
    torch.manual_seed(0)
    memory = kind(4, H, in_key="observation", out_key="features")
    head = TensorDictModule(lambda y: (y.sum(-1) > 0).long(), ["features"], ["action"])
    policy = TensorDictSequential(memory, head)
    collecting = HostCollector(vector("CartPole-v1", N, "SameStep"), policy, frames_per_batch=N * T, seed=0)
    data = torch.cat([collecting.collect().clone() for _ in range(3)], 1)
    collecting.shutdown()
    ours = (DeviceGRU if kind is GRUModule else DeviceLSTM)(4, H, in_key="observation", out_key="features")
    ours.load_rnn(memory)
    check(data, ours)


@pytest.mark.parametrize("kind", [DeviceGRU, LRU, GRUModule])
@pytest.mark.parametrize("of_module", [False, True], ids=["around", "of_the_module"])
def test_a_policy_acts_on_steps_whatever_mode_is_set(kind, of_module):
    """In recurrent mode the envs would be the steps of one sequence: each would get the state of the one before it."""
    policy, memory = policy_of(partial(kind, default_recurrent_mode=True) if of_module else kind)
    options = {"frames_per_batch": N * T}
    on_device = DeviceCollector(
        CartPole(N, device="cpu", seed=0), policy, auto_register_policy_transforms=True, mode="eager", **options
    )
    on_host = HostCollector(vector("CartPole-v1", N, "SameStep"), policy, seed=0, **options)
    for collecting in (on_device, on_host):
        with nullcontext() if of_module else set_recurrent_mode(True):
            data = collecting.collect()
        for row in range(N):  # alone in a batch of one row, an env has no neighbour
            states = {key: data[key][row : row + 1, 0] for key in memory.in_keys[1:-1]}
            for t in range(T):
                step = data[row : row + 1, t].select("observation", "is_init").update(states)
                with set_recurrent_mode(False):
                    memory(step)
                torch.testing.assert_close(step["features"], data["features"][row : row + 1, t])
                states = {key: step["next", key] for key in states}
    on_host.shutdown()


def test_random_steps_leave_no_state():
    policy, _ = policy_of(DeviceGRU)
    envs = vector("CartPole-v1", N, "SameStep")
    collecting = HostCollector(envs, policy, frames_per_batch=N * T, init_random_frames=5 * N, seed=0)
    data = collecting.collect()
    assert (data["recurrent_state"][:, :6] == 0).all()
    assert (data["recurrent_state"][:, 6] != 0).any()
    collecting.shutdown()


def test_a_new_start_is_a_new_state():
    policy, _ = policy_of(DeviceGRU)
    envs = vector("CartPole-v1", N, "SameStep")
    collecting = HostCollector(envs, policy, frames_per_batch=N * 4, seed=0)
    collecting.collect()
    collecting.reset()
    assert (collecting.collect()["recurrent_state"][:, 0] == 0).all()
    collecting.shutdown()


def collected(mode, **options):
    """Two batches of a fresh env and policy."""
    policy, _ = policy_of(DeviceGRU)
    torch.manual_seed(1)
    collecting = DeviceCollector(
        CartPole(N, device="cpu", seed=0),
        policy,
        frames_per_batch=N * T,
        auto_register_policy_transforms=True,
        mode=mode,
        **options,
    )
    return torch.cat([collecting.collect().clone() for _ in range(2)], 1), collecting


def test_state_above_an_env_that_resets_itself_is_carried_as_by_transforms(monkeypatch):
    found, _ = collected("eager")
    monkeypatch.setattr(device_collector, "inside_step", lambda env: None)
    by_transforms, _ = collected("eager")
    reads = [key for key in found.keys(True, True) if key != "observation" and "collector" not in key]
    assert set(found.keys(True, True)) == set(by_transforms.keys(True, True))
    states = [key for key in reads if "recurrent_state" in key]
    assert len(states) == 2
    # the draws of resets differ, and so what follows the first one; what comes before is equal bit for bit
    first = int((found["next", "done"] | by_transforms["next", "done"]).any(0).flatten().long().argmax())
    assert first > 2
    for key in reads:
        assert torch.equal(found[key][:, : first + 1], by_transforms[key][:, : first + 1]), key


def test_numbers_may_be_drawn_ahead_of_a_memory():
    found, _ = collected("eager", draw_ahead=True)
    check(found, policy_of(DeviceGRU)[1])


def test_a_carried_state_that_the_compiler_refuses_leaves_the_parts_compiled(monkeypatch):
    plain = stepping.stateful_step

    def refused(*args):
        torch._dynamo.graph_break()
        return plain(*args)

    monkeypatch.setattr(device_collector, "COMPILES_ANY_STEP", False)
    monkeypatch.setattr(stepping, "stateful_step", refused)
    found, collecting = collected("compile", draw_ahead=True)
    assert collecting.mode == "compile"
    check(found, policy_of(DeviceGRU)[1])
    begins, first = found["is_init"].squeeze(-1), found["observation"]
    assert first[begins].unique(dim=0).shape[0] == begins.sum()  # no draw is used twice
