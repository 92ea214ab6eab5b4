"""The peak of memory: a GPU's allocator knows it, and Linux that of a process."""

import resource
import sys
from pathlib import Path

import torch

_RESET, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


class PeakMemory:
    """Bytes at the peak since it was made: of the device's allocator, or resident of this process on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        elif _RESET.exists():
            _RESET.write_text("5")  # of all that the kernel counts, only the peak of the resident set

    @property
    def peak(self) -> int:
        """Bytes, so far."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        if _STATUS.exists():
            line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
            return int(line.split()[1]) * 1024
        factor = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * factor
