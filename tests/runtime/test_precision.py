"""Acceleration: TF32 flags in both APIs and their restoration, autocast, modules, optimisers, loss scale."""

import copy
import itertools

import pytest
import torch
from torch import nn

from torchrl_perf.runtime import Acceleration
from torchrl_perf.runtime.precision import autocast, float32_products

MATMUL, CUDNN, ONEDNN = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.mkldnn
NODES = {
    "generic": torch.backends,
    "cuda": CUDNN,
    "matmul": MATMUL,
    "conv": CUDNN.conv,
    "rnn": CUDNN.rnn,
    "onednn matmul": ONEDNN.matmul,
}


def answer(read):
    try:
        return read()
    except RuntimeError:
        return "mixed"


def answers():
    newer = {name: node.fp32_precision for name, node in NODES.items()}
    older = {
        "allow_tf32": answer(lambda: MATMUL.allow_tf32),
        "cudnn.allow_tf32": answer(lambda: CUDNN.allow_tf32),
        "matmul precision": answer(torch.get_float32_matmul_precision),
    }
    return newer | older


def everything():
    """What the flags answer now, and after each parent was moved: inherited values show themselves by following."""
    found = [answers()]
    for parent in (torch.backends, CUDNN):
        own = parent.fp32_precision
        for value in ("ieee", "tf32"):
            parent.fp32_precision = value
            found.append(answers())
        parent.fp32_precision = own
    # the older settings are hidden where they contradict the newer ones: move those
    kept = MATMUL.fp32_precision, ONEDNN.matmul.fp32_precision
    MATMUL.fp32_precision = ONEDNN.matmul.fp32_precision = "ieee"
    found.append({"older": torch.get_float32_matmul_precision()})
    MATMUL.fp32_precision, ONEDNN.matmul.fp32_precision = kept
    return found


@pytest.fixture(autouse=True)
def pristine_flags():
    """Every test begins and ends with a consistent state in which each node has a value of its own."""

    def reset():
        for node in (torch.backends, CUDNN):
            node.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")
        CUDNN.allow_tf32 = True

    reset()
    yield
    reset()


OLDER = list(itertools.product(("highest", "high", "medium"), (True, False)))
NEWER = [
    {},
    {"matmul": "tf32"},
    {"matmul": "ieee"},
    {"matmul": "none", "generic": "tf32"},
    {"matmul": "none", "cuda": "tf32"},
    {"matmul": "none", "generic": "bf16"},
    {"conv": "ieee"},
    {"rnn": "none"},
    {"conv": "none", "rnn": "none", "generic": "tf32"},
    {"conv": "none", "rnn": "tf32", "cuda": "ieee"},
    {"onednn matmul": "bf16"},
    {"onednn matmul": "none", "generic": "tf32", "matmul": "ieee"},
]


@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("newer", NEWER, ids=lambda values: " ".join(f"{k}={v}" for k, v in values.items()) or "none")
@pytest.mark.parametrize(("matmul", "cudnn"), OLDER)
def test_flags_agree_inside_and_return_to_any_prior_state(matmul, cudnn, newer, tf32):
    torch.set_float32_matmul_precision(matmul)
    CUDNN.allow_tf32 = cudnn
    for name, value in newer.items():
        NODES[name].fp32_precision = value
    before = answers()
    with float32_products(tf32):
        assert MATMUL.allow_tf32 is CUDNN.allow_tf32 is tf32
        assert (torch.get_float32_matmul_precision() != "highest") is tf32
        for node in (MATMUL, CUDNN.conv, CUDNN.rnn):
            assert (node.fp32_precision == "tf32") is tf32
    assert answers() == before


def test_inherited_values_are_inherited_again():
    NODES["matmul"].fp32_precision = NODES["conv"].fp32_precision = "none"
    before = everything()
    for tf32 in (True, False):
        with float32_products(tf32):
            pass
        assert everything() == before


def test_nesting_and_exceptions_restore_level_by_level():
    MATMUL.fp32_precision = "tf32"  # contradicts the older setting
    before = answers()
    with pytest.raises(KeyError), float32_products(True):
        with float32_products(False):
            assert not MATMUL.allow_tf32
            with float32_products(True):
                assert MATMUL.allow_tf32
            assert not MATMUL.allow_tf32
        assert MATMUL.allow_tf32
        raise KeyError
    assert answers() == before


def test_a_state_that_is_as_asked_for_is_not_touched():
    torch.set_float32_matmul_precision("medium")
    with float32_products(True):
        assert torch.get_float32_matmul_precision() == "medium"
    assert torch.get_float32_matmul_precision() == "medium"


@pytest.mark.parametrize(("precision", "allowed"), [("tf32", True), ("bf16", True), ("fp16", True), ("ieee", False)])
def test_active_sets_the_flags_for_cuda_alone(precision, allowed):
    before = answers()
    acceleration = Acceleration(precision)
    with acceleration.active("cpu"):
        assert answers() == before
    with acceleration.active(torch.device("cuda", 0)):
        assert MATMUL.allow_tf32 is CUDNN.allow_tf32 is allowed
    assert answers() == before


def test_a_compiler_reads_the_flags_where_the_apis_were_mixed(fresh_dynamo):
    MATMUL.fp32_precision = "tf32"
    fast = Acceleration("tf32")
    with fast.active("cuda"):
        torch.testing.assert_close(fast.compile(torch.sin)(torch.ones(3)), torch.ones(3).sin())


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "least", "most"), [("ieee", 0.0, 1e-6), ("tf32", 1e-5, 1e-3)])
def test_the_flags_reach_the_products(precision, least, most):
    a, b = torch.randn(2, 512, 512, device="cuda")
    expected = a.double() @ b.double()
    with Acceleration(precision).active("cuda"):
        error = (a @ b - expected).norm() / expected.norm()
    assert least <= float(error) <= most


class TestAutocast:
    @pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
    def test_products_are_narrow_and_sums_are_not(self, precision, dtype, device):
        a = torch.randn(8, 8, device=device)
        with Acceleration(precision).autocast(device):
            assert (a @ a).dtype == dtype
            assert (a + a).dtype == torch.float32
        assert (a @ a).dtype == torch.float32

    @pytest.mark.parametrize("precision", ["tf32", "ieee"])
    def test_nothing_changes_for_float32(self, precision):
        with Acceleration(precision).autocast("cpu"):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32

    def test_a_weight_first_used_without_gradients_still_learns(self, device):
        net = nn.Linear(3, 1, device=device)
        x = torch.ones(4, 3, device=device)
        with autocast("bf16", device):
            with torch.no_grad():
                target = net(x)
            loss = (net(x) - target + 1).float().square().mean()
        loss.backward()
        assert float(net.weight.grad.abs().sum()) > 0


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 2)

    def forward(self, x, *, offset=0.0):
        y = self.linear(x)
        return {"y": y + offset, "narrow": torch.tensor(y.element_size() == 2), "count": torch.tensor(3)}


class TestModule:
    @pytest.mark.parametrize("precision", ["bf16", "fp16"])
    def test_narrow_inside_and_float32_outside(self, precision):
        net = Acceleration(precision).module(Pair())
        out = net(torch.randn(5, 6), offset=1.0)
        assert bool(out["narrow"])
        assert out["y"].dtype == torch.float32
        assert out["count"].dtype == torch.int64

    def test_values_are_near_and_different(self):
        net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 3))
        x = torch.randn(32, 16)
        exact = net(x)
        rounded = Acceleration("bf16").module(net)(x)
        assert not torch.equal(rounded, exact)
        torch.testing.assert_close(rounded, exact, rtol=2e-2, atol=2e-2)

    def test_names_class_and_gradients_are_the_networks_own(self):
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        names = list(net.state_dict())
        fast = Acceleration("bf16").module(net)
        assert fast is net
        assert type(net) is nn.Sequential
        assert list(net.state_dict()) == names
        net(torch.randn(2, 4)).sum().backward()
        assert all(param.grad.dtype == torch.float32 for param in net.parameters())

    def test_a_copy_calls_itself(self):
        net = Acceleration("bf16").module(nn.Sequential(nn.Linear(2, 1, bias=False)))
        other = copy.deepcopy(net)
        with torch.no_grad():
            other[0].weight.fill_(2.0)
            net[0].weight.fill_(1.0)
            x = torch.ones(1, 2)
            assert float(net(x)) == 2.0
            assert float(other(x)) == 4.0
            swapped = torch.func.functional_call(net, {"0.weight": torch.full((1, 2), 3.0)}, (x,))
        assert float(swapped) == 6.0

    @pytest.mark.parametrize("precision", ["tf32", "ieee"])
    def test_float32_leaves_the_module_alone(self, precision):
        net = nn.Linear(2, 2)
        assert Acceleration(precision).module(net).__dict__.get("forward") is None

    def test_compiles_as_one_graph(self, fresh_dynamo):
        net = Acceleration("bf16").module(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
        x = torch.randn(3, 4)
        compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), net(x))

    def test_channels_last_reaches_weights_and_images(self):
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3))
        x = torch.randn(2, 3, 8, 8)
        expected = net(x)
        out = Acceleration(channels_last=True).module(net)(x)
        assert net[0].weight.is_contiguous(memory_format=torch.channels_last)
        assert out.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


class TestOptimizer:
    @pytest.mark.parametrize("kind", ["fused", "foreach", "for-loop"])
    def test_all_kinds_take_the_same_step(self, kind, device):
        def trained(optimizer):
            torch.manual_seed(0)
            net = nn.Linear(3, 2, device=device)
            adam = optimizer(net.parameters())
            for _ in range(3):
                adam.zero_grad()
                net(torch.ones(2, 3, device=device)).square().sum().backward()
                adam.step()
            return net.weight.detach()

        ours = trained(lambda params: Acceleration(optimizer=kind).make_optimizer(params, lr=1e-2))
        plain = trained(lambda params: torch.optim.Adam(params, lr=1e-2, foreach=False))
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)

    def test_what_a_class_does_not_know_is_left_out(self):
        optimizer = Acceleration().make_optimizer(nn.Linear(2, 2).parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
        assert optimizer.defaults["fused"]
        assert "capturable" not in optimizer.defaults

    def test_options_win(self):
        optimizer = Acceleration().make_optimizer(nn.Linear(2, 2).parameters(), torch.optim.AdamW, lr=0.1, fused=False)
        assert optimizer.defaults["fused"] is False


@pytest.mark.parametrize(
    ("name", "value"), [("precision", "fp8"), ("compile_mode", "reduce-overhead"), ("optimizer", "quick")]
)
def test_unknown_names_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}: expected one of .* received '{value}'"):
        Acceleration(**{name: value})
