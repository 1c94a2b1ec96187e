"""Perceptrons whose weights stay on chip, against the float64 reference: values and all gradients."""

import itertools

import pytest
import torch

from tests.kernels.interpreted import kernel_device, tries_kernels
from torchrl_perf.functional import resident
from torchrl_perf.functional.chain import chain, fused_chain

TOLERANCE = {"tf32": 3e-3, "fp16": 6e-3, "bf16": 3e-2}
JUMPS = {"fp16": 0.15, "bf16": 0.2}  # a rounded number near 0 may fall on the other side of the slope's jump
KINDS = [("tf32", "tanh"), *itertools.product(("fp16", "bf16"), resident.FROM_VALUE)]


@pytest.fixture
def small(monkeypatch):
    """Batches that the interpreter can take, also where the device has less room than these kernels want."""
    from torchrl_perf.kernels import resident_launch

    if kernel_device() == "cpu":
        monkeypatch.setattr(resident, "ROWS", 8)
        monkeypatch.setattr(resident, "room", lambda device: resident.ROOM)
        monkeypatch.setattr(resident_launch, "ROWS", 16)


def rows_of(count):
    """On CUDA so many that they are taken."""
    return count if kernel_device() == "cpu" else resident.ROWS + count


def make(rows, sizes, scale=1.0):
    generator, device = torch.Generator().manual_seed(rows), kernel_device()

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(device)

    params = []
    for inputs, outputs in itertools.pairwise(sizes):
        params += [normal(outputs, inputs) / inputs**0.5, 0.1 * normal(outputs)]
    return normal(rows, sizes[0]), params, scale * normal(rows, sizes[-1])


def both(x, params, grad, activation, precision):
    """Output and gradients: of the kernels, which must take it, and of the reference."""
    assert resident.stays_on_chip(x, params, activation, 0.0, precision)
    found = []
    for make_wide in (False, True):
        given = [p.double() if make_wide else p.clone() for p in params]
        given = [p.requires_grad_() for p in given]
        y = chain(x.double(), given, activation) if make_wide else fused_chain(x, given, activation, 0.0, precision)
        found.append([y.detach(), *torch.autograd.grad(y, given, grad.to(y.dtype))])
    return found


def compare(found, expected, activation, precision):
    for number, (got, want) in enumerate(zip(found, expected, strict=True)):
        assert got.dtype == torch.float32 and got.shape == want.shape
        jumps = number > 0 and activation in ("relu", "leaky_relu")
        error = float((got - want).norm() / want.norm().clamp_min(1e-30))
        assert error <= (JUMPS if jumps else TOLERANCE)[precision], (number, error)


@tries_kernels
@pytest.mark.usefixtures("small")
class TestAnywhere:
    @pytest.mark.parametrize(("precision", "activation"), KINDS)
    @pytest.mark.parametrize("sizes", [(4, 32, 32, 2), (5, 40, 70, 3), (20, 130, 33, 1), (16, 16, 200, 16)], ids=str)
    def test_values_and_gradients(self, precision, activation, sizes):
        if kernel_device() == "cpu" and (precision == "bf16" or max(sizes) > 100):
            sizes, precision = tuple(min(size, 48) for size in sizes), "fp16" if precision == "bf16" else precision
        compare(*both(*make(rows_of(37), sizes), activation, precision), activation, precision)

    @pytest.mark.parametrize("sizes", [(5, 40, 48, 3), (4, 50, 20, 2), (6, 20, 60, 1)], ids=str)
    @pytest.mark.parametrize(("precision", "activation"), [("tf32", "tanh"), ("fp16", "elu")])
    def test_layers_by_halves(self, monkeypatch, sizes, precision, activation):
        from torchrl_perf.kernels import resident_launch

        monkeypatch.setattr(resident_launch, "PART", 32)
        compare(*both(*make(rows_of(37), sizes), activation, precision), activation, precision)

    @pytest.mark.parametrize("scale", [1e-20, 1e-6, 1e6, 1e20])
    def test_gradients_may_have_any_size(self, scale):
        compare(*both(*make(rows_of(70), (5, 40, 24, 3), scale), "tanh", "tf32"), "tanh", "tf32")

    @pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, where the interpreter runs
    @pytest.mark.parametrize("scale", [1e-3, 30.0])
    def test_weights_of_other_sizes(self, scale):
        x, params, grad = make(rows_of(70), (5, 40, 24, 3))
        params[2] *= scale
        found, expected = both(x, params, grad, "tanh", "tf32")
        for got, want in zip(found, expected, strict=True):
            assert float((got - want).norm() / want.norm()) < 1e-2

    def test_one_row_of_large_gradients_leaves_the_others_theirs(self):
        x, params, grad = make(rows_of(70), (5, 40, 24, 3))
        grad[3] *= 1e6
        compare(*both(x, params, grad, "tanh", "tf32"), "tanh", "tf32")

    @pytest.mark.filterwarnings("ignore::RuntimeWarning")  # likewise
    @pytest.mark.parametrize("bad", [torch.nan, torch.inf])
    def test_bad_gradients_show(self, bad):
        x, params, grad = make(rows_of(40), (5, 40, 24, 3))
        grad[5, 1] = bad
        found, _ = both(x, params, grad, "tanh", "tf32")
        assert not torch.stack([each.sum() for each in found[1:]]).sum().isfinite()

    def test_strided_inputs_and_gradients(self):
        x, params, grad = make(rows_of(50), (6, 20, 24, 4))
        plain, _ = both(x, params, grad, "tanh", "tf32")
        strided, _ = both(x.t().contiguous().t(), params, torch.stack([grad, grad], -1)[..., 0], "tanh", "tf32")
        for got, want in zip(strided, plain, strict=True):
            torch.testing.assert_close(got, want)

    def test_without_gradients_values_are_the_same(self):
        x, params, _ = make(rows_of(40), (5, 40, 24, 3))
        kept = fused_chain(x, [p.clone().requires_grad_() for p in params], "tanh")
        with torch.no_grad():
            assert torch.equal(fused_chain(x, params, "tanh"), kept)

    def test_frozen_parameters_have_no_gradients(self, monkeypatch):
        x, params, grad = make(rows_of(40), (5, 40, 24, 3))
        products = []
        product = resident._product
        monkeypatch.setattr(resident, "_product", lambda *args: products.append(1) or product(*args))
        for number in (0, 2, 5):
            params[number].requires_grad_()
        fused_chain(x, params, "tanh").backward(grad)
        assert [p.grad is not None for p in params] == [True, False, True, False, False, True]
        params[2].requires_grad_(False)
        fused_chain(x, params, "tanh").backward(grad)
        assert len(products) == 1

    def test_gradients_are_differentiated_once_more(self):
        x, params, grad = make(rows_of(40), (5, 20, 24, 3))
        given = [p.requires_grad_() for p in params]
        wide = [p.detach().double().requires_grad_() for p in params]
        found = torch.autograd.grad(fused_chain(x, given, "tanh"), given, grad, create_graph=True)
        expected = torch.autograd.grad(chain(x.double(), wide, "tanh"), wide, grad.double(), create_graph=True)
        penalties = [sum(each.square().sum() for each in grads) for grads in (found, expected)]
        again = [torch.autograd.grad(each, ps) for each, ps in zip(penalties, (given[:5], wide[:5]), strict=True)]
        compare(again[0], again[1], "tanh", "tf32")

    def test_a_size_that_data_decide_leaves_it_to_the_chain(self, monkeypatch):
        from torch._dynamo import config

        x, params, _ = make(rows_of(40), (5, 20, 24, 3))
        taken = []
        run = resident.resident_chain
        monkeypatch.setattr(resident, "resident_chain", lambda *args: taken.append(1) or run(*args))
        with config.patch(capture_dynamic_output_shape_ops=True):
            fn = torch.compile(lambda x, m: fused_chain(x[m], params), backend="eager", fullgraph=True)
            y = fn(x, x[:, 0] > -9.0)
        assert not taken
        torch.testing.assert_close(y, chain(x, params), rtol=5e-3, atol=5e-3)

    def test_operators_pass_opcheck(self):
        x, params, _ = make(rows_of(32), (4, 20, 24, 2))
        params = [p.requires_grad_() for p in params]
        torch.library.opcheck(torch.ops.torchrl_perf.resident_forward, (x, params, "tanh", "tf32", True))


def test_what_is_taken(monkeypatch):
    monkeypatch.setattr(resident, "room", lambda device: resident.ROOM)

    def takes(rows=8192, sizes=(4, 256, 256, 2), activation="tanh", eps=0.0, precision="tf32", needs=False):
        params = [torch.empty(shape) for a, b in itertools.pairwise(sizes) for shape in ((b, a), (b,))]
        x = torch.empty(rows, sizes[0], requires_grad=needs)
        return resident.stays_on_chip(x, params, activation, eps, precision)

    assert takes() and takes(activation="elu", precision="bf16") and takes(sizes=(31, 100, 7, 16))
    refused = [
        {"rows": 8191}, {"sizes": (4, 257, 256, 2)}, {"sizes": (4, 64, 2)}, {"sizes": (4, 64, 64, 64, 2)},
        {"sizes": (32, 64, 64, 2)}, {"sizes": (4, 64, 64, 17)}, {"activation": "elu"}, {"eps": 1e-5},
        {"precision": "ieee"}, {"activation": "silu", "precision": "bf16"}, {"needs": True},
    ]  # fmt: skip
    assert not any(takes(**given) for given in refused)
    monkeypatch.setattr(resident, "room", lambda device: resident.ROOM - 1)
    assert not takes()


@pytest.mark.gpu
class TestCuda:
    @pytest.mark.parametrize(("precision", "activation"), KINDS)
    @pytest.mark.parametrize("rows", [65_536, 20_001])
    def test_values_and_gradients(self, precision, activation, rows):
        # as small as a mean's, but in float16, for which a loss is scaled
        scale = 1.0 if precision == "fp16" else 1 / rows
        compare(*both(*make(rows, (4, 256, 256, 2), scale), activation, precision), activation, precision)

    @pytest.mark.parametrize("precision", ["tf32", "bf16"])
    def test_results_repeat_bit_for_bit_and_in_a_graph(self, precision):
        x, params, grad = make(65_536, (4, 256, 256, 2))
        params = [p.requires_grad_() for p in params]

        def run():
            y = fused_chain(x, params, "tanh", 0.0, precision)
            return [y, *torch.autograd.grad(y, params, grad)]

        # what is kept has no graph of autograd, which would tie the capture to the stream of its leaves
        first = [each.detach() for each in run()]
        for _ in range(3):
            assert all(map(torch.equal, run(), first))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, captured, first))
