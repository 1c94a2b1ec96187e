"""Where parameters and gradients lie in memory: strides of any kind, against torch's Adam on contiguous copies."""

import pytest
import torch
from torch import nn

from torchrl_perf.functional.adam import AdamSettings, adam_steps_, bias_corrections, fused_adam_steps_
from torchrl_perf.runtime import Acceleration
from torchrl_perf.trainers import GuardedAdam

LAYOUTS = {
    "contiguous": lambda: torch.randn(4, 6),
    "transposed": lambda: torch.randn(6, 4).t(),
    "columns": lambda: torch.randn(4, 12)[:, ::2],
    "rows": lambda: torch.randn(4, 9)[:, 3:],
    "column of one": lambda: torch.randn(4, 2)[:, :1],
    "permuted": lambda: torch.randn(2, 3, 4).permute(2, 0, 1),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
}
GRADIENTS = {
    "contiguous": torch.randn,
    "reversed": lambda *shape: torch.randn(*reversed(shape)).permute(*reversed(range(len(shape)))),
    "expanded": lambda *shape: torch.randn(()).expand(shape),
    "columns": lambda *shape: torch.randn(*shape[:-1], 2 * shape[-1])[..., 1::2],
}


def expected(value, grads, dtype):
    param = nn.Parameter(value.detach().to(dtype).clone(memory_format=torch.contiguous_format))
    adam = torch.optim.Adam([param], lr=1e-2, foreach=False, fused=False)
    for grad in grads:
        param.grad = grad.to(dtype).clone(memory_format=torch.contiguous_format)
        adam.step()
    return param.detach()


@pytest.mark.parametrize("kind", ["fused", "for-loop"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("of_grads", GRADIENTS)
@pytest.mark.parametrize("form", ["step", "apply_gradients"])
def test_every_number_gets_its_own_gradient(kind, dtype, layout, of_grads, form):
    value = LAYOUTS[layout]()
    grads = [GRADIENTS[of_grads](*value.shape) for _ in range(3)]
    wanted = expected(value, grads, torch.float32 if dtype == torch.bfloat16 else dtype)
    param = nn.Parameter(value.to(dtype) if dtype != value.dtype else value)
    if dtype == torch.bfloat16:
        grads = [grad.to(dtype) for grad in grads]
        wanted = expected(param, grads, torch.float32)
    around = param.data.untyped_storage()
    before = around.tolist()
    optimizer = GuardedAdam([param], lr=1e-2, eps=1e-8, acceleration=Acceleration(optimizer=kind))
    for grad in grads:
        if form == "step":
            param.grad = grad
            optimizer.step()
        else:
            optimizer.apply_gradients([grad], torch.tensor(1.0))
    torch.testing.assert_close(
        param.detach().float(), wanted, atol=1e-2 if dtype == torch.bfloat16 else 1e-6, rtol=1e-2
    )
    # what lies between the numbers of a parameter is not its own
    own = torch.zeros(around.nbytes() // param.element_size(), dtype=torch.bool)
    own.as_strided(param.shape, param.stride(), param.storage_offset()).fill_(True)
    bytes_of_others = (~own).repeat_interleave(param.element_size())
    changed = torch.tensor(around.tolist()) != torch.tensor(before)
    assert not (changed & bytes_of_others).any()


def test_a_parameter_that_is_laid_out_anew_later():
    value, grad = torch.randn(4, 6), torch.randn(4, 6)
    param = nn.Parameter(value.clone())
    optimizer = GuardedAdam([param], lr=1e-2, eps=1e-8)
    for number in range(4):
        if number == 2:
            param.data = param.data.t().contiguous().t()
        optimizer.apply_gradients([(number + 1.0) * grad], torch.tensor(1.0))
    wanted = expected(value, [(number + 1.0) * grad for number in range(4)], torch.float32)
    torch.testing.assert_close(param.detach(), wanted, atol=1e-6, rtol=1e-5)


def test_the_function_takes_any_strides_and_skips():
    values = [torch.randn(4, 8)[:, ::2], torch.randn(3)]
    grads = [torch.randn(4, 4).t(), torch.ones(()).expand(3)]
    made = []
    plain = [value.clone(memory_format=torch.contiguous_format) for value in values]
    for fused, params in ((True, values), (False, plain)):
        moments = [[torch.zeros(value.shape) for value in values] for _ in range(2)]
        options = {"lr": torch.tensor(1e-2), "settings": AdamSettings(), "grad_scale": torch.tensor(2.0)}
        for count, skip in ((0.0, 1.0), (1.0, 0.0), (2.0, 0.0), (2.0, 1.0)):
            counts, flag = torch.full((2,), count), torch.tensor(skip)
            if fused:
                fused_adam_steps_(params, grads, *moments, counts, skip=flag, **options)
            else:
                corrections = bias_corrections(counts.clamp_min(1.0), (0.9, 0.999))
                adam_steps_(params, grads, *moments, corrections, skip=flag, **options)
        made.append([*params, *moments[0], *moments[1]])
    for one, other in zip(*made, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("grads", [[torch.ones(2)], [torch.ones(3), torch.ones(3)], [torch.ones(1)], []])
def test_gradients_of_another_shape_are_refused(grads):
    param = nn.Parameter(torch.zeros(3))
    optimizer = GuardedAdam([param], lr=1e-2)
    with pytest.raises(ValueError, match=r"grads: expected shapes \[\(3,\)\], received .* Remedy"):
        optimizer.apply_gradients(grads, torch.tensor(1.0))
    assert not param.any()


def test_an_expanded_parameter_is_refused():
    for value in (torch.zeros(1, 3).expand(4, 3), torch.zeros(()).expand(2)):
        with pytest.raises(ValueError, match=r"params: expected a place in memory for each number.* Remedy"):
            GuardedAdam([nn.Parameter(value)])
    GuardedAdam([nn.Parameter(torch.zeros(1, 3).expand(1, 3))])
