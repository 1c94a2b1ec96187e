"""How long a new process takes to its first replayed iteration on CUDA, with empty caches of all compilers.

``pytest -m gpu -s tests/trainers/test_cold_start.py`` prints where the seconds go.
"""

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, os, sys, time
marks = {"start": time.perf_counter()}
import torch
marks["import torch"] = time.perf_counter()
import torchrl_perf.trainers
marks["import torchrl and torchrl_perf"] = time.perf_counter()
from torchrl_perf.registry import entry_of
torch.set_num_threads(1)
name, device = sys.argv[1:]
torch.zeros(1, device=device)
marks["context"] = time.perf_counter()
worked = sum(os.times()[:4])
entry = entry_of(name)
trainer = entry.load("trainer")(entry.load("config")(device=device, logger="none"))
marks["trainer"] = time.perf_counter()
def step():
    trainer.step()
    trainer.iterations_done += 1
    if device == "cuda":
        torch.cuda.synchronize()
for _ in range(getattr(trainer.config, "fill_iterations", 0)):
    step()
marks["filling"] = time.perf_counter()
step()
marks["first iteration"] = time.perf_counter()
step()
marks["second iteration"] = time.perf_counter()
step()
marks["recording"] = time.perf_counter()
step()
marks["replay"] = time.perf_counter()
times = list(marks.values())
seconds = dict(zip(list(marks)[1:], [two - one for one, two in zip(times, times[1:])]))
captured = bool(getattr(trainer._captures.iterate, "captured", False))
imported = "torch._inductor.compile_fx" in sys.modules
# of this process and of those that it waited for; that others use the machine as well does not count
worked = sum(os.times()[:4]) - worked
print(json.dumps({"seconds": seconds, "worked": worked, "captured": captured, "compiler": imported}))
"""


def measure(name, device, folder):
    caches = {key: str(folder / key) for key in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")}
    # as installed packages have it: bytecode is kept
    caches |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(folder.parent / "bytecode")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, name, device],
        env={**os.environ, **caches},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"\n{name}: " + ", ".join(f"{part} {seconds:.2f} s" for part, seconds in found["seconds"].items()))
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["ppo", "dqn", "sac"])
def test_the_first_replay_comes_soon(name, tmp_path):
    found = measure(name, "cuda", tmp_path)
    assert found["captured"]
    assert not found["compiler"]
    assert found["worked"] < 15  # three times the aim, since cores that others use as well are slower
    # Triton's kernels of whole networks, which take it a second each, come with compiled ones
    assert not [path.name for path in tmp_path.rglob("*.cubin") if path.stem in ("_forward_kernel", "_backward_kernel")]


@pytest.mark.slow
def test_no_run_imports_the_compiler_before_it_needs_it(tmp_path):
    assert not measure("ppo", "cpu", tmp_path)["compiler"]
