"""One compose stack for all tests of the folder, where a Docker engine can be had."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from deployment import Deployment

from millrace.local.ports import free_ports


@pytest.fixture(scope="session")
def deployment() -> Iterator[Deployment]:
    """The stack, built and up; skipped with the reason where there is no engine."""
    engine = subprocess.run(["docker", "info"], capture_output=True, text=True) if _has_docker() else None
    if engine is None or engine.returncode:
        why = engine.stderr.strip() if engine else "there is no docker command"
        pytest.skip(f"no Docker engine ({why}); tests/compose/engine.sh gets one on Debian as root")
    (port,) = free_ports(1)
    stack = Deployment(project="millracetest", port=port)
    try:
        stack.build()
        stack.compose("--profile", "cli", "down", "--volumes", "--timeout", "5")  # what an aborted test run left
        print(f"\n{stack.up():.1f} s from up to healthy")
        yield stack
    finally:
        stack.close()


def _has_docker() -> bool:
    try:
        subprocess.run(["docker", "--version"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True
