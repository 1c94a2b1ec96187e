"""The claims of options_market, SAC with options on a market, on what surrounds an update: choices, copies, dicts.

Those on what is kept are in :mod:`~studies.options_market.data`, those on what is logged in
:mod:`~studies.options_market.log`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from studies.counts import counts
from studies.options_market import data as market_data
from studies.options_market import log as market_log
from studies.options_market.agents import (
    ENVS,
    NUM_OPTIONS,
    OBSERVATION,
    WindowEncoder,
    dicts_of,
    market,
    serial_actor,
)
from studies.originals import dict_replay
from studies.originals.options import SerialSelector, available, end_probability
from studies.sitting import NOT_HERE, Sitting, Variant, judge, times_text
from torchrl_perf.envs.market import PARTS, OptionRules, flatten, option_set
from torchrl_perf.modules import MixedSequential
from torchrl_perf.modules.option_actor import OptionActor
from torchrl_perf.modules.options import OptionController
from torchrl_perf.runtime import Upload

SERIAL, ARRAYS, RESIDENT, GRAPH = "one env after the other", "one pass, arrays", "one pass, on the device", "in a graph"
MOST_ROWS = 16
"""Most envs that a loop over envs is timed on; each takes the same."""
TWICE, STACKED, ARRAY = "tensor(np.array(list))", "from_numpy(np.array(list))", "from_numpy(array)"
STAGED, NONE = "Upload", "on the device"
LISTED, BY_KEY, CAT = "a dict after the other", "an array, key by key", "cat of tensors"


def tolerance(sitting: Sitting) -> float:
    """Largest difference of outputs; products on CUDA may be in TF32."""
    return 5e-3 if sitting.cuda else 1e-5


# -- inference --------------------------------------------------------------------------------------------------------


def inference(sitting: Sitting) -> None:
    """The actor's actions, one env after the other and all at once, from arrays and from tensors."""
    sizes = sitting.pick((16, 64), (16, 64, 256, 1024, 4096), (16, 64, 1024, 4096))
    for kind in ("MLP", "transformer"):
        for size in sizes if kind == "MLP" else sitting.pick((16,), (16,), (16, 1024)):
            _inference_case(sitting, kind, size)
    own = [row for row in sitting.rows if row["experiment"] == "inference" and row["case"] == f"MLP, N={ENVS}"]
    reads = {row["variant"]: row.get("reads") for row in own}
    found = {
        kind: sitting.ratio_of("inference", SERIAL, ARRAYS, [f"{kind}, N={ENVS}"]) for kind in ("MLP", "transformer")
    }
    sitting.verdict(
        "inference",
        "SAC inference 16x: one call in place of 16",
        f"{reads.get(SERIAL)} reads of the device become {reads.get(ARRAYS)}; "
        + ", ".join(f"{times_text(values)} ({kind})" for kind, values in found.items()),
        judge([value for values in found.values() for value in values], 16.0, 1.5),
        "16x is how many calls are saved, not how much time",
    )
    best = GRAPH if sitting.cuda else RESIDENT
    ours = sitting.ratio_of("inference", SERIAL, best, [f"MLP, N={ENVS}"])
    sitting.verdict(
        "inference", "16x by a batch that stays on the device", times_text(ours), judge(ours, 16.0, 1.5), "16 envs"
    )
    last = f"MLP, N={sizes[-1]}"
    most = sitting.ratio_of("inference", SERIAL, best, [last])
    sitting.verdict(
        "inference", f"one pass scales to {sizes[-1]:,} envs", times_text(most), judge(most, 16.0, 2.0), "MLP"
    )


def make_actor(kind: str, device: torch.device) -> OptionActor:
    """An actor of two layers of 512, of the flat observation or of the transformer's; the same at each call."""
    torch.manual_seed(0)
    env, _ = market(2, device)
    others = OBSERVATION - WindowEncoder.bars * WindowEncoder.columns + NUM_OPTIONS
    trunk: list[nn.Module] = [WindowEncoder(others)] if kind == "transformer" else []
    size = WindowEncoder.width + others if trunk else OBSERVATION + NUM_OPTIONS
    layers = [nn.Linear(size, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 2)]
    network = MixedSequential(*trunk, *layers).to(device)
    return OptionActor(network, option_set(env, rules=OptionRules.of_price()), spec=env.action_spec)


def _inference_case(sitting: Sitting, kind: str, size: int) -> None:
    actor = make_actor(kind, sitting.device)
    _, td = market(size, sitting.device, steps=2)
    rows, options = td["observation"], torch.arange(size, device=sitting.device) % NUM_OPTIONS
    arrays, numbers = rows.cpu().numpy(), options.tolist()
    serial, few = serial_actor(actor, sitting.device), min(size, MOST_ROWS)

    def one_by_one(greedy: bool = False) -> Tensor:
        pairs = zip(arrays[:few], numbers[:few], strict=True)
        return torch.from_numpy(np.array([serial.predict_one(row, option, greedy=greedy) for row, option in pairs]))

    def at_once(greedy: bool = False) -> Tensor:
        return torch.from_numpy(serial.predict_all(arrays, numbers, greedy=greedy))

    def resident() -> Tensor:
        return serial.act(rows, options)

    def greedy() -> Tensor:
        return serial.act(rows, options, greedy=True)[:few]

    variants = [
        Variant(SERIAL, one_by_one, partial(one_by_one, True), scale=size / few),
        Variant(ARRAYS, at_once, lambda: at_once(True)[:few]),
        Variant(RESIDENT, resident, greedy),
    ]
    graph = sitting.graph(resident) if sitting.cuda else None
    if graph is not None:
        variants.append(Variant(GRAPH, graph, compared=False, note="the same function, recorded"))
    found = sitting.compare("inference", f"{kind}, N={size}", variants, tolerance=tolerance(sitting))
    calls: dict[str, Callable[[], Any]] = {SERIAL: one_by_one, ARRAYS: at_once, RESIDENT: resident}
    for name, row in found.items():
        row["us_an_action"] = row["us"] / size
        factor = size / few if name == SERIAL else 1.0
        counted = counts(calls[name], sitting.device) if name in calls else {}
        row |= {key: round(value * factor) for key, value in counted.items()}
    if graph is not None:
        graph.release()


# -- choice of options ------------------------------------------------------------------------------------------------


def selection(sitting: Sitting) -> None:
    """A choice of an option for each env: rules in Python and a network for each, and all in one pass."""
    sizes = sitting.pick((16, 64), (16, 64, 256, 1024, 4096), (16, 64, 1024, 4096))
    for size in sizes:
        _selection_case(sitting, size)
    cases = [f"N={size}" for size in sizes]
    after = sitting.ratio_of("selection", SERIAL, ARRAYS, cases[:1])
    sitting.verdict(
        "selection",
        "option selection 10-16x (one pass of the network)",
        times_text(after),
        judge(after, 10.0, 1.5),
        "16 envs; rules and flattening stay a loop in Python",
    )
    best = GRAPH if sitting.cuda else RESIDENT
    for case, where in ((cases[0], "16 envs"), (cases[-1], f"{sizes[-1]:,} envs")):
        ours = sitting.ratio_of("selection", SERIAL, best, [case])
        sitting.verdict(
            "selection",
            f"option selection 10-16x (rules as tensors, {where})",
            times_text(ours),
            judge(ours, 10.0, 1.5),
        )


def _selection_case(sitting: Sitting, size: int) -> None:
    device, few = sitting.device, min(size, MOST_ROWS)
    env, seen = market(size, device, steps=12)
    torch.manual_seed(0)
    layers = [nn.Linear(OBSERVATION, 512), nn.LayerNorm(512), nn.ReLU(), nn.Linear(512, 512), nn.LayerNorm(512)]
    network = MixedSequential(*layers, nn.ReLU(), nn.Linear(512, NUM_OPTIONS)).to(device)
    # of the flat observation alone, as in training; the loops have the dicts
    flat = TensorDict({"observation": seen["observation"]}, [size], device=device)
    flat.set("option", torch.arange(size, device=device) % NUM_OPTIONS)
    flat.set("option_age", torch.zeros(size, dtype=torch.int64, device=device))
    controller = OptionController(network, option_set(env, rules=OptionRules.of_price()), example=flat)
    selector, dicts = SerialSelector(network, device), dicts_of(seen)

    @torch.no_grad()
    def ours() -> Tensor:
        return controller.choose(flat, explore=True).option

    def one_by_one() -> list[Any]:
        return [selector.select_one(observation) for observation in dicts[:few]]

    def at_once() -> Any:
        return selector.select_all(dicts)

    variants = [
        Variant(SERIAL, one_by_one, lambda: _judged(selector, dicts[:few], each=True), scale=size / few),
        Variant(ARRAYS, at_once, lambda: _judged(selector, dicts[:few], each=False)),
        Variant(RESIDENT, ours, lambda: _judged_at_once(controller, flat[:few])),
    ]
    graph = sitting.graph(ours) if sitting.cuda else None
    if graph is not None:
        variants.append(Variant(GRAPH, graph, compared=False, note="the same function, recorded"))
    found = sitting.compare("selection", f"N={size}", variants, tolerance=tolerance(sitting))
    for row in found.values():
        row["us_an_env"] = row["us"] / size
    if graph is not None:
        graph.release()


AGES = (1, 5, 12, 40)
"""Steps that an option has run, of which ends are compared."""


def _judged(selector: SerialSelector, dicts: list[dict[str, np.ndarray]], *, each: bool) -> list[Tensor]:
    """Log-probabilities of options, whether they are allowed, and with what probability they end."""
    allowed = [available(observation) for observation in dicts]
    ends = [
        [end_probability(index % NUM_OPTIONS, age, now) for age in AGES] for index, now in enumerate(dicts)
    ]  # fmt: skip
    if each:
        states = [torch.tensor(np.array([dict_replay.flatten(now)])).to(selector.device) for now in dicts]
        probs = torch.cat([selector.log_probs(row, [ok]) for row, ok in zip(states, allowed, strict=True)])
    else:
        rows = torch.from_numpy(dict_replay.flatten_keys(dicts)).to(selector.device)
        probs = selector.log_probs(rows, allowed)
    return [probs, torch.tensor(allowed), torch.tensor(ends)]


@torch.no_grad()
def _judged_at_once(controller: OptionController, td: TensorDict) -> list[Tensor]:
    allowed = controller.available(td)
    ends = [controller.termination_prob(td.copy().set("option_age", td["option_age"] + age)) for age in AGES]
    return [controller.log_probs(td, allowed), allowed, torch.stack(ends, -1)]


# -- tensors from arrays ----------------------------------------------------------------------------------------------


def tensors(sitting: Sitting) -> None:
    """A batch of observations to the device, from a list of arrays, from one array, and from nowhere."""
    sizes = sitting.pick((16,), (16, 256, 4096))
    for size in sizes:
        parts = list(np.random.default_rng(0).standard_normal((size, OBSERVATION), np.float32))
        whole, upload = np.array(parts), Upload(sitting.device)
        out, far = torch.empty(size, OBSERVATION, device=sitting.device), torch.from_numpy(whole).to(sitting.device)
        calls: dict[str, Callable[[], Tensor]] = {
            TWICE: lambda parts=parts: torch.tensor(np.array(parts)).to(sitting.device),
            STACKED: lambda parts=parts: torch.from_numpy(np.array(parts)).to(sitting.device),
            ARRAY: lambda whole=whole: torch.from_numpy(whole).to(sitting.device),
            STAGED: lambda whole=whole, upload=upload, out=out: upload.stage(whole, out=out),
            NONE: lambda far=far: far,
        }
        rows = sitting.compare("tensors", f"N={size}", [Variant(name, call) for name, call in calls.items()])
        for name, row in rows.items():
            row["bytes"] = counts(calls[name], sitting.device)["bytes"]
    stacked = sitting.ratio_of("tensors", TWICE, STACKED)
    sitting.verdict(
        "tensors",
        "tensor creation 100x: from_numpy(np.array(states))",
        times_text(stacked),
        judge(stacked, 100.0, 1.2),
        "as it is written: the list is still copied into an array",
    )
    array = sitting.ratio_of("tensors", TWICE, ARRAY)
    remark = "the copy to the device stays" if sitting.cuda else "on a CPU nothing is copied; it is the list that costs"
    sitting.verdict(
        "tensors", "tensor creation 100x: from_numpy of one array", times_text(array), judge(array, 100.0, 1.2), remark
    )
    word, text = NOT_HERE, ""
    if sitting.cuda:
        locked = sitting.ratio_of("tensors", ARRAY, STAGED)
        word, text = judge(locked, 1.1, 0.9), times_text(locked)
    sitting.verdict(
        "tensors",
        "non_blocking makes the copy cheaper (page-locked blocks against pageable memory)",
        text,
        word,
        "from pageable memory, as the original has it, non_blocking is blocking: see the benchmark of transfers",
    )
    _action_buffer(sitting)


def _action_buffer(sitting: Sitting) -> None:
    """The one buffer that the original preallocates, beside what its step makes anew."""
    buffer, action = np.zeros((ENVS, 1), np.float32), np.ones((ENVS, 1), np.float32)

    def filled() -> Tensor:
        buffer[:] = action
        return torch.from_numpy(buffer)

    variants = [Variant("a new array", lambda: torch.from_numpy(action.copy())), Variant("one array, filled", filled)]
    sitting.compare("tensors", "actions of 16 envs", variants)
    found = sitting.ratio_of("tensors", "a new array", "one array, filled", ["actions of 16 envs"])
    states, saved = ENVS * OBSERVATION * 4, buffer.nbytes
    sitting.verdict(
        "tensors",
        "preallocated action buffers: zero allocation during training",
        f"{saved} of {states + saved:,} bytes a step; {times_text(found)}",
        judge(saved / (states + saved), 0.99, 0.1),
        "flat observations, masks, tensors and batches are still made anew at each step",
    )


# -- dicts of observations --------------------------------------------------------------------------------------------


def flattening(sitting: Sitting) -> None:
    """Dicts of observations to ``[N, 578]``: a dict after the other, key by key, and one ``cat`` of tensors."""
    sizes = sitting.pick((16, 64), (16, 64, 256, 1024, 4096))
    for size in sizes:
        _, td = market(size, sitting.device, steps=2)
        dicts, parts = dicts_of(td), {name: td[name] for name in PARTS}

        def ours(parts: dict[Any, Tensor] = parts) -> Tensor:
            return flatten(parts)

        variants = [
            Variant(LISTED, lambda dicts=dicts: torch.from_numpy(dict_replay.flatten_each(dicts))),
            Variant(BY_KEY, lambda dicts=dicts: torch.from_numpy(dict_replay.flatten_keys(dicts))),
            Variant(CAT, ours, lambda ours=ours, td=td: _same_columns(ours(), td["observation"])),
        ]
        sitting.compare("flatten", f"N={size}", variants)
    after, ours_ = (sitting.ratio_of("flatten", LISTED, name) for name in (BY_KEY, CAT))
    sitting.verdict(
        "flatten",
        "vectorised flattening of the observations, 10x",
        times_text(after),
        judge(after, 10.0, 1.1),
        "the batched version still loops over envs and keys",
    )
    sitting.verdict("flatten", "one cat of tensors, 10x", times_text(ours_), judge(ours_, 10.0, 1.1), "578 columns")


def _same_columns(flat: Tensor, observation: Tensor) -> Tensor:
    """The flat form, NaN where it is not the env's own."""
    return torch.where(flat == observation, flat, torch.nan)


EXPERIMENTS: dict[str, Callable[[Sitting], None]] = {
    "inference": inference,
    "selection": selection,
    "tensors": tensors,
    "flatten": flattening,
    **market_data.EXPERIMENTS,
    **market_log.EXPERIMENTS,
}
"""Experiments by name."""
