"""Memory, utilization and power of the GPUs that this process may use, from NVIDIA's driver; nothing without one.

They are read with the driver's own library (NVML, `libnvidia-ml.so.1`), which comes with every driver, so that no
package is needed and no CUDA context is made. https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html
"""

import ctypes
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

logger = logging.getLogger(__name__)

PERIOD_S = 2.0
OLD_S = 20.0
"""The age from which on a reading is not returned: a driver that hangs must not look idle."""
MAX_GPUS = 64
_LIBRARY = "libnvidia-ml.so.1"
_OK = 0
_TEXT_BYTES = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """One GPU. A value that the driver does not report is None."""

    index: int
    uuid: str
    name: str
    memory_used: int | None = None
    """Bytes, of all processes."""
    memory_total: int | None = None
    """Bytes."""
    utilization: float | None = None
    """Share of the last moments in which a kernel ran, 0 to 1."""
    power_watts: float | None = None


class GpuReader(Protocol):
    """Reads GPUs; a second implementation replaces the driver in tests."""

    def read(self) -> Sequence[GpuUse]:
        """Return the present use of the GPUs that this process may use. May block as long as the driver does."""
        ...


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class Nvml:
    """The driver's library. Each of its functions returns 0, or a code if it cannot answer."""

    def __init__(self, library: Any, environ: Mapping[str, str]) -> None:
        """Take the driver's library, which is initialised, and choose the GPUs that CUDA_VISIBLE_DEVICES in
        `environ` allows.
        """
        self._library = library
        self._handles = self._allowed(environ.get("CUDA_VISIBLE_DEVICES"))

    @classmethod
    def open(cls, environ: Mapping[str, str]) -> "Nvml | None":
        """Load and initialise the library of this machine's GPU driver.

        Return None without a driver, or if that fails.
        """
        try:
            library = ctypes.CDLL(_LIBRARY)
        except OSError:
            return None
        code = library.nvmlInit_v2()
        if code != _OK:
            logger.info("the GPU driver does not answer", extra={"code": code})
            return None
        return cls(library, environ)

    def read(self) -> list[GpuUse]:
        """Return the present use of the GPUs that CUDA_VISIBLE_DEVICES lets this process use."""
        return [self._use(index, handle) for index, handle in self._handles]

    def _allowed(self, visible: str | None) -> list[tuple[int, ctypes.c_void_p]]:
        """Return the number and handle of each visible GPU, in order.

        `visible` is the value of CUDA_VISIBLE_DEVICES; None is all. As for CUDA, a name that is no GPU ends the list.
        """
        count = ctypes.c_uint()
        if self._library.nvmlDeviceGetCount_v2(ctypes.pointer(count)) != _OK:
            return []
        every: list[tuple[int, ctypes.c_void_p]] = []
        for index in range(min(count.value, MAX_GPUS)):
            handle = ctypes.c_void_p()
            if self._library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.pointer(handle)) == _OK:
                every.append((index, handle))
        if visible is None:
            return every
        found: list[tuple[int, ctypes.c_void_p]] = []
        for name in (part.strip() for part in visible.split(",")):
            match = next((each for each in every if self._is(each, name)), None)
            # As CUDA does: names after one that does not exist are not looked at.
            if match is None:
                break
            found.append(match)
        return found

    def _is(self, device: tuple[int, ctypes.c_void_p], name: str) -> bool:
        """Return whether a name in CUDA_VISIBLE_DEVICES is this device's: its number, or the beginning of its UUID."""
        if name.isdecimal():
            return device[0] == int(name)
        return name.startswith("GPU-") and self._text("nvmlDeviceGetUUID", device[1]).startswith(name)

    def _use(self, index: int, handle: ctypes.c_void_p) -> GpuUse:
        """Return the present use of the GPU with this number and handle; what the driver does not report is None."""
        memory, busy, power = _Memory(), _Utilization(), ctypes.c_uint()
        has_memory = self._library.nvmlDeviceGetMemoryInfo(handle, ctypes.pointer(memory)) == _OK
        is_busy_known = self._library.nvmlDeviceGetUtilizationRates(handle, ctypes.pointer(busy)) == _OK
        has_power = self._library.nvmlDeviceGetPowerUsage(handle, ctypes.pointer(power)) == _OK
        return GpuUse(
            index=index,
            uuid=self._text("nvmlDeviceGetUUID", handle),
            name=self._text("nvmlDeviceGetName", handle),
            memory_used=memory.used if has_memory else None,
            memory_total=memory.total if has_memory else None,
            utilization=busy.gpu / 100 if is_busy_known else None,
            power_watts=power.value / 1000 if has_power else None,
        )

    def _text(self, function: str, handle: ctypes.c_void_p) -> str:
        """Return the text that a function of the library gives for a GPU; "" if it does not answer."""
        buffer = ctypes.create_string_buffer(_TEXT_BYTES)
        code = getattr(self._library, function)(handle, buffer, ctypes.c_uint(_TEXT_BYTES))
        return buffer.value.decode(errors="replace") if code == _OK else ""


class GpuWatch:
    """Has the newest reading. A thread reads, because a driver may block for as long as a GPU is lost."""

    def __init__(self, reader: GpuReader | None = None, *, period_s: float = PERIOD_S) -> None:
        """Make a watch that reads every `period_s` seconds once it is started; without a reader it reads the driver."""
        self._reader = reader
        self._period_s = period_s
        self._latest: tuple[float, tuple[GpuUse, ...]] = (0.0, ())
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread that reads; a second call does nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="gpu-watch", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Have the thread stop; do not wait for a driver that blocks."""
        self._stopping.set()

    def latest(self) -> tuple[GpuUse, ...]:
        """Return the newest reading of each GPU; empty if there is none or it is older than `OLD_S`. Never blocks."""
        read_at, found = self._latest
        return found if time.monotonic() - read_at <= OLD_S else ()

    def _watch(self) -> None:
        """Read the GPUs again and again until stopped; end without a driver, and with a warning if it misbehaves."""
        try:
            reader = self._reader or Nvml.open(os.environ)
            while reader is not None and not self._stopping.is_set():
                # One tuple is assigned, so that a reader in another thread gets a time and the values that belong to
                # it.
                self._latest = (time.monotonic(), tuple(reader.read()))
                self._stopping.wait(self._period_s)
        except Exception:  # the edge of a thread: a driver that misbehaves costs a column of the dashboard, no work
            logger.warning("the use of GPUs cannot be read", exc_info=True)
