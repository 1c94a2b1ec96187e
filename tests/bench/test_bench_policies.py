"""The benchmark of policies: agents row by row and at once, the same C51 everywhere, verdicts, rows and the file."""

import json

import pytest
import torch
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_perf.bench import policies
from torchrl_perf.bench.policies_agents import AGENTS, AXES, CHOICES, build
from torchrl_perf.bench.policies_losses import C51Losses, LoopC51Loss, transitions
from torchrl_perf.modules import CategoricalMLP
from torchrl_perf.runtime import no_host_sync

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ALL = {"dqn", "qr-dqn", "iqn", "c51", "rainbow", "ddpg", "td3", "ac-iqn", "sac", "hybrid", "options"}


def test_every_agent_is_there():
    assert set(AGENTS) == ALL
    assert policies.BenchPolicies().agents == tuple(AGENTS)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", AGENTS)
def test_agents_act_row_by_row_as_at_once_and_ask_the_host_nothing(name, device):
    agent = build(name, 16, torch.device(device))
    with torch.no_grad():
        assert policies.difference(agent, 8) <= policies.TOLERANCE
        act = policies.chooser(agent.policy, agent)
        with set_exploration_type(ExplorationType.RANDOM), no_host_sync(agent.td.device):
            parts = act()
    shapes = [tuple(part.shape) for part in parts]
    assert shapes == {"hybrid": [(16,), (16, AXES)]}.get(
        name, [(16,)] if agent.outputs(agent.td).shape == (16, CHOICES) else [(16, AXES)]
    )
    assert all(part.double().isfinite().all() for part in parts)
    assert sorted(agent.td.keys()) == sorted(build(name, 16, torch.device(device)).td.keys())  # nothing is written


@pytest.mark.parametrize("name", [name for name in AGENTS if build(name, 2, torch.device("cpu")).peer is not None])
def test_torchrls_modules_write_actions_of_the_same_form(name):
    agent = build(name, 6, torch.device("cpu"))
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        ours, theirs = (policies.chooser(policy, agent)() for policy in (agent.policy, agent.peer))
    assert [part.shape for part in ours] == [part.shape for part in theirs]
    assert [part.dtype for part in ours] == [part.dtype for part in theirs]


def test_a_policy_that_mixes_its_rows_is_not_timed(monkeypatch):
    def mixing(num_rows, device):
        agent = AGENTS["td3"](num_rows, device)
        agent.policy.policy.module.register_forward_hook(lambda module, args, out: out - out.mean(0))
        return agent

    monkeypatch.setitem(AGENTS, "mixing", mixing)
    bench = policies.Bench(policies.BenchPolicies(sizes=(4,)), torch.device("cpu"))
    policies.actions(bench, "mixing")
    (row,) = bench.rows
    assert row["ok"] is False
    assert row["off_by"] > policies.TOLERANCE
    assert "us" not in row


@pytest.mark.parametrize("name", AGENTS)
def test_actions_of_one_policy_are_not_apart_and_those_of_other_states_are(name):
    agent, other = (build(name, 1024, torch.device("cpu")) for _ in range(2))
    other.td["observation"] = other.td["observation"].roll(1, 0)
    act, wrong = (policies.chooser(agent.policy, each) for each in (agent, other))
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        assert policies.apart(act, act) < policies.MOST_APART < policies.apart(act, wrong)


def test_apart_by_hand():
    """Draws of variance 1 whose means are 1 apart, by chance 1 / 16 + 1 / 16; and a choice that is always the same."""
    spread = (1 - 1 / policies.DRAWS) ** 0.5

    def alternating(mean):
        values = iter([mean - spread, mean + spread] * policies.DRAWS)
        return lambda: (torch.tensor([next(values)]), torch.tensor([3]))

    assert policies.apart(alternating(0.0), alternating(0.0)) == pytest.approx(0.0)
    assert policies.apart(alternating(0.0), alternating(1.0)) == pytest.approx(policies.DRAWS / 2)


@pytest.mark.parametrize("device", DEVICES)
def test_loop_torchrl_and_ours_have_one_loss_and_gradients(device):
    losses = C51Losses(6, torch.device(device))
    assert list(losses.calls) == ["loop", "torchrl", "eager"]
    for variant in losses.calls:
        assert losses.off_by(variant) <= policies.LOSS_TOLERANCE[device], variant
    with torch.no_grad():
        # ours alone: the loss of TorchRL has its own copy; the first atom of each action, whichever were drawn
        losses.network.head.layers[4].bias[:: losses.network.num_atoms] += 1.0
    assert losses.off_by("eager") > policies.LOSS_TOLERANCE[device]


def test_loop_projects_by_hand():
    """Support -1, 0, 1: a terminal reward of 0.25 is 3/4 on the atom 0 and 1/4 on 1."""
    network = CategoricalMLP(32, 8, num_atoms=3, v_min=-1.0, v_max=1.0)
    td = transitions(1, torch.device("cpu"))
    td["next", "terminated"] = torch.ones(1, 1, dtype=torch.bool)
    td["next", "reward"] = torch.full((1, 1), 0.25)
    log_probs = network.log_probs(td["observation"])[0, td["action"].squeeze()]
    torch.testing.assert_close(LoopC51Loss(network)(td), -(0.75 * log_probs[1] + 0.25 * log_probs[2]))


def test_verdicts_follow_the_rows():
    options = policies.BenchPolicies(agents=("dqn", "sac"))
    bench = policies.Bench(options, torch.device("cpu"))
    bench.device = torch.device("cuda")  # only its name is read
    for agent, num_rows, variant, us in (
        ("dqn", 4096, "graph", 30.0),
        ("dqn", 4096, "compiled + graph", 20.0),
        ("dqn", 4096, "eager", 1.0),
        ("sac", 4096, "graph", 41.0),
        ("c51 loss", 256, "torchrl", 3000.0),
        ("c51 loss", 256, "compiled + graph", 100.0),
        ("iqn update", 256, "compiled + graph", 400.0),
    ):
        bench.rows.append({"agent": agent, "N": num_rows, "variant": variant, "us": us})
    found = [(row["measured"], row["verdict"]) for row in policies.verdicts(bench)]
    assert found == [
        ("20.0 us", "holds"),
        ("41.0 us", "does not hold"),
        ("30.0 times", "holds"),
        ("2,500 a second", "does not hold"),
    ]
    bench.device = torch.device("cpu")
    assert {row["verdict"] for row in policies.verdicts(bench)} == {"n/a: not captured"}


def test_quick_run_prints_rows_as_they_come_and_writes_the_file(tmp_path, capsys):
    options = ["--quick", "--agents", "dqn", "td3", "--losses", "c51", "--repeats", "3", "--device", "cpu"]
    assert policies.main([*options, "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "policies_cpu.json").read_text(encoding="utf-8"))["rows"]
    seen = {(row["agent"], row["N"], row["variant"]) for row in rows if "us" in row}
    both = {policies.LOOP, policies.HOST_LOOP, "torchrl", "eager"}
    expected = {(agent, num_rows, variant) for agent in ("dqn", "td3") for num_rows in (1, 64) for variant in both}
    assert seen == expected | {("c51 loss", 32, variant) for variant in ("loop", "torchrl", "eager")}
    for row in rows:
        if "us" in row:
            assert row["per_second"] == pytest.approx(row["N"] / row["us"] * 1e6)
            assert row["latency_us"] > 0
    assert sum(row.get("part") == "verdict" for row in rows) == 3
    text = capsys.readouterr().out
    assert "4,096 actions in at most 40 us" in text


def test_a_run_that_is_cut_off_keeps_its_rows(tmp_path, monkeypatch):
    def cut_off(bench, name, agent, off_by):
        raise KeyboardInterrupt

    monkeypatch.setattr(policies, "ours", cut_off)
    options = ["--agents", "td3", "--losses", "c51", "--sizes", "2", "--repeats", "3", "--device", "cpu", "--quick"]
    with pytest.raises(KeyboardInterrupt):
        policies.main([*options, "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "policies_cpu.json").read_text(encoding="utf-8"))["rows"]
    assert [row["variant"] for row in rows] == [policies.LOOP, policies.HOST_LOOP, "torchrl"]


def test_iqn_rows_are_those_of_one_update(monkeypatch):
    ended = []
    monkeypatch.setattr(policies, "iqn_updates", lambda *args: (lambda: None, lambda: ended.append(args), 1.0))
    bench = policies.Bench(policies.BenchPolicies(quick=True, repeats=3), torch.device("cpu"))
    policies.iqn(bench)
    (row,) = bench.rows
    assert row["per_second"] == pytest.approx(1e6 / row["us"])
    assert ended == [("eager", torch.device("cpu"))]


@pytest.mark.parametrize("option", ["--agents", "--losses"])
def test_unknown_names_are_refused(option, capsys):
    assert policies.main([option, "what", "--device", "cpu"]) == 2
    assert "received what" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_cuda_graphs_draw_anew(tmp_path):
    options = ["--agents", "td3", "--sizes", "4096", "--losses", "c51", "--repeats", "3", "--quick"]
    assert policies.main([*options, "--device", "cuda", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "policies.json").read_text(encoding="utf-8"))["rows"]
    (graph,) = [row for row in rows if row.get("variant") == "graph" and row["agent"] == "td3"]
    assert graph["fresh"]
