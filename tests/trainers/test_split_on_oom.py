"""Trainers whose update runs out of memory: the same gradient from micro-batches, nothing left of the failed try."""

import dataclasses
import warnings

import pytest
import torch

from torchrl_perf.runtime import compiled
from torchrl_perf.runtime.compile_switch import CompileSwitch
from torchrl_perf.runtime.oom import OutOfMemoryWarning
from torchrl_perf.trainers import DQNConfig, DQNTrainer, PPOConfig, PPOTrainer, SACConfig, SACTrainer, train

COMMON = {"num_envs": 8, "num_steps": 8, "device": "cpu", "logger": "none", "hidden_size": 32, "mode": "eager"}
FILLED = {"learning_starts": 256, "capacity": 512, "minibatch_size": 50, "updates_per_iteration": 2}


def make_ppo(**changes):
    return PPOTrainer(PPOConfig(**{**COMMON, "epochs": 2, "minibatches": 2, "total_steps": 10_000, **changes}))


def make_dqn(**changes):
    return DQNTrainer(DQNConfig.without_task(**{**COMMON, **FILLED, "total_steps": 10_000, **changes}))


def make_sac(**changes):
    return SACTrainer(SACConfig.without_task(**{**COMMON, **FILLED, "total_steps": 10_000, **changes}))


def limit(owner, name, most, size=lambda *args: len(args[0])):
    """Makes ``owner.name`` run out of memory for more than ``most`` rows; counts what fits."""
    fn, sizes = getattr(owner, name), []

    def run(*args, **kwargs):
        if size(*args) > most:
            raise torch.OutOfMemoryError(f"no room for {size(*args)} rows")
        sizes.append(size(*args))
        return fn(*args, **kwargs)

    setattr(owner, name, run)
    return sizes


def modules_of(trainer):
    return trainer.q_network if isinstance(trainer, DQNTrainer) else trainer.loss


def compiles(trainer, update):
    """Makes a trainer take its whole update for compiled, with another one in its place."""
    algorithm = trainer.algorithm
    kernels = CompileSwitch(lambda fn: fn, at=0, may_go_on=False)
    algorithm._update_fn, algorithm.setup = (
        update,
        dataclasses.replace(algorithm.setup, mode="compile", kernels=kernels),
    )


def vector(tensors):
    return torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors])


def assert_same(ours, expected, tolerance=1e-6):
    ours, expected = vector(ours), vector(expected)
    assert float((ours - expected).norm() / expected.norm()) < tolerance


def moments(trainer):
    """First moments of all optimisers: after one step a tenth of the gradient."""
    sac = isinstance(trainer, SACTrainer)
    optimizers = (trainer.critic_optimizer, trainer.actor_optimizer) if sac else (trainer.optimizer,)
    return [optimizer.state[param]["exp_avg"] for optimizer in optimizers for param in optimizer.params]


def run(trainer, iterations, *, splits=False):
    torch.manual_seed(1)
    if not splits:
        for _ in range(iterations):
            trainer.step()
        return trainer.metrics.flush(1)
    with pytest.warns(OutOfMemoryWarning) as said:
        for _ in range(iterations):
            trainer.step()
    assert len({str(one.message) for one in said}) == len(said)
    return trainer.metrics.flush(1)


def compare(make, split, iterations=1, tolerance=1e-6, **options):
    """One trainer that splits as ``split`` has it, and one that does not: gradients, metrics, random numbers."""
    whole, ours = make(**options), make(**options)
    expected = run(whole, iterations)
    drawn_next = torch.rand(3)
    split(ours)
    row = run(ours, iterations, splits=True)
    assert torch.equal(torch.rand(3), drawn_next)
    assert_same(moments(ours), moments(whole), tolerance)
    assert_same(modules_of(ours).parameters(), modules_of(whole).parameters(), tolerance)
    for name, value in expected.items():
        if name != "train/micro_batches":
            assert row[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    assert expected["train/micro_batches"] == 1
    return row, ours


class TestPPO:
    @pytest.mark.parametrize("loss", ["device", "torchrl"])
    def test_gradients_metrics_and_draws_are_those_of_whole_minibatches(self, loss):
        sizes = []

        def split(trainer):
            sizes.append(limit(trainer, "_sum_losses", 10))

        row, trainer = compare(make_ppo, split, epochs=1, minibatches=1, loss=loss)
        assert row["train/micro_batches"] == 8 == trainer.micro.parts
        assert sizes[0] == [8] * 8

    def test_advantages_are_normalised_over_the_whole_minibatch(self):
        # in parts of one row a normalisation of their own would leave nothing
        row, _ = compare(make_ppo, lambda trainer: limit(trainer, "_sum_losses", 1), epochs=1, minibatches=1)
        assert row["train/loss_objective"] != 0

    def test_several_updates_stay_close(self):
        row, _ = compare(make_ppo, lambda trainer: limit(trainer, "_sum_losses", 16), 3, 1e-3)
        assert row["train/micro_batches"] == 2

    def test_memory_may_run_out_in_the_middle_of_the_backward_pass(self):
        def split(trainer):
            failures = [torch.OutOfMemoryError("no room for a gradient")]

            def fail(param):
                if failures:
                    raise failures.pop()

            list(trainer.loss.parameters())[-1].register_post_accumulate_grad_hook(fail)

        row, _ = compare(make_ppo, split, epochs=1, minibatches=1)
        assert row["train/micro_batches"] == 2

    def test_without_splitting_the_error_comes_as_it_is(self):
        trainer = make_ppo(split_on_oom=False)
        limit(trainer, "_sum_losses", 8)
        with pytest.raises(torch.OutOfMemoryError, match="no room for 32 rows"):
            trainer.step()

    def test_a_collection_that_does_not_fit_has_a_remedy(self):
        trainer = make_ppo()
        limit(trainer.collector, "collect", 0, size=lambda: 1)
        with pytest.raises(torch.OutOfMemoryError, match=r"collect: .*Remedy: fewer num_envs"):
            trainer.step()

    def test_a_resumed_run_is_split_from_its_first_update(self):
        first, second = make_ppo(), make_ppo()
        sizes = limit(first, "_sum_losses", 16), limit(second, "_sum_losses", 16)
        run(first, 2, splits=True)
        second.load_state_dict(first.state_dict())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for trainer in (first, second):
                run(trainer, 1)
        assert sizes[1] == [16] * 8
        assert torch.equal(vector(first.loss.parameters()), vector(second.loss.parameters()))

    def test_compiled(self, traced_only):
        # that whole minibatches are the same compiled is tested elsewhere
        once = {"epochs": 1, "minibatches": 1}
        whole, ours = make_ppo(**once), make_ppo(**once, mode="compile")
        run(whole, 1)
        limit(ours._whole_step, "_step_fn", 20, size=lambda rows, index, learning_rate: len(index))
        limit(ours, "_losses_fn", 20, size=lambda rows, index: len(index))
        limit(ours, "_part_losses_fn", 20, size=lambda rows, index, advantage: len(index))
        assert run(ours, 1, splits=True)["train/micro_batches"] == 4
        assert_same(moments(ours), moments(whole), 1e-5)
        assert_same(ours.loss.parameters(), whole.loss.parameters(), 1e-5)

    def test_in_a_run_it_is_a_column_of_the_metrics(self, tmp_path):
        trainer = make_ppo(logger="csv", total_steps=256, log_interval=1)
        limit(trainer, "_sum_losses", 16)
        with pytest.warns(OutOfMemoryWarning, match="2 micro-batches of 16 rows"):
            train(trainer, tmp_path, progress=False)
        header, *rows = (tmp_path / "progress.csv").read_text().splitlines()
        assert "train/micro_batches" in header.split(",") and len(rows) == 4


class TestDQN:
    @pytest.mark.parametrize("options", [{}, {"sampler": "prioritized", "n_step": 3}], ids=["uniform", "prioritised"])
    def test_gradients_metrics_and_draws_are_those_of_whole_samples(self, options):
        row, trainer = compare(make_dqn, lambda trainer: limit(trainer.algorithm, "_losses_fn", 13), 5, 1e-5, **options)
        assert row["train/micro_batches"] == 4
        assert float(trainer.updates) == 2

    def test_priorities_are_those_of_whole_samples(self):
        options = {"sampler": "prioritized", "updates_per_iteration": 1}
        whole, ours = make_dqn(**options), make_dqn(**options)
        run(whole, 5)
        limit(ours.algorithm, "_losses_fn", 25)
        run(ours, 5, splits=True)
        ours, whole = (trainer.buffer.sampler.state_dict() for trainer in (ours, whole))
        for name, value in whole.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6)


class TestSAC:
    @pytest.mark.parametrize("options", [{}, {"sampler": "prioritized", "n_step": 3}], ids=["uniform", "prioritised"])
    @pytest.mark.parametrize("stage", ["critic_losses", "actor_losses"])
    def test_gradients_metrics_and_draws_are_those_of_whole_samples(self, stage, options):
        options = {**options, "updates_per_iteration": 1}
        row, trainer = compare(make_sac, lambda trainer: limit(trainer.loss, stage, 13), 5, 1e-5, **options)
        assert row["train/micro_batches"] == 4
        assert float(trainer.updates) == 1

    def test_several_updates_stay_close(self):
        row, _ = compare(make_sac, lambda trainer: limit(trainer.loss, "actor_losses", 25), 7, 1e-3)
        assert row["train/micro_batches"] == 2

    def test_a_compiled_update_that_fails_half_way_is_undone(self):
        whole, ours = make_sac(updates_per_iteration=1), make_sac(updates_per_iteration=1)
        update, failures = ours.algorithm._update, [torch.OutOfMemoryError("no room")]

        def fail(sample):
            outcome = update(sample)  # has written everything
            if failures:
                raise failures.pop()
            return outcome

        compiles(ours, fail)
        run(whole, 5)
        run(ours, 5, splits=True)
        assert_same(moments(ours), moments(whole), 1e-5)
        assert_same(ours.loss.parameters(), whole.loss.parameters(), 1e-6)

    def test_later_a_compiled_update_that_fails_is_an_error_with_a_remedy(self):
        trainer = make_sac()
        compiles(trainer, trainer.algorithm._update)
        run(trainer, 6)
        limit(trainer.algorithm, "_update_fn", 1)
        with pytest.raises(torch.OutOfMemoryError, match="Remedy: go on from the last checkpoint"):
            trainer.step()

    @pytest.mark.slow
    def test_micro_batches_are_compiled_too(self):
        options = {"updates_per_iteration": 1, "sampler": "prioritized"}
        whole, ours = make_sac(**options), make_sac(**options)
        # the steps as well: PyTorch's fused kernel takes no gradients in another layout
        for name in ("critic_micro", "actor_micro", "critic_step", "actor_step"):
            setattr(ours.algorithm, f"_{name}_fn", compiled(getattr(ours.algorithm, f"_{name}"), backend="aot_eager"))
        ours.micro.parts = 3
        run(whole, 5)
        run(ours, 5)
        assert_same(moments(ours), moments(whole), 1e-5)
        assert_same(ours.loss.parameters(), whole.loss.parameters(), 1e-6)


class NoRoom:
    """A function that runs out of memory with whole samples: before the graph is recorded, or as it is."""

    def __init__(self, fn, micro, when):
        self.fn, self.micro, self.when = fn, micro, when

    def __call__(self, *args):
        if (self.when == "warm-up" or self.micro.recording) and self.micro.parts == 1:
            raise torch.OutOfMemoryError("no room")
        return self.fn(*args)

    def takes(self, sample):
        return self.fn.takes(sample)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [make_ppo, make_dqn, make_sac])
@pytest.mark.parametrize("when", ["warm-up", "recording"])
def test_graphs_are_recorded_in_micro_batches(make, when):
    options = {"device": "cuda", "mode": "graph"}
    whole, ours = make(**options), make(**options)
    expected = run(whole, 9)
    names = ["_update_fn", "_chained"] if isinstance(ours, SACTrainer) else ["_losses_fn"]
    owner = ours if hasattr(ours, names[0]) else ours.algorithm  # the on-policy loop compiles the losses itself
    for name in names:
        if (fn := getattr(owner, name)) is not None:
            setattr(owner, name, NoRoom(fn, ours.micro, when))
    row = run(ours, 9, splits=True)
    assert row["train/micro_batches"] == 2
    assert ours._captures.iterate.captured
    assert_same(modules_of(ours).parameters(), modules_of(whole).parameters(), 1e-2)
    assert row["episode/count"] == expected["episode/count"]
    for trainer in (whole, ours):
        trainer.close()
