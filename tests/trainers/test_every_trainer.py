"""What holds for each trainer alike: host waits, resume, modes, faults, memory, splitting, the command line."""

import json
import warnings

import pytest
import torch
from config_runs import KINDS, SMALL, TRAINERS, make, modules_of, on_policy, updates_of
from states import assert_graph_equals_compiled, assert_modes_agree, assert_same_state, run
from torch.torch_version import TorchVersion

from torchrl_perf.cli import main
from torchrl_perf.runtime import no_host_sync
from torchrl_perf.runtime.oom import OutOfMemoryWarning
from torchrl_perf.trainers.run.memory_estimate import PeakBytes

# the three that were first have files of their own, with the same tests of more variants
NEW = [name for name in KINDS if name not in ("ppo", "dqn", "sac")]
DRAWS_IN_LOSSES = ("iqn", "rainbow", "ac-iqn")  # numbers for each row
OTHERWISE_IN_PARTS = (*DRAWS_IN_LOSSES, "sac-options")  # the last standardises choices within each part
VARIANTS = {name: (name, {}) for name in NEW} | {
    "iqn, double and duelling": ("iqn", {"double": True, "dueling": True, "sampler": "prioritized", "n_step": 3}),
    "qr-dqn, cvar": ("qr-dqn", {"risk": "cvar", "risk_eta": 0.5, "greedy": "per_quantile"}),
    "rainbow, noise for each row": ("rainbow", {"noisy": "per_row", "beta_final": 1.0, "compact": True}),
    "ddpg, OU noise": ("ddpg", {"noise": "ou", "n_step": 3, "sampler": "prioritized"}),
    "td3, prioritised": ("td3", {"sampler": "prioritized", "updates_per_iteration": 4, "policy_delay": 4}),
    "ac-iqn, prioritised": ("ac-iqn", {"sampler": "prioritized", "n_step": 2}),
    "sac-options, prioritised": ("sac-options", {"sampler": "prioritized", "n_step": 2}),
    "sac-options, of the critics": (
        "sac-options",
        {"option_learning": "critic", "option_relabel": 0.5, "option_capacity": 2_000},
    ),
    "sac-options, compact": ("sac-options", {"compact": True, "learn_temperature": False}),
    "hybrid-ppo, one part": ("hybrid-ppo", {"env": "CartPole"}),
}
variants = pytest.mark.parametrize(("name", "options"), VARIANTS.values(), ids=VARIANTS.keys())


def parameters(trainer):
    return {
        f"{part}.{name}": param.detach().clone()
        for part, module in modules_of(trainer).items()
        for name, param in module.named_parameters()
    }


@variants
def test_iterations_change_all_networks_and_wait_for_nothing(name, options):
    trainer = run(make(name, options), 4)
    before = parameters(trainer)
    with no_host_sync():
        run(trainer, 2)
    after = parameters(trainer)
    # noise of a target network, whose copy was made before it learnt, included
    assert not [key for key, value in before.items() if torch.equal(value, after[key])]
    row = trainer.metrics.flush(96)
    assert row["train/first_bad_iteration"] == -1
    statistics = [f"train/{key}" for key in trainer.statistics]
    assert all(row[key] == row[key] and abs(row[key]) < float("inf") for key in statistics)
    trainer.close()


@variants
def test_four_save_two_is_load_two(name, options, tmp_path):
    trainer = run(make(name, options), 4)
    path = trainer.save(tmp_path / "checkpoint.pt")
    expected = run(trainer, 2).state_dict()
    resumed = run(make(name, {**options, "seed": 9}), 1)
    resumed.load(path)
    assert_same_state(expected, run(resumed, 2).state_dict())
    trainer.load(path)
    assert_same_state(expected, run(trainer, 2).state_dict())


@pytest.fixture(params=["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def backend(request):
    """What compiles: without Inductor the graphs are traced and run all the same, in a tenth of the time."""
    request.getfixturevalue("traced_only" if request.param == "aot_eager" else "fresh_dynamo")


QUICKLY_COMPILED = ("qr-dqn",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICKLY_COMPILED else [pytest.mark.slow]) for name in NEW]
)
def test_compiled_iterations_equal_eager(backend, name, request):
    if name in DRAWS_IN_LOSSES and "inductor" in request.node.name and TorchVersion(torch.__version__) < "2.12":
        pytest.skip("Inductor 2.11 draws the numbers of a loss in another order")
    options = {"epochs": 1} if on_policy(name) else {"updates_per_iteration": getattr(KINDS[name], "policy_delay", 1)}
    assert_modes_agree(lambda mode: make(name, {**options, "mode": mode}), parameters, 3)


@pytest.mark.gpu
@variants
def test_a_graph_equals_compiled(name, options, fresh_dynamo):
    on_gpu = {**options, "device": "cuda", "total_steps": 640}
    assert_graph_equals_compiled(lambda mode: make(name, {**on_gpu, "mode": mode}), parameters, 10).close()


@pytest.mark.gpu
@variants
def test_a_captured_run_resumes_bitwise(name, options, fresh_dynamo, tmp_path):
    trainer = run(make(name, {**options, "mode": "graph", "device": "cuda", "total_steps": 640}), 8)
    path = trainer.save(tmp_path / "checkpoint.pt")
    expected = parameters(run(trainer, 2))
    trainer.load(path)
    for key, value in parameters(run(trainer, 2)).items():
        assert torch.equal(value, expected[key]), key
    trainer.close()


class Spoilt:
    """Makes one reward of an env NaN, at a step counted over the whole run."""

    def __init__(self, env, step):
        self.env, self.step, self.calls = env, step, 0
        self.advance = env._advance
        env._advance = self

    def __call__(self, tensordict):
        entries, *others = self.advance(tensordict)
        self.calls += 1
        if self.calls == self.step:
            entries["reward"][1] = torch.nan
        return (entries, *others)


# a run that stops there does nothing more, whatever its variant
BAD_REWARDS = {
    f"{on_nan}-{title}": (*variant, on_nan)
    for on_nan in ("stop", "skip", "rollback")
    for title, variant in VARIANTS.items()
    if on_nan != "stop" or title in NEW
}


@pytest.mark.parametrize(("name", "options", "on_nan"), BAD_REWARDS.values(), ids=BAD_REWARDS.keys())
def test_a_bad_reward(name, options, on_nan):
    trainer = make(name, {**options, "on_nan": on_nan, "total_steps": 640})
    Spoilt(getattr(trainer.env, "base_env", trainer.env), step=14)
    guard = trainer.guard
    guard.snapshot()
    run(trainer, 3)
    assert guard.verdict(trainer.metrics.flush(1)) is None
    run(trainer, 1)
    verdict = guard.verdict(trainer.metrics.flush(2))
    assert (verdict.action, verdict.fault.env, verdict.fault.step) == (on_nan, 1, 1)
    assert all(value.isfinite().all() for value in parameters(trainer).values())
    if on_nan == "stop":
        return
    if on_nan == "rollback":
        guard.rollback()
    before = parameters(trainer)
    run(trainer, 4)
    row = trainer.metrics.flush(3)
    assert row["nonfinite/loss"] == row["nonfinite/gradient"] == 0
    assert row["train/updates_applied"] == updates_of(trainer)
    assert any((value != before[key]).any() for key, value in parameters(trainer).items())


@pytest.mark.parametrize("name", NEW)
def test_an_update_that_runs_out_of_memory_goes_on_in_parts(name):
    trainer = make(name, {})
    run_ = trainer.micro.run

    def limited(attempt, rows, **others):
        def in_little_memory(parts):
            if parts < 4:
                raise torch.OutOfMemoryError("no room")
            return attempt(parts)

        return run_(in_little_memory, rows, **others)

    trainer.micro.run = limited
    before = parameters(trainer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OutOfMemoryWarning)
        run(trainer, 4)
    assert trainer.micro.parts == 4
    row = trainer.metrics.flush(1)
    assert (row["train/micro_batches"], row["train/first_bad_iteration"]) == (4, -1)
    assert any((value != before[key]).any() for key, value in parameters(trainer).items())


@pytest.mark.parametrize("name", [name for name in NEW if name not in OTHERWISE_IN_PARTS])
def test_parts_have_the_gradient_of_the_whole(name):
    """Where neither a random number nor a mean depends on the size of the parts."""
    whole, ours = make(name, {}), make(name, {})
    ours.micro.parts = 3
    found = []
    for trainer in (whole, ours):
        torch.manual_seed(1)
        found.append(torch.cat([value.flatten() for value in parameters(run(trainer, 3)).values()]).double())
    assert (found[0] - found[1]).norm() / found[0].norm() < 1e-5, (
        f"{name}: if its losses draw random numbers, it belongs to DRAWS_IN_LOSSES in {__file__}"
    )


@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_sixteen_bits(name, kind):
    trainer = run(make(name, {"precision": kind}), 5)
    row = trainer.metrics.flush(1)
    assert row["train/first_bad_iteration"] == -1
    assert all(value.isfinite().all() and value.dtype == torch.float32 for value in parameters(trainer).values())


@pytest.mark.parametrize("name", NEW)
def test_the_announced_memory_is_what_an_iteration_takes(name):
    large = {"num_envs": 64, "num_steps": 4, "total_steps": 100_000, "hidden_size": 64}
    off = {"minibatch_size": 512, "learning_starts": 1024, "capacity": 4096, "option_capacity": 1024}
    known = set(KINDS[name].__dataclass_fields__)
    trainer = make(name, {key: value for key, value in (large | off).items() if key in known})
    estimate = trainer.memory_estimate
    with PeakBytes() as held:
        run(trainer, 6)
    assert 0.5 < estimate.total / (held.peak + estimate.rollout + estimate.networks) < 2, (estimate, held.peak)


@pytest.mark.parametrize("name", NEW)
def test_a_run_from_the_command_line_resumes(name, tmp_path, capsys):
    arguments = [
        f"--{key.replace('_', '-')}={value}" for key, value in SMALL[name].items() if key not in ("total_steps",)
    ]
    arguments += ["--log-interval=1", "--no-progress", f"--run-dir={tmp_path}"]
    assert main(["train", name, *arguments, "--total-steps=80"]) == 0
    (run_dir,) = tmp_path.iterdir()
    stored = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    assert stored["num_envs"] == 4
    assert run_dir.name.startswith(f"{name}-{stored['env']}")
    assert main(["train", name, "--resume", str(run_dir), "--total-steps", "112", "--no-progress"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("112 steps in ")
    assert TRAINERS[name].__name__.endswith("Trainer")
