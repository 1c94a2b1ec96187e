"""The claims of durotaxis on its env: PPO with each optimisation, batched envs, reduced precision and compilation."""

import gc
import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from studies.counts import counts
from studies.originals import selection
from studies.originals.colony import ColonyLoop
from studies.originals.colony_ppo import GAMMA, LAMBDA, MINIBATCH, ColonyNetwork, LoopPPO, Switches, ppo_loss
from studies.sitting import CONFIRMED, NOT_HERE, Sitting, Variant, judge, times_text
from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs.durotaxis import Durotaxis
from torchrl_perf.functional import generalized_advantage_estimate
from torchrl_perf.functional.losses.hybrid import normal_log_prob
from torchrl_perf.modules import NodeEncoder
from torchrl_perf.runtime import capture, compiled

NONE, ALL = "none", "all four"
ABLATION = {
    NONE: Switches(),
    "argpartition": Switches(partition=True),
    "dict template": Switches(template=True),
    "closed entropy": Switches(closed_entropy=True),
    "tensor GAE": Switches(tensors=True),
    ALL: Switches(partition=True, template=True, closed_entropy=True, tensors=True),
}
LOOP, EAGER, GRAPH, COMPILED_GRAPH = "one colony in Python", "batched", "batched, in a graph", "compiled, in a graph"
PLAIN, BF16, COMPILED = "float32", "bf16", "compiled"


# -- the whole loop ---------------------------------------------------------------------------------------------------


def present(td: TensorDictBase) -> tuple[Tensor, Tensor]:
    """Nodes ``[*, C, 11]`` and mask ``[*, C]``: beyond are only those of colonies that have just over-grown."""
    nodes, mask = td["nodes"], td["node_mask"]
    return nodes[..., : mask.shape[-1] // 2, :], mask[..., : mask.shape[-1] // 2]


class ColonyPolicy(TensorDictModuleBase):
    """The loop's network as a policy on batches: reads nodes and mask, writes action, draw, log-probability, value.

    Args:
        network: the network.
    """

    def __init__(self, network: ColonyNetwork) -> None:
        super().__init__()
        self.network = network
        self.in_keys = ["nodes", "node_mask"]
        self.out_keys = ["action", "draw", "log_prob", "state_value"]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Draws an action for each colony."""
        loc, scale, value = self.network(*present(tensordict))
        draw = loc + scale * torch.randn_like(loc)
        tensordict["action"], tensordict["draw"] = self.network.bounded(draw), draw
        tensordict["log_prob"] = normal_log_prob(draw, loc, scale).unsqueeze(-1)
        return tensordict.set("state_value", value.unsqueeze(-1))


class BatchPPO:
    """The same algorithm with the package's parts: batched colonies, a collector, a scan, a closed form.

    Args:
        num_envs: N.
        steps: T of a rollout.
        minibatch: rows of an update.
        epochs: passes over the rollout.
        device: of everything.
    """

    def __init__(self, num_envs: int, steps: int, minibatch: int, epochs: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.network = ColonyNetwork().to(device)
        self.env, self.epochs, self.minibatch = Durotaxis(num_envs, device=device, seed=0), epochs, minibatch
        policy, frames = ColonyPolicy(self.network), num_envs * steps
        self.collector = DeviceCollector(self.env, policy, frames_per_batch=frames, mode="eager")
        self.graph = capture(self._collect, device=device, audit=False) if device.type == "cuda" else None
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=1e-3)

    def _collect(self) -> TensorDictBase:
        with torch.no_grad():
            return self.collector.collect()

    def collect(self) -> TensorDictBase:
        """A rollout ``[N, T]``; on CUDA in a graph."""
        return self._collect() if self.graph is None else self.graph()

    def close(self) -> None:
        """Releases graph and collector."""
        if self.graph is not None:
            self.graph.release()
        self.collector.shutdown()

    @torch.no_grad()
    def advantages(self, batch: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Advantages, normalised over the batch, and returns ``[N T]``."""
        after = cast("Any", batch["next"])
        value = self.network(*present(after))[2].unsqueeze(-1)
        advantage, target = generalized_advantage_estimate(
            GAMMA, LAMBDA, batch["state_value"], value, after["reward"], after["done"], after["terminated"]
        )
        advantage = (advantage - advantage.mean()) / advantage.std(unbiased=False).clamp_min(1e-6)
        return advantage.flatten(), target.flatten()

    def iteration(self) -> None:
        """Rollout, advantages, updates."""
        batch = self.collect()
        advantage, target = self.advantages(batch)
        nodes, mask = present(batch)
        rows = {
            "nodes": nodes.flatten(0, 1),
            "mask": mask.flatten(0, 1),
            "draw": batch["draw"].flatten(0, 1),
            "log_prob": batch["log_prob"].flatten(),
            "advantage": advantage,
            "return": target,
        }
        for _ in range(self.epochs):
            for chosen in torch.randperm(len(advantage), device=advantage.device).split(self.minibatch):
                part = {name: value[chosen] for name, value in rows.items()}
                self.optimizer.zero_grad()
                ppo_loss(self.network, part, sampled_entropy=False).backward()
                nn.utils.clip_grad_norm_(self.network.parameters(), 0.5)
                self.optimizer.step()


def overall(sitting: Sitting) -> None:
    """PPO on the colony with each optimisation alone, all of them, and with the package's parts."""
    steps, num_envs, batch_steps = sitting.pick((64, 16, 8), (256, 64, 32), (256, 256, 16))
    loops = {name: LoopPPO(switches, sitting.device, steps) for name, switches in ABLATION.items()}
    want = [_first_rollout(switches, sitting.device) for switches in ABLATION.values()]
    variants = [
        Variant(name, loop.iteration, lambda found=found: found)
        for (name, loop), found in zip(loops.items(), want, strict=True)
    ]
    frames = num_envs * batch_steps
    label = f"package, {num_envs} colonies"
    batched = {
        f"{label}, minibatch {MINIBATCH}": BatchPPO(num_envs, batch_steps, MINIBATCH, 4, sitting.device),
        f"{label}, 4 minibatches": BatchPPO(num_envs, batch_steps, frames // 4, 4, sitting.device),
    }
    note = "per as many steps; the policy, the loss and 4 passes are the same"
    variants += [
        Variant(name, ppo.iteration, compared=False, scale=steps / frames, note=note) for name, ppo in batched.items()
    ]
    rows = sitting.compare("overall", f"{steps} steps", variants, tolerance=1e-4)
    for row in rows.values():
        row["steps_per_second"] = steps / row["us"] * 1e6
    _same_returns(sitting, loops[NONE], num_envs)
    found = sitting.ratio_of("overall", NONE, ALL)
    alone = {name: sitting.ratio_of("overall", NONE, name) for name in list(ABLATION)[1:-1]}
    text = ", ".join(f"{name} {times_text(values)}" for name, values in alone.items())
    sitting.verdict(
        "overall",
        "training is 40-50% faster overall",
        f"{times_text(found)} ({text})",
        judge(found, 1.4, 1.1),
        "estimated by the original, never timed; by its own table the entropy was in closed form before",
    )
    names = list(batched)
    own = {name.rpartition(", ")[2]: times_text(sitting.ratio_of("overall", NONE, name)) for name in names}
    most = max((value for name in names for value in sitting.ratio_of("overall", ALL, name)), default=None)
    sitting.verdict(
        "overall",
        "the package's loop is faster than all four together",
        ", ".join(f"{text} ({name})" for name, text in own.items()),
        judge(most, 1.4, 1.0),
        "per env step, against none of the four",
    )
    _memory(sitting)
    for ppo in batched.values():
        ppo.close()
    gc.collect()


def _memory(sitting: Sitting) -> None:
    """Bytes of new tensors in one iteration; the peak on CUDA."""
    size = {}
    for name in (NONE, ALL):
        found = counts(LoopPPO(ABLATION[name], sitting.device, 64).iteration, sitting.device)
        size[name] = found.get("peak_bytes", found["bytes"])
        sitting.add(
            "overall", "memory", name, **found, note=f"{size[name]:,} bytes, {found['operations']:,} operations"
        )
    saved = 1 - size[ALL] / max(1, size[NONE])
    sitting.verdict("overall", "10-20% fewer allocations", f"{saved:.0%} fewer", judge(saved, 0.1, 0.02))


def _first_rollout(switches: Switches, device: torch.device) -> list[Tensor]:
    """Rewards and advantages of a first rollout, which no optimisation is to change."""
    loop = LoopPPO(switches, device, 64)
    rows = loop.collect()
    return [torch.tensor(rows["reward"]), *loop.advantages(rows)]


def _same_returns(sitting: Sitting, loop: LoopPPO, num_envs: int) -> None:
    """Whether both envs reward the same policy alike: means of a rollout within five standard errors."""
    random.seed(1)
    fresh = LoopPPO(Switches(), loop.device, sitting.pick(256, 1024))
    theirs = torch.tensor(fresh.collect()["reward"])
    batch = BatchPPO(num_envs, 32, MINIBATCH, 1, sitting.device)
    batch.network.load_state_dict(fresh.network.state_dict())
    # a rollout from the start is short of ends: the episodes of a random policy last eight steps or so
    batch.collect()
    ours = cast("Tensor", batch.collect()["next", "reward"]).flatten().cpu()
    apart = float((theirs.mean() - ours.mean()).abs())
    error = math.sqrt(float(theirs.var() / len(theirs) + ours.var() / len(ours)))
    note = f"{float(theirs.mean()):.4f} a step in Python, {float(ours.mean()):.4f} batched, standard error {error:.4f}"
    # rewards of one episode are not independent: five, where three would do
    sitting.add("overall", "mean reward", EAGER, off_by=apart, tolerance=5 * error, ok=apart <= 5 * error, note=note)
    batch.close()


# -- batched envs -----------------------------------------------------------------------------------------------------


def vector(sitting: Sitting) -> None:
    """Env steps of one colony in Python and of N at once."""
    sizes = sitting.pick((1, 64), (1, 4, 16, 64, 256, 1024), (1, 4, 16, 64, 256, 1024, 4096))
    checked = one_step_of_both(sitting.device)
    for size in sizes:
        _vector_case(sitting, size, checked)
    after = GRAPH if sitting.cuda else EAGER
    curve = {size: sitting.ratio_of("vector", LOOP, after, [f"N={size}"]) for size in sizes}
    text = ", ".join(f"{size:,}: {values[0]:,.3g}x" for size, values in curve.items() if values)
    last = curve[sizes[-1]]
    sitting.verdict(
        "vector",
        "vectorised envs give 10x the throughput",
        text,
        judge(last, 10.0, 2.0),
        "the original's future list; one colony alone is slower in tensors than in Python",
    )
    if sitting.cuda:
        most = sitting.best("vector", "N=4096", "steps_per_second")
        text = "" if most is None else f"{most:,.0f}"
        sitting.verdict("vector", "1 M env steps/s of 4,096 colonies alone", text, judge(most, 1e6, 2.5e5))


def _vector_case(sitting: Sitting, size: int, checked: tuple[list[Tensor], list[Tensor]]) -> None:
    env = Durotaxis(size, device=sitting.device, seed=0)
    low, high = env.action_spec.space.low[0], env.action_spec.space.high[0]  # pyright: ignore
    state, start = {"td": env.reset()}, env.reset()

    def random_action() -> Tensor:
        return low + (high - low) * torch.rand(size, 5, device=sitting.device)

    def step() -> Tensor:
        stepped, state["td"] = env.step_and_maybe_reset(state["td"].set("action", random_action()))
        return stepped["next", "reward"]

    def rollout() -> Tensor:
        td = start.copy()
        for _ in range(ROLLOUT):
            stepped, td = env.step_and_maybe_reset(td.set("action", random_action()))
        return stepped["next", "reward"]

    random.seed(0)
    loop, bounds = ColonyLoop(selection.by_sort), list(zip(low.tolist(), high.tolist(), strict=True))
    python = {"features": loop.reset()}

    def one() -> None:
        _, ending, _ = loop.step(tuple(random.uniform(*bound) for bound in bounds), python["features"])
        python["features"] = loop.reset() if ending else loop.features()

    variants = [Variant(LOOP, one, lambda: checked[0], scale=float(size)), Variant(EAGER, step, lambda: checked[1])]
    calls = {GRAPH: sitting.graph(rollout)} if sitting.cuda else {}
    if sitting.compile and size in COMPILED_SIZES:
        calls[COMPILED_GRAPH if sitting.cuda else COMPILED] = sitting.graph(rollout, compile=True)
    for name, call in calls.items():
        variants.append(Variant(name, call, compared=False, scale=1 / ROLLOUT, note="the same function, recorded"))
    rows = sitting.compare("vector", f"N={size}", variants, tolerance=1e-4)
    for row in rows.values():
        row["steps_per_second"] = size / row["us"] * 1e6
    for call in calls.values():
        call.release()


ROLLOUT = 4
"""Steps of a captured or compiled function."""
COMPILED_SIZES = (64, 4096)
"""Colonies at which the step is compiled."""


SMOOTH = [0, 1, *range(3, 10)]
"""Features that are smooth in the place; stiffness and mark jump, so that rounding decides. Both act one step later."""


def one_step_of_both(device: torch.device, count: int = 16, steps: int = 4) -> tuple[list[Tensor], list[Tensor]]:
    """Features and rewards of the same steps, in Python and batched; each from the batched env's state.

    Returns:
        Of either, the features of each colony after each step, and the rewards ``[count]`` of each step.
    """
    env = Durotaxis(count, device=device, seed=3)
    td, draw = env.reset(), torch.Generator().manual_seed(6)
    bounds = env.action_spec.space
    low, high = bounds.low[0].cpu(), bounds.high[0].cpu()  # pyright: ignore
    loops: list[Tensor] = []
    batched: list[Tensor] = []
    for _ in range(steps):
        action = low + (high - low) * torch.rand(count, 5, generator=draw)
        before = {name: value.cpu() for name, value in env.snapshot().items()}
        stepped, td = env.step_and_maybe_reset(td.set("action", action.to(device)))
        after = stepped["next"].cpu()
        rewards = []
        for row in range(count):
            colony = _colony_of(before, row)
            reward, *_ = colony.step(tuple(action[row].tolist()), colony.features())
            loops.append(colony.features()[:, SMOOTH])
            batched.append(after["nodes"][row][after["node_mask"][row]][:, SMOOTH])
            rewards.append(reward)
        loops.append(torch.tensor(rewards))
        batched.append(after["reward"].squeeze(-1))
    return loops, batched


def _colony_of(snapshot: dict[str, Tensor], row: int) -> ColonyLoop:
    nodes = int(snapshot["count"][row])
    colony = ColonyLoop(selection.by_sort)
    place, age = snapshot["position"][row, :nodes].tolist(), snapshot["age"][row, :nodes].tolist()
    colony.nodes = [[x, y, float(old)] for (x, y), old in zip(place, age, strict=True)]
    colony.begin()
    return colony


# -- the update -------------------------------------------------------------------------------------------------------


class Updates:
    """Forward and backward pass of the original's encoder, four layers of 128, with two heads.

    Args:
        batch: rows.
        nodes: slots of a row.
        precision: of the layers.
        device: of everything.
    """

    def __init__(self, batch: int, nodes: int, precision: str, device: torch.device) -> None:
        torch.manual_seed(0)
        self.encoder = NodeEncoder(11, 19, precision=precision).to(device)
        self.head = nn.Linear(self.encoder.out_features, 6).to(device)
        self.nodes, self.graph = torch.randn(batch, nodes, 11, device=device), torch.randn(batch, 19, device=device)
        self.mask = torch.rand(batch, nodes, device=device) < 0.5
        self.target = torch.randn(batch, 6, device=device)
        self.parameters = [*self.encoder.parameters(), *self.head.parameters()]

    def loss(self) -> Tensor:
        """A squared error."""
        values = self.head(self.encoder.graph_embedding(self.nodes, self.mask, self.graph))
        return (values - self.target).square().mean()

    def step(self, loss: Callable[[], Tensor] | None = None) -> Tensor:
        """Loss and gradients."""
        for parameter in self.parameters:
            parameter.grad = None
        value = (loss or self.loss)()
        value.backward()
        return value.detach()


def update(sitting: Sitting) -> None:
    """An update in float32, in bf16 and compiled."""
    cases = sitting.pick([(16, 16)], [(64, 50)], [(64, 100), (1024, 100)])
    for batch, nodes in cases:
        plain, half = (Updates(batch, nodes, precision, sitting.device) for precision in ("ieee", "bf16"))
        variants = [Variant(PLAIN, plain.step), Variant(BF16, half.step, tolerance=5e-2)]
        if sitting.compile:
            fast = compiled(plain.loss)
            variants.append(Variant(COMPILED, partial(plain.step, fast)))
        sitting.compare("update", f"B={batch}, N={nodes}", variants, tolerance=1e-4)
    for after, claim, bounds in (
        (BF16, "AMP makes the update 30-50% faster", (1.3, 1.1)),
        (COMPILED, "torch.compile makes the update 20-30% faster", (1.2, 1.05)),
    ):
        found = sitting.ratio_of("update", PLAIN, after)
        word = judge(found, *bounds) if found else NOT_HERE
        remark = "" if found else "with --compile yes"
        remark = remark or ("" if sitting.cuda or after != BF16 else "on a CPU, which may lack bf16 products")
        sitting.verdict("update", claim, times_text(found), word, remark if word != CONFIRMED else "")


EXPERIMENTS: dict[str, Callable[[Sitting], None]] = {
    "overall": overall,
    "vector": vector,
    "update": update,
}
"""Experiments by name."""
