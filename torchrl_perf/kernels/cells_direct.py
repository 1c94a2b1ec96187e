"""Kernels of gated cells laid out by hand for the matrix instructions, in Triton's Gluon: values as the portable ones.

Left to Triton, a step moves each gate between two layouts, through shared memory and a barrier each. Here loads, gates
and stores have the layout of the matrix product, the weights lie in registers, and a step has two barriers: the state,
or the gradients of the gates, are all that the warps of a program exchange. Products take float16 operands and sum in
float32. Import this module only where Triton has Gluon.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

__all__ = ["gru_backward", "gru_forward", "lstm_backward", "lstm_forward"]


@gluon.jit
def _tanh(x):
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _sigmoid(x):
    return 0.5 * _tanh(0.5 * x) + 0.5


@gluon.jit
def _operand(
    ptr, row_step: gl.constexpr, column_step: gl.constexpr, H: gl.constexpr, PAD: gl.constexpr, layout: gl.constexpr
):
    """A matrix of ``[H, H]`` numbers at these steps, as the right operand of a product, with zeros around."""
    k = gl.arange(0, PAD, gl.SliceLayout(1, layout))[:, None]
    n = gl.arange(0, PAD, gl.SliceLayout(0, layout))[None, :]
    return gl.load(ptr + k * row_step + n * column_step, mask=(k < H) & (n < H), other=0.0).to(gl.float16)


@gluon.jit
def _bias(ptr, gate: gl.constexpr, HAS_BIAS: gl.constexpr, H: gl.constexpr, PAD: gl.constexpr, layout: gl.constexpr):
    """Biases of a gate as a row ``[1, PAD]``, or zeros."""
    if HAS_BIAS:
        c = gl.arange(0, PAD, gl.SliceLayout(0, layout))
        out = gl.load(ptr + gate * H + c, mask=c < H, other=0.0)[None, :]
    else:
        out = gl.zeros([1, PAD], gl.float32, layout)
    return out


@gluon.jit(do_not_specialize=["num_envs", "steps", "rows"])
def gru_forward(
    inputs_ptr, initial_ptr, begins_ptr, weight_ptr, bias_ptr, states_ptr, kept_ptr, num_envs, steps, rows, in_row,
    in_step, begin_row, begin_step,
    H: gl.constexpr, PAD: gl.constexpr, BLOCK: gl.constexpr, HAS_BIAS: gl.constexpr, KEEPS: gl.constexpr,
):  # fmt: skip
    """All steps of some rows; reference: :mod:`torchrl_perf.kernels.gru`."""
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[1, gl.num_warps()], instr_shape=[16, 8]
    )
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=2)
    right: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=mma, k_width=2)
    shared: gl.constexpr = gl.SwizzledSharedLayout(vec=8, per_phase=1, max_phase=8, order=[1, 0])
    of_reset = _operand(weight_ptr, 1, H, H, PAD, right)
    of_update = _operand(weight_ptr + H * H, 1, H, H, PAD, right)
    of_new = _operand(weight_ptr + 2 * H * H, 1, H, H, PAD, right)
    i = gl.arange(0, BLOCK, gl.SliceLayout(1, mma))
    c = gl.arange(0, PAD, gl.SliceLayout(0, mma))
    bias_reset = _bias(bias_ptr, 0, HAS_BIAS, H, PAD, mma)
    bias_update = _bias(bias_ptr, 1, HAS_BIAS, H, PAD, mma)
    bias_new = _bias(bias_ptr, 2, HAS_BIAS, H, PAD, mma)
    first = gl.program_id(0).to(gl.int64) * rows
    is_row = (i < rows) & (first + i < num_envs)
    r, h = i[:, None], c[None, :]
    mask = is_row[:, None] & (h < H)
    inputs_ptr += first * in_row
    begins_ptr += first * begin_row
    states_ptr += first * steps * H
    kept_ptr += first * 4 * H
    at_input, at_begin, at_state, at_kept = r * in_row + h, i * begin_row, r * (steps * H) + h, r * (4 * H) + h
    state = gl.load(initial_ptr + first * H + r * H + h, mask=mask, other=0.0)
    # what a step reads is asked for a step ahead, so that no step waits for memory
    begins = gl.load(begins_ptr + at_begin, mask=is_row, other=0)
    x_reset = gl.load(inputs_ptr + at_input, mask=mask, other=0.0)
    x_update = gl.load(inputs_ptr + H + at_input, mask=mask, other=0.0)
    x_new = gl.load(inputs_ptr + 2 * H + at_input, mask=mask, other=0.0)
    exchanged = gl.allocate_shared_memory(gl.float16, [BLOCK, PAD], shared)
    for t in range(steps):
        state = gl.where((begins != 0)[:, None], 0.0, state)
        exchanged.store(state.to(gl.float16))
        inputs_ptr += in_step
        begins_ptr += begin_step
        has_next = t + 1 < steps
        next_begins = gl.load(begins_ptr + at_begin, mask=is_row & has_next, other=0)
        next_reset = gl.load(inputs_ptr + at_input, mask=mask & has_next, other=0.0)
        next_update = gl.load(inputs_ptr + H + at_input, mask=mask & has_next, other=0.0)
        next_new = gl.load(inputs_ptr + 2 * H + at_input, mask=mask & has_next, other=0.0)
        a = exchanged.load(left)
        reset = _sigmoid(mma_v2(a, of_reset, x_reset + bias_reset))
        update = _sigmoid(mma_v2(a, of_update, x_update + bias_update))
        gate_new = mma_v2(a, of_new, gl.zeros([BLOCK, PAD], gl.float32, mma) + bias_new)
        new = _tanh(x_new + reset * gate_new)
        state = new + update * (state - new)
        gl.store(states_ptr + at_state, state, mask=mask)
        states_ptr += H
        if KEEPS:
            gl.store(kept_ptr + at_kept, reset, mask=mask)
            gl.store(kept_ptr + H + at_kept, update, mask=mask)
            gl.store(kept_ptr + 2 * H + at_kept, new, mask=mask)
            gl.store(kept_ptr + 3 * H + at_kept, gate_new, mask=mask)
            kept_ptr += num_envs.to(gl.int64) * 4 * H
        begins = next_begins
        x_reset = next_reset
        x_update = next_update
        x_new = next_new


@gluon.jit(do_not_specialize=["num_envs", "steps", "rows"])
def gru_backward(
    grad_ptr, largest_ptr, states_ptr, kept_ptr, initial_ptr, begins_ptr, weight_ptr, of_inputs_ptr, of_new_ptr,
    before_ptr, of_initial_ptr, num_envs, steps, rows, grad_row, grad_step, begin_row, begin_step,
    H: gl.constexpr, PAD: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """All steps of some rows, the last first. ``largest_ptr``: the largest gradient of a row's states."""
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[1, gl.num_warps()], instr_shape=[16, 8]
    )
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=2)
    right: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=mma, k_width=2)
    shared: gl.constexpr = gl.SwizzledSharedLayout(vec=8, per_phase=1, max_phase=8, order=[1, 0])
    by_reset = _operand(weight_ptr, H, 1, H, PAD, right)
    by_update = _operand(weight_ptr + H * H, H, 1, H, PAD, right)
    by_new = _operand(weight_ptr + 2 * H * H, H, 1, H, PAD, right)
    i = gl.arange(0, BLOCK, gl.SliceLayout(1, mma))
    c = gl.arange(0, PAD, gl.SliceLayout(0, mma))
    first = gl.program_id(0).to(gl.int64) * rows
    is_row = (i < rows) & (first + i < num_envs)
    r, h = i[:, None], c[None, :]
    mask = is_row[:, None] & (h < H)
    last = (steps - 1).to(gl.int64)
    kept_step = num_envs.to(gl.int64) * 4 * H
    end = first * steps + last
    grad_ptr += first * grad_row + last * grad_step
    begins_ptr += first * begin_row + last * begin_step
    states_ptr += (end - 1) * H
    kept_ptr += last * kept_step + first * 4 * H
    of_inputs_ptr += end * 3 * H
    of_new_ptr += end * H
    before_ptr += end * H
    at_grad, at_begin, at_kept = r * grad_row + h, i * begin_row, r * (4 * H) + h
    at_inputs, at_state, at_initial = r * (steps * 3 * H) + h, r * (steps * H) + h, r * H + h
    largest = gl.maximum(gl.load(largest_ptr + first + i, mask=is_row, other=1.0), 1e-30)[:, None]
    scale = 1.0 / largest
    grad = gl.load(grad_ptr + at_grad, mask=mask, other=0.0)
    begins = gl.load(begins_ptr + at_begin, mask=is_row, other=0)
    before = gl.load(states_ptr + at_state, mask=mask & (steps > 1), other=0.0)
    reset = gl.load(kept_ptr + at_kept, mask=mask, other=0.0)
    update = gl.load(kept_ptr + H + at_kept, mask=mask, other=0.0)
    new = gl.load(kept_ptr + 2 * H + at_kept, mask=mask, other=0.0)
    gate_new = gl.load(kept_ptr + 3 * H + at_kept, mask=mask, other=0.0)
    carried = gl.zeros([BLOCK, PAD], gl.float32, mma)
    # float16 has no small numbers: gradients are scaled by the largest one that a row starts from
    exchanged_reset = gl.allocate_shared_memory(gl.float16, [BLOCK, PAD], shared)
    exchanged_update = gl.allocate_shared_memory(gl.float16, [BLOCK, PAD], shared)
    exchanged_new = gl.allocate_shared_memory(gl.float16, [BLOCK, PAD], shared)
    for t in range(steps):
        if t + 1 == steps:
            before = gl.load(initial_ptr + first * H + at_initial, mask=mask, other=0.0)
        is_first = (begins != 0)[:, None]
        before = gl.where(is_first, 0.0, before)
        grad += carried
        d_new = grad * (1.0 - update) * (1.0 - new * new)
        d_update = grad * (before - new) * update * (1.0 - update)
        d_gate = d_new * reset
        d_reset = d_new * gate_new * reset * (1.0 - reset)
        carried = grad * update * scale
        exchanged_reset.store((d_reset * scale).to(gl.float16))
        exchanged_update.store((d_update * scale).to(gl.float16))
        exchanged_new.store((d_gate * scale).to(gl.float16))
        gl.store(of_inputs_ptr + at_inputs, d_reset, mask=mask)
        gl.store(of_inputs_ptr + H + at_inputs, d_update, mask=mask)
        gl.store(of_inputs_ptr + 2 * H + at_inputs, d_new, mask=mask)
        gl.store(of_new_ptr + at_state, d_gate, mask=mask)
        gl.store(before_ptr + at_state, before, mask=mask)
        of_inputs_ptr -= 3 * H
        of_new_ptr -= H
        before_ptr -= H
        grad_ptr -= grad_step
        begins_ptr -= begin_step
        states_ptr -= H
        kept_ptr -= kept_step
        has_next = t + 1 < steps
        grad = gl.load(grad_ptr + at_grad, mask=mask & has_next, other=0.0)
        begins = gl.load(begins_ptr + at_begin, mask=is_row & has_next, other=0)
        before = gl.load(states_ptr + at_state, mask=mask & (t + 2 < steps), other=0.0)
        reset = gl.load(kept_ptr + at_kept, mask=mask & has_next, other=0.0)
        update = gl.load(kept_ptr + H + at_kept, mask=mask & has_next, other=0.0)
        new = gl.load(kept_ptr + 2 * H + at_kept, mask=mask & has_next, other=0.0)
        gate_new = gl.load(kept_ptr + 3 * H + at_kept, mask=mask & has_next, other=0.0)
        carried = mma_v2(exchanged_reset.load(left), by_reset, carried)
        carried = mma_v2(exchanged_update.load(left), by_update, carried)
        carried = mma_v2(exchanged_new.load(left), by_new, carried)
        carried = gl.where(is_first, 0.0, carried * largest)
    gl.store(of_initial_ptr + first * H + at_initial, carried, mask=mask)


@gluon.jit(do_not_specialize=["num_envs", "steps", "rows"])
def lstm_forward(
    inputs_ptr, state_ptr, cell_ptr, begins_ptr, weight_ptr, bias_ptr, states_ptr, cells_ptr, kept_ptr, num_envs, steps,
    rows, in_row, in_step, begin_row, begin_step,
    H: gl.constexpr, PAD: gl.constexpr, BLOCK: gl.constexpr, HAS_BIAS: gl.constexpr, KEEPS: gl.constexpr,
):  # fmt: skip
    """All steps of some rows; reference: :mod:`torchrl_perf.kernels.lstm`. Two gates' weights lie in shared memory."""
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[1, gl.num_warps()], instr_shape=[16, 8]
    )
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=2)
    right: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=mma, k_width=2)
    shared: gl.constexpr = gl.SwizzledSharedLayout(vec=8, per_phase=1, max_phase=8, order=[1, 0])
    upright: gl.constexpr = gl.SwizzledSharedLayout(vec=8, per_phase=1, max_phase=8, order=[0, 1])
    of_into = _operand(weight_ptr, 1, H, H, PAD, right)
    of_forget = _operand(weight_ptr + H * H, 1, H, H, PAD, right)
    of_new = _operand(weight_ptr + 2 * H * H, 1, H, H, PAD, right)
    of_out = _operand(weight_ptr + 3 * H * H, 1, H, H, PAD, right)
    of_new = gl.allocate_shared_memory(gl.float16, [PAD, PAD], upright, of_new)
    of_out = gl.allocate_shared_memory(gl.float16, [PAD, PAD], upright, of_out)
    bias_into = _bias(bias_ptr, 0, HAS_BIAS, H, PAD, mma)
    bias_forget = _bias(bias_ptr, 1, HAS_BIAS, H, PAD, mma)
    bias_new = _bias(bias_ptr, 2, HAS_BIAS, H, PAD, mma)
    bias_out = _bias(bias_ptr, 3, HAS_BIAS, H, PAD, mma)
    i = gl.arange(0, BLOCK, gl.SliceLayout(1, mma))
    c = gl.arange(0, PAD, gl.SliceLayout(0, mma))
    first = gl.program_id(0).to(gl.int64) * rows
    is_row = (i < rows) & (first + i < num_envs)
    r, h = i[:, None], c[None, :]
    mask = is_row[:, None] & (h < H)
    inputs_ptr += first * in_row
    begins_ptr += first * begin_row
    states_ptr += first * steps * H
    cells_ptr += first * steps * H
    kept_ptr += first * 4 * H
    at_input, at_begin, at_state, at_kept = r * in_row + h, i * begin_row, r * (steps * H) + h, r * (4 * H) + h
    state = gl.load(state_ptr + first * H + r * H + h, mask=mask, other=0.0)
    cell = gl.load(cell_ptr + first * H + r * H + h, mask=mask, other=0.0)
    begins = gl.load(begins_ptr + at_begin, mask=is_row, other=0)
    x_into = gl.load(inputs_ptr + at_input, mask=mask, other=0.0)
    x_forget = gl.load(inputs_ptr + H + at_input, mask=mask, other=0.0)
    x_new = gl.load(inputs_ptr + 2 * H + at_input, mask=mask, other=0.0)
    x_out = gl.load(inputs_ptr + 3 * H + at_input, mask=mask, other=0.0)
    exchanged = gl.allocate_shared_memory(gl.float16, [BLOCK, PAD], shared)
    for t in range(steps):
        is_first = (begins != 0)[:, None]
        state = gl.where(is_first, 0.0, state)
        cell = gl.where(is_first, 0.0, cell)
        exchanged.store(state.to(gl.float16))
        inputs_ptr += in_step
        begins_ptr += begin_step
        has_next = t + 1 < steps
        next_begins = gl.load(begins_ptr + at_begin, mask=is_row & has_next, other=0)
        next_into = gl.load(inputs_ptr + at_input, mask=mask & has_next, other=0.0)
        next_forget = gl.load(inputs_ptr + H + at_input, mask=mask & has_next, other=0.0)
        next_new = gl.load(inputs_ptr + 2 * H + at_input, mask=mask & has_next, other=0.0)
        next_out = gl.load(inputs_ptr + 3 * H + at_input, mask=mask & has_next, other=0.0)
        a = exchanged.load(left)
        into = _sigmoid(mma_v2(a, of_into, x_into + bias_into))
        forget = _sigmoid(mma_v2(a, of_forget, x_forget + bias_forget))
        new = _tanh(mma_v2(a, of_new.load(right), x_new + bias_new))
        out = _sigmoid(mma_v2(a, of_out.load(right), x_out + bias_out))
        cell = forget * cell + into * new
        state = out * _tanh(cell)
        gl.store(states_ptr + at_state, state, mask=mask)
        gl.store(cells_ptr + at_state, cell, mask=mask)
        states_ptr += H
        cells_ptr += H
        if KEEPS:
            gl.store(kept_ptr + at_kept, into, mask=mask)
            gl.store(kept_ptr + H + at_kept, forget, mask=mask)
            gl.store(kept_ptr + 2 * H + at_kept, new, mask=mask)
            gl.store(kept_ptr + 3 * H + at_kept, out, mask=mask)
            kept_ptr += num_envs.to(gl.int64) * 4 * H
        begins = next_begins
        x_into = next_into
        x_forget = next_forget
        x_new = next_new
        x_out = next_out


@gluon.jit(do_not_specialize=["num_envs", "steps", "rows"])
def lstm_backward(
    grad_ptr, grad_cell_ptr, largest_ptr, states_ptr, cells_ptr, kept_ptr, state_ptr, cell_ptr, begins_ptr, weight_ptr,
    of_inputs_ptr, before_ptr, of_state_ptr, of_cell_ptr, num_envs, steps, rows, grad_row, grad_step, grad_cell_row,
    grad_cell_step, begin_row, begin_step,
    H: gl.constexpr, PAD: gl.constexpr, BLOCK: gl.constexpr, OF_CELLS: gl.constexpr,
):  # fmt: skip
    """All steps of some rows, the last first. ``largest_ptr``: the largest gradient of a row's states."""
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[1, gl.num_warps()], instr_shape=[16, 8]
    )
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=2)
    right: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=mma, k_width=2)
    shared: gl.constexpr = gl.SwizzledSharedLayout(vec=8, per_phase=1, max_phase=8, order=[1, 0])
    by_into = _operand(weight_ptr, H, 1, H, PAD, right)
    by_forget = _operand(weight_ptr + H * H, H, 1, H, PAD, right)
    by_new = _operand(weight_ptr + 2 * H * H, H, 1, H, PAD, right)
    by_out = _operand(weight_ptr + 3 * H * H, H, 1, H, PAD, right)
    by_forget = gl.allocate_shared_memory(gl.float16, [PAD, PAD], shared, by_forget)
    by_new = gl.allocate_shared_memory(gl.float16, [PAD, PAD], shared, by_new)
    by_out = gl.allocate_shared_memory(gl.float16, [PAD, PAD], shared, by_out)
    i = gl.arange(0, BLOCK, gl.SliceLayout(1, mma))
    c = gl.arange(0, PAD, gl.SliceLayout(0, mma))
    first = gl.program_id(0).to(gl.int64) * rows
    is_row = (i < rows) & (first + i < num_envs)
    r, h = i[:, None], c[None, :]
    mask = is_row[:, None] & (h < H)
    last = (steps - 1).to(gl.int64)
    kept_step = num_envs.to(gl.int64) * 4 * H
    end = first * steps + last
    grad_ptr += first * grad_row + last * grad_step
    grad_cell_ptr += first * grad_cell_row + last * grad_cell_step
    begins_ptr += first * begin_row + last * begin_step
    states_ptr += (end - 1) * H
    cells_ptr += (end - 1) * H
    kept_ptr += last * kept_step + first * 4 * H
    of_inputs_ptr += end * 4 * H
    before_ptr += end * H
    at_grad, at_grad_cell, at_begin = r * grad_row + h, r * grad_cell_row + h, i * begin_row
    at_kept, at_inputs, at_state = r * (4 * H) + h, r * (steps * 4 * H) + h, r * (steps * H) + h
    at_initial = first * H + r * H + h
    largest = gl.maximum(gl.load(largest_ptr + first + i, mask=is_row, other=1.0), 1e-30)[:, None]
    scale = 1.0 / largest
    grad = gl.load(grad_ptr + at_grad, mask=mask, other=0.0)
    begins = gl.load(begins_ptr + at_begin, mask=is_row, other=0)
    before = gl.load(states_ptr + at_state, mask=mask & (steps > 1), other=0.0)
    cell = gl.load(cells_ptr + H + at_state, mask=mask, other=0.0)
    cell_before = gl.load(cells_ptr + at_state, mask=mask & (steps > 1), other=0.0)
    into = gl.load(kept_ptr + at_kept, mask=mask, other=0.0)
    forget = gl.load(kept_ptr + H + at_kept, mask=mask, other=0.0)
    new = gl.load(kept_ptr + 2 * H + at_kept, mask=mask, other=0.0)
    out = gl.load(kept_ptr + 3 * H + at_kept, mask=mask, other=0.0)
    carried = gl.zeros([BLOCK, PAD], gl.float32, mma)
    carried_cell = carried
    if OF_CELLS:
        carried_cell += gl.load(grad_cell_ptr + at_grad_cell, mask=mask, other=0.0)
    exchanged_into = gl.allocate_shared_memory(gl.float16, [BLOCK, PAD], shared)
    exchanged_forget = gl.allocate_shared_memory(gl.float16, [BLOCK, PAD], shared)
    exchanged_new = gl.allocate_shared_memory(gl.float16, [BLOCK, PAD], shared)
    exchanged_out = gl.allocate_shared_memory(gl.float16, [BLOCK, PAD], shared)
    for t in range(steps):
        if t + 1 == steps:
            before = gl.load(state_ptr + at_initial, mask=mask, other=0.0)
            cell_before = gl.load(cell_ptr + at_initial, mask=mask, other=0.0)
        is_first = (begins != 0)[:, None]
        grad += carried
        squashed = _tanh(cell)
        of_cell = carried_cell + grad * out * (1.0 - squashed * squashed)
        d_into = of_cell * new * into * (1.0 - into)
        d_forget = of_cell * gl.where(is_first, 0.0, cell_before) * forget * (1.0 - forget)
        d_new = of_cell * into * (1.0 - new * new)
        d_out = grad * squashed * out * (1.0 - out)
        carried_cell = gl.where(is_first, 0.0, of_cell * forget)
        exchanged_into.store((d_into * scale).to(gl.float16))
        exchanged_forget.store((d_forget * scale).to(gl.float16))
        exchanged_new.store((d_new * scale).to(gl.float16))
        exchanged_out.store((d_out * scale).to(gl.float16))
        gl.store(of_inputs_ptr + at_inputs, d_into, mask=mask)
        gl.store(of_inputs_ptr + H + at_inputs, d_forget, mask=mask)
        gl.store(of_inputs_ptr + 2 * H + at_inputs, d_new, mask=mask)
        gl.store(of_inputs_ptr + 3 * H + at_inputs, d_out, mask=mask)
        gl.store(before_ptr + at_state, gl.where(is_first, 0.0, before), mask=mask)
        of_inputs_ptr -= 4 * H
        before_ptr -= H
        grad_ptr -= grad_step
        grad_cell_ptr -= grad_cell_step
        begins_ptr -= begin_step
        states_ptr -= H
        cells_ptr -= H
        kept_ptr -= kept_step
        has_next = t + 1 < steps
        grad = gl.load(grad_ptr + at_grad, mask=mask & has_next, other=0.0)
        begins = gl.load(begins_ptr + at_begin, mask=is_row & has_next, other=0)
        before = gl.load(states_ptr + at_state, mask=mask & (t + 2 < steps), other=0.0)
        cell = cell_before
        cell_before = gl.load(cells_ptr + at_state, mask=mask & (t + 2 < steps), other=0.0)
        into = gl.load(kept_ptr + at_kept, mask=mask & has_next, other=0.0)
        forget = gl.load(kept_ptr + H + at_kept, mask=mask & has_next, other=0.0)
        new = gl.load(kept_ptr + 2 * H + at_kept, mask=mask & has_next, other=0.0)
        out = gl.load(kept_ptr + 3 * H + at_kept, mask=mask & has_next, other=0.0)
        if OF_CELLS:
            carried_cell += gl.load(grad_cell_ptr + at_grad_cell, mask=mask & has_next, other=0.0)
        carried = mma_v2(exchanged_into.load(left), by_into, gl.zeros([BLOCK, PAD], gl.float32, mma))
        carried = mma_v2(exchanged_forget.load(left), by_forget.load(right), carried)
        carried = mma_v2(exchanged_new.load(left), by_new.load(right), carried)
        carried = mma_v2(exchanged_out.load(left), by_out.load(right), carried)
        carried = gl.where(is_first, 0.0, carried * largest)
    gl.store(of_state_ptr + at_initial, carried, mask=mask)
    gl.store(of_cell_ptr + at_initial, carried_cell, mask=mask)
