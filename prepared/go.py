# ruff: noqa
"""Checks that prepared kernels are equal to the references, then times each beside what runs today, in one process.

    python prepared/go.py                      on a GPU, all parts, at most 240 s
    TRITON_INTERPRET=1 python prepared/go.py --dry    on a CPU, with tiny sizes and Triton's interpreter
    python prepared/go.py --parts gae tree     some of them
    python prepared/go.py --warm 3 14          compiles each fourteenth variant and ends: fourteen at once fill Triton's cache

A line of the table: part, variant, microseconds of a call in a CUDA graph, how far from the reference, and what it
would mean. Today's variant is the first of each group. Exit status 1: something is not equal.
"""

import argparse
import contextlib
import itertools
import os
import statistics
import sys
import time
import traceback

import torch

START = time.monotonic()
FAILED: list[str] = []
LINES: list[str] = []
SEEN = 0
WARM: tuple[int, int] | None = None


def say(part: str, variant: str, us: float | None, error: float | None, limit: float, note: str = "") -> None:
    """A line of the table."""
    bad = error is not None and not error <= limit
    if bad:
        FAILED.append(f"{part}: {variant}")
    time_ = "       -" if us is None else f"{us:8.1f}"
    far = "        -" if error is None else f"{error:9.1e}{'  NOT EQUAL' if bad else ''}"
    LINES.append(f"{part:10} {variant:44} {time_} us {far}  {note}")
    print(LINES[-1], flush=True)


def timed(call, calls: int = 10, replays: int = 20) -> float | None:
    """Microseconds of a call among several in one CUDA graph, the median; None on a CPU."""
    if DEVICE.type == "cpu":
        call()
        return None
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    for _ in range(3):
        graph.replay()
    found = []
    for _ in range(replays):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        found.append(first.elapsed_time(last) * 1e3 / calls)
    return statistics.median(found)


def error_of(found, expected) -> float:
    """The largest of the tensors' distances over their lengths."""
    pairs = [(f.detach().double().cpu(), e.detach().double().cpu()) for f, e in zip(found, expected, strict=True)]
    return max(float((f - e.view_as(f)).norm() / e.norm().clamp_min(1e-30)) for f, e in pairs)


def random(*shape, scale: float = 1.0):
    return scale * torch.randn(*shape, device=DEVICE)


# -- GAE ---------------------------------------------------------------------------------------------------------------


def gae() -> None:
    """1024 x 1024: 23 MB, of which a copy takes 5.4 us."""
    from torchrl_perf.functional import generalized_advantage_estimate
    from torchrl_perf.kernels import scan

    steps, envs = (24, 9) if DRY else (1024, 1024)
    numbers = [random(steps, envs) for _ in range(3)]
    done = torch.rand(steps, envs, device=DEVICE) < 0.02
    rows = [*numbers, done, done & (torch.rand(steps, envs, device=DEVICE) < 0.5)]
    wide = [each.cpu().t().unsqueeze(-1) for each in rows]
    expected = [each.squeeze(-1).t() for each in generalized_advantage_estimate(0.99, 0.95, *wide)]
    shapes = {"today": None} | {f"tiles {s}": s for s in ((8, 512, 16), (8, 1024, 32), (8, 512, 8), (16, 256, 8))}
    rule = scan.launch_shape
    for name, shape in shapes.items():
        if DRY and shape is not None:
            continue
        scan.launch_shape = rule if shape is None else (lambda *_, shape=shape, **__: shape)
        attempt("gae", name, lambda: scan.launch_gae(0.99, 0.95, *rows), expected, 1e-5, "target 13")
    scan.launch_shape = rule
    try:
        runs = gluon("gae_runs")
    except ImportError as error:
        print("gae: Triton has no Gluon:", error)
        return
    kinds = ((8, 2, 2),) if DRY else ((8, 8, 16), (8, 4, 32), (8, 8, 8), (8, 4, 16), (4, 8, 16), (8, 16, 16))
    for kind in kinds:
        shape = runs.Runs(*kind)
        attempt("gae", f"runs {kind}", lambda s=shape: runs.gae_in_runs(0.99, 0.95, *rows, s), expected, 1e-5)


def gluon(name: str):
    """A module of Gluon kernels, interpreted on a CPU."""
    import importlib

    if DEVICE.type == "cuda":
        return importlib.import_module(f"torchrl_perf.kernels.{name}")
    from tests.kernels.interpreted import gluon_kernels

    return gluon_kernels(name)


def attempt(part, name, call, expected, limit, note="", calls=10, work=None) -> float | None:
    """A variant: what it gives beside what it should, and its time; an error is told, and the next one tried."""
    global SEEN
    SEEN += 1
    if WARM is not None:
        if SEEN % WARM[1] == WARM[0]:
            with contextlib.suppress(Exception):  # the run that follows tells
                call()
        return None
    if time.monotonic() - START > LIMIT:
        print(f"{part} {name}: no time left")
        return None
    try:
        error = None if expected is None else error_of(call(), expected)
        us = timed(work or call, calls)
        say(part, name, us, error, limit, note(us) if callable(note) and us else "" if callable(note) else note)
        return us
    except Exception:  # noqa: BLE001  the others are to be measured all the same
        FAILED.append(f"{part}: {name} raised")
        print(f"{part} {name}: RAISED\n{traceback.format_exc(limit=-3)}", flush=True)
        return None


# -- the sum tree ------------------------------------------------------------------------------------------------------


def tree() -> None:
    """4,096 of 1,048,576 priorities: three launches, or two; then a whole sample and update of rows of 3 kB."""
    from torchrl_perf.kernels import dependent
    from torchrl_perf.kernels import priority_tree as kernels
    from torchrl_perf.replay import priority_tree as module

    slots, batch = (4160 * 2, 24) if DRY else (2**20, 4096)
    if DRY:
        module.tree_kernels = lambda words: kernels if hasattr(words, "is_interpreted") else None

    def made():
        tree = module.PriorityTree(slots, DEVICE, largest_top=4 if DRY else None)
        if DRY:
            tree._words.is_interpreted = True
            tree._running = tree._make_running()
        return tree

    index = torch.randint(slots, (batch,), device=DEVICE)
    weight = torch.rand(batch, device=DEVICE) + 0.1
    plain = torch.zeros(slots)
    for place, value in zip(index.tolist(), weight.tolist(), strict=True):
        plain[place] = value
    alpha, largest = torch.ones((), device=DEVICE), torch.ones((), device=DEVICE)
    switches = ((False, False), (True, False), (False, True), (True, True))
    for together, early in switches:
        if DRY and early:
            continue
        kernels.TOGETHER, dependent.EARLY = together, early
        ours = made()

        def work(ours=ours):
            ours.update_(index, weight, alpha=alpha, eps=0.0, max_priority=largest)

        def update(ours=ours, work=work):
            work()
            return ours.weights, ours.total, ours.minimum

        name = f"update, {2 if together else 3} launches{', early' if early else ''}"
        attempt("tree", name, update, (plain, plain.double().sum(), plain[plain > 0].min()), 1e-6, work=work)
    replay(kernels, switches[:1] if DRY else switches)
    kernels.TOGETHER, dependent.EARLY = True, False


def replay(kernels, switches) -> None:
    """Sample and update of a buffer, as `bench replay` measures them."""
    if DRY or WARM:
        return
    from torchrl_perf.bench.replay import fill, transitions
    from torchrl_perf.kernels import dependent
    from torchrl_perf.replay import make_replay_buffer
    from torchrl_perf.runtime import capture, time_cuda

    rows = 2**20
    buffer = make_replay_buffer(rows, batch_size=32, device=DEVICE, sampler="prioritized", alpha=0.6)
    fill(buffer, rows, DEVICE)
    buffer.update_priority(torch.arange(rows, device=DEVICE), torch.rand(rows, device=DEVICE))

    def step():
        sample = buffer.sample(4096)
        buffer.update_priority(sample["index"], sample["next", "reward"].view(-1).abs())
        return sample

    for together, early in switches:
        kernels.TOGETHER, dependent.EARLY = together, early
        call = capture(lambda: [step() for _ in range(10)][-1], audit=False)
        us = time_cuda(call, 30, device=DEVICE).median / 10
        name = f"sample + update, {2 if together else 3} launches{', early' if early else ''}"
        say(
            "replay",
            name,
            us,
            None,
            0,
            f"target 18, go for 15; rows of {sum(v.nbytes for v in transitions(2, DEVICE).values(True, True)) // 2} bytes",
        )
        call.release()
    call = capture(lambda: [buffer.sample(4096) for _ in range(10)][-1], audit=False)
    say("replay", "sample alone", time_cuda(call, 30, device=DEVICE).median / 10, None, 0)
    call.release()


# -- perceptrons whose weights stay on chip ----------------------------------------------------------------------------


def network(sizes, scale: float = 1.0):
    """Parameters as PPO's: the last layer small."""
    params = []
    for inputs, outputs in itertools.pairwise(sizes):
        params += [(random(outputs, inputs) / inputs**0.5).requires_grad_(), (0.1 * random(outputs)).requires_grad_()]
    return params


def resident() -> None:
    """256-256 at 65,536 rows, a minibatch of 2048 x 128, and forward alone at 262,144, the critic's in GAE."""
    from torchrl_perf.functional import resident as switch
    from torchrl_perf.functional.chain import chain, fused_chain
    from torchrl_perf.kernels import resident_launch

    sizes, rows = ((4, 24, 40, 2), 50) if DRY else ((4, 256, 256, 2), 65_536)
    params, x, grad = network(sizes), random(rows, sizes[0]), random(rows, sizes[-1], scale=1 / rows)
    if DRY:
        switch.room, resident_launch.ROWS = (lambda device: switch.ROOM), 16
    wide = [p.detach().double().requires_grad_() for p in params]
    y = chain(x.double(), wide, "tanh")
    expected = [y, *torch.autograd.grad(y, wide, grad.double())]
    del y
    flops = 2 * rows * sum(a * b for a, b in itertools.pairwise(sizes))

    def both(precision):
        y = fused_chain(x, params, "tanh", 0.0, precision)
        return [y.detach(), *torch.autograd.grad(y, params, grad)]

    many = random(4 * rows, sizes[0])

    def forward(precision):
        with torch.no_grad():
            return [fused_chain(many, params, "tanh", 0.0, precision)]

    least = switch.ROWS
    for precision, limit in (("tf32", 3e-3), ("bf16", 3e-2)):
        if DRY and precision == "bf16":
            continue
        variants = {"today": (2**60, 128), "on chip, whole": (8, 256), "on chip, by halves": (8, 128)}
        for name, (from_rows, part) in variants.items():
            if DRY and from_rows > 8:
                continue
            switch.ROWS, resident_launch.PART = from_rows, part // 4 if DRY else part
            note = lambda us, n=3 * flops: f"{n / us / 1e6:.0f} TFLOP/s; 32 of them {32 * us / 1e3:.1f} ms"
            attempt("resident", f"{precision} both ways, {name}", lambda: both(precision), expected, limit, note)
            attempt("resident", f"{precision} forward x 4, {name}", lambda: forward(precision), None, 0)
    switch.ROWS, resident_launch.PART = least, 128


# -- actor and critic in one launch ------------------------------------------------------------------------------------


def pair() -> None:
    """Actor and critic of 64-64: two launches each way, or one; at the rows of a minibatch of each size."""
    from torchrl_perf.functional.mlp import mlp
    from torchrl_perf.kernels import mlp as kernels
    from torchrl_perf.kernels import processors

    hidden, count = (32, 2) if DRY else (64, processors(DEVICE))
    precisions = ("ieee",) if DRY else ("tf32", "bf16")
    for rows, precision in itertools.product((40,) if DRY else (128, 65_536, 131_072), precisions):
        both = tuple([p.detach() for p in network((4, hidden, hidden, outputs))] for outputs in (2, 1))
        x, grads = random(rows, 4), tuple(random(rows, n, scale=1 / rows) for n in (2, 1))
        wide = [[p.double().requires_grad_() for p in params] for params in both]
        ys = [mlp(x.double(), params) for params in wide]
        expected = [y.detach() for y in ys]
        for y, params, grad in zip(ys, wide, grads, strict=True):
            expected += torch.autograd.grad(y, params, grad.double())
        del ys

        def parts(flat, both=both):
            return flat.split([p.numel() for params in both for p in params])

        def apart(both=both, x=x, grads=grads, precision=precision):
            y = [kernels.forward(x, params, "tanh", precision, count) for params in both]
            flat = [
                kernels.backward(grad, x, params, "tanh", precision, count)
                for grad, params in zip(grads, both, strict=True)
            ]
            return [*y, *parts(torch.cat(flat))]

        def together(both=both, x=x, grads=grads, precision=precision):
            y = kernels.forward_of(both, x, "tanh", precision, count)
            return [*y, *parts(kernels.backward_of(grads, both, x, "tanh", precision, count))]

        limit = {"ieee": 1e-5, "tf32": 5e-3, "bf16": 4e-2}[precision]
        attempt("pair", f"{rows} rows, {precision}, today (and a cat)", apart, expected, limit)
        attempt("pair", f"{rows} rows, {precision}, one launch", together, expected, limit)


def small() -> None:
    """The backward kernel of 64-64 in other tiles: today's spills 280 bytes a thread in TF32."""
    from torchrl_perf.functional.mlp import mlp
    from torchrl_perf.kernels import mlp as kernels
    from torchrl_perf.kernels import processors
    from torchrl_perf.kernels.launch import launch

    hidden, count = (32, 2) if DRY else (64, processors(DEVICE))
    tiles = ((64, 4, 2), (64, 8, 1), (128, 8, 1), (32, 4, 2), (32, 8, 1), (32, 8, 2), (16, 4, 3), (16, 4, 4))
    precisions = ("ieee",) if DRY else ("tf32", "bf16")
    for rows, precision in itertools.product((40,) if DRY else (65_536, 131_072), precisions):
        params = [p.detach() for p in network((4, hidden, hidden, 2))]
        x, grad = random(rows, 4), random(rows, 2, scale=1 / rows)
        wide = [p.double().requires_grad_() for p in params]
        expected = torch.autograd.grad(mlp(x.double(), wide), wide, grad.double())
        sizes = [p.numel() for p in params]
        constants = kernels._constants((params,), "tanh", precision)
        for block, warps, each in tiles[:1] if DRY else tiles:
            programs = min(-(-rows // block), each * count)
            part = x.new_empty(programs, sum(sizes))

            def backward(block=block, warps=warps, programs=programs, part=part):
                launch(
                    kernels._backward_kernel, (programs, 1),
                    (x, (grad,), *((p,) for p in params[:5]), part, rows, *x.stride(), *grad.stride(), *grad.stride()),
                    {**constants, "BLOCK": block}, num_warps=warps, num_stages=1,
                )  # fmt: skip
                return part.sum(0).split(sizes)

            limit = {"ieee": 1e-5, "tf32": 5e-3, "bf16": 4e-2}[precision]
            is_today = " (today)" if (block, warps, each) == tiles[0] else ""
            name = f"{rows} rows, {precision}, {block} rows, {warps} warps, x {each}{is_today}"
            attempt("backward", name, backward, expected, limit)


# -- many rows ---------------------------------------------------------------------------------------------------------


def many() -> None:
    """The networks' passes of a SAC update with 512-256-128 in bf16, on 32,768 and 8,192 rows."""
    for rows in (40,) if DRY else (32_768, 8_192):
        update_of(rows)


def update_of(rows: int) -> None:
    """The passes of one update."""
    from torchrl_perf.functional.members import Members, members
    from torchrl_perf.kernels import layered_launch, members_launch

    hidden = (24, 33, 20) if DRY else (512, 256, 128)
    precision, limit = ("fp16", 0.1) if DRY else ("bf16", 0.2)  # relu: a rounded number may fall on its other side
    if DRY:
        members_launch.MANY_ROWS, layered_launch.ROWS, layered_launch.WIDE = 32, 32, 20
        layered_launch.TILES = members_launch.Tiles(16, 32, 16)

    def made(size, inputs, outputs, inner):
        sizes = (inputs, *hidden, outputs)
        shapes = [(b, a) if inner else (size, a, b) for a, b in itertools.pairwise(sizes)]
        weights = [random(*s, scale=(s[1] if inner else s[1]) ** -0.5) for s in shapes]
        biases = [random(*((b,) if inner else (size, 1, b)), scale=0.1) for b in sizes[1:]]
        return Members(weights, biases, activation="relu", precision=precision, inner=inner)

    actor = made(1, 17, 12, True)
    critics, targets = made(2, 23, 1, False), made(2, 23, 1, False)
    states, taken = random(1, 2 * rows, 17), random(2, rows, 23)
    g, g_actor = random(2, rows, 1, scale=1 / rows), random(1, rows, 12, scale=1 / rows)

    def update():
        y, of_actor = actor.forward(states)
        values, kept = critics.forward(taken, beside=targets)
        gradients, _ = critics.backward(g, kept, taken[:1])
        again, kept = critics.forward(taken[:1])
        _, dx = critics.backward(g, kept, needs_x=True)
        of_policy, _ = actor.backward(g_actor, of_actor, states)
        return [y, values, again, dx, *gradients.values, *of_policy.values]

    def reference():
        def wide(net):
            return [[p.detach().double().requires_grad_() for p in group] for group in net.groups if group]

        mine, theirs, policy = wide(critics), wide(targets), wide(actor)
        of_policy = [[p.mT.unsqueeze(0) if p.ndim == 2 else p.view(1, 1, -1) for p in group] for group in policy]
        y = members(states.double(), of_policy, "relu")
        x = taken[:1].double().repeat(2, 1, 1).requires_grad_()
        first = members(x, mine, "relu")
        values = torch.cat([first, members(taken[1:].double().repeat(2, 1, 1), theirs, "relu")])
        order = [group[n] for n in range(len(hidden) + 1) for group in mine]
        grads = torch.autograd.grad(first, [*order, x], g.double())
        learnt = [group[n] for n in range(len(hidden) + 1) for group in policy]
        of_policy = torch.autograd.grad(y[:, :rows], learnt, g_actor.double())
        return [y, values, first, grads[-1], *grads[:-1], *of_policy]

    expected = reference()
    work = [sum(a * b for a, b in itertools.pairwise((n, *hidden, m))) for n, m in ((17, 12), (23, 1))]
    # forward: actor of 2 B rows, six critics; backward: critics' both products, critics' one, actor's both
    flops = 2 * rows * (2 * work[0] + 6 * work[1] + 4 * work[1] + 2 * work[1] + 2 * work[0])
    note = lambda us: f"{flops / us / 1e6:.0f} TFLOP/s of 395"
    before, least = layered_launch.TILES, layered_launch.ROWS
    layered_launch.ROWS = min(rows, least)
    ways = [("today", "none", before)]
    kinds = ((16, 32, 16),) if DRY else ((128, 128, 64, 4, 3), (128, 256, 64, 8, 3))
    for kind, way in ((kinds[0], "own"), (kinds[0], "cublas"), (kinds[-1], "own"))[: 2 if rows < 10_000 else 3]:
        ways.append((f"{way} {kind}", way, members_launch.Tiles(*kind)))
    for name, way, kind in ways:
        layered_launch.WAY, layered_launch.TILES = way, kind
        attempt("many rows", f"{rows}, {name}", update, expected, limit, note, calls=3)
    layered_launch.WAY, layered_launch.TILES, layered_launch.ROWS = "own", before, least
    if rows > 10_000 or DRY:
        layers(rows, hidden)


def robot() -> None:
    """48-512-256-128-12 with elu at 24,576 rows, a minibatch of 4096 x 24: the chain of today, or layer by layer."""
    from torchrl_perf.functional.chain import chain, fused_chain
    from torchrl_perf.functional.members import Members
    from torchrl_perf.kernels import layered_launch, members_launch

    sizes, rows = ((9, 33, 24, 20, 3), 40) if DRY else ((48, 512, 256, 128, 12), 24_576)
    params, x, grad = network(sizes), random(rows, sizes[0]), random(rows, sizes[-1], scale=1 / rows)
    wide = [p.detach().double().requires_grad_() for p in params]
    y = chain(x.double(), wide, "elu")
    expected = [y.detach(), *torch.autograd.grad(y, wide, grad.double())]
    del y
    flops = 6 * rows * sum(a * b for a, b in itertools.pairwise(sizes))
    note = lambda us: f"{flops / us / 1e6:.0f} TFLOP/s; 40 of them {40 * us / 1e3:.1f} ms"
    before = layered_launch.TILES, layered_launch.ROWS, layered_launch.PRECISIONS
    layered_launch.PRECISIONS = ("tf32", "bf16", "fp16")
    if DRY:
        members_launch.MANY_ROWS, layered_launch.ROWS, layered_launch.WIDE = 32, 32, 20
    for precision, limit in (("fp16", 1e-2),) if DRY else (("tf32", 3e-3), ("bf16", 3e-2)):

        def today(precision=precision):
            y = fused_chain(x, params, "elu", 0.0, precision)
            return [y.detach(), *torch.autograd.grad(y, params, grad)]

        def plain(precision=precision):
            with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
                y = chain(x, params, "elu").float()
            return [y.detach(), *torch.autograd.grad(y, params, grad)]

        attempt("robot", f"{precision}, today", today, expected, limit, note)
        if not DRY:
            attempt("robot", f"{precision}, plain PyTorch", plain, expected, limit, note)
        net = Members([p.detach() for p in params[::2]], [p.detach() for p in params[1::2]], activation="elu",
                      precision=precision, inner=True)  # fmt: skip

        def layered(net=net):
            y, kept = net.forward(x[None])
            gradients, _ = net.backward(grad[None], kept, x[None])
            return [y, *gradients.values]

        first, second = ((16, 32, 16), (32, 32, 16)) if DRY else ((128, 128, 64, 4, 3), (64, 128, 64, 4, 4))
        for kind, way in ((first, "own"), (first, "cublas"), (second, "own")):
            layered_launch.WAY, layered_launch.TILES = way, members_launch.Tiles(*kind)
            attempt("robot", f"{precision}, {way} {kind}", layered, expected, limit, note)
    layered_launch.TILES, layered_launch.ROWS, layered_launch.PRECISIONS = before
    layered_launch.WAY = "own"


def layers(rows, hidden) -> None:
    """Products of the hidden layers alone, in cuBLAS: what is possible, with and without its epilogues."""
    if WARM:
        return
    dtype = torch.float32 if DRY else torch.bfloat16
    for depth, width in itertools.pairwise(hidden):
        a, w, b = random(rows, depth).to(dtype), random(width, depth).to(dtype), random(width).to(dtype)
        d, out = random(rows, width).to(dtype), torch.empty(rows, width, dtype=dtype, device=DEVICE)
        rate = lambda us, n=2 * rows * depth * width: f"{n / us / 1e6:.0f} TFLOP/s"
        attempt("cublas", f"{depth}-{width} up", lambda: torch.mm(a, w.t(), out=out), None, 0, rate)
        attempt("cublas", f"{depth}-{width} up, bias", lambda: torch.addmm(b, a, w.t(), out=out), None, 0, rate)
        attempt(
            "cublas", f"{depth}-{width} up, bias and relu", lambda: torch._addmm_activation(b, a, w.t()), None, 0, rate
        )
        attempt("cublas", f"{depth}-{width} down", lambda: torch.mm(d, w), None, 0, rate)
        attempt("cublas", f"{depth}-{width} weights", lambda: torch.mm(d.t(), a), None, 0, rate)
        two, four = a.expand(2, *a.shape).contiguous(), w.t().expand(2, depth, width).contiguous()
        attempt("cublas", f"{depth}-{width} up, two at once", lambda: torch.bmm(two, four), None, 0,
                lambda us, n=4 * rows * depth * width: f"{n / us / 1e6:.0f} TFLOP/s")  # fmt: skip


# -- whole iterations --------------------------------------------------------------------------------------------------


def whole() -> None:
    """PPO and SAC as the benches have them. They compile, so that they take what is left of the time."""
    if DRY or WARM:
        return
    from torchrl_perf.bench.ppo import BenchPPO, measure
    from torchrl_perf.functional import resident as switch

    least, options = switch.ROWS, BenchPPO(hidden_sizes=(256, 256), repeats=10)
    for name, from_rows, variant in (
        ("on chip", least, "graph"),
        ("on chip", least, "graph-bf16"),
        ("today", 2**60, "graph"),
    ):
        if time.monotonic() - START > LIMIT - 45:
            print("whole", name, variant, ": no time left")
            continue
        switch.ROWS = from_rows
        row = measure(variant, "2048x128", "cuda", options)
        note = ", ".join(f"{key[:-3]} {row[key]:.2f} ms" for key in row if key.endswith("_ms") and key[0] != "p")
        say(
            "whole",
            f"PPO 256-256, {variant}, {name}",
            1e3 * row["ms"],
            None,
            0,
            f"{row['steps_per_second'] / 1e6:.1f} M steps/s of 27; {note}",
        )
    switch.ROWS = least


def early() -> None:
    """PPO of 64-64 with launches that overlap, of the compiler's kernels and of ours: some thousand small ones."""
    if DRY or WARM:
        return
    from torch._inductor import config

    from torchrl_perf.bench.ppo import BenchPPO, measure
    from torchrl_perf.kernels import dependent

    for shape, is_early in itertools.product(("4x128", "2048x128"), (False, True)):
        if time.monotonic() - START > LIMIT - 40:
            print("early", shape, is_early, ": no time left")
            continue
        dependent.EARLY = is_early
        with config.patch("triton.enable_pdl", is_early):
            row = measure("graph", shape, "cuda", BenchPPO(repeats=20))
        note = ", ".join(f"{key[:-3]} {row[key]:.2f} ms" for key in row if key.endswith("_ms") and key[0] != "p")
        say(
            "early",
            f"PPO 64-64, {shape}, {'overlapping' if is_early else 'today'}",
            1e3 * row["ms"],
            None,
            0,
            f"{row['steps_per_second'] / 1e6:.2f} M steps/s; {note}",
        )
    dependent.EARLY = False


PARTS = {
    "gae": gae,
    "tree": tree,
    "resident": resident,
    "small": small,
    "pair": pair,
    "many": many,
    "robot": robot,
    "whole": whole,
    "early": early,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--limit", type=float, default=220.0)
    parser.add_argument("--warm", type=int, nargs=2)
    given = parser.parse_args()
    WARM = tuple(given.warm) if given.warm else None
    DRY, LIMIT = given.dry, given.limit
    DEVICE = torch.device("cpu" if DRY else "cuda")
    if DRY and os.environ.get("TRITON_INTERPRET") != "1":
        sys.exit("--dry: expected TRITON_INTERPRET=1 in the environment. Remedy: set it.")
    torch.manual_seed(0)
    if not DRY:
        torch.backends.cuda.matmul.allow_tf32 = True
        print(torch.cuda.get_device_name(), torch.__version__)
    for chosen in given.parts:
        try:
            PARTS[chosen]()
        except Exception:  # noqa: BLE001
            FAILED.append(f"{chosen} raised")
            traceback.print_exc()
        print(f"-- {chosen}: {time.monotonic() - START:.0f} s in all", flush=True)
    print("\n".join(["", *LINES, "", f"{len(FAILED)} failed: {FAILED}" if FAILED else "all equal"]))
    sys.exit(bool(FAILED))
