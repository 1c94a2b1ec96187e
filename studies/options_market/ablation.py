"""The switches that options_market claims figures for, off and on, in the update of SAC with options at its sizes."""

import gc
import math
from collections.abc import Callable
from typing import Any, cast

import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from studies.options_market.agents import NUM_OPTIONS, OBSERVATION, WindowEncoder, outputs_of, settings
from studies.sitting import NOT_HERE, Sitting, judge
from torchrl_perf.bench.ablation import (
    CLAIMS,
    OUTPUT_TOLERANCE,
    Ablation,
    BenchAblation,
    available_switches,
    variants_of,
)
from torchrl_perf.bench.ablation_loops import LOOPS, Loop, SACLoop, Variant
from torchrl_perf.modules import EnsembleQ, MixedSequential
from torchrl_perf.modules.option_actor import OptionActor, OptionConditioned
from torchrl_perf.modules.option_set import OptionSet
from torchrl_perf.objectives.sac import VALUE_KEY
from torchrl_perf.systems.options_market.config import OptionsMarketConfig
from torchrl_perf.systems.options_market.trainer import MarketNetworks, OptionsMarketTrainer

NAMES = {"tf32": "TF32", "bf16": "mixed precision (bf16)", "compile": "torch.compile", "fused": "fused optimizer"}
WORDS = {"tf32": "8x", "bf16": "2x", "compile": "15-30%", "fused": "20%"}
BUT_COMPILE = "all on but compile"
COMPILED = "MLP, B=256"
"""The one case that is compiled."""


class TransformerNetworks(MarketNetworks):
    """Actor and critics with an encoder each, the transformer of the original; controller as it is.

    Actor, critics and options see the observation as it is, without compression of large numbers.
    """

    def actor(self, observation: Any, action: Any, options: OptionSet) -> OptionActor:
        """Two layers behind the encoder."""
        others, width = self._others(NUM_OPTIONS), self.config.hidden_size
        trunk = WindowEncoder(others, self.config.precision)
        layers = [nn.Linear(trunk.out_features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
        network = MixedSequential(trunk, *layers, nn.Linear(width, 2), precision=self.config.precision)
        return OptionActor(network.to(action.device), options, spec=action)

    def critic(self, observation: Any, action: Any, options: OptionSet) -> TensorDictModule:
        """Two critics behind one encoder."""
        config, others = self.config, self._others(NUM_OPTIONS + 1)
        trunk = WindowEncoder(others, config.precision).to(action.device)
        sizes = (config.hidden_size, config.hidden_size)
        net = EnsembleQ(
            config.num_critics,
            trunk.out_features,
            hidden_sizes=sizes,
            precision=config.precision,
            device=cast("Any", action.device),
        )
        whole = OptionConditioned(nn.Sequential(trunk, net), NUM_OPTIONS)
        return TensorDictModule(whole, ["observation", "action", "active_option"], [VALUE_KEY])

    @staticmethod
    def _others(more: int) -> int:
        return OBSERVATION - WindowEncoder.bars * WindowEncoder.columns + more


class UpdateLoop(SACLoop):
    """One update of SAC with options at a time, without the envs."""

    rows = 256
    networks: type[MarketNetworks] = MarketNetworks

    def make(self) -> None:
        """The trainer with a filled buffer, and second optimisers."""
        small = self.quick or self.rows < 1024
        sizes: dict[str, Any] = {"num_envs": 32 if small else 256, "updates_per_iteration": 1}
        sizes |= {"hidden_size": 32 if self.quick else 512, "minibatch_size": 32 if self.quick else self.rows}
        filled = max(512, sizes["minibatch_size"])
        sizes |= {"learning_starts": filled, "capacity": max(2 * filled, 8 * sizes["num_envs"])}
        mode = {"mode": "compile" if self.compiles else "eager", "precision": self.precision}
        self.trainer = trainer = self._trainer(settings(self.device, **sizes, **mode))
        for _ in range(trainer.config.fill_iterations):
            trainer.step()
        self.optimizers = {True: (trainer.critic_optimizer, trainer.actor_optimizer)}
        self.optimizers[False] = tuple(self._unfused(optimizer) for optimizer in self.optimizers[True])
        self.keep_start()

    def _trainer(self, config: OptionsMarketConfig) -> OptionsMarketTrainer:
        return OptionsMarketTrainer(config, networks=self.networks(config))

    def iteration(self) -> None:
        """An update."""
        self.trainer.learn()

    @torch.no_grad()
    def outputs(self) -> Tensor:
        """Of all networks, flat."""
        return torch.cat([output.flatten() for output in outputs_of(self.trainer)])


def loops(sitting: Sitting) -> dict[str, type[Loop]]:
    """The loops of a sitting by case: sizes of a batch, and the transformer."""
    batches = sitting.pick((256,), (64, 256, 1024), (64, 256, 1024, 4096))
    plain = {f"MLP, B={rows}": type("Sized", (UpdateLoop,), {"rows": rows}) for rows in batches}
    rows = sitting.pick(8, 32, 256)
    sized = {"rows": rows, "networks": TransformerNetworks}
    encoder = {} if sitting.quick else {f"transformer, B={rows}": type("Sized", (UpdateLoop,), sized)}
    return {"product": LOOPS["matmul"], **plain, **encoder}


class CaseAblation(Ablation):
    """All variants of one loop of a sitting.

    Args:
        kind: the loop.
        sitting: gives device and size.
        compiles: whether variants are compiled.
    """

    def __init__(self, kind: type[Loop], sitting: Sitting, compiles: bool) -> None:
        options = BenchAblation(rounds=5, calls=2, budget=0, quick=sitting.quick or not sitting.cuda)
        super().__init__("sac", options, sitting.device)
        self.kind, self.small = kind, sitting.quick
        switches = available_switches(sitting.device) - (set() if compiles else {"compile"})
        found = [one for one in variants_of(kind, switches) if not one.name.startswith("- ")]
        if compiles and not sitting.cuda:  # where the compiler takes a minute for each precision
            found = [one for one in found if one.name != "all on"]
            found.append(Variant(BUT_COMPILE, frozenset(kind.switches) & switches - {"compile"}))
        self.variants = found

    def loop_of(self, variant: Variant) -> Loop:
        """The loop that runs a variant."""
        key = (variant.precision, "compile" in variant)
        if key not in self.loops:
            # a product of 4,096 numbers a side takes a CPU seconds
            small = self.small or (self.kind is LOOPS["matmul"] and self.device.type == "cpu")
            self.loops[key] = self.kind(*key, small, self.device)
        return self.loops[key]


def ablation(sitting: Sitting) -> None:
    """Each switch alone, and all together without each, by size of the batch; outputs against full float32."""
    for case, kind in loops(sitting).items():
        made = CaseAblation(kind, sitting, sitting.compile and case == COMPILED)
        rows = made.rows()
        for row in rows:
            _add(sitting, case, row, rows[0].get("ms"))
        made.close()
        gc.collect()
    for switch in ("tf32", "bf16"):
        _verdict(sitting, switch, "product")
    for switch in NAMES:
        _verdict(sitting, switch)
    _graph_verdict(sitting)
    _together(sitting)
    _batch_sizes(sitting)


def _together(sitting: Sitting) -> None:
    """All switches at once, and how near TF32 is."""
    rows = [row for row in sitting.rows if row["experiment"] == "ablation"]
    whole = ("all on", BUT_COMPILE)
    together = [row["ratio"] for row in rows if row["variant"] in whole and row["case"] == COMPILED and "ratio" in row]
    sitting.verdict(
        "ablation",
        "computation +30%: TF32, mixed precision, compile and fused together",
        ", ".join(f"{value:.3g}x" for value in together),
        judge(together, 1.3, 1.05),
        f"the four, if they multiplied, would be {math.prod(CLAIMS[name][0] for name in NAMES):.0f}x"
        + ("" if sitting.cuda else "; on a CPU without TF32"),
    )
    deviations: dict[str, float] = {
        row["variant"]: row["off_by"] for row in rows if row["case"] == COMPILED and "off_by" in row
    }
    worst = deviations.get("+ tf32" if sitting.cuda else "+ bf16")
    sitting.verdict(
        "ablation",
        "TF32 computes the same, about 1e-3 relative",
        f"{worst:.1e} off" if sitting.cuda and worst is not None else "",
        judge(1.0 if worst is not None and worst <= OUTPUT_TOLERANCE["tf32"] else 0.0, 1.0, 0.5)
        if sitting.cuda
        else NOT_HERE,
        f"bf16: {deviations['+ bf16']:.1e}" if "+ bf16" in deviations else "",
    )


def _add(sitting: Sitting, case: str, row: dict[str, Any], plain: float | None) -> None:
    """A row of the ablation as the sitting has them; ``plain`` are the milliseconds with all off."""
    # one that cannot be recorded says nothing of what the others give
    found: dict[str, Any] = {"note": row["error"][:120]} if "error" in row else {"ok": row["ok"]}
    if "ms" in row:
        found |= {"us": row["ms"] * 1e3, "p10_us": row["p10_ms"] * 1e3, "p90_us": row["p90_ms"] * 1e3}
        found |= {"repeats": row["repeats"], "start_s": row["start_s"]}
        found |= {"off_by": row["outputs_off_by"]} | ({} if plain is None else {"ratio": plain / row["ms"]})
        loss = row["loss_off_by"]
        found["note"] = "" if loss is None else f"loss of the first updates off by {loss:.1e}"
    sitting.add("ablation", case, row["variant"], **found)


def _verdict(sitting: Sitting, switch: str, case: str | None = None) -> None:
    """Of a switch alone, over the cases of the update, or in one."""
    found = {
        row["case"]: row["ratio"]
        for row in sitting.rows
        if row["experiment"] == "ablation" and row["variant"] == f"+ {switch}" and "ratio" in row
    }
    if case is None:
        found.pop("product", None)
    else:
        found = {name: value for name, value in found.items() if name == case}
    least = CLAIMS[switch][0]
    where = "a matrix product" if case else "the update"
    remark = (
        "beside float32; 8x is the ratio of two peak rates of a card"
        if case
        else {
            "tf32": "small nets are bound by their launches",
            "bf16": "beside an update in float32",
            "compile": "" if sitting.compile else "needs --compile yes",
            "fused": "of the optimiser's step, which is a part of the update",
        }[switch]
    )
    sitting.verdict(
        "ablation",
        f"{NAMES[switch]} {WORDS[switch]}: {where}",
        ", ".join(f"{value:.2f}x ({name})" for name, value in found.items()),
        judge(list(found.values()) or None, least, 1 + (least - 1) / 4),
        remark,
    )


def _times(sitting: Sitting, variant: str, column: str) -> dict[int, float]:
    """A column of a variant of the plain networks, by rows of a batch."""
    return {
        int(row["case"].rpartition("=")[2]): row[column]
        for row in sitting.rows
        if row["experiment"] == "ablation"
        and row["variant"] == variant
        and row["case"].startswith("MLP")
        and column in row
    }


def _graph_verdict(sitting: Sitting) -> None:
    """The graph alone, which is most of what ``reduce-overhead`` is."""
    found = _times(sitting, "+ graph", "ratio")
    sitting.verdict(
        "ablation",
        "torch.compile(mode='reduce-overhead') 15-30%: the CUDA graph alone",
        ", ".join(f"{value:.2f}x (B={rows})" for rows, value in found.items()),
        judge(list(found.values()) or None, 1.15, 1.04),
        "" if sitting.cuda else "no GPU",
    )


def _batch_sizes(sitting: Sitting) -> None:
    """Rows learnt from in a second by rows of a batch."""
    variant = "+ graph" if sitting.cuda else "all off"
    speed = {rows: rows / us * 1e6 for rows, us in _times(sitting, variant, "us").items()}
    largest = max(speed, default=0)
    enough = largest > 256 and 256 in speed
    sitting.verdict(
        "ablation",
        "optimal batch size: 128-256",
        ", ".join(f"B={rows}: {value:,.0f} rows/s" for rows, value in speed.items()),
        judge(1.1 * speed[256] / speed[largest], 1.0, 0.5) if enough else NOT_HERE,
        "of speed alone: how well larger batches learn is not asked" if enough else "larger ones are measured in full",
    )


EXPERIMENTS: dict[str, Callable[[Sitting], None]] = {"ablation": ablation}
"""Experiments by name."""
