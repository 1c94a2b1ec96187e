"""The claims of marine on its loop: from end to end, utilisation, replay and precision."""

import copy
import gc
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from studies.marine.agents import CHOICES, EPSILON, FEATURES, ObjectTrunk, observations
from studies.marine.env import COMPILED, COMPILED_GRAPH, EAGER, FINAL_STAGE, GRAPH
from studies.originals.experience import ListReplay, insert_by_robot, insert_whole
from studies.originals.navigation_loop import ROBOTS, LoopTraining
from studies.originals.policy_wrapper import SampleAgent, SampleWrapper
from studies.sitting import NOT_HERE, Sitting, Variant, gpu_reading, judge, times_text
from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs.agent_streams import AgentStreams
from torchrl_perf.envs.marine import MarineNavigation
from torchrl_perf.functional import quantile_huber_loss
from torchrl_perf.modules import EpsilonGreedy, ImplicitQuantileMLP, QuantileMLP
from torchrl_perf.replay import make_replay_buffer
from torchrl_perf.runtime import CaptureError, HostSyncError, capture

LEGACY, WRAPPER_ALONE, PACKAGE = "the original's loop", "its wrapper on our env", "package"
WHOLE = "whole iteration in a graph"
FORMS = (WHOLE, COMPILED_GRAPH, GRAPH, COMPILED, EAGER)
CAPACITY, STEPS, BATCH, LEVELS = 2**15, 4, 64, 8
TARGET = 20.0
"""Robot steps a second of the package over the original's loop, 64 envs on a CPU."""


# -- from end to end --------------------------------------------------------------------------------------------------


class Learner:
    """A network of action values and its update, the same for all loops.

    Args:
        agent: "iqn", or "dqn": one quantile, whose level is a half, so that the loss is half of Huber's.
        device: of everything.
        precision: of the layers.
    """

    def __init__(self, agent: str, device: torch.device, precision: str = "tf32") -> None:
        torch.manual_seed(0)
        options: Any = {"hidden_size": FEATURES, "precision": precision, "trunk": ObjectTrunk(precision)}
        network: ImplicitQuantileMLP | QuantileMLP
        if agent == "iqn":
            network = ImplicitQuantileMLP(FEATURES, CHOICES, **options)
        else:
            network = QuantileMLP(FEATURES, CHOICES, num_quantiles=1, **options)
        self.network, self.device = network.to(device), device
        self.target = copy.deepcopy(self.network).requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=1e-4, capturable=device.type == "cuda")

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Quantile regression on one-step targets (arXiv:1806.06923)."""
        quantiles, taus = self.network.sample(batch["observation"], num_taus=LEVELS)
        count = quantiles.shape[-1]
        chosen = batch["action"].view(-1, 1, 1).expand(-1, 1, count)
        current = quantiles.gather(1, chosen).squeeze(1)
        with torch.no_grad():
            following, _ = self.target.sample(batch["next_observation"], num_taus=LEVELS)
            best = following.mean(-1).argmax(-1).view(-1, 1, 1).expand(-1, 1, count)
            future = following.gather(1, best).squeeze(1)
            alive = 1.0 - batch["done"].float().view(-1, 1)
            target = batch["reward"].float().view(-1, 1) + 0.99 * alive * future
        return quantile_huber_loss(current, target, taus).mean()

    def update(self, batch: dict[str, Tensor]) -> Tensor:
        """One step of Adam."""
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 0.5)
        self.optimizer.step()
        return loss.detach()

    def wrapper(self) -> SampleWrapper:
        """The original's wrapper around the network."""
        return SampleWrapper(SampleAgent(self.network, self.device, EPSILON))


class PackageTraining:
    """The package's loop: streams of robots, a collector, a replay with a mask.

    Args:
        learner: network and update.
        num_envs: E.
        mode: of the collector; "captured" is "eager" in a graph, and "whole" the iteration in one.
    """

    def __init__(self, learner: Learner, num_envs: int, mode: str) -> None:
        device = learner.device
        env = MarineNavigation(num_envs, action="discrete", curriculum=FINAL_STAGE, device=device, seed=0)
        self.streams = AgentStreams(env)
        policy = EpsilonGreedy(
            learner.network,
            spec=self.streams.action_spec,
            eps_start=EPSILON,
            eps_end=EPSILON,
            valid_key="valid",
            write_values=False,
        )
        frames = num_envs * ROBOTS * STEPS
        self.collector = DeviceCollector(
            self.streams, policy, frames_per_batch=frames, mode=mode if mode in ("compile", "graph") else "eager"
        )
        capacity = max(CAPACITY, frames)
        self.replay = make_replay_buffer(capacity, batch_size=BATCH, device=device, mask_key="valid")
        self.learner = learner
        self.graph = None
        if mode in ("captured", "whole"):
            self.graph = capture(self.collect if mode == "captured" else self.eager, device=device, audit=False)
        self.collects = self.graph if mode == "captured" and self.graph is not None else self.collect
        self.iteration = self.graph if mode == "whole" and self.graph is not None else self.eager
        for _ in range(4 if self.graph is not None else 0):
            self.iteration()

    def collect(self) -> TensorDictBase:
        """Four steps of all envs."""
        with torch.no_grad():
            return self.collector.collect()

    def close(self) -> None:
        """Releases graph and collector."""
        if self.graph is not None:
            self.graph.release()
        self.collector.shutdown()

    def eager(self) -> None:
        """Four steps of all envs, then one update."""
        self.replay.extend(self.collects())
        rows = cast("Any", self.replay.sample())
        after = rows["next"]
        batch = {
            "observation": rows["observation"],
            "action": rows["action"],
            "reward": after["reward"],
            "next_observation": after["observation"],
            "done": after["terminated"],
        }
        self.learner.update(batch)


class WrapperTraining:
    """The original's wrapper and insertion on the batched env: what the wrapper alone costs.

    Args:
        learner: network and update.
        num_envs: E.
    """

    def __init__(self, learner: Learner, num_envs: int) -> None:
        self.env = MarineNavigation(num_envs, action="discrete", curriculum=FINAL_STAGE, device=learner.device, seed=0)
        self.learner, self.wrapper, self.replay = learner, learner.wrapper(), ListReplay(CAPACITY)
        self.td = self.env.reset()

    def iteration(self) -> None:
        """Four steps of all envs, then one update."""
        for _ in range(STEPS):
            before = self.td["agents"]
            rows = before["observation"]
            action = self.wrapper(rows.flatten(0, 1)).view(rows.shape[:-1])
            stepped, self.td = self.env.step_and_maybe_reset(self.td.set(("agents", "action"), action))
            after = stepped["next", "agents"]
            event = after["event"].squeeze(-1)
            step = {
                "observation": rows,
                "action": action,
                "reward": after["reward"].squeeze(-1),
                "next_observation": after["observation"],
                "done": after["done"].squeeze(-1),
                "active": before["active"].squeeze(-1),
                "goal": event == 1,
                "collision": event == 2,
            }
            insert_by_robot(step, self.replay)
        self.learner.update(self.replay.sample(BATCH, self.learner.device))


def end_to_end(sitting: Sitting) -> None:
    """Robot steps a second of the original's loop and of the package's, with an update each four steps."""
    sizes = sitting.pick((8,), (64,), (64, 1024))
    for agent in ("dqn", "iqn"):
        for size in sizes:
            _end_to_end_case(sitting, agent, size)
        case = f"{agent}, E={sizes[0]}"
        found = {name: sitting.ratio_of("end-to-end", LEGACY, name, [case]) for name in FORMS}
        found = {name: values[0] for name, values in found.items() if values}
        sitting.verdict(
            "end-to-end",
            f"{agent}: at least {TARGET:g}x the robot steps/s of the per-sample pattern at {sizes[0]} envs",
            ", ".join(f"{value:.3g}x {name}" for name, value in found.items()),
            judge(max(found.values(), default=None), TARGET, 5.0),
            "64 envs are the target" if sizes[0] != 64 else "",
        )
    alone = sitting.ratio_of("end-to-end", WRAPPER_ALONE, EAGER)
    sitting.verdict("end-to-end", "the wrapper alone was a bottleneck", times_text(alone), judge(alone, 2.0, 1.1))


def _end_to_end_case(sitting: Sitting, agent: str, size: int) -> None:
    learner = Learner(agent, sitting.device)
    np.random.seed(0)
    part = min(size, 64)
    loop = LoopTraining(learner.wrapper(), part, CAPACITY, sitting.device)
    modes = {EAGER: "eager"}
    if sitting.cuda:
        modes |= {GRAPH: "captured", WHOLE: "whole"}
    if sitting.compile and size == 64:
        modes |= {COMPILED_GRAPH: "graph"} if sitting.cuda else {COMPILED: "compile"}
    case = f"{agent}, E={size}"
    ours = {}
    for name, mode in modes.items():
        try:  # a graph keeps the gradients of its own learner
            ours[name] = PackageTraining(Learner(agent, sitting.device), size, mode)
        except (CaptureError, HostSyncError) as error:  # of this variant alone: the others are worth a figure
            sitting.add("end-to-end", case, name, note=f"not captured: {str(error)[:120]}")
    _same_rewards(sitting, loop, ours[EAGER], case)
    note = "its parts are compared in same, experience and environment"
    legacy = partial(loop.iteration, STEPS, BATCH, learner.update)
    variants = [Variant(LEGACY, legacy, compared=False, scale=size / part, note=note)]
    if size == part:
        variants.append(Variant(WRAPPER_ALONE, WrapperTraining(learner, size).iteration, compared=False))
    variants += [Variant(name, training.iteration, compared=False) for name, training in ours.items()]
    rows = sitting.compare("end-to-end", case, variants)
    for row in rows.values():
        row["robot_steps_per_second"] = size * ROBOTS * STEPS / row["us"] * 1e6
    for training in ours.values():
        training.close()
    gc.collect()


def _same_rewards(sitting: Sitting, loop: LoopTraining, ours: PackageTraining, case: str) -> None:
    """Whether both loops reward the same network alike: means of the first steps, within five standard errors."""
    for _ in range(STEPS):
        loop.step()
    batch = ours.collect()
    valid = batch["valid"].squeeze(-1)
    mine, theirs = batch["next", "reward"].squeeze(-1)[valid].cpu(), torch.tensor(loop.rewards)
    apart = float((mine.mean() - theirs.mean()).abs())
    error = float((mine.var() / len(mine) + theirs.var() / len(theirs)).sqrt())
    note = f"{float(theirs.mean()):.4f} a robot step, {float(mine.mean()):.4f} in the package"
    sitting.add(
        "end-to-end", f"{case}, reward", PACKAGE, off_by=apart, tolerance=5 * error, ok=apart <= 5 * error, note=note
    )


# -- utilisation, replay, precision -----------------------------------------------------------------------------------


def utilisation(sitting: Sitting) -> None:
    """What NVML says of the GPU while the loops run."""
    claim = "better GPU utilisation"
    if not sitting.cuda:
        sitting.verdict("utilisation", claim, "", NOT_HERE, "no GPU")
        return
    learner, size = Learner("iqn", sitting.device), sitting.pick(8, 64)
    np.random.seed(0)
    loop = LoopTraining(learner.wrapper(), size, CAPACITY, sitting.device)
    ours = PackageTraining(Learner("iqn", sitting.device), sitting.pick(64, 4096), "whole")
    calls = {LEGACY: partial(loop.iteration, STEPS, BATCH, learner.update), PACKAGE: ours.iteration}
    found = {name: gpu_reading(call, sitting).get("gpu/utilization") for name, call in calls.items()}
    for name, value in found.items():
        sitting.add("utilisation", "", name, utilisation=value, note="no reading" if value is None else f"{value:.0f}%")
    before, after = found[LEGACY], found[PACKAGE]
    known = before is not None and after is not None
    text = f"{before:.0f}% and {after:.0f}% of the time a kernel ran" if known else ""
    word = judge(after / max(before, 1.0), 1.1, 1.0) if before is not None and after is not None else NOT_HERE
    sitting.verdict("utilisation", claim, text, word, "a kernel that runs says nothing of how full the GPU is")
    ours.close()


def replay(sitting: Sitting) -> None:
    """A batch for an update, from a list on the host and from the device's replay."""
    rows = sitting.pick(2048, 16_384)
    step = replay_rows(rows, sitting.device)
    listed, ours = ListReplay(rows), make_replay_buffer(rows, device=sitting.device, batch_size=BATCH)
    insert_whole({name: value.view(-1, ROBOTS, *value.shape[1:]) for name, value in step.items()}, listed)
    ours.extend(_flat(step))
    for size in sitting.pick((64,), (64, 4096)):
        variants = [
            Variant("list on the host", partial(listed.sample, size, sitting.device), compared=False),
            Variant(
                "device replay", partial(ours.sample, size), compared=False, note="rows are compared in experience"
            ),
        ]
        sitting.compare("replay", f"B={size}", variants)
    found = sitting.ratio_of("replay", "list on the host", "device replay")
    sitting.verdict("replay", "a replay on the GPU avoids transfers", times_text(found), judge(found, 2.0, 1.1))


def replay_rows(count: int, device: torch.device) -> dict[str, Tensor]:
    """Rows of robots that are all active."""
    rows = observations(count - count % ROBOTS)
    flags = torch.zeros(len(rows), dtype=torch.bool)
    entries = {
        "observation": rows,
        "action": torch.randint(0, CHOICES, (len(rows),)),
        "reward": torch.randn(len(rows)),
        "next_observation": rows.flip(0),
        "done": flags,
        "active": ~flags,
        "goal": flags,
        "collision": flags,
    }
    return {name: value.to(device) for name, value in entries.items()}


def _flat(step: dict[str, Tensor]) -> TensorDictBase:
    from studies.marine.claims import as_streams

    return as_streams({name: value.unsqueeze(1) for name, value in step.items()})


def precision(sitting: Sitting) -> None:
    """IQN's update in float32 and in bf16."""
    for size in sitting.pick((64,), (64, 1024), (64, 4096)):
        batch = replay_rows(size + ROBOTS - 1 - (size - 1) % ROBOTS, sitting.device)
        learners = {name: Learner("iqn", sitting.device, name) for name in ("ieee", "bf16")}

        def fixed(learner: Learner, batch: dict[str, Tensor] = batch) -> Tensor:
            torch.manual_seed(1)
            return learner.loss(batch).detach().view(1)

        variants = [
            Variant(name, partial(learner.update, batch), partial(fixed, learner)) for name, learner in learners.items()
        ]
        sitting.compare("precision", f"B={size}", variants, tolerance=0.02)
    found = sitting.ratio_of("precision", "ieee", "bf16")
    remark = "" if sitting.cuda else "on a CPU, which may lack bf16 products"
    sitting.verdict(
        "precision", "mixed precision makes updates faster", times_text(found), judge(found, 1.3, 1.05), remark
    )


EXPERIMENTS: dict[str, Callable[[Sitting], None]] = {
    "end-to-end": end_to_end,
    "utilisation": utilisation,
    "replay": replay,
    "precision": precision,
}
"""Experiments by name."""
