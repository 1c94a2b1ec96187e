"""What a recorded call depends on beside its inputs is found when it is replaced; what cannot be found is refused."""

import dataclasses
import functools
import gc
import weakref

import pytest
import torch
from recording_device import recording_device
from tensordict import TensorDict
from torch import nn

from torchrl_perf.objectives import DeviceDQNLoss
from torchrl_perf.runtime.self_capture import SelfCaptureWarning, is_recorded, self_capturing
from torchrl_perf.runtime.self_capture.watch import Watch

device = recording_device


class Scaled(nn.Module):
    """Calls a function of its input and writes the result."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    @self_capturing
    def forward(self, td):
        return TensorDict({"y": self.function(td["x"])}, td.batch_size)


def called(module, device):
    td = TensorDict({"x": torch.ones(3, device=device)}, [3])
    return float(module(td)["y"][0].detach())


def recorded(module, device):
    for _ in range(4):
        called(module, device)
    assert is_recorded(module)
    return called(module, device)


FACTOR = torch.tensor(2.0)


@dataclasses.dataclass
class Settings:
    factor: torch.Tensor


class OfClass(nn.Module):
    factor = None

    def forward(self, x):
        return x * OfClass.factor


class Holder(nn.Module):
    """A network that keeps a tensor in some place, and finds it there."""

    def __init__(self, kept, find):
        super().__init__()
        self.kept, self.find = kept, find

    def forward(self, x):
        return x * self.find(self.kept)


def in_attribute(value):
    net = Holder(value, lambda kept: kept)
    return net, lambda new: setattr(net, "kept", new)


def in_list(value):
    net = Holder([0, value], lambda kept: kept[1])
    return net, lambda new: net.kept.__setitem__(1, new)


def in_tuple_of_dicts(value):
    net = Holder(({"factor": value},), lambda kept: kept[0]["factor"])
    return net, lambda new: net.kept[0].update(factor=new)


def in_dataclass(value):
    net = Holder(Settings(value), lambda kept: kept.factor)
    return net, lambda new: setattr(net.kept, "factor", new)


def in_dataclass_that_is_replaced(value):
    net = Holder(Settings(value), lambda kept: kept.factor)
    return net, lambda new: setattr(net, "kept", Settings(new))


def in_tensordict(value):
    net = Holder(TensorDict({"deep": {"factor": value}}, []), lambda kept: kept["deep", "factor"])
    return net, lambda new: net.kept.set(("deep", "factor"), new)


def in_closure(value):
    factor = value

    def replace(new):
        nonlocal factor
        factor = new

    return (lambda x: x * factor), replace


def in_partial(value):
    keywords = {"other": value}
    net = Holder(None, lambda _: 1.0)
    net.multiply = functools.partial(torch.mul, **keywords)
    net.find = lambda _: net.multiply(torch.ones_like(net.multiply.keywords["other"]))
    return net, lambda new: setattr(net, "multiply", functools.partial(torch.mul, other=new))


def in_global(value):
    globals()["FACTOR"] = value
    return (lambda x: x * FACTOR), lambda new: globals().update(FACTOR=new)


def in_class(value):
    OfClass.factor = value
    return OfClass(), lambda new: setattr(OfClass, "factor", new)


def behind_a_function(value):
    inner, replace = in_closure(value)
    return (lambda x: inner(x + 0)), replace


def in_child(value):
    net, replace = in_attribute(value)
    return nn.Sequential(nn.Identity(), net), replace


def in_child_that_is_replaced(value):
    net = nn.Sequential(nn.Identity(), in_attribute(value)[0])
    return net, lambda new: net.__setitem__(1, in_attribute(new)[0])


PLACES = [
    in_attribute,
    in_list,
    in_tuple_of_dicts,
    in_dataclass,
    in_dataclass_that_is_replaced,
    in_tensordict,
    in_closure,
    in_partial,
    in_global,
    in_class,
    behind_a_function,
    in_child,
    in_child_that_is_replaced,
]


@pytest.mark.parametrize("place", PLACES, ids=[place.__name__ for place in PLACES])
def test_a_closed_over_tensor_that_was_replaced(place, device):
    function, replace = place(torch.tensor(2.0, device=device))
    module = Scaled(function)
    assert recorded(module, device) == 2.0
    for number in (3.0, 4.0):
        replace(torch.tensor(number, device=device))
        assert called(module, device) == number
        assert recorded(module, device) == number


@pytest.mark.parametrize("place", PLACES, ids=[place.__name__ for place in PLACES])
def test_a_closed_over_tensor_that_was_written(place, device):
    value = torch.tensor(2.0, device=device)
    module = Scaled(place(value)[0])
    assert recorded(module, device) == 2.0
    value.fill_(3.0)
    assert called(module, device) == 3.0
    assert is_recorded(module)


@pytest.mark.gpu
@pytest.mark.parametrize("registered", [False, True])
def test_a_number_on_the_host(registered):
    """A graph has it as a number, so a write counts as a replacement."""
    torch.zeros(1, device="cuda")
    net = Holder(None, lambda kept: kept)
    if registered:
        del net.kept
        net.register_buffer("kept", torch.tensor(2.0))
    else:
        net.kept = torch.tensor(2.0)
    module = Scaled(net)
    assert recorded(module, "cuda") == 2.0
    net.kept.fill_(3.0)
    assert called(module, "cuda") == 3.0
    assert recorded(module, "cuda") == 3.0


def test_one_that_is_replaced_at_each_call_is_named(device):
    net, replace = in_list(torch.tensor(2.0, device=device))
    module = Scaled(net)
    with pytest.warns(SelfCaptureWarning, match=r"Scaled runs eagerly.*Holder\.kept\[1\] was replaced 9 times.*copy_"):
        for call in range(40):
            replace(torch.tensor(float(call), device=device))
            assert called(module, device) == call
    assert not is_recorded(module)


class Hidden:
    """Keeps a tensor where nothing looks."""

    __slots__ = ("value",)

    def __call__(self, x):
        return x * self.value


def test_one_that_nothing_leads_to_is_refused_with_the_line(device):
    function = Hidden()
    function.value = torch.tensor(2.0, device=device)
    module = Scaled(function)
    with pytest.warns(
        SelfCaptureWarning, match=r"neither it nor its argument holds, at .*test_self_capture_watch.py:\d"
    ):
        for call in range(6):
            function.value = torch.tensor(float(call), device=device)
            assert called(module, device) == call
    assert not is_recorded(module)


def test_a_parameter_outside_of_the_module_is_refused(device):
    weights = [nn.Parameter(torch.tensor(2.0, device=device))]
    module = Scaled(lambda x: x * weights[0])
    with pytest.warns(SelfCaptureWarning, match=r"no parameter of it, but learns.*Remedy: register_buffer"):
        for _ in range(6):
            called(module, device)
    assert not is_recorded(module)


@pytest.mark.parametrize("deep", [False, True])
def test_numbers_words_and_functions_of_all_parts(deep, device):
    class Power(nn.Module):
        def __init__(self):
            super().__init__()
            self.power, self.shape, self.finish = 1, (1,), torch.abs

        def forward(self, x):
            return self.finish((x * 2) ** self.power) * self.shape[0]

    power = Power()
    module = Scaled(nn.Sequential(nn.Sequential(nn.Identity(), power)) if deep else power)
    assert recorded(module, device) == 2.0
    power.power = 3
    assert called(module, device) == recorded(module, device) == 8.0
    power.shape = (2,)
    assert called(module, device) == recorded(module, device) == 16.0
    power.finish = torch.neg
    assert called(module, device) == recorded(module, device) == -16.0
    power.power, power.finish, power.shape = 1, torch.abs, (1,)
    assert called(module, device) == 2.0


def test_a_recorded_module_is_freed_with_its_last_name(device):
    module = Scaled(in_child(torch.tensor(2.0, device=device))[0])
    assert recorded(module, device) == 2.0
    last = weakref.ref(module)
    del module
    gc.collect()
    assert last() is None


RATE = 1.0


class Rated(nn.Module):
    def forward(self, x):
        return x * RATE


@pytest.mark.parametrize("place", ["closure", "global", "forward"])
def test_numbers_that_functions_close_over_or_name(place, device):
    rate = 1.0
    function = {"closure": lambda x: x * rate, "global": lambda x: x * RATE, "forward": Rated()}[place]
    module = Scaled(function)
    for number in (1.0, 2.0, 3.0, 1.0):
        rate = number
        globals()["RATE"] = number
        assert called(module, device) == number
        assert recorded(module, device) == number


def test_keys_that_are_set_anew(device):
    torch.manual_seed(0)
    loss = DeviceDQNLoss(nn.Linear(3, 4)).to(device)
    td = TensorDict({"observation": torch.randn(5, 3), "action": torch.zeros(5, dtype=torch.int64)}, [5])
    flags = {name: torch.zeros(5, 1, dtype=torch.bool) for name in ("done", "terminated")}
    following = {"observation": torch.randn(5, 3), "reward": torch.zeros(5, 1), "bonus": torch.full((5, 1), 100.0)}
    td["next"] = TensorDict(following | flags, [5])
    td = td.to(device)
    for _ in range(4):
        before = float(loss(td.copy())["loss"].detach())
    assert is_recorded(loss)
    loss.set_keys(reward="bonus")
    assert float(loss(td.copy())["loss"].detach()) > before + 10


def test_settings_that_change_at_each_call_run_eagerly(device):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return x * self.calls

    module = Scaled(Counting())
    with pytest.warns(SelfCaptureWarning, match="more than 8 shapes or settings"):
        for call in range(30):
            assert called(module, device) == call + 1


def test_weights_that_autocast_has_converted_before(device):
    """Its cache holds them for the network's next call, whoever makes it."""
    net = nn.Linear(3, 3).to(device)
    module = Scaled(net)
    for _ in range(5):
        with torch.no_grad(), torch.autocast(device, torch.bfloat16):
            one = net(torch.ones(3, device=device))
            other = module(TensorDict({"x": torch.ones(3, device=device)}, [3]))["y"]
        with torch.enable_grad(), torch.autocast(device, torch.bfloat16):
            net(torch.ones(3, device=device))
            called(module, device)
        torch.testing.assert_close(other, one, rtol=0, atol=0)
    assert is_recorded(module)


def test_the_modes_of_a_compiled_part():
    """What torch.compile returns has no flag of its own, in some versions of torch."""
    net = nn.Linear(3, 3)
    compiled = torch.compile(net, backend="eager")
    compiled.__dict__.pop("training", None)
    watch = Watch(nn.Sequential(compiled, nn.Dropout()))
    modes = watch.modes()
    net.eval()
    assert watch.modes() != modes
    net.train()
    assert watch.modes() == modes


@pytest.mark.gpu
def test_a_compiled_part():
    torch.zeros(1, device="cuda")
    net = nn.Linear(3, 3, bias=False).cuda()
    nn.init.eye_(net.weight)
    module = Scaled(torch.compile(net, backend="eager"))
    assert recorded(module, "cuda") == 1.0
    with torch.no_grad():
        net.weight.mul_(2.0)
    assert called(module, "cuda") == 2.0
