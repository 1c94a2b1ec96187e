"""What ``runtime/upstream`` reads of PyTorch: the installed version has it, and it does what is said there."""

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torchrl.objectives import DQNLoss, SoftUpdate

from torchrl_perf.runtime.upstream import (
    inductor,
    modules,
    optimizers,
    target_updaters,
    tensors,
)


class TestTensors:
    def test_pieces_are_tensors_of_their_own(self, device):
        memory = torch.arange(12.0, device=device)
        matrix, number = tensors.pieces_of(memory.view(torch.uint8), torch.float32, [((2, 3), (3, 1), 0), ((), (), 8)])
        assert matrix.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
        assert number.item() == 8.0
        assert not matrix._is_view()
        before = number._version
        matrix.add_(1.0)
        assert number._version == before
        assert memory[0] == 1.0
        total = number + torch.ones((), device=device, requires_grad=True)
        total += 1.0
        total.backward()

    def test_apply_plain(self):
        class Double(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return 2 * x

            @staticmethod
            def backward(ctx, grad):
                return 2 * grad

        leaf = torch.ones(3, requires_grad=True)
        tensors.apply_plain(Double, leaf).sum().backward()
        assert leaf.grad.tolist() == [2.0, 2.0, 2.0]

    @pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
    def test_hooks_of_gradients(self, register):
        param = torch.nn.Parameter(torch.zeros(2))
        assert not tensors.has_gradient_hooks(param)
        handle = getattr(param, register)(lambda _: None)
        assert tensors.has_gradient_hooks(param)
        handle.remove()
        assert not tensors.has_gradient_hooks(param)

    def test_what_waits_for_a_gradient_is_called_by_hand(self):
        param, seen = torch.nn.Parameter(torch.zeros(2)), []
        tensors.call_gradient_hooks(param)
        param.register_post_accumulate_grad_hook(seen.append)
        tensors.call_gradient_hooks(param)
        assert len(seen) == 1 and seen[0] is param

    def test_transforms(self, fresh_dynamo):
        seen, carried = [], []

        def look(x):
            seen.append(tensors.is_transformed())
            carried.append(tensors.carries_tangents())
            return x

        one = torch.ones(2)
        look(one)
        torch.func.vmap(look)(one)
        torch.func.jvp(look, (one,), (one,))
        with torch.autograd.forward_ad.dual_level():
            look(one)
        look(one)
        assert seen == [False, True, True, True, False]
        assert carried == [False, False, True, True, False]
        traced = torch.compile(lambda x: x + 1 if tensors.is_transformed() else x - 1, fullgraph=True, backend="eager")
        assert torch.equal(traced(one), torch.zeros(2))

    def test_modes(self):
        seen = []
        assert not tensors.under_a_mode()
        with TorchDispatchMode():
            seen.append(tensors.under_a_mode())
        torch.vmap(lambda row: seen.append(tensors.under_a_mode()) or row)(torch.zeros(2))
        assert seen == [True, True]
        assert not tensors.under_a_mode()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    def test_a_graph_that_is_cut_no_longer_reaches_its_leaf(self, dtype):
        def node(leaf):
            return leaf.view_as(leaf).grad_fn.next_functions[0][0]

        net = nn.Linear(2, 3).to(dtype)
        calls = []
        net.weight.register_hook(calls.append)
        net.weight.register_post_accumulate_grad_hook(lambda param: calls.append(param.grad))
        before, place = net.weight.detach().clone(), net.weight.data_ptr()
        frozen = torch.zeros(2)
        held = net.weight.clone()
        node(net.weight).metadata["old"] = True
        assert "old" in node(net.weight).metadata, "it lives as long as the copy"
        tensors.cut_graphs([*net.parameters(), frozen, held])
        assert "old" not in node(net.weight).metadata
        assert net.weight.data_ptr() == place
        assert net.weight.dtype == dtype
        assert torch.equal(net.weight, before)
        net(torch.ones(1, 2, dtype=dtype)).sum().backward()
        assert torch.equal(net.weight.grad, torch.ones(3, 2, dtype=dtype))
        assert len(calls) == 2, "hooks are those of the leaf"
        held.sum().backward()
        assert torch.equal(net.weight.grad, torch.full((3, 2), 2.0, dtype=dtype)), "the graph that is held ends in it"

    @pytest.mark.gpu
    def test_the_current_stream(self):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            assert tensors.current_stream(torch.device("cuda", 0)) == stream.cuda_stream


def test_hooks_around_a_step():
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    assert not optimizers.has_step_hooks(optimizer)
    calls = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append(0)),
        optimizer.register_step_pre_hook(lambda *_: calls.append(1)),
        optimizer.register_step_post_hook(lambda *_: calls.append(2)),
        register_optimizer_step_post_hook(lambda *_: calls.append(3)),
    ]
    assert optimizers.has_step_hooks(optimizer)
    optimizer.step()
    for hooks in optimizers.step_hooks(optimizer):
        for hook in hooks:
            hook(optimizer, (), {})
    assert calls == [0, 1, 2, 3] * 2, "in the order of torch"
    for handle in handles:
        handle.remove()
    assert not optimizers.has_step_hooks(optimizer)


def test_whether_a_transform_is_active():
    def mark(x):
        return x + (1.0 if tensors.is_transformed() else 0.0)

    zeros = torch.zeros(3)
    both = torch.compile(lambda x: (mark(x), torch.func.vmap(mark)(x)), fullgraph=True, backend="eager")(zeros)
    assert not tensors.is_transformed()
    assert [value.sum().item() for value in both] == [0.0, 3.0]
    assert torch.func.vmap(mark)(zeros).sum() == 3.0


def test_what_an_updater_moves():
    network = TensorDictModule(nn.Linear(2, 3), ["observation"], ["action_value"])
    network.module.bias.requires_grad_(False)
    loss = DQNLoss(network, action_space="categorical", delay_value=True)
    pairs = list(target_updaters.sources_and_targets(SoftUpdate(loss, tau=0.5)))
    assert len(pairs) == 1
    assert pairs[0][0] is network.module.weight
    assert pairs[0][1] is loss.target_value_network_params["module", "weight"]


def test_the_children_of_a_module():
    net = nn.Sequential(nn.Linear(1, 1))
    assert modules.child_dict(net)["0"] is net[0]
    net[0] = nn.Identity()
    assert modules.child_dict(net)["0"] is net[0]


class TestInductor:
    KERNEL = "triton_meta={'launch_pdl': True}\ndef triton_fill(out, XBLOCK : tl.constexpr):\n    xnumel = 64\n"

    def test_a_kernel_that_is_launched_early_waits_first(self):
        meta, head, *body = inductor.waiting("triton_fill", self.KERNEL).splitlines()
        assert "True" in meta and "triton_fill" in head and body == ["    tl.extra.cuda.gdc_wait()", "    xnumel = 64"]
        plain = self.KERNEL.replace("True", "False")
        assert inductor.waiting("triton_fill", plain) == plain
        assert inductor.waiting("triton_of_another_name", self.KERNEL) == plain  # nowhere to put it: not early

    def test_every_kernel_that_is_compiled_goes_through_it(self, monkeypatch):
        from torch._dynamo.callback import callback_handler
        from torch._inductor.async_compile import AsyncCompile

        seen = []
        monkeypatch.setattr(AsyncCompile, "triton", lambda self, name, source, device="cuda": seen.append(source))
        for _ in range(2):
            inductor.wait_first()
        assert callback_handler.start_callbacks.count(inductor.patch_loader) == 1
        inductor.patch_loader()
        torch.compile(lambda x: x + 2, backend="eager")(torch.ones(2))  # the start of the compiler calls it once more
        AsyncCompile().triton("triton_fill", self.KERNEL, device="cuda")
        assert seen == [inductor.waiting("triton_fill", self.KERNEL)]


def test_a_size_that_data_decide_is_not_known_to_be_large():
    from torch._dynamo import config

    def fn(x, mask):
        return x[mask] + (1 if tensors.at_least(x[mask].shape[0], 2) else 0)

    assert tensors.at_least(3, 2) and not tensors.at_least(1, 2)
    with config.patch(capture_dynamic_output_shape_ops=True):
        traced = torch.compile(fn, fullgraph=True, backend="eager")
        assert float(traced(torch.zeros(4), torch.ones(4) > 0)[0]) == 0
