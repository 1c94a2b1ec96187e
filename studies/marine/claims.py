"""The claims of marine, navigation with six agents, on action selection and on the way to the replay buffer."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from studies.counts import counts
from studies.marine.agents import (
    AGENTS,
    AXES,
    CHOICES,
    Agent,
    build,
    fixed_levels,
    observations,
    without_noise,
)
from studies.originals.experience import STORED, ListReplay, insert_by_robot, insert_whole
from studies.sitting import (
    CONFIRMED,
    NOT_HERE,
    NOT_REPRODUCED,
    PARTLY,
    Sitting,
    Variant,
    judge,
    times_text,
)
from torchrl_perf.modules import EpsilonGreedy
from torchrl_perf.replay import make_replay_buffer

WRAPPER, BATCHED, GRAPH = "wrapper, row by row", "batched", "batched, in a graph"
BY_ROBOT, WHOLE, OURS = "each robot, each entry", "each entry once", "device replay"
MOST_ROWS = 16
"""Most rows that the wrapper is timed on; each takes the same."""
CAPACITY, ROBOTS = 2**16, 5
CHI_SQUARE_24 = 51.2
"""What a chi-square of 24 degrees of freedom exceeds once in a thousand times."""


def tolerance(sitting: Sitting) -> float:
    """Largest difference of outputs; products on CUDA may be in TF32."""
    return 2e-3 if sitting.cuda else 1e-5


# -- the same algorithm -----------------------------------------------------------------------------------------------


@torch.no_grad()
def same(sitting: Sitting) -> None:
    """Row by row and all at once give the same; with epsilon 0 the greedy action, with 1 any with equal chance."""
    good = []
    for name in AGENTS:
        agent = build(name, MOST_ROWS, sitting.device)
        fixed_levels(agent)
        rows = agent.td["observation"]
        together = agent.values(rows)
        alone = torch.cat([agent.values(rows[index : index + 1]) for index in range(len(rows))])
        off_by, most = float((alone - together).abs().max()), tolerance(sitting)
        good.append(off_by <= most)
        entries = {"off_by": off_by, "tolerance": most, "ok": good[-1]}
        sitting.add("same", f"N={MOST_ROWS}", name, note=f"off by {off_by:.1e}", **entries)
    sitting.verdict(
        "same", "the same actions for all six agents", f"{sum(good)} of {len(AGENTS)} agents", _all_or_none(good)
    )
    greedy, uniform = _greedy_share(sitting), _chi_square(sitting)
    sitting.add("same", "epsilon=0", BATCHED, ok=greedy == 1.0, note=f"{greedy:.0%} greedy")
    note = f"chi-square {uniform:.1f} of {CHOICES - 1} degrees of freedom"
    sitting.add("same", "epsilon=1", BATCHED, ok=uniform <= CHI_SQUARE_24, chi_square=uniform, note=note)
    sitting.verdict(
        "same",
        "epsilon-greedy acts as before",
        f"epsilon 0: {greedy:.0%} greedy; epsilon 1: {note}",
        _all_or_none([greedy == 1.0, uniform <= CHI_SQUARE_24]),
    )


def _all_or_none(good: list[bool]) -> str:
    return CONFIRMED if all(good) else PARTLY if any(good) else NOT_REPRODUCED


def _explore(sitting: Sitting, epsilon: float, num_rows: int) -> tuple[Agent, Tensor]:
    agent = build("dqn", num_rows, sitting.device)
    policy = agent.policy
    assert isinstance(policy, EpsilonGreedy)
    policy.epsilon.fill_(epsilon)
    return agent, agent.act()


def _greedy_share(sitting: Sitting) -> float:
    agent, action = _explore(sitting, 0.0, 4096)
    values = agent.values(agent.td["observation"])
    return float((values.gather(-1, action.unsqueeze(-1)).squeeze(-1) == values.amax(-1)).double().mean())


def _chi_square(sitting: Sitting) -> float:
    count = 4096 * 8
    _, action = _explore(sitting, 1.0, count)
    seen, expected = torch.bincount(action, minlength=CHOICES).double(), count / CHOICES
    return float(((seen - expected).square() / expected).sum())


# -- copies and waits -------------------------------------------------------------------------------------------------


def transfers(sitting: Sitting) -> None:
    """Copies to the host and back, waits and operations of one action selection, by rows."""
    totals: dict[str, list[int]] = {WRAPPER: [], BATCHED: []}
    sizes = sitting.pick((1, 16), (1, 16, 64, 256, 1024, 4096))
    for size in sizes:
        agent = build("iqn", min(size, 64), sitting.device)
        wrapper, factor = agent.wrapper(), max(1, size // 64)
        found = counts(partial(wrapper, agent.td["observation"]), sitting.device)
        # a row takes what each other row takes; the array of all actions comes on top, once
        found = {key: value * factor for key, value in found.items()}
        if factor > 1:
            found["uploads"] -= factor - 1
        ours = counts(build("iqn", size, sitting.device).act, sitting.device)
        for variant, row in ((WRAPPER, found), (BATCHED, ours)):
            totals[variant].append(row["reads"] + row["uploads"])
            text = ", ".join(f"{value:,} {key}" for key, value in row.items() if not key.endswith("bytes"))
            sitting.add("transfers", f"N={size}", variant, note=text, **row)
    none = max(totals[BATCHED]) == 0
    sitting.verdict(
        "transfers",
        "eliminates N CPU transfers per batch",
        f"{totals[WRAPPER][-1]:,} copies at N={sizes[-1]:,} become {totals[BATCHED][-1]}",
        CONFIRMED if none else PARTLY,
        f"it was {totals[WRAPPER][-1] / sizes[-1]:.0f} copies a row: two to the host, one back",
    )


# -- latency ----------------------------------------------------------------------------------------------------------


def latency(sitting: Sitting) -> None:
    """Action selection of each agent, row by row and all at once."""
    sizes = sitting.pick((1, 64), (1, 16, 64, 256, 1024, 4096))
    for name in AGENTS:
        for size in sizes:
            _latency_case(sitting, name, size)
    by_size = {
        size: sitting.ratio_of("latency", WRAPPER, BATCHED, [f"{name}, N={size}" for name in AGENTS]) for size in sizes
    }
    most = by_size[sizes[-1]]
    sitting.verdict(
        "latency",
        f"reduced latency ({sizes[-1]:,} rows)",
        times_text(most),
        judge(most, 2.0, 1.1),
    )
    one = by_size[1]
    sitting.verdict("latency", "reduced latency (one row)", times_text(one), judge(one, 1.1, 0.9))
    medians = [float(np.median(values)) for values in by_size.values() if values]
    rises = sorted(medians) == medians
    text = ", ".join(f"{median:.3g}x at {size:,}" for median, size in zip(medians, by_size, strict=False))
    sitting.verdict("latency", "improvement scales with batch", text, CONFIRMED if rises else PARTLY)


@torch.no_grad()
def _latency_case(sitting: Sitting, name: str, size: int) -> None:
    agent = build(name, size, sitting.device)
    rows = agent.td["observation"]
    few = rows[:MOST_ROWS]
    wrapper = agent.wrapper()

    def chosen() -> Tensor:
        """What the wrapper chooses: the value of its choice, so that equal values do not count as different."""
        return _worth(agent, few, without_noise(agent).wrapper(0.0)(few))

    def ours() -> Tensor:
        values = agent.values(rows)[: len(few)]
        return values.amax(-1) if agent.discrete else values

    network = getattr(agent.policy, "network", None)
    was_random = getattr(getattr(network, "implicit", None), "random", None)
    fixed_levels(agent)
    outputs = chosen(), ours()
    if was_random is not None:
        network.implicit.random = was_random  # pyright: ignore
    agent.policy.train()
    variants = [
        Variant(WRAPPER, partial(wrapper, few), lambda: outputs[0], scale=max(1.0, size / MOST_ROWS)),
        Variant(BATCHED, agent.act, lambda: outputs[1]),
    ]
    graph = sitting.graph(agent.act) if sitting.cuda else None
    if graph is not None:
        variants.append(Variant(GRAPH, graph, compared=False, note="the same function, recorded"))
    sitting.compare("latency", f"{name}, N={size}", variants, tolerance=tolerance(sitting))
    if graph is not None:
        graph.release()


def _worth(agent: Agent, rows: Tensor, action: Tensor) -> Tensor:
    if not agent.discrete:
        return action
    return agent.values(rows).gather(-1, action.unsqueeze(-1)).squeeze(-1)


# -- experience -------------------------------------------------------------------------------------------------------


def experience(sitting: Sitting) -> None:
    """One step of all robots into the replay buffer: robot by robot, entry by entry, on the device."""
    sizes = sitting.pick((1, 64), (1, 64, 1024), (1, 64, 1024, 4096))
    for num_envs in sizes:
        _experience_case(sitting, num_envs)
    whole = sitting.ratio_of("experience", BY_ROBOT, WHOLE)
    sitting.verdict("experience", "fewer synchronisation points", *_points(sitting, sizes[-1]))
    sitting.verdict("experience", "the trainer's transfers cost less", times_text(whole), judge(whole, 2.0, 1.1))
    ours = sitting.ratio_of("experience", WHOLE, OURS)
    sitting.verdict(
        "experience",
        "the package's replay costs less than the original's fix",
        times_text(ours),
        judge(ours, 1.1, 0.9),
        "on one env of five robots NumPy and a list are the faster" if min(ours, default=1.0) < 1 else "",
    )


def _points(sitting: Sitting, num_envs: int) -> tuple[str, str, str]:
    case = f"E={num_envs}"
    found = {row["variant"]: row for row in sitting.rows if row["experiment"] == "experience" and row["case"] == case}
    before, after, ours = (found.get(name, {}).get("reads", float("nan")) for name in (BY_ROBOT, WHOLE, OURS))
    word = CONFIRMED if after < before else NOT_REPRODUCED
    return f"{before:,} reads a step become {after:,}; the package has {ours:,}", word, f"{num_envs:,} envs"


def one_step(num_envs: int, device: torch.device) -> dict[str, Tensor]:
    """A step of five robots in each env, some of which are gone and some of which end in it."""
    draw = torch.Generator().manual_seed(5)
    shape = (num_envs, ROBOTS)
    count = num_envs * ROBOTS
    ends, active = (torch.rand(shape, generator=draw) < chance for chance in (0.1, 0.8))
    goal = ends & (torch.rand(shape, generator=draw) < 0.5)
    step = {
        "observation": observations(count).view(*shape, -1),
        "action": torch.rand(*shape, AXES, generator=draw),
        "reward": torch.randn(shape, generator=draw),
        "next_observation": observations(count).flip(0).view(*shape, -1),
        "done": ends,
        "active": active,
        "goal": goal,
        "collision": ends & ~goal,
    }
    return {name: value.to(device) for name, value in step.items()}


def _experience_case(sitting: Sitting, num_envs: int) -> None:
    step = one_step(num_envs, sitting.device)
    part = {name: value[:MOST_ROWS] for name, value in step.items()}
    rows = num_envs * ROBOTS
    ours = make_replay_buffer(max(CAPACITY, rows), device=sitting.device)
    batch = as_streams(step)

    def kept(insert: Callable[[dict[str, Tensor], ListReplay], Any]) -> list[Tensor]:
        replay = ListReplay(CAPACITY)
        insert(step, replay)
        return [torch.from_numpy(np.array([row[i] for row in replay.rows])).flatten(1) if i in (0, 1, 3) else
                torch.tensor([float(row[i]) for row in replay.rows]) for i in range(len(STORED))]  # fmt: skip

    def stored() -> list[Tensor]:
        replay = make_replay_buffer(max(CAPACITY, rows), device=sitting.device)
        replay.extend(batch)
        held = replay[:rows]
        valid = held["valid"].squeeze(-1)
        names = (*STORED[:2], ("next", "reward"), ("next", "observation"), ("next", "done"))
        columns = [held.get(name)[valid] for name in names]
        return [column.squeeze(-1) if index in (2, 4) else column for index, column in enumerate(columns)]

    lists = ListReplay(CAPACITY), ListReplay(CAPACITY)
    calls: dict[str, Callable[[], Any]] = {
        BY_ROBOT: partial(insert_by_robot, part, lists[0]),
        WHOLE: partial(insert_whole, step, lists[1]),
        OURS: partial(ours.extend, batch),
    }
    variants = [
        Variant(BY_ROBOT, calls[BY_ROBOT], partial(kept, insert_by_robot), scale=max(1.0, num_envs / MOST_ROWS)),
        Variant(WHOLE, calls[WHOLE], partial(kept, insert_whole)),
        Variant(OURS, calls[OURS], stored),
    ]
    found = sitting.compare("experience", f"E={num_envs}", variants)
    for variant in variants:
        if variant.name in found:
            row = counts(calls[variant.name], sitting.device)
            found[variant.name] |= {key: round(value * variant.scale) for key, value in row.items()}


def as_streams(step: dict[str, Tensor]) -> TensorDict:
    """The step as ``[E R, 1]`` rows of the package's replay, with ``valid`` where the robot was active before it."""
    flat = {name: value.flatten(0, 1).unsqueeze(1) for name, value in step.items()}
    column = {name: flat[name].unsqueeze(-1) for name in ("reward", "done", "active")}
    terminated = column["done"]
    following = TensorDict(
        {
            "observation": flat["next_observation"],
            "reward": column["reward"],
            "done": column["done"],
            "terminated": terminated,
        },
        flat["reward"].shape,
    )
    rows = {"observation": flat["observation"], "action": flat["action"], "valid": column["active"]}
    return TensorDict({**rows, "next": following}, flat["reward"].shape)


# -- what cannot be measured here -------------------------------------------------------------------------------------


def data_parallel(sitting: Sitting) -> None:
    """Training on several GPUs, which the package does not do."""
    gpus = torch.cuda.device_count() if sitting.cuda else 0
    sitting.verdict("ddp", "DDP scales across GPUs", "", NOT_HERE, f"a future item of the original; {gpus} GPUs here")


EXPERIMENTS: dict[str, Callable[[Sitting], None]] = {
    "same": same,
    "transfers": transfers,
    "latency": latency,
    "experience": experience,
    "ddp": data_parallel,
}
"""Experiments by name."""
