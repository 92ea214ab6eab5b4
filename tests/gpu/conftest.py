"""Tests of what only CUDA can do: collected everywhere, skipped with the reason where there is too little of it."""

import subprocess

import pytest
import torch

from millrace_testing.inference.registry import orchestrator

__all__ = ["cuda_vllm", "gpu", "orchestrator", "two_gpus"]


@pytest.fixture
def gpu() -> torch.device:
    """Return the first GPU."""
    if not torch.cuda.is_available():
        pytest.skip(f"no CUDA device (torch {torch.__version__})")
    return torch.device("cuda", 0)


@pytest.fixture
def two_gpus(gpu: torch.device) -> torch.device:
    """Return the first GPU, where there is a second one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device, and the test needs two")
    return gpu


@pytest.fixture
def cuda_vllm(gpu: torch.device, vllm_python: str) -> str:
    """Return an interpreter with vLLM for GPUs; `make setup-vllm` installs that for CPUs."""
    asked = [vllm_python, "-c", "import torch; print(torch.version.cuda or '')"]
    if not subprocess.run(asked, capture_output=True, text=True, timeout=120).stdout.strip():
        pytest.skip(f"{vllm_python} has vLLM for CPUs: name one with CUDA in MILLRACE_VLLM_PYTHON")
    return vllm_python
