"""What learns of a GPU's use is what the GPU does: memory, utilization and power, through the driver's library."""

import os
import threading
import time

import pytest
import torch

from millrace.telemetry.gpus import GpuUse, GpuWatch, Nvml

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
SIZE = 1 << 30


@pytest.fixture
def driver() -> Nvml:
    found = Nvml.open(os.environ)
    assert found is not None, "there is a GPU, so there is a driver"
    return found


def of(device: torch.device, found: list[GpuUse]) -> GpuUse:
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return next(each for each in found if each.uuid.removeprefix("GPU-") == uuid)


def test_every_gpu_of_torch_is_read_and_no_other(gpu: torch.device, driver: Nvml) -> None:
    uuids = {str(torch.cuda.get_device_properties(at).uuid) for at in range(torch.cuda.device_count())}
    assert {each.uuid.removeprefix("GPU-") for each in driver.read()} == uuids
    found = of(gpu, driver.read())
    assert found.name == torch.cuda.get_device_name(gpu)
    assert found.memory_total is not None
    assert abs(found.memory_total / torch.cuda.get_device_properties(gpu).total_memory - 1) < 0.1


def test_memory_that_is_allocated_is_used(gpu: torch.device, driver: Nvml) -> None:
    torch.zeros(1, device=gpu)
    before = of(gpu, driver.read()).memory_used
    kept = torch.zeros(SIZE, dtype=torch.uint8, device=gpu)
    torch.cuda.synchronize(gpu)
    after = of(gpu, driver.read()).memory_used
    assert before is not None and after is not None
    assert after - before >= 0.95 * kept.numel()


def test_a_gpu_at_work_is_busy_and_draws_power(gpu: torch.device) -> None:
    watch, stopping = GpuWatch(period_s=0.2), threading.Event()
    matrix = torch.randn(8192, 8192, device=gpu, dtype=torch.bfloat16)

    def work() -> None:
        while not stopping.is_set():
            for _ in range(20):
                torch.mm(matrix, matrix)
            torch.cuda.synchronize(gpu)

    worker = threading.Thread(target=work)
    worker.start()
    watch.start()
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            time.sleep(0.2)
            found = watch.latest()
            if found and (of(gpu, list(found)).utilization or 0) > 0.8:
                break
        busy = of(gpu, list(watch.latest()))
    finally:
        stopping.set()
        worker.join(30)
        watch.stop()
    print(busy)
    assert busy.utilization is not None and busy.utilization > 0.8
    assert busy.power_watts is not None and 50 < busy.power_watts < 2000


def test_a_reading_costs_little(gpu: torch.device, driver: Nvml) -> None:
    began = time.perf_counter()
    for _ in range(20):
        driver.read()
    each = (time.perf_counter() - began) / 20
    print(f"one reading: {1000 * each:.2f} ms")
    assert each < 0.25
