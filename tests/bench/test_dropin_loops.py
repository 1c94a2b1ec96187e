"""The loops of the drop-in benchmark: those of the examples, every variant of them, and how their time is reckoned."""

import importlib.util
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch

from torchrl_perf.bench.dropin_loops import LOOPS, Loop, Sizes
from torchrl_perf.bench.dropin_run import (
    ALL,
    CAPTURED,
    READ_EVERY,
    TRAINER,
    Mark,
    figures_of,
    main,
    make_trainer,
    marks_of,
    measure,
    replaced_by,
    sizes_of,
    variants_of,
)

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CPU = torch.device("cpu")
FILES = {"ppo": "drop_in", "dqn": "drop_in_dqn", "sac": "drop_in_sac"}
SMALL = {
    "ppo": {"num_envs": 8, "frames_per_batch": 256, "total_frames": 512, "updates": 16, "batch_size": 128},
    "dqn": {"num_envs": 4, "frames_per_batch": 128, "total_frames": 512, "updates": 2, "batch_size": 16},
    "sac": {"num_envs": 4, "frames_per_batch": 804, "total_frames": 1608, "updates": 2, "batch_size": 16},
}
TINY = {**SMALL, "sac": {**SMALL["sac"], "frames_per_batch": 16, "total_frames": 64}}
CASES = [(algorithm, variant) for algorithm in LOOPS for variant in variants_of(algorithm)]


def small(algorithm, changes):
    default = LOOPS[algorithm].default
    capacity = {} if algorithm == "ppo" else {"capacity": 2048}
    return replace(default, **changes[algorithm], **capacity, first_frames=changes[algorithm]["frames_per_batch"])


def example_of(algorithm):
    name = FILES[algorithm]
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("algorithm", LOOPS)
def test_a_loop_is_that_of_its_example(algorithm, ours):
    """To the last bit of the returns, after updates that the rest of the run depends on."""
    example, sizes = example_of(algorithm), small(algorithm, SMALL)
    settings = {name: getattr(sizes, name) for name in ("num_envs", "frames_per_batch", "total_frames")}
    if algorithm == "ppo":
        parts = {"epochs": LOOPS["ppo"].epochs, "minibatch_size": sizes.batch_size, "all_ours": ours}
    else:
        parts = {name: getattr(sizes, name) for name in ("updates", "batch_size", "capacity")} | {"ours": ours}
    expected = example.main(example.Config(**settings, **parts, device="cpu"))
    loop = LOOPS[algorithm](sizes, CPU, LOOPS[algorithm].parts if ours else ())
    for _ in loop.iterations():
        pass
    loop.close()
    assert loop.mean_return == expected


@pytest.mark.parametrize("algorithm", LOOPS)
def test_the_sizes_are_those_of_the_example(algorithm):
    config, sizes = example_of(algorithm).Config(), LOOPS[algorithm].default
    names = ("num_envs", "frames_per_batch", "total_frames", "learning_rate", "seed")
    assert [getattr(config, name) for name in names] == [getattr(sizes, name) for name in names]
    if algorithm == "ppo":
        updates = config.epochs * config.frames_per_batch // config.minibatch_size
        assert (updates, config.minibatch_size) == (sizes.updates, sizes.batch_size)
    else:
        assert (config.updates, config.batch_size) == (sizes.updates, sizes.batch_size)
        assert config.capacity == sizes.capacity


@pytest.mark.parametrize(("algorithm", "variant"), CASES)
def test_every_variant_runs(algorithm, variant):
    sizes = small(algorithm, TINY)
    row = measure(algorithm, variant, CPU, limit=60.0, sizes=sizes)
    assert row["frames"] == row["run_frames"] == sizes.total_frames
    assert not row["extrapolated"]
    assert 0 < row["start_s"] <= row["seconds"] == row["run_s"]
    ratio = sizes.updates / sizes.frames_per_batch
    assert row["updates_per_second"] == pytest.approx(row["frames_per_second"] * ratio)
    assert row["replaced"] == list(replaced_by(algorithm, variant))


def made_parts(loop: Loop):
    """Which parts of a loop are this package's, by the classes of its objects."""
    kinds = {"collector": loop.collector, "loss": loop.loss, "buffer": loop.buffer, "optimizer": loop.optimizer}
    kinds |= {"advantages": loop.advantage} if hasattr(loop, "advantage") else {}
    kinds |= {"exploration": loop.explore} if hasattr(loop, "explore") else {}
    kinds |= {"targets": loop.target} if hasattr(loop, "target") else {}
    return {name for name, value in kinds.items() if type(value).__module__.startswith("torchrl_perf")}


@pytest.mark.parametrize(("algorithm", "part"), [(name, part) for name in LOOPS for part in LOOPS[name].parts])
def test_one_part_is_replaced_alone(algorithm, part):
    loop = LOOPS[algorithm](small(algorithm, TINY), CPU, [part])
    assert made_parts(loop) == {part}
    loop.close()


@pytest.mark.parametrize("algorithm", LOOPS)
def test_a_trainer_makes_the_updates_of_the_loop(algorithm):
    sizes = sizes_of(algorithm, 0)
    trainer = make_trainer(algorithm, sizes, CPU)
    config = trainer.config
    assert config.num_envs * config.num_steps == sizes.frames_per_batch
    assert config.experiences_per_iteration == sizes.updates * sizes.batch_size
    trainer.close()


@pytest.mark.parametrize("algorithm", LOOPS)
def test_variants(algorithm):
    assert replaced_by(algorithm, ALL) == replaced_by(algorithm, CAPTURED) == LOOPS[algorithm].parts
    assert replaced_by(algorithm, "torchrl") == ()
    assert len(LOOPS[algorithm].parts) == 5
    with pytest.raises(ValueError, match=r"expected one of torchrl, all, .* received 'wings'"):
        replaced_by(algorithm, "wings")


SIZES = Sizes(num_envs=1, frames_per_batch=10, total_frames=400, updates=5, batch_size=1, first_frames=40)


def test_figures_by_hand():
    """Ten iterations: the first takes 8 s, the second 3, the others 1 each; the run is cut at 100 of 400 frames."""
    seconds = [8.0, 11.0, *(11.0 + n for n in range(1, 9))]
    marks = [Mark(10 * number, value) for number, value in enumerate(seconds, start=1)]
    assert figures_of(marks, SIZES) == {
        "frames": 100,
        "seconds": 19.0,
        "first_frames": 40,
        "first_per_second": 40 / 13.0,
        "frames_per_second": 10.0,
        "updates_per_second": 5.0,
        "start_s": 12.0,
        "run_s": 19.0 + 30.0,
        "run_frames": 400,
        "extrapolated": True,
    }


def test_a_run_is_cut_after_its_limit_and_its_first_frames():
    def clock(step):
        times = count(step, step)
        return lambda: float(next(times))

    def frames(step, every, limit, sizes=SIZES):
        return [mark.frames for mark in marks_of(iter(lambda: None, 0), sizes, clock(step), every, limit)]

    assert frames(1, 1, 9.5)[-1] == 100
    assert frames(100, 1, 1.0)[-1] == 80  # eight marks at least
    assert frames(100, 1, 1.0, replace(SIZES, first_frames=200))[-1] == 200
    assert frames(1, 1, 1e9)[-1] == 400
    ten = list(range(10, 101, 10))
    assert frames(1, READ_EVERY, 1e9) == [*ten, 200, 300, 400]
    assert frames(1, READ_EVERY, 1e9, replace(SIZES, total_frames=250)) == [*ten, 200, 250]


def test_a_run_of_its_own_prints_its_row_last(capsys, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)  # of this process it is everybody's
    assert main(["--algorithm", "sac", "--variant", TRAINER, "--frames", "1280", "--limit", "60"]) == 0
    assert '"variant": "trainer"' in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.gpu
@pytest.mark.parametrize("variant", [ALL, CAPTURED])
@pytest.mark.parametrize("algorithm", LOOPS)
def test_captured_and_drop_in_run_on_cuda(algorithm, variant):
    row = measure(algorithm, variant, torch.device("cuda"), limit=5.0, sizes=small(algorithm, TINY))
    assert row["clock"] == "wall"
