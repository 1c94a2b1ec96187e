"""The README's table of results, made from the committed JSON files."""

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from torchrl_perf.bench.report import RESULTS, format_table, read_results

BEGIN, END = "<!-- results -->", "<!-- /results -->"
VARIANTS = {
    "torchrl": "TorchRL as it comes",
    "jax": "JAX, one jitted program",
    "eager": "torchrl_perf eager",
    "compile": "torchrl_perf + compile",
    "graph": "torchrl_perf + compile + graph",
    "graph-bf16": "the same, bf16 products",
}


def results_table() -> str:
    """Markdown: PPO throughput by shape and variant, the time to learn, and the machine it was measured on."""
    result = read_results("ppo")
    rows = result["rows"]
    shapes = list(dict.fromkeys(row["N x T"] for row in rows if "ms" in row))
    table = [_throughput_row(rows, variant, shapes) for variant in VARIANTS]
    lines = [
        "PPO on CartPole, tanh 64-64 actor and critic, 4 epochs x 4 minibatches; env steps/s of whole iterations "
        "(N=4: ms an iteration), by envs x steps:",
        "",
        format_table([row for row in table if len(row) > 1], ["", *shapes, "s to 475"]),
        "",
        f"{gae_line()} {collector_line()}",
        "",
        machine_line(result["machine"]),
    ]
    return "\n".join(lines)


def _throughput_row(rows: Sequence[dict[str, Any]], variant: str, shapes: Sequence[str]) -> dict[str, Any]:
    out: dict[str, Any] = {"": VARIANTS[variant]}
    for row in rows:
        if row["variant"] == variant and "ms" in row:
            small = row["N x T"].startswith("4x")
            out[row["N x T"]] = f"{row['ms']:.2f} ms" if small else f"{row['steps_per_second'] / 1e6:.2f} M"
    seconds = [row["seconds"] for row in rows if row.get("learns") == variant]
    if seconds:
        out["s to 475"] = f"{median(seconds):.2f}"
    return out


def gae_line(shape: str = "65536x128") -> str:
    """One sentence on advantages: ours in a graph against TorchRL's better form."""
    rows = {row["variant"]: row for row in read_results("gae")["rows"] if row["N x T"] == shape}
    ours = rows["torchrl_perf, in a graph"]
    theirs = min(rows["torchrl loop"]["us"], rows["torchrl vectorised"]["us"])
    return (
        f"GAE at {shape}: {ours['us']:.0f} us, {ours['of_copy_bandwidth']:.0%} of a device copy's bandwidth (TorchRL "
        f"{theirs:,.0f} us)."
    )


def collector_line() -> str:
    """One sentence on collection on a CPU, against TorchRL's collector with its defaults."""
    rows = {row["variant"]: row for row in read_results("collector_cpu")["rows"]}
    base = rows["torchrl"]["frames_per_second"]
    eager, fused = (rows[name]["frames_per_second"] / base for name in ("eager", "compile"))
    return (
        f"Collecting CartPole on one CPU thread, {rows['torchrl']['N x T']}: {eager:.1f}x TorchRL's frames/s eager, "
        f"{fused:.1f}x compiled."
    )


def machine_line(card: dict[str, Any]) -> str:
    """One line that names the machine."""
    packages = card["packages"]
    watts = f" ({card['power_limit_w']:.0f} W)" if card.get("power_limit_w") else ""
    return (
        f"{card.get('gpu') or card['cpu']}{watts}, {card['cores']} CPU cores, torch {packages['torch']}, "
        f"torchrl {packages['torchrl']}, Python {card['python']}; medians; every row in `torchrl_perf/bench/results/`."
    )


def main(argv: list[str] | None = None) -> int:
    """Rewrites the block between the markers of README.md."""
    path = Path(argv[0]) if argv else RESULTS.parents[2] / "README.md"
    text = path.read_text()
    before, rest = text.split(BEGIN, 1)
    _, after = rest.split(END, 1)
    path.write_text(f"{before}{BEGIN}\n{results_table()}\n{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
