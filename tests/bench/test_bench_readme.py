"""The documentation's block of results: what it shows of the files of results, and what without some of them."""

import json
from pathlib import Path

import pytest

from torchrl_perf.bench import readme, readme_networks


def write(folder: Path, name: str, rows: list[dict[str, object]]) -> None:
    (folder / f"{name}.json").write_text(json.dumps({"machine": {}, "rows": rows}))


def replay_row(operation: str, variant: str, us: float, batch: int = 4096) -> dict[str, object]:
    return {"operation": operation, "batch": batch, "variant": variant, "us": us, "floor_us": 8.4}


def test_nothing_is_shown_of_what_was_not_measured(tmp_path: Path) -> None:
    assert readme.replay_table(tmp_path) == readme.training_line(tmp_path) == readme.host_line(tmp_path) == ""
    text = readme.results_table(tmp_path)
    assert "## Replay" not in text
    assert "\n\n\n" not in text


def test_replay_has_a_column_for_each_variant_that_was_measured(tmp_path: Path) -> None:
    rows = [replay_row("sample", "torchrl", 184.0), replay_row("sample", "torchrl_perf, in a graph", 16.6)]
    rows += [replay_row("extend", "torchrl", 1234.0), replay_row("sample", "torchrl", 5.0, batch=256)]
    flashbax = replay_row("prioritised sample + update", "flashbax", 50.0)
    write(tmp_path, "replay", [*rows, {key: flashbax[key] for key in flashbax if key != "floor_us"}])
    lines = readme.replay_table(tmp_path).splitlines()[4:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["us", "TorchRL", "Flashbax (JAX)", "in a graph", "lower bound"]
    assert cells[2:] == [
        ["sample, 4,096", "184", "", "17", "8"],
        ["prioritised sample + update, 4,096", "", "50", "", ""],
        ["extend, 4,096", "1,234", "", "", "8"],
    ]


def test_off_policy_sentences(tmp_path: Path) -> None:
    rows = [{"task": "SAC updates", "variant": name, "per_second": n} for name, n in (("torchrl", 301.2), ("eager", 9))]
    write(tmp_path, "offpolicy", rows[:1])
    assert readme.training_line(tmp_path) == ""
    rows += [{"task": "SAC updates", "variant": "graph", "per_second": 6543.2}]
    rows += [{"task": "DQN env steps", "variant": "graph", "per_second": 2.46e7}]
    times = (1.0, 2.0, 9.0, None)
    rows += [{"task": "DQN, time to 475", "seed": seed, "seconds": seconds} for seed, seconds in enumerate(times)]
    write(tmp_path, "offpolicy", rows)
    assert readme.training_line(tmp_path).splitlines()[2:] == [
        "SAC with two hidden layers of 256 and a batch of 256 makes 6,543 full updates a second; TorchRL makes 301.",
        "DQN on CartPole takes 24.6 M env steps a second in whole iterations and has a return of 475 after 2.0 s (3 of "
        "4 seeds).",
    ]


def test_policies_sentences_take_the_fastest_graph(tmp_path: Path) -> None:
    assert readme.policies_line(tmp_path) == ""
    timed = [("dqn", 4096, "eager", 400.0), ("dqn", 4096, "graph", 48.0), ("dqn", 4096, "compiled + graph", 31.6)]
    timed += [("dqn", 16, "graph", 9.0), ("sac", 4096, "graph", 36.0), ("c51 loss", 256, "torchrl", 8000.0)]
    timed += [("c51 loss", 256, "compiled + graph", 160.0), ("iqn update", 256, "compiled + graph", 125.0)]
    rows: list[dict[str, object]] = [dict(zip(("agent", "N", "variant", "us"), row, strict=True)) for row in timed]
    write(tmp_path, "policies", [*rows, {"part": "verdict", "target": "t"}])
    assert readme.policies_line(tmp_path).splitlines()[2:6] == [
        "These figures are of a CPU.",
        "Choosing 4,096 actions takes, in microseconds: dqn 32, sac 36.",
        "The loss of C51 and its gradients are 50 times as fast as TorchRL's.",
        "IQN with a batch of 256 and 8 x 32 quantiles makes 8,000 updates a second.",
    ]


def test_host_sentence_compares_collectors_of_one_vector_env(tmp_path: Path) -> None:
    frames = {"bare": 1000.0, "host": 900.0, "host-groups": 950.0, "host-random": 990.0, "torchrl-vector": 250.0}
    shared = {"N x T": "16x32", "env": "Ant-v5"}
    rows = [{**shared, "variant": k, "frames_per_second": v, "share_of_bare": v / 1000} for k, v in frames.items()]
    write(tmp_path, "host", rows)
    expected = "`HostCollector` on 16 envs of Ant-v5 takes 900 frames a second, 90% of what the vector env takes alone"
    assert readme.host_line(tmp_path) == expected + " and 3.6 times TorchRL's."
    write(tmp_path, "host", rows[:-1])
    assert readme.training_line(tmp_path).splitlines()[2:] == [expected + "."]


def test_main_rewrites_the_blocks_of_every_page_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs" / "algorithms").mkdir(parents=True)
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    pages = readme.pages()
    assert {path.name: list(blocks) for path, blocks in pages.items()} == {
        "results.md": ["results"],
        "index.md": ["agents"],
        "tasks.md": ["tasks", "systems"],
        "active_dynamics.md": ["samples", "effort"],
        "drop_in.md": ["steps", "off-policy"],
        "zoo.md": ["zoo"],
        "figures.md": ["curves"],
        "robots.md": ["robots"],
        "memory.md": ["memory"],
    }
    for path, blocks in pages.items():
        path.write_text(
            "before " + " between ".join(f"<!-- {name} -->\nold\n<!-- /{name} -->" for name in blocks) + " after"
        )
    made = {path: {name: lambda name=name: f"new {name}" for name in blocks} for path, blocks in pages.items()}
    monkeypatch.setattr(readme, "pages", lambda: made)
    assert readme.main() == 0
    for path, blocks in pages.items():
        expected = (f"<!-- {name} -->\nnew {name}\n<!-- /{name} -->" for name in blocks)
        assert path.read_text() == "before " + " between ".join(expected) + " after"


def test_a_lost_marker_is_named() -> None:
    with pytest.raises(ValueError, match="expected the markers <!-- results --> and <!-- /results -->, received none"):
        readme.made("<!-- results --> without an end", {"results": str})


@pytest.mark.parametrize("path", readme.pages(), ids=lambda path: path.name)
def test_each_page_is_what_the_script_makes(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text == readme.made(text, readme.pages()[path]), f"{path}: run `python -m torchrl_perf.bench.readme`"


def test_networks_have_a_row_for_each_shape_that_was_measured(tmp_path: Path) -> None:
    assert readme_networks.networks_block(tmp_path) == ""
    row = {"N x T": "4x128", "ms": 1.234, "steps_per_second": 4e5}
    rows = [{**row, "variant": name} for name in ("graph", "jax", "torchrl")]
    rows += [{"N x T": "2048x128", "ms": 3.0, "steps_per_second": 8.765e7, "variant": "graph-bf16", "earlier": "abc"}]
    machine = {"gpu": "a card"}
    learnt = [
        {"variant": f"time to 475, {name}", "learns": "graph", "seconds": seconds, "steps": steps}
        for name, seconds, steps in (("tf32", 0.1, 2000), ("tf32", 0.2, 1000), ("fp16", None, 5000))
    ]
    (tmp_path / "ppo_64-64.json").write_text(json.dumps({"machine": machine, "rows": [*rows, *learnt]}))
    update = {"task": "SAC updates", "hidden_sizes": [8, 4], "batch": 32_768, "precision": "bf16", "tflops": 12.3}
    write(tmp_path, "offpolicy_sac", [{**update, "variant": name, "per_second": 1234.5} for name in ("eager", "graph")])
    head, words, table, sentence = readme_networks.networks_block(tmp_path).split("\n\n")
    assert head == "## Networks" and "on a card" in words
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert cells[2:] == [["64-64, 4x128", "1.23 ms", "", "", "1.23 ms"], ["64-64, 2048x128", "", "87.7 M *", "", ""]]
    assert sentence == (
        "SAC with 8-4, a batch of 32,768 and bf16 products makes 1,234 full updates a second (12 TFLOP/s). "
        "PPO with 64-64 reached a return of 475 in 2 of 3 runs in tf32, fp16, after 1,000 to 2,000 env steps."
    )
