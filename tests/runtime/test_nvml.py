"""Readings of a GPU against a fake NVML: present and missing values, which card is meant, and errors."""

import threading
from types import SimpleNamespace

import pytest
import torch

from torchrl_perf.runtime import machine, nvml
from torchrl_perf.runtime.nvml import GpuReader, GpuSampler, read_gpu, visible_id

WHOLE = {
    "gpu/utilization": 83.0,
    "gpu/memory_used_mib": 512.0,
    "gpu/memory_total_mib": 1024.0,
    "gpu/temperature_c": 61.0,
    "gpu/power_w": 350.5,
}


@pytest.fixture(autouse=True)
def every_card_is_visible(monkeypatch):
    """Whatever the machine hides from CUDA."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


class NVMLError(Exception):
    """What the real module raises."""


class FakeNVML:
    """Two cards; a handle is the card's number. Each call can be made to fail."""

    NVML_TEMPERATURE_GPU = 0
    UUIDS = ("GPU-aaaa-1", "GPU-bbbb-2")

    def __init__(self, *broken):
        self.broken = set(broken)
        self.open = 0
        self.readings = 0
        self.utilization = 83

    def check(self, name):
        if name in self.broken:
            raise NVMLError(f"{name}: Not Supported")

    def nvmlInit(self):  # noqa: N802
        self.check("init")
        self.open += 1

    def nvmlShutdown(self):  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self):  # noqa: N802
        return len(self.UUIDS)

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        if not 0 <= index < len(self.UUIDS):
            raise NVMLError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        if uuid.startswith("MIG-"):
            return uuid
        if uuid not in self.UUIDS:
            raise NVMLError("Not Found")
        return self.UUIDS.index(uuid)

    def nvmlDeviceGetUUID(self, handle):  # noqa: N802
        return self.UUIDS[handle]

    def nvmlDeviceGetUtilizationRates(self, handle):  # noqa: N802
        self.readings += 1
        self.check("utilization")
        return SimpleNamespace(gpu=self.utilization)

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        self.check("memory")
        return SimpleNamespace(used=512 * 2**20, total=1024 * 2**20)

    def nvmlDeviceGetTemperature(self, handle, sensor):  # noqa: N802
        self.check("temperature")
        return 61

    def nvmlDeviceGetPowerUsage(self, handle):  # noqa: N802
        self.check("power")
        return 350_500

    def nvmlDeviceGetName(self, handle):  # noqa: N802
        return b"Fake H100"

    def nvmlSystemGetDriverVersion(self):  # noqa: N802
        return "570.12"

    def nvmlSystemGetCudaDriverVersion(self):  # noqa: N802
        return 12080

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):  # noqa: N802
        return 500_000

    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle):  # noqa: N802
        return 700_000

    def nvmlDeviceGetPowerManagementLimitConstraints(self, handle):  # noqa: N802
        self.check("constraints")
        return [200_000, 700_000]


class TestVisibleId:
    @pytest.mark.parametrize(
        ("visible", "index", "expected"),
        [
            (None, 2, "2"),
            ("3,1", 0, "3"),
            ("3,1", 1, "1"),
            ("3,1", 2, None),
            ("", 0, None),
            ("-1", 0, None),
            ("0,-1,1", 1, None),  # nothing behind an entry that is no device
            ("1,1", 1, None),
            ("GPU-bbbb", 0, "GPU-bbbb"),
            ("MIG-7f", 0, "MIG-7f"),
            (" 1 , 0 ", 0, "1"),
        ],
    )
    def test_as_cuda_numbers_devices(self, visible, index, expected):
        environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        assert visible_id(index, environ) == expected

    def test_the_process_is_the_default(self, monkeypatch):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
        assert visible_id(0) == "5"


class TestReader:
    def test_a_whole_reading(self):
        fake = FakeNVML()
        assert read_gpu("cuda:1", nvml=fake) == WHOLE
        assert fake.open == 0

    @pytest.mark.parametrize("name", ["utilization", "memory", "temperature", "power"])
    def test_what_is_not_supported_is_left_out(self, name):
        expected = {key: value for key, value in WHOLE.items() if name not in key}
        assert read_gpu("cuda", nvml=FakeNVML(name)) == expected

    def test_the_newer_call_for_the_temperature(self):
        fake = FakeNVML("temperature")
        fake.nvmlDeviceGetTemperatureV = lambda handle, sensor: 62
        assert read_gpu("cuda", nvml=fake)["gpu/temperature_c"] == 62.0

    @pytest.mark.parametrize("device", ["cpu", "cuda:7", torch.device("cpu"), "mps"])
    def test_no_such_gpu(self, device):
        fake = FakeNVML()
        with GpuReader(device, nvml=fake) as reader:
            assert not reader.available
            assert reader.read() == reader.facts() == {}
        assert fake.open == 0

    def test_no_driver(self):
        assert read_gpu("cuda", nvml=FakeNVML("init")) == {}

    def test_no_pynvml(self, monkeypatch):
        monkeypatch.setitem(nvml.sys.modules, "pynvml", None)  # makes the import fail
        assert read_gpu("cuda") == {}

    def test_pynvml_is_the_default(self, monkeypatch):
        monkeypatch.setitem(nvml.sys.modules, "pynvml", FakeNVML())
        assert read_gpu("cuda:0") == WHOLE

    @pytest.mark.parametrize(
        ("visible", "device", "handle"),
        [
            ("1", "cuda:0", 1),
            ("1,0", "cuda:1", 0),
            ("GPU-bbbb-2", "cuda", 1),
            ("GPU-b", "cuda", 1),
            ("GPU-c", "cuda", None),
            ("MIG-7f", "cuda", "MIG-7f"),
            ("", "cuda", None),
        ],
    )
    def test_which_card_is_meant(self, visible, device, handle):
        reader = GpuReader(device, nvml=FakeNVML(), environ={"CUDA_VISIBLE_DEVICES": visible})
        assert reader._handle == handle

    def test_an_initialised_cuda_names_its_card_by_uuid(self, monkeypatch):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="bbbb-2"))
        assert GpuReader("cuda", nvml=FakeNVML())._handle == 1

    def test_facts(self):
        facts = GpuReader("cuda", nvml=FakeNVML("constraints")).facts()
        assert facts == {
            "name": "Fake H100",
            "uuid": "GPU-aaaa-1",
            "driver": "570.12",
            "cuda_driver": "12.8",
            "power_limit_w": 500.0,
            "power_default_w": 700.0,
        }

    def test_the_machine_card_has_them(self, monkeypatch):
        monkeypatch.setitem(nvml.sys.modules, "pynvml", FakeNVML())
        assert machine._nvml() == {"power_limit_w": 500.0, "driver": "570.12"}
        monkeypatch.setitem(nvml.sys.modules, "pynvml", None)
        assert machine._nvml() is None


def until(condition):
    """Wait for a thread; fails after five seconds."""
    waits = threading.Event()
    for _ in range(500):
        if condition():
            return
        waits.wait(0.01)
    raise AssertionError("it did not happen")


class TestSampler:
    def test_means_since_the_last_call(self):
        sampler = GpuSampler("cuda", nvml=FakeNVML())
        sampler._readings = [{"gpu/utilization": 20.0, "gpu/power_w": 100.0}, {"gpu/utilization": 60.0}]
        assert sampler.latest() == {"gpu/utilization": 40.0, "gpu/power_w": 100.0}

    def test_a_short_interval_repeats_the_newest_reading(self):
        sampler = GpuSampler("cuda", interval=60.0, nvml=FakeNVML()).start()
        until(lambda: sampler._last)
        assert sampler.latest() == sampler.latest() == WHOLE
        sampler.close()

    def test_the_thread_ends(self):
        fake = FakeNVML()
        sampler = GpuSampler("cuda", interval=60.0, nvml=fake).start()
        thread = sampler._thread
        assert thread.daemon
        sampler.close()
        sampler.close()
        assert not thread.is_alive()
        assert fake.open == 0
        assert sampler.start()._thread is thread  # and is not started again

    def test_an_error_in_mid_run_leaves_the_readings_out_until_it_is_over(self):
        fake = FakeNVML()
        sampler = GpuSampler("cuda", interval=0.005, nvml=fake).start()
        until(lambda: sampler.latest() == WHOLE)
        fake.broken = {"utilization", "memory", "temperature", "power"}
        until(lambda: sampler.latest() == {})
        fake.broken = set()
        until(lambda: sampler.latest() == WHOLE)
        sampler.close()

    @pytest.mark.parametrize(("device", "fake"), [("cpu", FakeNVML()), ("cuda", FakeNVML("init"))])
    def test_without_a_gpu_there_is_no_thread(self, device, fake):
        sampler = GpuSampler(device, nvml=fake).start()
        assert sampler._thread is None
        assert sampler.latest() == {}
        sampler.close()

    def test_memory_is_bounded(self):
        sampler = GpuSampler("cuda", interval=1e-6, nvml=FakeNVML())
        sampler._readings = [WHOLE] * 10_000
        sampler.start()
        until(lambda: len(sampler._readings) <= 3600)
        sampler.close()

    @pytest.mark.parametrize("interval", [0.0, -1.0, float("nan")])
    def test_an_interval_is_positive(self, interval):
        with pytest.raises(ValueError, match="interval: expected a positive number"):
            GpuSampler("cuda", interval)


@pytest.mark.gpu
def test_a_real_gpu_is_read():
    torch.zeros(1, device="cuda")
    reading = read_gpu("cuda")
    assert reading["gpu/memory_total_mib"] > 1000
    sampler = GpuSampler("cuda", interval=0.01).start()
    until(sampler.latest)
    sampler.close()
