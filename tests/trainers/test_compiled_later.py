"""Runs whose kernels are eager at first: when they are compiled, what that changes, and a resume on either side."""

import functools
import gc
import math
import time

import pytest
import torch
from config_runs import KINDS, make
from emulated_runs import emulate
from states import assert_same_state, flatten, run
from torch import nn
from torch.utils._pytree import tree_map_only

from torchrl_perf.collectors import device_collector
from torchrl_perf.modules import FusedMLP
from torchrl_perf.runtime import CaptureError, no_host_sync, precision
from torchrl_perf.runtime.compile_switch import CompileSwitch
from torchrl_perf.systems.active_dynamics import ActiveDynamicsConfig, ActiveDynamicsTrainer
from torchrl_perf.systems.marine import MarineDQNConfig
from torchrl_perf.trainers import ConfigError, DQNConfig, PPOConfig, train
from torchrl_perf.trainers import device as place
from torchrl_perf.trainers.config import WORK_BEFORE_COMPILING, WORK_OF_UPDATE

FIELD = {
    **{"num_envs": 3, "num_steps": 8, "total_steps": 240, "device": "cpu", "logger": "none", "encoder_size": 8},
    **{"dynamics_size": 32, "random_steps": 24, "window": 6, "history": 20, "minibatch_size": 4, "updates": 2},
    **{"samples": 2, "prediction_horizon": 3, "plan_horizon": 3, "candidates": 6, "plan_rounds": 2, "elites": 3},
}
SYSTEM = "active-dynamics"


def is_captured(trainer):
    """Whether the iteration is a graph by now."""
    return (trainer._iterate if isinstance(trainer, ActiveDynamicsTrainer) else trainer._captures.iterate).captured


def assert_same_on_device(*states):
    """Equal but for the rows that the host has counted, which hears of no replay."""
    leaves = [flatten(state) for state in states]
    for each in leaves:
        each.pop("/parts/replay/_writer/write_count", None)
    assert_same_state(*leaves)


def make_any(name, options):
    if name == SYSTEM:
        return ActiveDynamicsTrainer(ActiveDynamicsConfig.without_task(**{**FIELD, **options}))
    return make(name, options)


@pytest.fixture
def other_rounding(monkeypatch):
    """A compiler whose functions give the same up to rounding, and the list of all calls of them."""
    calls = []

    def compiled(fn, **_):
        @functools.wraps(fn)
        def call(*args, **kwargs):
            calls.append(getattr(fn, "__name__", "partial"))
            return tree_map_only(torch.Tensor, rounded, fn(*args, **kwargs))

        return call

    for module in (precision, device_collector):
        monkeypatch.setattr(module, "compiled", compiled)
    return calls


def rounded(value):
    return value * (1 + 2**-20) if value.is_floating_point() and value.ndim == 0 else value


@pytest.mark.parametrize("name", [*KINDS, SYSTEM])
def test_kernels_are_compiled_from_the_stated_iteration_on(name, other_rounding):
    trainer = make_any(name, {"mode": "compile", "compile_after": 4})
    run(trainer, 4)
    assert other_rounding == []
    run(trainer, 1)
    assert "_advance" in other_rounding or "_step" in other_rounding  # of the collector
    assert len(set(other_rounding)) >= 3
    trainer.close()


def fused_networks(before=()):
    """Perceptrons with a kernel of their own that there are now, less those that there were."""
    gc.collect()
    return [each for each in gc.get_objects() if type(each) is FusedMLP and id(each) not in before]


@pytest.mark.parametrize("name", [*KINDS, SYSTEM])
def test_networks_are_fused_from_the_same_iteration_on(name, other_rounding):
    kept = fused_networks()
    trainer = make_any(name, {"mode": "compile", "compile_after": 2})
    networks = fused_networks({id(each) for each in kept})
    assert [each.fuses for each in networks] == [False] * len(networks)
    run(trainer, 2)
    assert [each.fuses for each in networks] == [False] * len(networks)
    state = trainer.state_dict()
    run(trainer, 1)
    assert [each.fuses for each in networks] == [True] * len(networks)
    trainer.load_state_dict(state)
    trainer.iterations_done = 1
    run(trainer, 1)
    assert [each.fuses for each in networks] == [False] * len(networks)
    assert networks or name not in ("ppo", "dqn", "hybrid-ppo")
    trainer.close()


@pytest.mark.parametrize("options", [{"mode": "eager"}, {"mode": "compile"}, {"mode": "compile", "compile_after": 0}])
def test_a_mode_that_was_asked_for_fuses_at_once(options, other_rounding):
    kept = fused_networks()
    trainer = make_any("ppo", options)
    networks = fused_networks({id(each) for each in kept})
    assert [each.fuses for each in networks] == [True] * len(networks) != []
    trainer.close()


@pytest.mark.parametrize("name", ["ppo", "dqn", "sac", "sac-options", SYSTEM])
@pytest.mark.parametrize("saved", [2, 4, 5])
def test_a_resumed_run_changes_where_the_other_one_does(name, saved, other_rounding, tmp_path):
    options = {"mode": "compile", "compile_after": 4}
    trainer = run(make_any(name, options), saved)
    path = trainer.save(tmp_path / "checkpoint.pt")
    expected = run(trainer, 7 - saved).state_dict()
    resumed = run(make_any(name, {**options, "seed": 9}), 1)
    resumed.load(path)
    assert_same_state(expected, run(resumed, 7 - saved).state_dict())
    trainer.load(path)  # from compiled kernels back to eager ones, where the state is that old
    assert_same_state(expected, run(trainer, 7 - saved).state_dict())


@pytest.mark.parametrize("name", ["ppo", "sac"])
def test_the_iteration_of_the_change_is_seen_in_the_numbers(name, other_rounding):
    """So that the tests of resume do not compare runs that are equal anyway."""
    ends = [run(make(name, {"mode": "compile", "compile_after": after}), 7).state_dict() for after in (0, 4, 7)]
    eager = run(make(name, {}), 7).state_dict()
    assert_same_state(ends[2], eager)
    for one in (0, 1):
        with pytest.raises(AssertionError):
            assert_same_state(ends[one], ends[one + 1])


def test_what_cannot_be_recorded_is_compiled_in_the_same_iteration(other_rounding, monkeypatch, caplog):
    trainer = make("ppo", {"mode": "compile", "compile_after": 10})
    trainer.kernels._may_go_on = True  # as in mode "auto"
    call = trainer.micro.call

    def refuse(fn, *args):
        if not trainer.kernels.on and trainer.iterations_done == 2:
            raise CaptureError("expected no host wait, received one")
        return call(fn, *args)

    monkeypatch.setattr(trainer.micro, "call", refuse)
    run(trainer, 2)
    assert other_rounding == []
    run(trainer, 1)
    assert other_rounding != []
    assert "cannot be recorded (expected no host wait, received one)" in caplog.text
    state = trainer.state_dict()
    expected = run(trainer, 2).state_dict()
    other = make("ppo", {"mode": "compile", "compile_after": 10})
    other.load_state_dict(state)
    assert_same_state(expected, run(other, 2).state_dict())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_graph_that_refuses_eager_kernels_takes_compiled_ones(device, request, monkeypatch, caplog):
    if device == "cpu":
        request.getfixturevalue("other_rounding")
        emulate(monkeypatch)
    else:
        request.getfixturevalue("fresh_dynamo")
    trainer = make("ppo", {"mode": "auto", "device": device, "total_steps": 1600})
    loss = trainer.algorithm.minibatch_loss

    def waits_unless_compiled(minibatch):
        total, statistics = loss(minibatch)
        if not trainer.kernels.on:
            float(total.detach())
        return total, statistics

    monkeypatch.setattr(trainer.algorithm, "minibatch_loss", waits_unless_compiled)
    run(trainer, 3)
    assert trainer.kernels.on
    assert "iteration 3: kernels are compiled at once, since eager ones cannot be recorded" in caplog.text
    assert trainer.train_state.notes["compiled_from"] == 2
    run(trainer, 2)
    assert is_captured(trainer)
    assert int(trainer._iteration) == 5
    trainer.close()


@pytest.mark.parametrize("name", [*KINDS, SYSTEM])
def test_on_a_cpu_auto_is_eager_and_compiles_updates_later(name, other_rounding):
    trainer = make_any(name, {"mode": "auto", "compile_after": 4})
    assert trainer.mode == "eager"
    run(trainer, 4)
    assert other_rounding == []
    run(trainer, 1)
    assert len(set(other_rounding)) >= 2
    trainer.close()


@pytest.mark.parametrize("kind", ["ppo", "dqn"])
def test_a_policy_that_acts_for_envs_on_the_host_is_compiled_in_that_iteration(kind, other_rounding):
    pytest.importorskip("gymnasium")
    trainer = make(kind, {"env": "CartPole-v1", "mode": "auto", "compile_after": 3})
    run(trainer, 3)
    assert "__call__" not in other_rounding
    run(trainer, 1)
    assert "__call__" in other_rounding
    trainer.close()


def test_a_long_run_goes_on_eagerly_where_there_is_no_compiler(monkeypatch, caplog):
    def compiled(fn, **_):
        def call(*args, **kwargs):
            raise torch._dynamo.exc.BackendCompilerFailed(fn, RuntimeError("no C++ compiler"), None)

        return call

    monkeypatch.setattr(precision, "compiled", compiled)
    expected = run(make("ppo", {"mode": "eager"}), 5).state_dict()
    trainer = make("ppo", {"mode": "auto", "compile_after": 3})
    assert_same_state(expected, run(trainer, 5).state_dict())
    assert "is not compiled, since the compiler refuses it" in caplog.text
    trainer.close()


def test_networks_without_a_kernel_are_told_in_one_line(monkeypatch, caplog):
    net = nn.Sequential(nn.Linear(3, 3), nn.Sigmoid(), nn.Linear(3, 3))
    fuse = functools.partial(place.fuse_when_compiled, CompileSwitch(None, at=None, may_go_on=True))
    fuse([net], "tf32")
    assert not caplog.records  # on a CPU all networks run so
    monkeypatch.setattr(place, "_is_on_cuda", lambda network: True)
    fuse([net, nn.ModuleList([net, nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))])], "tf32")
    (record,) = caplog.records
    assert "1 of the networks run layer by layer, such as ['Linear', 'Sigmoid', 'Linear']" in record.getMessage()


@pytest.mark.parametrize("algorithm", ["ppo", "dqn", "sac"])
def test_networks_of_the_settings_are_not_said_to_lack_a_kernel(algorithm, monkeypatch, caplog):
    monkeypatch.setattr(place, "_is_on_cuda", lambda network: True)
    make(algorithm, {"mode": "auto", "compile_after": 3}).close()
    assert "layer by layer" not in caplog.text


def test_a_run_says_in_one_line_when_it_changed(other_rounding, tmp_path, caplog):
    trainer = make("dqn", {"mode": "compile", "compile_after": 3, "run_dir": str(tmp_path)})
    train(trainer, progress=False)
    assert [line for line in caplog.messages if line.startswith("iteration 4: compiled kernels from here on")]


# on a CPU the priorities of prioritised replay are kept by NumPy, of which no emulation hears
EMULATED = [
    pytest.param(name, marks=[] if name in ("ppo", "dqn", "sac") else [pytest.mark.slow])
    for name in KINDS
    if name != "rainbow"
]


@pytest.mark.parametrize("name", EMULATED)
def test_graphs_of_both_kinds_repeat_the_iteration(name, other_rounding, monkeypatch):
    """Of eager kernels first, then of compiled ones: the numbers of the run that is not captured."""
    emulate(monkeypatch)
    options = {"compile_after": 6, "total_steps": 1600}
    expected = run(make(name, {**options, "mode": "compile"}), 12).state_dict()
    trainer = make(name, {**options, "mode": "graph"})
    kinds = []
    for _ in range(12):
        run(trainer, 1)
        kinds.append((trainer.kernels.on, is_captured(trainer)))
    filling = getattr(trainer.config, "fill_iterations", 0)
    eager = [(False, False)] * (filling + 2) + [(False, True)] * (4 - filling)
    assert kinds == [*eager, (True, False), (True, False), *[(True, True)] * 4]
    assert_same_on_device(expected, trainer.state_dict())
    trainer.close()


class TestWhen:
    def test_a_mode_that_names_it_compiles_from_the_start(self):
        for mode in ("compile", "graph"):
            assert PPOConfig(mode=mode).compiles_at == 0
            assert PPOConfig(mode=mode, compile_after=7).compiles_at == 7

    def test_a_short_run_never_does(self):
        assert PPOConfig().compiles_at is None
        assert PPOConfig(compile_after=0).compiles_at == 0

    @pytest.mark.parametrize("kind", [PPOConfig, DQNConfig])
    def test_a_long_one_does_as_soon_as_it_repays(self, kind):
        config = kind(total_steps=10**11)
        updates = config.updates_each_iteration
        work = config.num_steps + WORK_OF_UPDATE * updates
        expected = math.ceil(WORK_BEFORE_COMPILING["cuda"] / work) + getattr(config, "fill_iterations", 0)
        assert config.compiles_at == expected
        twice = 2 * expected * config.batch_size
        assert kind(total_steps=twice).compiles_at == expected
        assert kind(total_steps=twice - config.batch_size).compiles_at is None

    def test_a_step_of_a_large_world_saves_more(self):
        config = MarineDQNConfig(total_steps=10**11)
        work = MarineDQNConfig.work_of_step * config.num_steps + WORK_OF_UPDATE * config.updates_each_iteration
        assert MarineDQNConfig.work_of_step > 1
        assert config.compiles_at == math.ceil(WORK_BEFORE_COMPILING["cuda"] / work) + config.fill_iterations

    def test_the_length_of_a_long_run_does_not_matter(self):
        assert PPOConfig(total_steps=10**10).compiles_at == PPOConfig(total_steps=10**11).compiles_at

    def test_a_cpu_repays_it_earlier(self):
        config = PPOConfig(total_steps=10**11)
        assert 3 < config.compiles_on("cuda") / config.compiles_on("cpu") < 5

    def test_updates_are_counted(self):
        assert PPOConfig(epochs=3, minibatches=8).updates_each_iteration == 24
        assert DQNConfig(updates_per_iteration=5).updates_each_iteration == 5
        assert ActiveDynamicsConfig(updates=6).updates_each_iteration == 6

    @pytest.mark.parametrize("value", [-1, 0.5, "soon"])
    def test_bad_values(self, value):
        with pytest.raises(ConfigError, match=r"compile_after: expected None or .* received"):
            PPOConfig(compile_after=value)

    def test_an_eager_run_compiles_nothing(self):
        with pytest.raises(ConfigError, match=r"compile_after: expected None with mode='eager'.* received 3"):
            PPOConfig(mode="eager", compile_after=3)


ON_CUDA = {"mode": "auto", "device": "cuda", "total_steps": 16_000, "log_interval": 100}


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*KINDS, SYSTEM])
class TestOnCuda:
    def test_a_run_starts_without_the_compiler(self, name, monkeypatch):
        def refuse(*_, **__):
            raise AssertionError("torch.compile was called")

        monkeypatch.setattr(torch, "compile", refuse)
        start = time.perf_counter()
        trainer = make_any(name, ON_CUDA)
        filling = getattr(trainer.config, "fill_iterations", 0)
        run(trainer, filling + 2)
        assert not is_captured(trainer)
        run(trainer, 1)
        assert is_captured(trainer)
        torch.cuda.synchronize()
        # without imports, which pytest has done; kernels of Triton may have to be made
        assert time.perf_counter() - start < 15
        with no_host_sync("cuda", trace=False):
            run(trainer, 2)
        trainer.close()

    def test_it_changes_to_compiled_kernels_and_resumes_bitwise(self, name, fresh_dynamo, tmp_path):
        options = {**ON_CUDA, "compile_after": 10}
        trainer = run(make_any(name, options), 9)
        early = trainer.save(tmp_path / "early.pt")
        run(trainer, 1)
        assert is_captured(trainer)
        assert not trainer.kernels.on
        run(trainer, 1)
        assert trainer.kernels.on
        assert not is_captured(trainer)
        run(trainer, 2)
        assert is_captured(trainer)
        late = trainer.save(tmp_path / "late.pt")
        expected = run(trainer, 3).state_dict()
        trainer.load(late)
        assert_same_on_device(expected, run(trainer, 3).state_dict())
        trainer.close()
        resumed = make_any(name, {**options, "seed": 9})
        for path, left in ((early, 7), (late, 3)):
            resumed.load(path)
            assert_same_on_device(expected, run(resumed, left).state_dict())
        resumed.close()

    def test_in_the_end_it_is_the_graph_of_mode_graph(self, name, fresh_dynamo):
        """From the same state on, the same kernels: the same numbers."""
        later = run(make_any(name, {**ON_CUDA, "compile_after": 10}), 14)
        state = later.state_dict()
        expected = run(later, 3).state_dict()
        later.close()
        graph = run(make_any(name, {**ON_CUDA, "mode": "graph"}), 12)
        graph.load_state_dict(state)
        assert_same_on_device(expected, run(graph, 3).state_dict())
        graph.close()
