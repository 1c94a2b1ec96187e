"""The claims of active_dynamics on its loss: cached weights of the divergences, masks, a cached variance."""

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.profiler import profile

from studies.counts import counts
from studies.originals.latent_loss import (
    CachedPowers,
    CachedVariance,
    LoopLoss,
    MaskBuffer,
    mask_anew,
    powers,
)
from studies.sitting import CONFIRMED, NOT_REPRODUCED, Sitting, Variant, judge, times_text
from torchrl_perf.functional.losses.elbo import decayed_weights, temporal_mask
from torchrl_perf.systems.active_dynamics import MultiStepELBOLoss
from torchrl_perf.systems.active_dynamics.config import ActiveDynamicsConfig
from torchrl_perf.systems.active_dynamics.networks import make_field_env, make_seq_vae
from torchrl_perf.systems.active_dynamics.seq_vae import SeqVAE

AHEAD, DECAY, STEPS, RATE = 5, 0.8, 20, 0.2
ANEW, KEPT, KEYED, BUFFER = "from a list, each time", "kept after the first time", "kept by arguments", "buffer"
LOSS_ANEW, LOSS_KEPT = "weights anew", "weights kept"
BY_START, PACKAGE, GRAPH = "weights anew, start by start", "package", "package, in a graph"
FRESH, OUT, ONE, IN_PLACE = "ones, bernoulli", "ones, into a buffer", "package, one tensor", "a buffer, in place"
COMPUTED, CACHED = "computed each time", "kept with its graph"


def tolerance(sitting: Sitting) -> float:
    """Largest difference of losses of about 30 nats."""
    return 5e-3 if sitting.cuda else 2e-4


def make_model(device: torch.device) -> SeqVAE:
    """The model of the default settings."""
    config = ActiveDynamicsConfig.without_task()
    return make_seq_vae(config, make_field_env(config, device, 1))


def windows(batch: int, device: torch.device) -> TensorDict:
    """Windows ``[B, 20]`` of counts and inputs, each the beginning of an episode."""
    draw = torch.Generator().manual_seed(4)
    entries = {
        "observation": torch.poisson(torch.full((batch, STEPS, 20), 1.0), generator=draw),
        "action": torch.randn(batch, STEPS, 2, generator=draw) * 0.3,
        "is_init": torch.zeros(batch, STEPS, 1, dtype=torch.bool),
    }
    entries["is_init"][:, 0] = True
    return TensorDict(entries, [batch]).to(device)


def memory_events(found: profile) -> list[tuple[int, int]]:
    """Time and bytes, negative where they are given back, of each block of memory that a profile saw, in order."""
    events: Sequence[Any] = found.profiler.kineto_results.events() if found.profiler is not None else []
    return sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")


# -- weights and divergences ------------------------------------------------------------------------------------------


def divergences(sitting: Sitting) -> None:
    """Weights alone, the loss that they are a part of, and whether kept weights are the right ones."""
    alone = _weights(sitting)
    sizes = sitting.pick((4,), (16, 256), (16, 256, 4096))
    for batch in sizes:
        _loss_case(sitting, batch)
    cases = [f"B={batch}" for batch in sizes]
    whole = sitting.ratio_of("kl", LOSS_ANEW, LOSS_KEPT, cases)
    least = min(row["us"] for row in sitting.rows if row["experiment"] == "kl" and row["variant"] == LOSS_ANEW)
    share = alone / least
    sitting.verdict(
        "kl",
        "KL computation is 60-80% faster",
        f"{times_text(whole)} of loss and gradient",
        judge(whole, 2.5, 1.1),
        f"the weights take {alone:.3g} us, {share:.2%} of the loss and its gradient",
    )
    ours = sitting.ratio_of("kl", LOSS_ANEW, GRAPH if sitting.cuda else PACKAGE, cases)
    sitting.verdict("kl", "the package's loss is as fast or faster", times_text(ours), judge(ours, 0.95, 0.8))
    batched = sitting.ratio_of("kl", BY_START, PACKAGE, cases)
    sitting.verdict(
        "kl",
        "all starts at once are 60-80% faster than one after the other",
        times_text(batched),
        judge(batched, 2.5, 1.1),
    )
    _stale(sitting)


def _weights(sitting: Sitting) -> float:
    """Microseconds of the weights from a list."""
    device, kept = sitting.device, CachedPowers()
    buffer = decayed_weights(AHEAD, DECAY, device=device).clone()

    def whole(make: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return lambda: make() / make().sum()

    listed, cached = partial(powers, DECAY, AHEAD, device), partial(kept, DECAY, AHEAD, device)
    variants = [
        Variant(ANEW, listed, whole(listed)),
        Variant(KEPT, cached, whole(cached)),
        Variant(KEYED, partial(decayed_weights, AHEAD, DECAY, device=device)),
        Variant(BUFFER, lambda: buffer),
    ]
    rows = sitting.compare("kl", "weights alone", variants, tolerance=1e-6)
    found = sitting.ratio_of("kl", ANEW, KEPT, ["weights alone"])
    sitting.verdict("kl", "the weights alone are 60-80% faster", times_text(found), judge(found, 2.5, 1.1))
    return rows[ANEW]["us"]


def _loss_case(sitting: Sitting, batch: int) -> None:
    """Loss and gradient; all forms draw the same random numbers in the same order."""
    td, device = windows(batch, sitting.device), sitting.device
    torch.manual_seed(0)
    model = make_model(device)
    losses: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {}
    for name, options in ((LOSS_ANEW, {}), (LOSS_KEPT, {"cached": True}), (BY_START, {"by_start": True})):
        losses[name] = partial(LoopLoss(model, **options), td["observation"], td["action"])
    losses[PACKAGE] = package_loss(model, td)

    def gradient(of: SeqVAE, call: Callable[[], tuple[Tensor, Tensor]]) -> None:
        of.zero_grad(set_to_none=True)
        recon, kl = call()
        (recon + kl).backward()

    def seeded(call: Callable[[], tuple[Tensor, Tensor]]) -> list[Tensor]:
        torch.manual_seed(7)
        gradient(model, call)
        steepness = model.dynamics.input_matrix.grad
        assert steepness is not None
        torch.manual_seed(7)
        with torch.no_grad():
            return [*(part.clone() for part in call()), steepness.clone()]

    variants = [Variant(name, partial(gradient, model, call), partial(seeded, call)) for name, call in losses.items()]
    graph = None
    if sitting.cuda:  # a graph keeps the gradients of its own model
        own = copy.deepcopy(model)
        graph = sitting.graph(partial(gradient, own, package_loss(own, td)))
        variants.append(Variant(GRAPH, graph, compared=False, note="the same function, recorded"))
    sitting.compare("kl", f"B={batch}", variants, tolerance=tolerance(sitting))
    if graph is not None:
        graph.release()


def package_loss(model: SeqVAE, td: TensorDictBase, rate: float = 0.0) -> Callable[[], tuple[Tensor, Tensor]]:
    """The package's loss of windows, as its two parts."""
    loss = MultiStepELBOLoss(model, horizon=AHEAD, decay=DECAY, samples=5, mask_rate=rate)

    def call() -> tuple[Tensor, Tensor]:
        found = loss(td)
        return cast("Tensor", found["loss_recon"]), cast("Tensor", found["loss_kl"])

    return call


def _stale(sitting: Sitting) -> None:
    """Another decay and another number of steps, after those that were asked for first."""
    device, kept = sitting.device, CachedPowers()
    kept(DECAY, AHEAD, device)
    wrong = {}
    for decay, ahead in ((0.5, AHEAD), (DECAY, 3)):
        right = powers(decay, ahead, device).double()
        for name, found in (
            (KEPT, kept(decay, ahead, device).double()),
            (KEYED, decayed_weights(ahead, decay, device=device).double() * right.sum()),
        ):
            fits = found.shape == right.shape and bool((found - right).abs().max() < 1e-6)
            wrong[name] = wrong.get(name, 0) + (not fits)
            entries: dict[str, Any] = {"ok": fits} if name == KEYED else {}
            note = "right" if fits else "those of the first call"
            sitting.add("kl", f"decay={decay}, K={ahead}", name, fits=fits, note=note, **entries)
    sitting.verdict(
        "kl",
        "kept weights are those that are asked for",
        f"{wrong[KEPT]} of 2 changes not seen; by arguments {wrong[KEYED]}",
        CONFIRMED if not wrong[KEPT] else NOT_REPRODUCED,
        "kept without a key, and not normalised",
    )


# -- masks ------------------------------------------------------------------------------------------------------------


def masking(sitting: Sitting) -> None:
    """A mask of 20 steps: time, bytes, and what a buffer does to a gradient that still needs it."""
    device, size = sitting.device, {}
    buffer, kept = MaskBuffer(STEPS, device), torch.empty(STEPS, 1, device=device)
    calls: dict[str, Callable[[], Tensor]] = {
        FRESH: partial(mask_anew, STEPS, RATE, device),
        OUT: partial(buffer, STEPS, RATE, device),
        ONE: partial(temporal_mask, STEPS, 1, rate=RATE, device=device),
        IN_PLACE: lambda: kept.bernoulli_(1.0 - RATE),
    }
    count = 40_000
    forms: dict[str, Callable[[], Tensor]] = {
        FRESH: partial(mask_anew, count, RATE, device),
        OUT: lambda: MaskBuffer(count, device)(count, RATE, device),
        ONE: partial(temporal_mask, count, 1, rate=RATE, device=device),
        IN_PLACE: lambda: torch.empty(count, 1, device=device).bernoulli_(1.0 - RATE),
    }
    variants = [Variant(name, call, partial(_rates, forms[name])) for name, call in calls.items()]
    # five standard errors of a difference of two shares of 40,000
    rows = sitting.compare("masking", f"T={STEPS}", variants, tolerance=5 * math.sqrt(2 * RATE * (1 - RATE) / count))
    for name, row in rows.items():
        size[name] = row["bytes"] = counts(calls[name], device)["bytes"]
        row["note"] = f"{size[name]} bytes of new tensors"
    saved = {name: 1 - size[name] / size[FRESH] for name in (OUT, ONE, IN_PLACE)}
    td = windows(16, device)
    loss = counts(package_loss(make_model(device), td, RATE), device)["bytes"]
    sitting.verdict(
        "masking",
        "40-60% less memory for masks",
        f"{saved[OUT]:.0%} less; one tensor {saved[ONE]:.0%}, in place {saved[IN_PLACE]:.0%}",
        judge(saved[OUT], 0.4, 0.05),
        f"the probabilities are still made at each call; of the loss's new tensors a mask is {size[FRESH] / loss:.4%}",
    )
    found = sitting.ratio_of("masking", FRESH, OUT)
    ours = sitting.ratio_of("masking", FRESH, ONE)
    text = f"{times_text(found)}; package {times_text(ours)}"
    sitting.verdict("masking", "faster temporal masking", text, judge(found, 1.1, 0.95))
    _reused(sitting)


def _rates(make: Callable[[], Tensor]) -> Tensor:
    """The share of ones, and the share of what is neither 0 nor 1."""
    drawn = make()
    return torch.stack([drawn.mean(), 1.0 - ((drawn == 0) | (drawn == 1)).float().mean()])


def _reused(sitting: Sitting) -> None:
    """Two losses, differentiated together: autograd still needs the first mask when the second is drawn."""
    device, failed = sitting.device, {}
    buffer = MaskBuffer(STEPS, device)
    ways: dict[str, Callable[[], Tensor]] = {
        OUT: partial(buffer, STEPS, RATE, device),
        ONE: partial(temporal_mask, STEPS, 1, rate=RATE, device=device),
    }
    for name, make in ways.items():
        latent = torch.ones(STEPS, 2, device=device, requires_grad=True)
        total = (make() * latent).sum() + (make() * latent).sum()
        try:
            total.backward()
            failed[name] = False
        except RuntimeError:
            failed[name] = True
        note = "refused by autograd" if failed[name] else "differentiated"
        sitting.add(
            "masking", "two losses at once", name, note=note, **({"ok": not failed[name]} if name == ONE else {})
        )
    sitting.verdict(
        "masking",
        "a mask in a buffer does as well as a new one",
        "refused by autograd where two losses are differentiated together" if failed[OUT] else "it does",
        NOT_REPRODUCED if failed[OUT] else CONFIRMED,
        "right as long as each loss is differentiated before the next mask is drawn",
    )


# -- the cached variance ----------------------------------------------------------------------------------------------


def variance(sitting: Sitting) -> None:
    """A variance that is kept with its graph: what it saves, and what it is after an update."""
    modules = {
        name: CachedVariance(2, cached=cached, device=sitting.device)
        for name, cached in ((COMPUTED, False), (CACHED, True))
    }
    sitting.compare("variance", "S=2", [Variant(name, module) for name, module in modules.items()])
    found = sitting.ratio_of("variance", COMPUTED, CACHED)
    text = f"{times_text(found)} of a single operation"
    sitting.verdict("variance", "a cached variance is faster", text, judge(found, 1.5, 1.05))
    faults = {name: _after_update(module) for name, module in modules.items()}
    for name, (off, again) in faults.items():
        note = f"off by {off:.2g} after an update; a second gradient {'works' if again else 'is refused'}"
        entries = {"ok": off == 0.0 and again} if name == COMPUTED else {}
        sitting.add("variance", "after an update", name, stale_by=off, second_gradient=again, note=note, **entries)
    off, again = faults[CACHED]
    sitting.verdict(
        "variance",
        "training convergence is unchanged by the cache",
        f"stale by {off:.2g} after one update, a second gradient {'works' if again else 'is refused'}",
        CONFIRMED if off == 0.0 and again else NOT_REPRODUCED,
        "the package computes it each time",
    )


def _after_update(module: CachedVariance) -> tuple[float, bool]:
    """How far the variance is from that of its parameter after a step of SGD, and whether a second gradient works."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module().sum().backward()
    optimizer.step()
    with torch.no_grad():
        right = torch.nn.functional.softplus(module.raw) + 1e-5
        off = float((module() - right).abs().max())
    try:
        module().sum().backward()
    except RuntimeError:
        return off, False
    return off, True
