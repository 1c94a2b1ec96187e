"""The memory guard acts exactly when its rule says so; the leak check finds a leak and lets a flat loop pass."""

import gc
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_perf.runtime.memory import LeakCheck, MemoryGuard, MemoryReading, heap_bytes, rss_bytes, theil_sen
from torchrl_perf.trainers import PPOConfig, PPOTrainer

MIB = 2**20


class FakeDevice:
    """Readings in percent of a device of 100 bytes; emptying frees what ``frees`` says of the unused part."""

    def __init__(self, allocated=10, reserved=20, frees=1.0):
        self.allocated, self.reserved, self.frees = allocated, reserved, frees
        self.reads = self.emptied = 0

    def read(self):
        self.reads += 1
        return MemoryReading(allocated=self.allocated, reserved=self.reserved, total=100, peak=90, allocations=7)

    def empty(self):
        self.emptied += 1
        self.reserved -= int(self.frees * (self.reserved - self.allocated))


def guard(fake, **options):
    options = {"check_interval": 1, "gc_interval": 0, **options}
    made = MemoryGuard("cuda", read=fake.read, empty=fake.empty, **options)
    made.cooldown = 10
    return made


def after(guard, count):
    for _ in range(count):
        guard.after_iteration()
    return guard.cleanups


class TestUnusedRule:
    @pytest.mark.parametrize(
        ("allocated", "reserved", "due"),
        [(59, 80, False), (60, 81, True), (61, 81, False), (60, 82, True), (10, 79, False), (0, 100, True)],
    )
    def test_due_above_the_threshold_with_more_than_a_fifth_unused(self, allocated, reserved, due):
        fake = FakeDevice(allocated, reserved)
        assert after(guard(fake), 1) == fake.emptied == int(due)

    def test_threshold_is_a_choice(self):
        assert after(guard(FakeDevice(10, 51), threshold=0.5), 1) == 1
        assert after(guard(FakeDevice(10, 50), threshold=0.5), 1) == 0

    def test_what_cannot_be_freed_calls_for_no_second_cleanup(self):
        fake = FakeDevice(40, 90, frees=0.0)  # pools of graphs
        watch = guard(fake)
        assert after(watch, 1000) == 1
        fake.allocated = 20  # 70 unused, of which 50 were left by the cleanup
        assert after(watch, 10) == 1
        fake.allocated = 19
        assert after(watch, 1) == 2

    def test_never_within_the_cooldown(self):
        fake = FakeDevice(10, 95)
        watch = guard(fake)
        seen = []
        for k in range(1, 41):
            fake.reserved = 95
            watch.after_iteration()
            if watch.cleanups > len(seen):
                seen.append(k)
        assert seen == [1, 11, 21, 31]


class TestOtherRules:
    @pytest.mark.parametrize(("allocated", "due"), [(80, False), (81, True)])
    def test_allocated_is_the_original_rule(self, allocated, due):
        assert after(guard(FakeDevice(allocated, allocated), rule="allocated"), 1) == int(due)

    def test_allocated_does_not_run_at_each_iteration_either(self):
        assert after(guard(FakeDevice(90, 95), rule="allocated"), 30) == 3

    def test_never(self):
        fake = FakeDevice(90, 100)
        assert after(guard(fake, rule="never"), 100) == fake.reads == 0

    def test_readings_are_taken_every_check_interval(self):
        fake = FakeDevice()
        after(guard(fake, check_interval=100), 1000)
        assert fake.reads == 10

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"rule": "often"}, "rule: expected"),
            ({"threshold": 1.0}, "threshold: expected"),
            ({"gc_interval": -1}, "gc_interval >= 0"),
            ({"check_interval": 0}, "check_interval >= 1"),
        ],
    )
    def test_bad_settings(self, options, words):
        with pytest.raises(ValueError, match=words):
            MemoryGuard("cpu", **options)


class TestGarbage:
    def test_collected_every_interval_and_frozen_once(self, monkeypatch):
        calls = []
        monkeypatch.setattr(gc, "collect", lambda: calls.append("collect"))
        monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
        monkeypatch.setattr(gc, "unfreeze", lambda: calls.append("unfreeze"))
        monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)  # whatever a test before has left frozen
        watch = MemoryGuard("cpu", gc_interval=4)
        after(watch, 13)
        watch.close()
        watch.close()
        assert calls == ["collect", "freeze", "collect", "collect", "unfreeze"]
        assert watch.gc_runs == 3

    def test_zero_leaves_it_to_python(self, monkeypatch):
        monkeypatch.setattr(gc, "collect", lambda: pytest.fail("collected"))
        after(MemoryGuard("cpu", gc_interval=0), 100)

    def test_objects_that_somebody_else_froze_stay_frozen(self, monkeypatch):
        frozen = gc.get_freeze_count()
        assert frozen > 100_000  # the session's own
        monkeypatch.setattr(gc, "unfreeze", lambda: pytest.fail("thawed"))
        watch = MemoryGuard("cpu", gc_interval=1)
        after(watch, 1)
        watch.close()
        assert gc.get_freeze_count() == pytest.approx(frozen, abs=100)


class TestRow:
    def test_on_a_device_with_an_allocator(self):
        row = guard(FakeDevice(10, 20)).row()
        assert row["memory/allocated_mib"] == 10 / MIB and row["memory/reserved_mib"] == 20 / MIB
        assert row["memory/peak_mib"] == 90 / MIB and row["memory/allocations"] == 7
        assert row["memory/cleanups"] == row["memory/gc_runs"] == row["memory/alloc_retries"] == 0

    def test_on_a_cpu(self):
        row = MemoryGuard("cpu").row()
        known = {"memory/cleanups", "memory/gc_runs", "memory/rss_mib", "memory/heap_mib"}
        assert {"memory/cleanups", "memory/gc_runs"} <= set(row) <= known

    @pytest.mark.gpu
    def test_on_cuda(self):
        before = MemoryGuard("cuda").row()
        block = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        row = MemoryGuard("cuda").row()
        assert row["memory/allocated_mib"] - before["memory/allocated_mib"] == pytest.approx(64)
        assert row["memory/allocations"] > before["memory/allocations"]
        assert row["memory/peak_mib"] >= row["memory/allocated_mib"]
        del block


@pytest.mark.skipif(heap_bytes() is None, reason="needs mallinfo2")
def test_heap_counts_tensors_to_the_byte_and_forgets_them():
    before = heap_bytes()
    tensor = torch.zeros(5_000_000)
    assert heap_bytes() - before == pytest.approx(20_000_000, abs=100_000)
    del tensor
    assert heap_bytes() == pytest.approx(before, abs=100_000)


@pytest.mark.skipif(rss_bytes() is None, reason="needs /proc")
def test_rss_is_of_this_process():
    assert 10 * MIB < rss_bytes() < 2**40


class TestLeakCheck:
    def test_an_exact_line(self):
        check = LeakCheck()
        for k in range(100):
            check.record(10 * k, 50 + 0.02 * k)  # 0.02 MiB in 10 iterations
        report = check.report()
        assert (report.slope_mib_per_1000, report.low, report.high) == pytest.approx((2, 2, 2), abs=1e-6)
        assert report.leaks and not report.flat and report.samples == 100

    def test_constant_readings_are_flat(self):
        check = LeakCheck()
        for k in range(50):
            check.record(k, 123.0)
        report = check.report()
        assert (report.slope_mib_per_1000, report.low, report.high) == (0, 0, 0)
        assert report.flat and not report.leaks

    def test_what_fills_in_the_first_quarter_is_warm_up(self):
        check = LeakCheck()
        for k in range(100):
            check.record(k, min(k, 24))
        assert check.report().flat

    def test_a_single_step_is_no_leak(self):
        check = LeakCheck()
        for k in range(400):
            check.record(k, 100 + 50 * (k > 250))
        assert not check.report().leaks

    def test_steps_without_end_are_one(self):
        check = LeakCheck()
        for k in range(1000):
            check.record(k, 100 + k // 100)
        assert check.report().leaks

    def test_outliers_do_not_matter(self):
        check = LeakCheck()
        for k in range(1000):
            check.record(k, 100 + 0.0001 * k + 1000 * (k % 97 == 0))
        assert check.report().slope_mib_per_1000 == pytest.approx(0.1, abs=0.05)

    @pytest.mark.parametrize("memory", [0.0, 0.9])
    def test_noise_is_rarely_called_a_leak(self, memory):
        generator, calls, trials = random.Random(0), 0, 60
        for _ in range(trials):
            check, noise = LeakCheck(tolerance=0.0), 0.0
            for k in range(400):
                noise = memory * noise + generator.gauss(0, 1)
                check.record(k, noise)
            calls += check.report().leaks
        assert calls <= 0.15 * trials  # 2.5% are meant

    def test_a_small_leak_in_large_noise_is_found_with_enough_iterations(self):
        generator, check = random.Random(0), LeakCheck()
        for k in range(20_000):
            check.record(k, 100 + 0.001 * k + generator.gauss(0, 1))
        report = check.report()
        assert report.leaks and report.low < 1 < report.high

    def test_memory_of_the_check_is_bounded_and_no_reading_is_lost(self):
        check = LeakCheck(maximum=32)
        for k in range(10_000):
            check.record(k, 0.003 * k)
        assert len(check._mib) == 32 and check.report().slope_mib_per_1000 == pytest.approx(3)
        assert check.report().samples == 10_000

    @pytest.mark.parametrize("count", [0, 1, 4])
    def test_too_few_readings(self, count):
        check = LeakCheck(warmup=0)
        for k in range(count):
            check.record(k, k)
        report = check.report()
        assert math.isnan(report.slope_mib_per_1000) and not report.leaks and not report.flat

    @pytest.mark.parametrize("options", [{"warmup": 1.0}, {"warmup": -0.1}, {"maximum": 30}, {"maximum": 33}])
    def test_bad_settings(self, options):
        with pytest.raises(ValueError, match="expected warmup"):
            LeakCheck(**options)

    def test_theil_sen_by_hand(self):
        # slopes of the pairs of (0, 0), (1, 1), (2, 4): 1, 2, 3
        slope, low, high = theil_sen([(0, 0), (1, 1), (2, 4)])
        assert (slope, low, high) == (2, 1, 3)

    @settings(max_examples=25, deadline=None)
    @given(
        values=st.lists(st.floats(-100, 100), min_size=5, max_size=30),
        slope=st.floats(-5, 5),
        offset=st.floats(-100, 100),
    )
    def test_a_line_added_adds_its_slope(self, values, slope, offset):
        plain = theil_sen([(k, value) for k, value in enumerate(values)])
        tilted = theil_sen([(k, value + slope * k + offset) for k, value in enumerate(values)])
        assert tilted[0] == pytest.approx(plain[0] + slope, abs=1e-6)


@pytest.mark.skipif(heap_bytes() is None, reason="needs mallinfo2")
@pytest.mark.usefixtures("small_heap")
class TestRealLoops:
    @staticmethod
    def slope(step, iterations, every=10):
        check = LeakCheck()
        for k in range(iterations):
            step()
            if k % every == 0:
                gc.collect()  # cycles that wait for Python's collector are no leak
                check.record(k, heap_bytes() / MIB)
        return check.report()

    def test_a_loop_that_keeps_graphs_leaks(self):
        weight, kept = torch.randn(16, 16, requires_grad=True), []
        report = self.slope(lambda: kept.append((torch.randn(8, 16) @ weight).tanh()), 400)
        assert report.leaks and report.slope_mib_per_1000 > 1

    def test_a_loop_that_keeps_losses_in_a_list_leaks(self):
        kept = []
        report = self.slope(lambda: kept.extend(float(k) for k in range(10)), 2_000)
        assert report.leaks and report.low > 0.1

    @pytest.mark.slow
    def test_the_packages_loop_is_flat(self):
        config = PPOConfig(num_envs=4, num_steps=2, epochs=1, minibatches=1, device="cpu", mode="eager", logger="none")
        trainer, done = PPOTrainer(config), 0

        def step():
            nonlocal done
            trainer.step()
            done += 1
            if done % 10 == 0:
                trainer.metrics.flush(done)
                trainer.phases.flush()

        for _ in range(150):
            step()
        report = self.slope(step, 1_000)
        # the interval itself is wider where other processes take the cores
        assert not report.leaks and abs(report.slope_mib_per_1000) <= 0.1, report


@pytest.mark.gpu
class TestOnCuda:
    @staticmethod
    def slope(step, iterations):
        check = LeakCheck()
        for k in range(iterations):
            step()
            check.record(k, torch.cuda.memory_allocated() / MIB)
        return check.report()

    def test_a_loop_that_keeps_graphs_leaks(self):
        weight, kept = torch.randn(64, 64, device="cuda", requires_grad=True), []
        assert self.slope(lambda: kept.append((weight @ weight).tanh()), 400).leaks

    def test_the_packages_loop_is_flat(self):
        trainer = PPOTrainer(PPOConfig(num_envs=64, num_steps=8, epochs=1, minibatches=1, device="cuda", logger="none"))
        for _ in range(5):
            trainer.step()
        assert self.slope(trainer.step, 2_000).flat
        trainer.close()

    def test_a_guard_that_empties_the_cache_leaves_a_graph_alone(self):
        trainer = PPOTrainer(PPOConfig(num_envs=64, num_steps=8, epochs=1, minibatches=1, device="cuda", logger="none"))
        for _ in range(5):
            trainer.step()
        whole = MemoryReading(allocated=0, reserved=100, total=100)
        watch = MemoryGuard("cuda", read=lambda: whole, check_interval=1)
        watch.after_iteration()
        assert watch.cleanups == 1
        trainer.step()
        assert all(p.isfinite().all() for p in trainer.loss.parameters())
        trainer.close()
