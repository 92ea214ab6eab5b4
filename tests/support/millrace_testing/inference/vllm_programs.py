"""What tests and programs of theirs that vLLM's interpreter runs have in common: the orders, and how one is run."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from millrace.inference.launch_env import vllm_environ
from millrace.inference.vllm.ranks import write_order
from millrace.internal.v1.policy_pb2 import PolicyEntry
from millrace.policies.host_copy import HostCopy
from millrace.storage.local import LocalStore
from millrace_testing.inference import published
from millrace_testing.repository import REPOSITORY

PROGRAMS = REPOSITORY / "tests" / "support" / "millrace_testing" / "inference"
START_S = 900.0  # 15 s on a quiet machine


def orders(directory: Path, first: Any, second: Any) -> list[dict[str, Any]]:
    """Return what a replica tells its workers of version 0, whole, and of version 1, a delta; each from its own
    copy.
    """
    publisher = published.Publisher(LocalStore(directory / "store"), directory, "run1")
    return orders_of(directory, [publisher.full(first, 0), publisher.delta(second, 1, base=0)])


def orders_of(directory: Path, entries: Sequence[PolicyEntry]) -> list[dict[str, Any]]:
    """Return the orders of the versions of `entries`, each but the first a delta on the one before."""
    found: list[dict[str, Any]] = []
    for last in range(len(entries)):
        place = directory / f"orders-{last}"
        place.mkdir()
        copy = HostCopy(LocalStore(directory / "store"), directory=place)
        [*_, staged] = [copy.stage(entry.manifest_key, entry.manifest_sha256) for entry in entries[: last + 1]]
        assert (staged.changes is not None) == bool(last)
        found.append(write_order(staged, place))
    return found


def _vision() -> list[str]:
    """Return directories for PYTHONPATH: torchvision's if TORCHVISION_DIR is set, and one that makes it importable
    without a GPU.
    """
    found = os.environ.get("TORCHVISION_DIR")
    return [str(PROGRAMS / "torchvision_on_cpus"), found] if found else []


def run(python: str, program: str, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a program of `PROGRAMS` on one thread, without plugins, with our services importable."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MILLRACE_", "VLLM_"))}
    environ |= vllm_environ(environ) | {
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY / "services"), *_vision()]),
        "VLLM_PLUGINS": "",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [python, str(PROGRAMS / program), *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=START_S, check=False)
