"""One object for everything that changes: exact, all or nothing, and for loops of one's own."""

import random

import numpy as np
import pytest
import torch
from torchrl.data import LazyTensorStorage, ReplayBuffer

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import CartPole
from torchrl_perf.modules import EpsilonGreedy, FusedMLP
from torchrl_perf.replay import make_replay_buffer
from torchrl_perf.runtime.files import CheckpointError, load_checkpoint
from torchrl_perf.trainers.run.state import Attributes, TrainState, check_modules, load_random_state, random_state


class Loop:
    """A loop of somebody's own: collect, store, learn, with parts of torch, TorchRL and the package."""

    def __init__(self, seed: int = 0, device: str = "cpu") -> None:
        torch.manual_seed(seed)
        self.env = CartPole(4, device=device)
        self.net = FusedMLP(4, 2, hidden_size=32, device=device)
        actor = EpsilonGreedy(self.net, spec=self.env.action_spec)
        self.collector = DeviceCollector(self.env, actor, frames_per_batch=16, mode="eager")
        self.adam = torch.optim.Adam(self.net.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.adam, 2)
        self.buffer = make_replay_buffer(48, batch_size=8, device=device)
        self.total = torch.zeros((), device=device)
        self.state = TrainState(
            network=self.net,
            optimizer=self.adam,
            schedule=self.schedule,
            replay=self.buffer,
            env=self.collector,
            counters={"iteration": 0, "total": self.total},
        )

    def run(self, iterations: int) -> list[float]:
        losses = []
        for _ in range(iterations):
            self.buffer.extend(self.collector.collect())
            sample = self.buffer.sample()
            noise = random.random() + float(np.random.rand())
            loss = (self.net(sample["observation"]) - sample["next", "reward"]).pow(2).mean() * noise
            self.adam.zero_grad()
            loss.backward()
            self.adam.step()
            self.schedule.step()
            self.total += loss.detach()
            self.state.counters["iteration"] += 1
            losses.append(float(loss.detach()))
        return losses


def test_a_loop_of_ones_own_goes_on_bitwise(tmp_path, device):
    loop = Loop(device=str(device))
    loop.run(4)
    path = loop.state.save(tmp_path / "checkpoint.pt")
    expected = loop.run(3)
    other = Loop(seed=5, device=str(device))
    other.run(1)
    total = other.total
    other.state.load(path)
    assert other.state.counters["iteration"] == 4
    assert other.run(3) == expected
    assert other.total is total  # in place
    assert torch.equal(total, loop.total)


def test_torchrls_own_buffer_is_a_part_too(tmp_path):
    buffers = [ReplayBuffer(storage=LazyTensorStorage(8), batch_size=4) for _ in range(2)]
    buffers[0].extend(torch.arange(6.0))
    path = TrainState(replay=buffers[0]).save(tmp_path / "checkpoint.pt")
    buffers[1].extend(torch.zeros(2))
    TrainState(replay=buffers[1]).load(path)
    assert torch.equal(buffers[1][:], torch.arange(6.0))


def test_the_file_says_what_made_it(tmp_path):
    state = load_checkpoint(TrainState(net=torch.nn.Linear(1, 1), made_by="mine").save(tmp_path / "checkpoint.pt"))
    assert (state["format"], state["version"]) == ("torchrl_perf.TrainState", 1)
    assert state["made_by"]["algorithm"] == "mine"
    assert set(state["made_by"]) == {"algorithm", "torchrl_perf", "torch"}


def test_a_copy_is_a_copy_and_notes_come_back(tmp_path):
    net = torch.nn.Linear(2, 2)
    state = TrainState(net=net, counters={"steps": 3})
    state.notes["best"] = {"value": 1.5}
    copies = [state.state_dict(), state.snapshot()]
    with torch.no_grad():
        net.weight.zero_()
    state.counters["steps"], state.notes = 9, {}
    for copy in copies:
        state.load_state_dict(copy)
        assert float(net.weight.detach().abs().sum()) > 0
        assert (state.counters, state.notes) == ({"steps": 3}, {"best": {"value": 1.5}})


def test_parts_can_be_left_as_they_are():
    net, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    state = TrainState(net=net, other=other, counters={"steps": 1})
    saved = state.state_dict(skip=["other", "random", "counters"])
    assert set(saved["parts"]) == {"net"}
    with torch.no_grad():
        net.weight.fill_(7)
        other.weight.fill_(8)
    state.counters["steps"] = 5
    before = torch.get_rng_state()
    state.load_state_dict(saved, skip=["other", "random", "counters"])
    assert net.weight.item() != 7
    assert other.weight.item() == 8
    assert state.counters["steps"] == 5
    assert torch.equal(torch.get_rng_state(), before)


class Refusing:
    """A part whose state is never right."""

    def state_dict(self):
        return {"value": 1}

    def load_state_dict(self, state_dict):
        if state_dict["value"] != 1:
            raise ValueError("expected 1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: s["parts"].pop("net"),
            r"expected parts \['net', 'odd'\] .*received \['odd'\].* Nothing was",
        ),
        (lambda s: s["parts"].update(more={}), r"received \['more', 'net', 'odd'\]"),
        (lambda s: s["counters"].clear(), r"counters \['steps'\], received .* and \[\]"),
        (lambda s: s["parts"].update(net=torch.nn.Linear(2, 4).state_dict()), r"in net bias: \[3\], received \[4\]"),
        (lambda s: s["parts"]["odd"].update(value=2), "expected 1"),
        (lambda s: s.update(version=0), "expected format version 1, received 0"),
        (lambda s: s.update(format="x"), "expected one that torchrl_perf has saved, received"),
        (lambda s: s["made_by"].update(algorithm="sac"), "expected one of mine, received one of sac"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(change, message):
    net = torch.nn.Linear(2, 3)
    state = TrainState(net=net, odd=Refusing(), counters={"steps": 1}, made_by="mine")
    saved = TrainState(net=torch.nn.Linear(2, 3), odd=Refusing(), counters={"steps": 2}, made_by="mine").state_dict()
    change(saved)
    before, random_before = net.weight.clone(), torch.get_rng_state()
    with pytest.raises(ValueError, match=message):
        state.load_state_dict(saved)
    assert torch.equal(net.weight, before)
    assert state.counters == {"steps": 1}
    assert torch.equal(torch.get_rng_state(), random_before)


def test_a_plain_set_of_weights_is_told_apart(tmp_path):
    torch.save(torch.nn.Linear(1, 1).state_dict(), tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match=r"received \['bias', 'weight'\]. Remedy: .* of the network"):
        TrainState(net=torch.nn.Linear(1, 1)).load(tmp_path / "weights.pt")


def test_a_part_without_state_is_refused_at_construction():
    with pytest.raises(ValueError, match=r"expected steps to have state_dict .* received int. Remedy: .*counters"):
        TrainState(steps=3)


def test_attributes_of_an_object():
    class Owner:
        def __init__(self):
            self.steps, self._mean = 3, torch.ones(())

    owner = Owner()
    counters = Attributes(owner, ("steps", "_mean"))
    assert dict(counters) == {"steps": 3, "mean": owner._mean}
    saved = TrainState(counters=counters).state_dict()
    mean = owner._mean.fill_(5)
    owner.steps = 9
    TrainState(counters=counters).load_state_dict(saved)
    assert (owner.steps, float(mean)) == (3, 1.0)
    assert owner._mean is mean
    del counters["mean"]
    assert len(counters) == 1


def test_other_networks_are_told():
    parts = {"policy": torch.nn.Linear(2, 3), "optimizer": object()}
    check_modules(parts, {"policy": torch.nn.Linear(2, 3).state_dict(), "optimizer": {}})
    with pytest.raises(ValueError, match=r"in policy bias: \[3\], received \[4\], weight: .* Nothing was changed"):
        check_modules(parts, {"policy": torch.nn.Linear(2, 4).state_dict()})


def test_random_state_of_all_four(device, tmp_path):
    def draw():
        return (
            torch.rand(3).tolist(),
            torch.rand(3, device=device).tolist(),
            random.gauss(0, 1),
            np.random.randn(3).tolist(),
        )

    draw()
    torch.save(random_state(device), tmp_path / "random.pt")
    first = draw()
    load_random_state(torch.load(tmp_path / "random.pt", weights_only=True), device)
    assert draw() == first


def test_names_and_counters_that_do_not_fit():
    net = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"parts of other names than parts, counters, random, notes.*\['random'\]"):
        TrainState(random=net)
    saved = TrainState(net=net, counters={"total": torch.zeros(())}).state_dict()
    other = torch.nn.Linear(1, 1)
    before = other.weight.detach().clone()
    state = TrainState(net=other, counters={"total": torch.ones(3)})
    with pytest.raises(ValueError, match=r"in counters total: \[3\], received \[\]. Nothing was changed"):
        state.load_state_dict(saved)
    assert torch.equal(other.weight, before)


def test_what_a_part_refuses_is_told_by_its_name():
    net = torch.nn.Linear(1, 1)
    adam = torch.optim.Adam(net.parameters())
    saved = TrainState(net=net, optimizer=adam).state_dict()
    saved["parts"]["optimizer"] = {"rate": 1.0}
    with pytest.raises(ValueError, match=r"in optimizer what a Adam can load, .*param_groups.* Nothing was changed"):
        TrainState(net=net, optimizer=adam).load_state_dict(saved)
