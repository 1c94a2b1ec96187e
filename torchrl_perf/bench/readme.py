"""The tables of the documentation: results from the committed JSON, agents and tasks from the registry."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from torchrl_perf.bench import readme_dropin
from torchrl_perf.bench.readme_agents import agents_table, systems_table, tasks_table
from torchrl_perf.bench.readme_curves import curves_table, memory_table, robots_table
from torchrl_perf.bench.readme_dynamics import effort_table, samples_table
from torchrl_perf.bench.readme_networks import networks_block
from torchrl_perf.bench.report import RESULTS, format_table, read_results
from torchrl_perf.bench.zoo import zoo_table

ROOT = RESULTS.parents[2]
VARIANTS = {
    "torchrl": "TorchRL as it comes",
    "jax": "JAX, one jitted program",
    "eager": "torchrl_perf eager",
    "compile": "torchrl_perf + compile",
    "graph": "torchrl_perf + compile + graph",
    "graph-bf16": "the same, bf16 products",
}
LEARNT = "return 475 after, s"
BOUND = "lower bound"
REPLAY_VARIANTS = {
    "torchrl": "TorchRL",
    "flashbax": "Flashbax (JAX)",
    "torchrl with our parts": "TorchRL, our parts",
    "torchrl_perf": "torchrl_perf",
    "torchrl_perf, in a graph": "in a graph",
}
REPLAY_ROWS = (
    ("sample", 4096),
    ("sample", 65_536),
    ("prioritised sample + update", 4096),
    ("slice sample", 4096),
    ("extend", 4096),
)


def results_table(folder: Path = RESULTS) -> str:
    """Markdown: replaced lines, PPO by shape and variant, replay, off-policy and host collection, and the machines.

    Args:
        folder: of the results of all but PPO, which are shown where they are there.
    """
    result = read_results("ppo")
    rows = result["rows"]
    shapes = list(dict.fromkeys(row["N x T"] for row in rows if "ms" in row))
    table = [_throughput_row(rows, variant, shapes) for variant in VARIANTS]
    lines = [
        *[line for part in dropin_lines(folder) for line in (part, "")],
        "## PPO on CartPole\n\nActor and critic have two hidden layers of 64 with tanh. An iteration has 4 epochs of 4 "
        "minibatches. The columns are envs x steps. A cell is env steps per second of whole iterations, or the "
        f"milliseconds of an iteration of 4 envs. `{LEARNT}` is the time until the mean return is 475.",
        "",
        format_table([row for row in table if len(row) > 1], ["", *shapes, LEARNT]),
        "",
        f"{gae_line()} {collector_line()}",
        "",
        *[line for part in (networks_block(folder),) if part for line in (part, "")],
        *[line for part in (replay_table(folder), training_line(folder)) if part for line in (part, "")],
        *[line for line in (policies_line(folder),) if line],
        f"All other figures are {machine_line(result['machine'])}",
    ]
    return "\n".join(lines)


def _throughput_row(rows: Sequence[dict[str, Any]], variant: str, shapes: Sequence[str]) -> dict[str, Any]:
    out: dict[str, Any] = {"": VARIANTS[variant]}
    for row in rows:
        if row["variant"] == variant and "ms" in row:
            small = row["N x T"].startswith("4x")
            out[row["N x T"]] = f"{row['ms']:.2f} ms" if small else f"{row['steps_per_second'] / 1e6:.2f} M"
    seconds = [row["seconds"] for row in rows if row.get("learns") == variant and row["seconds"] is not None]
    if seconds:
        out[LEARNT] = f"{median(seconds):.2f}"
    return out


def gae_line(shape: str = "65536x128") -> str:
    """One sentence on advantages: ours in a graph against TorchRL's better form."""
    results = read_results("gae")
    rows = {row["variant"]: row for row in results["rows"] if row["N x T"] == shape}
    ours = rows["torchrl_perf, in a graph"]
    theirs = min(rows["torchrl loop"]["us"], rows["torchrl vectorised"]["us"])
    return (
        f"Generalised advantage estimation at {shape} takes {ours['us']:.0f} us, at {ours['of_copy_bandwidth']:.0%} of "
        f"the bandwidth of a copy on {results['machine'].get('gpu') or 'the device'}. TorchRL takes {theirs:,.0f} us."
    )


def collector_line() -> str:
    """One sentence on collection on a CPU, against TorchRL's collector with its defaults."""
    rows = {row["variant"]: row for row in read_results("collector_cpu")["rows"]}
    base = rows["torchrl"]["frames_per_second"]
    eager, fused = (rows[name]["frames_per_second"] / base for name in ("eager", "compile"))
    return (
        f"Collecting {rows['torchrl']['N x T']} frames of CartPole on one CPU thread is {eager:.1f} times as fast as "
        f"TorchRL's collector eagerly, and {fused:.1f} times compiled."
    )


TRAINING_SIDES = {
    "torchrl_perf": "eager",
    "torchrl_perf-compile": "compiled",
    "sb3": "Stable-Baselines3",
    "cleanrl": "CleanRL",
}
"""Sides of ``bench training``, as the sentences name them."""


def _rows(name: str, folder: Path) -> list[dict[str, Any]]:
    """Rows of one file of results; none where it has not been measured."""
    return read_results(name, folder)["rows"] if (folder / f"{name}.json").exists() else []


def replay_table(folder: Path = RESULTS) -> str:
    """Markdown: microseconds of the replay buffers' operations; empty where they have not been measured."""
    rows, table = _rows("replay", folder), []
    for operation, batch in REPLAY_ROWS:
        found = {row["variant"]: row for row in rows if (row["operation"], row["batch"]) == (operation, batch)}
        cells = {name: f"{found[variant]['us']:,.0f}" for variant, name in REPLAY_VARIANTS.items() if variant in found}
        floors = [row["floor_us"] for row in found.values() if row.get("floor_us")]
        if cells:
            floor = f"{floors[0]:,.0f}" if floors else ""
            table.append({"us": f"{operation}, {batch:,}", **cells, BOUND: floor})
    if not table:
        return ""
    columns = [name for name in REPLAY_VARIANTS.values() if any(name in row for row in table)]
    gpu = read_results("replay", folder)["machine"].get("gpu")
    where = f" These figures are of {gpu}." if gpu else ""
    return (
        "## Replay\n\nThe buffer has 1,048,576 rows of 2 x 376 + 18 floats. A cell is the microseconds (us) of a call "
        "from Python, or inside a CUDA graph. The lower bound is the time in which the GPU's memory can move as many "
        f"bytes as the call has to.{where}\n\n" + format_table(table, ["us", *columns, BOUND])
    )


def training_line(folder: Path = RESULTS) -> str:
    """Sentences on SAC, DQN and the collection from CPU envs; empty where none has been measured."""
    rows = _rows("offpolicy", folder)
    lines = [line for line in (_sac_line(rows), _dqn_line(rows), host_line(folder), *whole_lines(folder)) if line]
    return "\n".join(["## Off-policy training and envs on the CPU", "", *lines]) if lines else ""


def _sac_line(rows: Sequence[dict[str, Any]]) -> str:
    speed = {row["variant"]: row["per_second"] for row in rows if row["task"] == "SAC updates"}
    ours = [speed[variant] for variant in speed if variant != "torchrl"]
    theirs = f"; TorchRL makes {speed['torchrl']:,.0f}" if "torchrl" in speed else ""
    words = "SAC with two hidden layers of 256 and a batch of 256 makes"
    return f"{words} {max(ours):,.0f} full updates a second{theirs}." if ours else ""


def _dqn_line(rows: Sequence[dict[str, Any]]) -> str:
    speed = [row["per_second"] for row in rows if row["task"] == "DQN env steps"]
    seeds = [row["seconds"] for row in rows if "seed" in row]
    learnt = [seconds for seconds in seeds if seconds is not None]
    parts = [f"takes {max(speed) / 1e6:.1f} M env steps a second in whole iterations"] if speed else []
    if learnt:
        parts.append(f"has a return of 475 after {median(learnt):.1f} s ({len(learnt)} of {len(seeds)} seeds)")
    return f"DQN on CartPole {' and '.join(parts)}." if parts else ""


def host_line(folder: Path = RESULTS) -> str:
    """One sentence on envs on the CPU: one vector env, bare, under our collector and under TorchRL's."""
    rows = {row["variant"]: row for row in _rows("host", folder)}
    ours = rows.get("host")
    if ours is None:
        return ""
    share = f", {ours['share_of_bare']:.0%} of what the vector env takes alone" if ours.get("share_of_bare") else ""
    theirs = rows.get("torchrl-vector")
    times = f" and {ours['frames_per_second'] / theirs['frames_per_second']:.1f} times TorchRL's" if theirs else ""
    num_envs = ours["N x T"].split("x")[0]
    return (
        f"`HostCollector` on {num_envs} envs of {ours['env']} takes {ours['frames_per_second']:,.0f} frames a "
        f"second{share}{times}."
    )


def whole_lines(folder: Path = RESULTS) -> list[str]:
    """A sentence on each case of whole training on a CPU, ours beside other packages'."""
    rows, lines = _rows("training_cpu", folder), []
    for case in dict.fromkeys(row["case"] for row in rows):
        own = [row for row in rows if row["case"] == case]
        speed = {row["side"]: row["frames_per_second"] for row in own if "frames_per_second" in row}
        cells = [f"{words} {speed[side]:,.0f}" for side, words in TRAINING_SIDES.items() if side in speed]
        if cells:
            algorithm, env = case.split("-", 1)
            lines.append(f"Training {algorithm.upper()} on {env}, 2 CPU cores, frames a second: {', '.join(cells)}.")
    return lines


def policies_line(folder: Path = RESULTS, num_rows: int = 4096) -> str:
    """Sentences on action selection and losses, in graphs; empty where they have not been measured."""
    rows = [row for row in _rows("policies", folder) if "us" in row]
    fastest: dict[tuple[str, int], float] = {}
    for row in rows:
        if "graph" in row["variant"]:
            key = row["agent"], row["N"]
            fastest[key] = min(row["us"], fastest.get(key, math.inf))
    losses = {agent: us for (agent, _), us in fastest.items() if " " in agent}
    chosen = ", ".join(f"{agent} {us:.0f}" for (agent, n), us in fastest.items() if n == num_rows)
    parts = [f"Choosing {num_rows:,} actions takes, in microseconds: {chosen}."] if chosen else []
    theirs = [row["us"] for row in rows if (row["agent"], row["variant"]) == ("c51 loss", "torchrl")]
    if theirs and "c51 loss" in losses:
        times = theirs[0] / losses["c51 loss"]
        parts.append(f"The loss of C51 and its gradients are {times:.0f} times as fast as TorchRL's.")
    if "iqn update" in losses:
        speed = 1e6 / losses["iqn update"]
        parts.append(f"IQN with a batch of 256 and 8 x 32 quantiles makes {speed:,.0f} updates a second.")
    if not parts:
        return ""
    gpu = read_results("policies", folder)["machine"].get("gpu", "a CPU")
    return "\n".join(
        ["## Policies and losses in graphs", "", f"These figures are of {gpu}.", *parts, "", "## Machine", ""]
    )


def machine_line(card: dict[str, Any], rows: str = "torchrl_perf/bench/results/") -> str:
    """What figures are, after the words "Figures are": medians on a machine; then where every row is.

    Args:
        card: of the machine, as the file of results has it.
        rows: the folder of that file.
    """
    return f"medians on {machine_words(card)}. Every row is in `{rows}`."


def machine_words(card: dict[str, Any]) -> str:
    """A machine and its versions, by its card."""
    packages = card["packages"]
    watts = f" ({card['power_limit_w']:.0f} W)" if card.get("power_limit_w") else ""
    return (
        f"{card.get('gpu') or card['cpu']}{watts}, {card['cores']} CPU cores, torch {packages['torch']}, "
        f"torchrl {packages['torchrl']}, Python {card['python']}"
    )


def dropin_lines(folder: Path = RESULTS) -> list[str]:
    """The table of replaced lines and its machine; nothing where they have not been measured."""
    return [line for line in (readme_dropin.dropin_table(folder), dropin_machine(folder)) if line]


def dropin_machine(folder: Path = RESULTS) -> str:
    """The machine of the table of replaced lines, and how they were measured; empty where they were not."""
    results = readme_dropin.measured(folder)
    if results is None:
        return ""
    return f"Measured on {machine_words(results['machine'])}. {readme_dropin.runs_line(results)}"


def steps_block(folder: Path = RESULTS) -> str:
    """The table of ``docs/drop_in.md`` on PPO, with its machine."""
    return "\n\n".join(part for part in (readme_dropin.steps_table(folder), dropin_machine(folder)) if part)


def made(text: str, blocks: Mapping[str, Callable[[], str]]) -> str:
    """A page with each of its blocks replaced.

    A block is what stands between ``<!-- name -->`` and ``<!-- /name -->``.

    Args:
        text: the present page.
        blocks: what makes each of them, by name.

    Raises:
        ValueError: for a page without one of the markers.
    """
    for name, table in blocks.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"page: expected the markers {begin} and {end}, received none. Remedy: put them back.")
        text = f"{before}{begin}\n{table()}\n{end}{after}"
    return text


def pages() -> dict[Path, dict[str, Callable[[], str]]]:
    """The blocks of each page that holds tables."""
    docs = ROOT / "docs"
    return {
        docs / "results.md": {"results": results_table},
        docs / "algorithms" / "index.md": {"agents": agents_table},
        docs / "tasks.md": {"tasks": tasks_table, "systems": systems_table},
        docs / "drop_in.md": {"steps": steps_block, "off-policy": readme_dropin.off_policy_table},
        docs / "zoo.md": {"zoo": zoo_table},
        docs / "figures.md": {"curves": curves_table},
        docs / "active_dynamics.md": {"samples": samples_table, "effort": effort_table},
        docs / "robots.md": {"robots": robots_table},
        docs / "memory.md": {"memory": memory_table},
    }


def main() -> int:
    """Rewrites the tables of every page."""
    for path, blocks in pages().items():
        path.write_text(made(path.read_text(encoding="utf-8"), blocks), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
