"""The table of other networks than the small one: ``bench ppo`` and ``bench offpolicy`` with sizes of their own."""

from pathlib import Path
from typing import Any

from torchrl_perf.bench.report import RESULTS, format_table, read_results

PPO = {"ppo_64-64": "64-64", "ppo_256-256": "256-256", "ppo_robot": "robot, 512-256-128"}
"""Files of PPO, and how a row calls the network."""
UPDATES = ("offpolicy_sac", "offpolicy_td3", "offpolicy_sac_8192_512-256-128_bf16",
           "offpolicy_sac_32768_512-256-128_bf16")  # fmt: skip
VARIANTS = {
    "graph": "tf32",
    "graph-bf16": "bf16",
    "graph-plain": "tf32, layer by layer",
    "jax": "JAX, one jitted program",
}


def networks_block(folder: Path = RESULTS) -> str:
    """Markdown: env steps a second of PPO by network, and updates of actor and critics; empty without results.

    Args:
        folder: of the results.
    """
    table, machine = [], None
    for file, name in PPO.items():
        if not (folder / f"{file}.json").exists():
            continue
        found = read_results(file, folder)
        machine = found["machine"]
        rows = [row for row in found["rows"] if row["variant"] in VARIANTS and "ms" in row]
        for shape in dict.fromkeys(row["N x T"] for row in rows):
            cells = {VARIANTS[row["variant"]]: _speed(row) for row in rows if row["N x T"] == shape}
            table.append({"network and envs x steps": f"{name}, {shape}", **cells})
    if machine is None:
        return ""
    lines = [_updates(row) for file in UPDATES for row in _measured(file, folder)]
    lines += [sentence for file, name in PPO.items() for sentence in _learnt(file, name, folder)]
    words = (
        "## Networks\n\nPPO on CartPole, or a task of a robot's sizes (48 observations, 12 continuous actions, elu, 5 "
        "epochs), in one graph, on "
    )
    parts = [
        f"{words}{machine.get('gpu') or machine['cpu']}. A cell is env steps a second of whole iterations, or the "
        "milliseconds of an iteration of 4 envs. The third column is the same loop without kernels of ours. Cells "
        "with * are of an earlier commit than the others of their network, which the file names.",
        format_table(table, ["network and envs x steps", *VARIANTS.values()]),
        " ".join(lines),
    ]
    return "\n\n".join(part for part in parts if part)


def _speed(row: dict[str, Any]) -> str:
    speed = f"{row['ms']:.2f} ms" if row["N x T"].startswith("4x") else f"{row['steps_per_second'] / 1e6:.1f} M"
    return f"{speed} *" if "earlier" in row else speed


def _measured(file: str, folder: Path) -> list[dict[str, Any]]:
    """The rows of updates in a graph."""
    rows = read_results(file, folder)["rows"] if (folder / f"{file}.json").exists() else []
    return [row for row in rows if row["variant"] == "graph"]


def _learnt(file: str, name: str, folder: Path) -> list[str]:
    """A sentence on the runs that reached CartPole's return of 475: steps, whose number no clock alters."""
    rows = read_results(file, folder)["rows"] if (folder / f"{file}.json").exists() else []
    runs = [row for row in rows if "learns" in row]
    if not runs:
        return []
    learnt = [row["steps"] for row in runs if row["seconds"] is not None]
    precisions = dict.fromkeys(row["variant"].rpartition(" ")[2] for row in runs)
    steps = f", after {min(learnt):,} to {max(learnt):,} env steps" if learnt else ""
    share = f"{len(learnt)} of {len(runs)} runs in {', '.join(precisions)}"
    return [f"PPO with {name} reached a return of 475 in {share}{steps}."]


def _updates(row: dict[str, Any]) -> str:
    task, sizes = row["task"].split()[0], "-".join(map(str, row["hidden_sizes"]))
    return (
        f"{task} with {sizes}, a batch of {row['batch']:,} and {row['precision']} products makes "
        f"{row['per_second']:,.0f} full updates a second ({row['tflops']:.0f} TFLOP/s)."
    )
