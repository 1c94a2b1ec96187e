"""``torchrl-perf export``: files that do what the policy does, for each algorithm and system; what is refused."""

import sys

import numpy as np
import pytest
import torch
from config_runs import KINDS
from config_runs import make as make_small
from finished_runs import finished
from tensordict import TensorDict
from torch import nn
from torchrl.data import Bounded

from torchrl_perf.cli import main
from torchrl_perf.trainers import export as module
from torchrl_perf.trainers import load_policy
from torchrl_perf.trainers.export import ActingNetwork, ExportError, export_policy, random_rows

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

SYSTEMS = ("marine-iqn", "durotaxis", "fuel-breaks", "options-market")
FILES = ["policy.md", "policy.onnx", "policy.pt2"]


def policy_of(name, tmp_path):
    """A policy of each algorithm and system, that has learnt a little."""
    if name in SYSTEMS:
        return load_policy(finished(name))
    trainer = make_small(name, {})
    for _ in range(4):
        trainer.step()
        trainer.iterations_done += 1
    path = trainer.save(tmp_path / "checkpoint.pt")
    trainer.close()
    return load_policy(path)


@pytest.mark.parametrize("name", [*KINDS, *SYSTEMS])
def test_files_do_what_the_policy_does(name, tmp_path):
    policy = policy_of(name, tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    made = export_policy(policy, out)
    assert sorted(path.name for path in out.iterdir()) == FILES
    assert made.rows == 1000
    assert made.difference <= 1e-5
    network = ActingNetwork(policy)
    names, out_names = network.names
    rows = random_rows(policy, network.in_keys, 37, seed=5)  # another number, other inputs
    for controller in [part for part in network.modules() if hasattr(part, "ends_by_chance")]:
        assert controller.ends_by_chance  # the policy itself is as it was
        controller.ends_by_chance = False
    with torch.no_grad():
        expected = network(*rows)
        from_torch = torch.export.load(out / "policy.pt2").module()(*rows)
    session = onnxruntime.InferenceSession(str(out / "policy.onnx"), providers=["CPUExecutionProvider"])
    kept = {each.name for each in session.get_inputs()}
    fed = {name: row.numpy() for name, row in zip(names, rows, strict=True) if name in kept}
    from_onnx = session.run(out_names, fed)
    for right, one, other in zip(expected, from_torch, from_onnx, strict=True):
        np.testing.assert_allclose(one, right, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(other, right, rtol=1e-5, atol=1e-5)
    text = (out / "policy.md").read_text()
    assert all(f"| in | `{each}` | [batch" in text for each in names)
    assert all(f"| out | `{each}` | [batch" in text for each in out_names)
    acted = policy.specs.full_action_spec.values(True, True)
    has_range = any(isinstance(spec, Bounded) and spec.dtype.is_floating_point for spec in acted)
    assert ("Clip an action to its values" in text) == has_range


def test_command_line(capsys):
    run = finished("ppo", seed=3)
    assert main(["export", str(run), "--rows", "50"]) == 0
    assert "the same actions as the policy on 50 random inputs" in capsys.readouterr().out
    assert {"policy.md", "policy.onnx", "policy.pt2"} <= {path.name for path in run.iterdir()}
    text = (run / "policy.md").read_text()
    assert text.startswith("# Policy of ppo on CartPole\n\nFrom `000000010.pt` of this run, after 640 env steps.")
    code = text.split("```python")[1].split("```")[0].replace('"policy.onnx"', repr(str(run / "policy.onnx")))
    scope = {"observation": np.zeros((2, 4), dtype=np.float32)}
    exec(code, scope)
    acted = load_policy(run)(TensorDict({"observation": torch.zeros(2, 4)}, [2]))
    assert scope["action"].tolist() == acted["action"].tolist()


def test_random_rows_are_within_bounds_and_differ(tmp_path):
    policy = policy_of("sac", tmp_path)
    (first,), (second,) = (random_rows(policy, ["observation"], 500, seed=seed) for seed in (0, 1))
    space = policy.specs.observation_spec["observation"].space
    assert ((first >= space.low[0]) & (first <= space.high[0])).all()
    assert not torch.equal(first, second)
    assert first.std() > 0.5


class TestRefusals:
    def refused(self, policy, tmp_path, message, **options):
        out = tmp_path / "out"
        out.mkdir(exist_ok=True)
        (out / "policy.onnx").write_text("what was there before")
        with pytest.raises(ExportError, match=message):
            export_policy(policy, out, **options)
        assert [path.name for path in out.iterdir()] == ["policy.onnx"]
        assert (out / "policy.onnx").read_text() == "what was there before"

    def test_a_planner(self, tmp_path):
        policy = load_policy(finished("active-dynamics"))
        self.refused(policy, tmp_path, r"which its env observes, received one that reads \['hidden'")

    def test_a_policy_that_draws(self, tmp_path):
        policy = policy_of("ppo", tmp_path)
        policy.policy.module[0].module = Chance()
        self.refused(policy, tmp_path, r"gives the same action for the same input, received a DeviceActor that draws")

    def test_an_operator_that_onnx_lacks(self, tmp_path):
        policy = policy_of("ppo", tmp_path)
        policy.policy.module[0].module = nn.Sequential(Eigenvalues(), nn.Linear(4, 2))
        self.refused(policy, tmp_path, r"operators that ONNX and its runtime have, received one that is")
        out = tmp_path / "out"
        assert export_policy(policy, out, form="torch").difference == 0.0

    def test_a_branch_on_values(self, tmp_path):
        policy = policy_of("ppo", tmp_path)
        policy.policy.module[0].module = Branch()
        self.refused(policy, tmp_path, r"that torch\.export can trace for any number of rows, received", form="torch")

    def test_a_file_that_does_something_else(self, tmp_path, monkeypatch):
        policy = policy_of("sac", tmp_path)
        monkeypatch.setattr(module, "_torch", lambda program, path: lambda rows: [torch.ones(len(rows[0]), 1)])
        self.refused(policy, tmp_path, r"expected action of policy\.pt2 within 1e-05 of the policy's", form="torch")
        monkeypatch.setattr(module, "_torch", lambda program, path: lambda rows: [torch.ones(len(rows[0]))])
        self.refused(policy, tmp_path, r"expected action of policy\.pt2 of shape \[1000, 1\], received", form="torch")

    def test_another_choice(self, tmp_path, monkeypatch):
        policy = policy_of("dqn", tmp_path)
        monkeypatch.setattr(module, "_torch", lambda program, path: lambda rows: [torch.full((len(rows[0]),), 9)])
        self.refused(policy, tmp_path, r"received another one for 100\.0% of 1000 random inputs", form="torch")

    def test_packages_that_are_missing(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setitem(sys.modules, "onnxscript", None)
        run = finished("ppo")
        assert main(["export", str(run), "--out", str(tmp_path)]) == 1
        assert "received no onnxscript. Remedy: pip install 'torchrl_perf[export]'" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []
        assert main(["export", str(run), "--out", str(tmp_path), "--format", "torch"]) == 0
        assert sorted(path.name for path in tmp_path.iterdir()) == ["policy.md", "policy.pt2"]

    def test_rows(self, capsys):
        assert main(["export", str(finished("ppo")), "--rows", "0"]) == 1
        assert "rows: expected a positive integer, received 0." in capsys.readouterr().err


class Eigenvalues(nn.Module):
    """An operation that ONNX does not have."""

    def forward(self, x):
        return torch.linalg.eigvalsh(x.unsqueeze(-1) * x.unsqueeze(-2))


class Chance(nn.Module):
    """Logits that are drawn."""

    def forward(self, x):
        return torch.randn_like(x[..., :2])


class Branch(nn.Module):
    """Logits whose computation depends on a value."""

    def forward(self, x):
        return x[..., :2] if bool(x.sum() > 0) else x[..., 2:]
