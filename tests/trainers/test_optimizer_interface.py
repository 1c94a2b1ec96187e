"""GuardedAdam as a torch.optim.Optimizer: groups, schedulers, states, hooks, closures, GradScaler, settings."""

import copy
import io
import math
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.optim import lr_scheduler
from torchrl.trainers.trainers import DefaultOptimizationStepper, MixedPrecisionOptimizationStepper

from torchrl_perf.runtime import Acceleration
from torchrl_perf.trainers import GuardedAdam


def make_net(dtype=torch.float32):
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)


def backward(net, scale=1.0):
    x = torch.linspace(-1, 1, 12).view(4, 3).to(next(net.parameters()).dtype)
    loss = net(x).square().mean() * scale
    loss.backward()
    return loss.detach()


def learn(net, optimizer, steps=5, between=lambda: None):
    for _ in range(steps):
        optimizer.zero_grad()
        backward(net)
        optimizer.step()
        between()
    return [param.detach().clone() for param in net.parameters()]


def assert_same(one, other, **tolerance):
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, **(tolerance or {"rtol": 1e-5, "atol": 1e-7}))


def pair(**options):
    """The same net twice: with ours and with torch's."""
    ours, theirs = make_net(), make_net()
    return ours, GuardedAdam(ours.parameters(), **options), theirs, torch.optim.Adam(theirs.parameters(), **options)


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 1.0, 0.1, 6),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 8, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.02, 12),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.02, 3, cycle_momentum=True),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 2), lr_scheduler.ExponentialLR(o, 0.8)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_of_torch(name):
    ours, optimizer, theirs, adam = pair(lr=1e-2, eps=1e-5)
    held = optimizer.learning_rate
    schedules = SCHEDULERS[name](optimizer), SCHEDULERS[name](adam)
    rates = []
    one = learn(ours, optimizer, 10, lambda: (schedules[0].step(), rates.append(float(optimizer.learning_rate))))
    expected = []
    other = learn(theirs, adam, 10, lambda: (schedules[1].step(), expected.append(float(adam.param_groups[0]["lr"]))))
    assert rates == pytest.approx(expected, rel=1e-5)
    assert_same(one, other, rtol=1e-4, atol=1e-6)
    assert optimizer.learning_rate is held is optimizer.param_groups[0]["lr"]


def test_reduce_on_plateau():
    net = make_net()
    optimizer = GuardedAdam(net.parameters(), lr=1e-2)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    learn(net, optimizer, 6, lambda: scheduler.step(1.0))
    assert float(optimizer.learning_rate) == pytest.approx(2.5e-3)


def test_a_rate_that_is_set_in_a_group_is_written_in_place():
    optimizer = GuardedAdam(make_net().parameters(), lr=1e-2)
    held = optimizer.learning_rate
    for write in (
        lambda group: group.__setitem__("lr", 0.5),
        lambda group: group.__setitem__("lr", torch.tensor(0.5)),
        lambda group: group.update(lr=0.5),
    ):
        held.fill_(0.1)
        write(optimizer.param_groups[0])
        assert optimizer.param_groups[0]["lr"] is held
        assert float(held) == 0.5
    with pytest.raises(ValueError, match="lr: expected a finite number of at least 0, received -1"):
        optimizer.param_groups[0]["lr"] = -1.0


def test_a_rate_given_as_a_tensor_is_kept():
    rate = torch.tensor(0.1)
    optimizer = GuardedAdam(make_net().parameters(), rate)
    assert optimizer.learning_rate.data_ptr() == rate.data_ptr()
    with pytest.raises(ValueError, match=r"lr: expected a number or a torch.float32 tensor.*received torch.int64"):
        GuardedAdam(make_net().parameters(), torch.tensor(1))


def test_groups_have_settings_of_their_own():
    def groups(net):
        return [
            {"params": net[0].parameters(), "lr": 3e-2, "betas": (0.8, 0.9)},
            {"params": net[2].parameters(), "weight_decay": 0.1, "eps": 1e-3},
        ]

    ours, theirs = make_net(), make_net()
    optimizer = GuardedAdam(groups(ours), lr=1e-2, eps=1e-5)
    one = learn(ours, optimizer)
    assert_same(one, learn(theirs, torch.optim.Adam(groups(theirs), lr=1e-2, eps=1e-5)))
    assert [float(rate) for rate in optimizer.learning_rates] == pytest.approx([3e-2, 1e-2])
    assert len(optimizer.grad_norms) == len(optimizer.params) == 4
    optimizer.param_groups[1]["lr"] = 0.25
    assert [float(rate) for rate in optimizer.learning_rates] == pytest.approx([3e-2, 0.25])


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_equals_adamw(decay):
    ours, theirs = make_net(), make_net()
    optimizer = GuardedAdam(ours.parameters(), 1e-2, weight_decay=decay, decoupled_weight_decay=True, eps=1e-8)
    assert_same(learn(ours, optimizer), learn(theirs, torch.optim.AdamW(theirs.parameters(), 1e-2, weight_decay=decay)))


@pytest.mark.parametrize("when", [0, 3])
def test_a_group_added_later(when):
    nets = make_net(), make_net()
    optimizers = (
        GuardedAdam(nets[0][0].parameters(), lr=1e-2, eps=1e-5),
        torch.optim.Adam(nets[1][0].parameters(), lr=1e-2, eps=1e-5),
    )
    results = []
    for net, optimizer in zip(nets, optimizers, strict=True):
        learn(net, optimizer, when)
        optimizer.add_param_group({"params": list(net[2].parameters()), "lr": 5e-2})
        results.append(learn(net, optimizer))
    assert_same(*results)
    assert len(optimizers[0].grad_norms) == 4
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizers[0].add_param_group({"params": [nets[0][0].weight]})


@pytest.mark.parametrize("kind", ["fused", "for-loop"])
def test_frozen_parameters_and_those_without_a_gradient(kind):
    net = make_net()
    net[0].weight.requires_grad_(False)
    optimizer = GuardedAdam(net.parameters(), lr=1e-2, acceleration=Acceleration(optimizer=kind))
    optimizer.step()  # no gradient at all
    assert float(optimizer.grad_norm()) == 0.0
    before = net[0].weight.detach().clone()
    learn(net, optimizer)
    assert torch.equal(net[0].weight, before)
    assert not any(value.any() for value in optimizer.state[net[0].weight].values())
    assert optimizer.grad_norms[0] == 0
    assert (optimizer.grad_norms[1:] > 0).all()


class TestState:
    def test_torch_reads_ours_and_we_read_torchs(self):
        ours, optimizer, theirs, adam = pair(lr=1e-2, eps=1e-5)
        learn(ours, optimizer)
        learn(theirs, adam)
        swapped = GuardedAdam(theirs.parameters(), lr=1.0, eps=1e-5)
        swapped.load_state_dict(adam.state_dict())
        back = torch.optim.Adam(ours.parameters(), lr=1.0, eps=1e-5)
        back.load_state_dict(optimizer.state_dict())
        assert_same(learn(theirs, swapped), learn(ours, back))
        assert float(swapped.learning_rate) == pytest.approx(1e-2)

    def test_it_is_loaded_in_place_and_survives_a_file(self):
        net = make_net()
        optimizer = GuardedAdam(net.parameters(), lr=1e-2)
        learn(net, optimizer)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        expected = learn(net, optimizer)
        file.seek(0)
        other_net = make_net()
        other = GuardedAdam(other_net.parameters(), lr=0.5)
        learn(other_net, other, 2)
        tensors = [*other.learning_rates, *(v for p in other.params for v in other.state[p].values())]
        other.load_state_dict(torch.load(file, weights_only=True))
        again = [*other.learning_rates, *(v for p in other.params for v in other.state[p].values())]
        assert all(one is two for one, two in zip(tensors, again, strict=True))
        reference_net = make_net()
        learn(reference_net, GuardedAdam(reference_net.parameters(), lr=1e-2))
        other_net.load_state_dict(reference_net.state_dict())
        assert all(torch.equal(a, b) for a, b in zip(learn(other_net, other), expected, strict=True))

    def test_moments_of_parameters_that_the_state_does_not_know_are_zero(self):
        net = make_net()
        optimizer = GuardedAdam(net.parameters(), lr=1e-2)
        backward(net)
        net[0].weight.grad = None
        optimizer.step()
        state = copy.deepcopy(optimizer.state_dict())
        learn(net, optimizer, 2)
        optimizer.load_state_dict(state)
        assert all(not optimizer.state[net[0].weight][name].any() for name in ("step", "exp_avg", "exp_avg_sq"))
        assert torch.equal(optimizer.state[net[2].weight]["exp_avg"], state["state"][2]["exp_avg"])

    def test_what_does_not_fit_is_refused_and_changes_nothing(self):
        net = make_net()
        optimizer = GuardedAdam(net.parameters(), lr=1e-2)
        learn(net, optimizer, 2)
        before = copy.deepcopy(optimizer.state_dict())
        small = nn.Linear(3, 5)
        other = GuardedAdam(small.parameters(), lr=0.3)
        with pytest.raises(ValueError, match=r"state_dict: expected param_groups of \[4\] parameters, received \[2\]"):
            optimizer.load_state_dict(other.state_dict())
        wrong = copy.deepcopy(before)
        wrong["state"][1]["exp_avg"] = torch.zeros(7)
        wrong["param_groups"][0]["lr"] = torch.tensor(9.0)
        with pytest.raises(ValueError, match=r"state_dict: expected step, exp_avg, exp_avg_sq of shapes .*received"):
            optimizer.load_state_dict(wrong)
        amsgrad = copy.deepcopy(before)
        amsgrad["param_groups"][0]["amsgrad"] = True
        with pytest.raises(ValueError, match=r"state_dict: expected none of amsgrad.*Remedy: torch.optim.Adam"):
            optimizer.load_state_dict(amsgrad)
        after = optimizer.state_dict()
        assert torch.equal(after["param_groups"][0]["lr"], before["param_groups"][0]["lr"])
        for number, state in before["state"].items():
            assert all(torch.equal(after["state"][number][name], value) for name, value in state.items())

    def test_hooks_of_the_state(self):
        net = make_net()
        optimizer = GuardedAdam(net.parameters(), lr=1e-2)
        learn(net, optimizer, 2)
        state, seen = optimizer.state_dict(), []

        def halve(_, state_dict):
            group = {**state_dict["param_groups"][0], "lr": 5e-3}
            return {**state_dict, "param_groups": [group]}

        optimizer.register_load_state_dict_pre_hook(halve)
        optimizer.register_load_state_dict_post_hook(lambda o: seen.append(float(o.learning_rate)))
        optimizer.load_state_dict(state)
        assert seen == pytest.approx([5e-3])

    def test_copies_are_whole(self):
        net = make_net()
        optimizer = GuardedAdam(net.parameters(), lr=1e-2, max_grad_norm=0.3)
        learn(net, optimizer, 2)
        twin_net, twin = copy.deepcopy((net, optimizer))
        assert twin.params[0] is twin_net[0].weight
        assert twin.max_grad_norm == 0.3
        assert twin.learning_rate is not optimizer.learning_rate
        assert all(torch.equal(a, b) for a, b in zip(learn(net, optimizer), learn(twin_net, twin), strict=True))

    def test_scheduler_and_optimizer_resume_together(self):
        def make():
            net = make_net()
            optimizer = GuardedAdam(net.parameters(), lr=1e-2)
            return net, optimizer, lr_scheduler.CosineAnnealingLR(optimizer, 10)

        net, optimizer, scheduler = make()
        learn(net, optimizer, 4, scheduler.step)
        saved = copy.deepcopy((net.state_dict(), optimizer.state_dict(), scheduler.state_dict()))
        other_net, other, other_scheduler = make()
        for part, state in zip((other_net, other, other_scheduler), saved, strict=True):
            part.load_state_dict(state)
        one = learn(net, optimizer, 4, scheduler.step)
        two = learn(other_net, other, 4, other_scheduler.step)
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


class TestStep:
    @pytest.mark.parametrize("named", [True, False])
    def test_closure(self, named):
        ours, optimizer, theirs, adam = pair(lr=1e-2, eps=1e-5)

        def closure(net, of):
            def inner():
                of.zero_grad()
                return backward(net)

            return inner

        for _ in range(3):
            mine = closure(ours, optimizer)
            loss = optimizer.step(closure=mine) if named else optimizer.step(mine)
            assert float(loss) == pytest.approx(float(adam.step(closure(theirs, adam))), rel=1e-5)
        assert_same([*ours.parameters()], [*theirs.parameters()])
        assert optimizer.step() is None

    def test_hooks(self):
        net = make_net()
        optimizer = GuardedAdam(net.parameters(), lr=1e-2)
        calls = []
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        learn(net, optimizer, 2)
        assert calls == ["before", "after"] * 2

    @pytest.mark.parametrize("to_none", [True, False])
    def test_zero_grad(self, to_none):
        net = make_net()
        optimizer = GuardedAdam(net.parameters(), lr=1e-2)
        backward(net)
        optimizer.zero_grad(set_to_none=to_none)
        assert all(p.grad is None if to_none else not p.grad.any() for p in net.parameters())

    def test_one_argument_alone_is_used(self):
        nets = [make_net() for _ in range(3)]
        for net in nets:
            backward(net)
        plain, halved, kept = (GuardedAdam(net.parameters(), lr=1e-2, max_grad_norm=1e9, eps=1.0) for net in nets)
        before = [param.detach().clone() for param in nets[2].parameters()]
        plain.step()
        halved.step(grad_scale=torch.tensor(2.0))
        kept.step(skip=torch.ones((), dtype=torch.bool))
        assert all(torch.equal(a, b) for a, b in zip(nets[2].parameters(), before, strict=True))
        assert not torch.allclose(nets[0][0].weight, nets[1][0].weight, rtol=0, atol=1e-5)
        nets[1][0].weight.grad[0, 0] = torch.nan
        before = [param.detach().clone() for param in nets[1].parameters()]
        halved.step(grad_scale=torch.tensor(2.0))
        assert all(torch.equal(a, b) for a, b in zip(nets[1].parameters(), before, strict=True))

    @pytest.mark.parametrize("unscaled", [True, False])
    def test_grad_scaler(self, unscaled):
        ours, theirs = make_net(), make_net()
        optimizer = GuardedAdam(ours.parameters(), lr=1e-2, max_grad_norm=0.1)
        plain = GuardedAdam(theirs.parameters(), lr=1e-2, max_grad_norm=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=10**6)
        for step in range(5):
            optimizer.zero_grad()
            scaler.scale(backward_loss(ours)).backward()
            if step == 2:
                ours[0].weight.grad[0, 0] = torch.inf
            if unscaled:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            if step != 2:
                learn(theirs, plain, 1)
        assert_same([*ours.parameters()], [*theirs.parameters()], rtol=1e-4, atol=1e-6)
        assert scaler.get_scale() == 2.0**11

    @pytest.mark.parametrize("half", [None, torch.bfloat16, torch.float16])
    def test_the_steppers_of_torchrls_trainers(self, half):
        nets = make_net(), make_net()
        optimizers = (
            GuardedAdam(nets[0].parameters(), lr=1e-2, eps=1e-5),
            torch.optim.Adam(nets[1].parameters(), lr=1e-2, eps=1e-5),
        )
        for net, optimizer in zip(nets, optimizers, strict=True):
            trainer = SimpleNamespace(
                optimizer=optimizer,
                clip_grad_norm=True,
                clip_norm=0.1,
                compute_loss=lambda _, net=net: TensorDict({"loss_x": backward_loss(net).float()}),
            )
            stepper = DefaultOptimizationStepper()
            if half is not None:
                stepper = MixedPrecisionOptimizationStepper(
                    optimizer, mixed_precision=True, autocast_dtype=half, gradient_accumulation_steps=2
                )
            for _ in range(6):
                stepper.step(trainer, TensorDict({}))
        assert_same([*nets[0].parameters()], [*nets[1].parameters()], rtol=1e-3, atol=1e-5)
        assert not torch.equal(nets[0][0].weight, make_net()[0].weight)

    def test_two_loss_scales_are_refused(self):
        net = make_net()
        optimizer = GuardedAdam(net.parameters(), lr=1e-2, acceleration=Acceleration("fp16"))
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(backward_loss(net)).backward()
        with pytest.raises(RuntimeError, match=r"step: expected one loss scale.*Remedy"):
            scaler.step(optimizer)

    def test_sparse_gradients_are_refused(self):
        table = nn.Embedding(4, 2, sparse=True)
        optimizer = GuardedAdam(table.parameters(), lr=1e-2)
        table(torch.tensor([1])).sum().backward()
        with pytest.raises(ValueError, match=r"grad: expected a dense one.*Remedy"):
            optimizer.step()


def backward_loss(net):
    return net(torch.linspace(-1, 1, 12).view(4, 3)).square().mean()


BAD = [
    *(("lr", value) for value in (-1e-3, math.nan, math.inf, "1e-3", True, torch.tensor(-1.0))),
    *(("betas", value) for value in ((1.0, 0.9), (0.9, 1.0), (-0.1, 0.9), (0.9, math.nan), (0.9,), 0.9, None)),
    *(("eps", value) for value in (-1e-8, math.nan, None)),
    *(("weight_decay", value) for value in (-0.1, math.nan, math.inf)),
    *(("max_grad_norm", value) for value in (0.0, -1.0, math.nan)),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_bad_settings_are_refused_at_construction(name, value):
    params = list(make_net().parameters())
    if (name, value) != ("lr", None):
        pattern = rf"{name.removesuffix('s')}.*: expected .*received .*Remedy: "
        with pytest.raises(ValueError, match=pattern):
            GuardedAdam(params, **{name: value})
        if name != "max_grad_norm":
            optimizer = GuardedAdam(params[:2])
            with pytest.raises(ValueError, match=pattern):
                optimizer.add_param_group({"params": params[2:], name: value})
            assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("given", [None, math.inf])
def test_a_norm_that_is_set_later_counts(given):
    nets = make_net(), make_net()
    nets[1].load_state_dict(nets[0].state_dict())
    optimizer, plain = GuardedAdam(nets[0].parameters(), max_grad_norm=1e-3), GuardedAdam(nets[1].parameters())
    optimizer.max_grad_norm = given
    assert optimizer.max_grad_norm == copy.deepcopy(optimizer).max_grad_norm == math.inf
    for net, adam in zip(nets, (optimizer, plain), strict=True):
        backward_loss(net).backward()
        adam.step()
        grads = torch.autograd.grad(backward_loss(net), adam.params)
        adam.apply_gradients(grads, torch.zeros(()))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*(net.parameters() for net in nets), strict=True))
    for bad in (0.0, -1.0, math.nan, "0.5", True):
        with pytest.raises(ValueError, match=r"max_grad_norm: expected .* received .* Remedy"):
            optimizer.max_grad_norm = bad


@pytest.mark.parametrize("name", ["amsgrad", "maximize", "differentiable"])
def test_what_is_not_there_is_refused_in_groups(name):
    with pytest.raises(ValueError, match=f"param_group: expected none of .*received {name}. Remedy: torch.optim.Adam"):
        GuardedAdam([{"params": make_net().parameters(), name: True}])


@pytest.mark.parametrize(
    ("name", "value"),
    [("betas", (0.9, 1.5)), ("betas", 0.9), ("eps", -1.0), ("weight_decay", math.nan), ("amsgrad", True)],
)
def test_a_bad_setting_of_a_group_is_refused_where_it_is_set(name, value):
    optimizer = GuardedAdam(make_net().parameters())
    kept = optimizer.param_groups[0].get(name)
    with pytest.raises(ValueError, match=r"expected .* received .* Remedy"):
        optimizer.param_groups[0][name] = value
    assert optimizer.param_groups[0].get(name) == kept


@pytest.mark.parametrize("name", ["max_grad_norm", "acceleration"])
def test_what_all_groups_have_together_is_no_setting_of_one(name):
    with pytest.raises(ValueError, match=f"for all groups together, received {name} for one. Remedy"):
        GuardedAdam([{"params": list(make_net().parameters()), name: None}])


def test_other_faults_at_construction():
    params = list(make_net().parameters())
    with pytest.raises(ValueError, match="lr: expected it or learning_rate, received both"):
        GuardedAdam(params, 1e-3, learning_rate=1e-3)
    with pytest.raises(ValueError, match="empty parameter list"):
        GuardedAdam([])
    with pytest.raises(ValueError, match=r"params: expected all on one device.*meta.*Remedy"):
        GuardedAdam([*params, nn.Parameter(torch.zeros(2, device="meta"))])


def test_named_parameters_and_the_printed_form():
    optimizer = GuardedAdam(make_net().named_parameters(), lr=1e-2)
    assert optimizer.param_groups[0]["param_names"][0] == "0.weight"
    assert "GuardedAdam" in repr(optimizer)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.adam is optimizer
