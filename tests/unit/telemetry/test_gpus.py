"""The use of GPUs: read from a are-in of the driver's library, kept while it is fresh, and carried by heartbeats."""

import ctypes
import math
import threading

import pytest

from millrace.internal.v1 import worker_service_pb2 as pb2
from millrace.rpc.worker import gpu_to_proto, gpus_from_proto
from millrace.telemetry import gpus
from millrace.telemetry.gpus import GpuUse, GpuWatch, Nvml

UUIDS = [b"GPU-aaaa-1", b"GPU-bbbb-2", b"GPU-bbbb-3"]
NOT_SUPPORTED = 3


class Driver:
    """A second implementation of the library's functions: three GPUs, of which the last says nothing of its use."""

    def nvmlDeviceGetCount_v2(self, count):
        count.contents.value = len(UUIDS)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        handle.contents.value = index.value + 1
        return 0

    def nvmlDeviceGetUUID(self, handle, buffer, size):
        buffer.value = UUIDS[handle.value - 1]
        return 0

    def nvmlDeviceGetName(self, handle, buffer, size):
        buffer.value = b"NVIDIA Test"
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle, memory):
        memory.contents.total, memory.contents.used = 80 << 30, handle.value << 30
        return 0 if handle.value < 3 else NOT_SUPPORTED

    def nvmlDeviceGetUtilizationRates(self, handle, busy):
        busy.contents.gpu = 75
        return 0 if handle.value < 3 else NOT_SUPPORTED

    def nvmlDeviceGetPowerUsage(self, handle, power):
        power.contents.value = 350_500
        return 0 if handle.value < 3 else NOT_SUPPORTED


class Reader:
    """Gives readings one after the other, then hangs as a driver does whose GPU is lost; or fails."""

    def __init__(self, *readings, error=None):
        self.readings, self.error = list(readings), error
        self.asked = threading.Semaphore(0)
        self.hangs = threading.Event()

    def read(self):
        self.asked.release()
        if self.error:
            raise self.error
        if not self.readings:
            self.hangs.wait(30)
        return self.readings.pop(0) if self.readings else ()


def test_a_gpu_is_read_and_what_the_driver_does_not_say_is_none():
    first, _, last = Nvml(Driver(), {}).read()
    assert first == GpuUse(
        index=0, uuid="GPU-aaaa-1", name="NVIDIA Test", memory_used=1 << 30, memory_total=80 << 30, utilization=0.75,
        power_watts=350.5,
    )  # fmt: skip
    assert (last.memory_used, last.memory_total, last.utilization, last.power_watts) == (None,) * 4


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        ("", []), ("-1", []), ("1", [1]), ("2,0", [2, 0]), ("1, 0", [1, 0]), ("0,9,1", [0]), ("GPU-aaaa", [0]),
        ("GPU-bbbb-3,0", [2, 0]), ("MIG-1", []), ("no", []),
    ],
)  # fmt: skip
def test_only_the_gpus_that_the_process_may_use_are_read(visible, indices):
    found = Nvml(Driver(), {"CUDA_VISIBLE_DEVICES": visible}).read()
    assert [gpu.index for gpu in found] == indices


def test_without_a_driver_there_is_nothing(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert Nvml.open({}) is None
    watch = GpuWatch()
    watch.start()
    assert watch.latest() == ()
    watch.stop()


def test_a_driver_that_hangs_blocks_nobody_and_its_last_words_get_old(monkeypatch):
    gpu = GpuUse(index=0, uuid="GPU-1", name="x", utilization=0.5)
    reader = Reader([gpu])
    watch = GpuWatch(reader, period_s=0.001)
    watch.start()
    for _ in range(2):
        assert reader.asked.acquire(timeout=30)
    assert watch.latest() == (gpu,)
    monkeypatch.setattr(gpus, "OLD_S", 0.0)
    assert watch.latest() == ()
    watch.stop()
    reader.hangs.set()


def test_a_driver_that_fails_costs_its_readings_only(caplog):
    reader = Reader(error=ValueError("out of range"))
    watch = GpuWatch(reader)
    watch.start()
    assert reader.asked.acquire(timeout=30)
    watch.stop()
    assert watch.latest() == ()


def test_a_heartbeat_carries_it_and_a_wrong_number_is_none():
    gpu = GpuUse(index=3, uuid="GPU-1", name="H", memory_used=0, memory_total=1 << 40, utilization=0.0)
    assert gpus_from_proto([gpu_to_proto(gpu)]) == [gpu]
    for value in (math.nan, math.inf, -1.0, 1.5):
        assert gpus_from_proto([pb2.GpuUse(utilization=value)])[0].utilization is None
    many = gpus_from_proto([pb2.GpuUse(name="x" * 5000)] * 500)
    assert len(many) == gpus.MAX_GPUS and len(many[0].name) == 100
