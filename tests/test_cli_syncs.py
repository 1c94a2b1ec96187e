"""``torchrl-perf syncs``: other people's scripts run as they are, with a report, limits and exit codes."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from torchrl_perf.cli import main
from torchrl_perf.cli.syncs import make_parser

ROOT = Path(__file__).resolve().parents[1]

TRAIN = """
import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--top", default="mine")
args = parser.parse_args()
torch.manual_seed(0)
net = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(args.steps):
    loss = net(torch.rand(8, 3)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(args.top, loss.item())
"""

COLLECT = """
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.data import Binary, Composite, Unbounded
from torchrl.envs import EnvBase


def flags(n, value=False):
    return {key: torch.full((n, 1), value) for key in ("done", "terminated", "truncated")}


class Counter(EnvBase):
    '''One env of each batch is done at each step.'''

    def __init__(self, n):
        super().__init__(batch_size=[n])
        self.n = n
        self.observation_spec = Composite(obs=Unbounded((n, 1)), shape=(n,))
        self.action_spec = Unbounded((n, 1))
        self.reward_spec = Unbounded((n, 1))
        self.done_spec = Composite({key: Binary(1, (n, 1), dtype=torch.bool) for key in flags(n)}, shape=(n,))

    def _reset(self, td):
        return TensorDict({"obs": torch.zeros(self.n, 1), **flags(self.n)}, [self.n])

    def _step(self, td):
        done = flags(self.n, True)
        return TensorDict({"obs": td["obs"] + 1, "reward": td["action"], **done, "truncated": ~done["done"]}, [self.n])

    def _set_seed(self, seed):
        pass


policy = TensorDictModule(torch.nn.Linear(1, 1), in_keys=["obs"], out_keys=["action"])
options = {"auto_register_policy_transforms": False}
for batch in Collector(Counter(4), policy, frames_per_batch=4 * 5, total_frames=4 * 5 * 3, **options):
    assert batch.shape == (4, 5)
"""


@pytest.fixture
def script(tmp_path):
    """Write a script and return its path."""

    def write(source, name="script.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        return str(path)

    return write


def audit(tmp_path, *arguments):
    """Exit code and JSON report of a run in this process."""
    path = tmp_path / "report.json"
    code = main(["syncs", "--device", "cpu", "--json", str(path), *arguments])
    return code, json.loads(path.read_text())


def test_a_script_with_options_of_its_own_keeps_them_and_its_output(tmp_path, script, capsys):
    path = script(TRAIN)
    argv, search, module = list(sys.argv), list(sys.path), sys.modules["__main__"]
    code, report = audit(tmp_path, path, "--steps", "3", "--top", "theirs")
    out, err = capsys.readouterr()
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["theirs"] * 3
    assert "3.00 per step" not in err
    assert f"{Path(path).name}:17" in err
    assert "-> keep the value on the device" in err
    assert report["waits"]["loop"] == 3
    assert report["waits"]["per_step"] == 1.0
    assert (sys.argv, sys.path, sys.modules["__main__"]) == (argv, search, module)


def test_the_schema_of_the_report(tmp_path, script):
    _, report = audit(tmp_path, script(TRAIN))
    assert report.keys() == {
        *("script", "arguments", "exit_code", "version", "device", "stand_in", "seconds", "processes"),
        *("step", "iteration", "counts", "waits", "rows"),
    }
    assert report["version"] == 1
    assert (report["device"], report["stand_in"]) == ("cpu", True)
    assert report["step"] == {"unit": "optimizer step", "number": 4}
    assert report["counts"] == {"env_steps": 0, "optimizer_steps": 4, "iterations": 0}
    (row,) = report["rows"]
    assert row.keys() == {
        *("op", "file", "line", "source", "library_file", "library_line", "library_source", "function", "remedy"),
        *("replacement", "planned", "waits", "count", "per_step", "per_iteration", "before", "after", "seconds"),
    }
    assert (row["op"], row["source"], row["seconds"]) == ("_local_scalar_dense", "print(args.top, loss.item())", None)


def test_torchrls_default_collector_waits_nine_times_a_step(tmp_path, script):
    code, report = audit(tmp_path, script(COLLECT))
    assert code == 0
    assert report["counts"] == {"env_steps": 15, "optimizer_steps": 0, "iterations": 3}
    loop = [row for row in report["rows"] if row["count"]]
    places = {}
    for row in loop:
        assert row["source"].startswith("for batch in Collector(")
        file = row["library_file"].rpartition("torchrl" + os.sep)[2]
        places[file] = places.get(file, 0) + row["per_step"]
        assert row["replacement"] == "torchrl_perf.collectors.DeviceCollector"
    assert places == {
        os.path.join("envs", "common.py"): 5.0,
        os.path.join("envs", "utils.py"): 1.0,
        os.path.join("collectors", "_single.py"): 1.0,
        os.path.join("collectors", "utils.py"): 2.0,
    }
    assert report["waits"]["per_step"] == 9.0


@pytest.mark.parametrize(("name", "iterations"), [("ppo", 2), ("dqn", 40), ("sac", 110)])
def test_the_examples_do_not_wait(tmp_path, name, iterations):
    """SAC draws its actions at random for 100 iterations."""
    arguments = ("--max-per-step", "0", "--max-iterations", str(iterations), str(ROOT / "examples" / f"{name}.py"))
    code, report = audit(tmp_path, *arguments, "--device", "cpu")
    assert (code, report["waits"]["loop"], report["counts"]["iterations"]) == (0, 0, iterations)
    assert report["counts"]["optimizer_steps"]


@pytest.mark.parametrize(("limit", "expected"), [("0", 1), ("1", 0)])
def test_the_exit_code_for_continuous_integration(tmp_path, script, capsys, limit, expected):
    code, _ = audit(tmp_path, "--max-per-step", limit, script(TRAIN))
    assert code == expected
    assert ("expected at most 0 host waits per optimizer step" in capsys.readouterr().err) == bool(expected)


def test_the_limit_on_steps_ends_the_script_cleanly(tmp_path, script, capsys):
    code, report = audit(tmp_path, "--max-steps", "2", script(TRAIN), "--steps", "1000")
    assert (code, report["counts"]["optimizer_steps"]) == (0, 2)
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_the_limit_on_iterations_keeps_whole_batches(tmp_path, script):
    code, report = audit(tmp_path, "--max-iterations", "2", script(COLLECT))
    assert (code, report["counts"]["iterations"], report["counts"]["env_steps"]) == (0, 2, 10)


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        ("raise SystemExit(7)", 7),
        ("raise SystemExit", 0),
        ("raise SystemExit('words')", 1),
        ("raise KeyboardInterrupt", 130),
        ("raise ValueError('theirs')", 1),
        ("pass", 0),
    ],
)
def test_the_report_is_printed_however_the_script_ends(tmp_path, script, capsys, ending, expected):
    path = script(f"import torch\ntorch.ones(()).item()\n{ending}\n")
    code, report = audit(tmp_path, path)
    assert (code, report["exit_code"], report["waits"]["loop"]) == (expected, expected, 1)
    err = capsys.readouterr().err
    assert "1 host waits in the loop" in err
    if "ValueError" in ending:
        assert "ValueError: theirs" in err
        assert "syncs.py" not in err.partition("torchrl-perf syncs:")[0]


def test_a_module_with_relative_imports(tmp_path, script, monkeypatch):
    script("def read(x):\n    return x.item()\n", "tool/helper.py")
    script("", "tool/__init__.py")
    script(
        "import sys\nimport torch\nfrom .helper import read\nread(torch.ones(()))\nassert sys.argv[1:] == ['a']\n",
        "tool/__main__.py",
    )
    monkeypatch.chdir(tmp_path)
    code, report = audit(tmp_path, "-m", "tool", "a")
    assert code == 0
    assert [row["source"] for row in report["rows"]] == ["return x.item()"]
    for name in [name for name in sys.modules if name.split(".")[0] == "tool"]:
        del sys.modules[name]


def test_a_script_that_imports_its_neighbour(tmp_path, script):
    script("import torch\ndef read():\n    return torch.ones(()).item()\n", "lib/neighbour_of_script.py")
    path = script("import neighbour_of_script\nassert __name__ == '__main__'\nneighbour_of_script.read()\n", "lib/s.py")
    code, report = audit(tmp_path, path)
    assert code == 0
    assert [Path(row["file"]).name for row in report["rows"]] == ["neighbour_of_script.py"]
    del sys.modules["neighbour_of_script"]


@pytest.mark.timeout(240)
def test_threads_are_waited_for_as_python_does_and_idle_pools_are_not(tmp_path, script):
    path = script(
        """
        import threading
        import time
        import torch
        from concurrent.futures import ThreadPoolExecutor

        def later():
            time.sleep(0.2)
            torch.ones(()).item()

        pool = ThreadPoolExecutor(1)
        pool.submit(torch.ones(3).nonzero).result()
        threading.Thread(target=later).start()
        """
    )
    code, report = audit(tmp_path, path)
    assert code == 0
    assert sorted(row["op"] for row in report["rows"]) == ["_local_scalar_dense", "nonzero"]


def test_child_processes_are_said_not_to_be_seen(tmp_path, script, capsys):
    path = script(
        """
        import multiprocessing
        child = multiprocessing.get_context("spawn").Process(target=print, args=("child",))
        child.start()
        child.join()
        """
    )
    _, report = audit(tmp_path, path)
    assert report["processes"] == 1
    assert "1 child processes were started; what they wait for is not seen" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "expected a SCRIPT or -m MODULE"),
        (["nowhere.py"], "received nowhere.py, which is no file"),
        (["-m", "no_such_module"], "received no_such_module"),
        (["-m", "no_such_package.part"], "No module named"),
        (["--top", "0", "x.py"], "at least 1"),
    ],
)
def test_bad_arguments_end_with_two_and_say_why(capsys, arguments, words):
    with pytest.raises(SystemExit) as caught:
        main(["syncs", *arguments])
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_options_behind_the_script_are_its_own():
    options = make_parser().parse_args(["--top", "3", "script.py", "--top", "4", "-m"])
    assert (options.top, options.module, options.command) == (3, False, ["script.py", "--top", "4", "-m"])


def test_as_a_command_it_leaves_standard_output_to_the_script(tmp_path, script):
    path = script(TRAIN)
    command = [sys.executable, path]
    plain = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    command = [sys.executable, "-m", "torchrl_perf", "syncs", "--device", "cpu", path]
    result = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert result.stdout == plain.stdout
    assert "4 host waits in the loop: 1.00 per step" in result.stderr


ENDLESS = """
import sys, time
import torch

x = torch.rand(3)
for step in range(10**9):
    x.sum().item()
    if step == 3:
        print("running", flush=True)
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(other, marks=pytest.mark.slow) for other in (signal.SIGHUP, signal.SIGXCPU))],
)
def test_a_script_that_is_ended_from_outside_gets_its_report(tmp_path, number):
    script, report = tmp_path / "endless.py", tmp_path / "report.json"
    script.write_text(ENDLESS)
    command = [sys.executable, "-m", "torchrl_perf", "syncs", "--device", "cpu", "--json", str(report), str(script)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout.readline() == "running\n"
    process.send_signal(number)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 128 + number
    assert f"the script was ended by {number.name}" in errors
    assert "x.sum().item()" in errors
    assert json.loads(report.read_text())["waits"]["loop"] >= 4


def test_a_handler_of_the_script_comes_first_and_none_is_left_behind(tmp_path):
    script = tmp_path / "own.py"
    script.write_text(
        "import os, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    before = signal.getsignal(signal.SIGHUP)
    own = signal.getsignal(signal.SIGTERM)
    try:
        assert main(["syncs", "--device", "cpu", str(script)]) == 7
    finally:
        signal.signal(signal.SIGTERM, own)
    assert signal.getsignal(signal.SIGHUP) is before


GYM = """
import warnings
warnings.filterwarnings("ignore")
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, RewardSum, TransformedEnv

env = TransformedEnv(GymEnv("CartPole-v1"), RewardSum())
env.rollout(5)
collector = Collector(env, None, frames_per_batch=50, total_frames=100)
for batch in collector:
    pass
collector.shutdown()
"""


def test_one_env_gets_advice_for_one_collector(tmp_path):
    script, report = tmp_path / "loop.py", tmp_path / "report.json"
    script.write_text(GYM)
    assert main(["syncs", "--device", "cpu", "--json", str(report), str(script)]) == 0
    rows = json.loads(report.read_text())["rows"]
    advised = {row["replacement"].rpartition(".")[2] for row in rows}
    assert "HostCollector" in advised
    assert "DeviceCollector" not in advised
