"""A machine with NVIDIA GPUs, as far as anything asks before it computes: the driver's tool, and the wheel."""

from pathlib import Path

import pytest

TORCH = "2.13.0"
"""The version of a wheel for CUDA: one for CPUs ends with +cpu, and its trainer gets no GPU."""


def fake_gpus(
    monkeypatch: pytest.MonkeyPatch, directory: Path, count: int, *, torch_version: str = TORCH, mib: int = 81_920
) -> None:
    """Put an nvidia-smi that shows so many GPUs of that memory first on the PATH, beside that version of torch."""
    place = directory / "driver"
    place.mkdir()
    program = place / "nvidia-smi"
    ids = "; ".join(f"echo {index}, GPU-{index}" for index in range(count)) or "true"
    sizes = "; ".join(f"echo {index}, {mib}" for index in range(count)) or "true"
    program.write_text(f'#!/bin/sh\ncase "$1" in *memory.total*) {sizes};; *) {ids};; esac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(place), prepend=":")
    for name in ("CUDA_VISIBLE_DEVICES", "MILLRACE_TRAINER_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("millrace.local.gpus.version", lambda package: {"torch": torch_version}[package])
