"""The images, once for all tests of the folder where a Docker engine can be had; a client outside the containers."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from deployment import ROOT, Deployment, run, started

from millrace.local.ports import free_ports


@pytest.fixture(scope="session")
def images() -> None:
    """All images of today's code; skipped with the reason where no engine or no base image can be had."""
    for command in (["docker", "info"], ["docker", "compose", "version"], ["docker", "buildx", "version"]):
        if problem := _problem(command):
            pytest.skip(f"no Docker engine: {problem}; tests/compose/engine.sh gets one on Debian as root")
    if problem := _problem(["bash", "tests/compose/base_images.sh"], timeout_s=1200):
        pytest.skip(f"no base image can be had: {problem}")
    builder = Deployment(project="millracetest", port=0)
    try:
        builder.build()
    finally:
        builder.forget()


@pytest.fixture(scope="module")
def deployment(images: None) -> Iterator[Deployment]:
    """The stack of docker-compose.yml, up and healthy."""
    with started(Deployment(project="millracetest", port=free_ports(1)[0])) as stack:
        yield stack


@pytest.fixture(scope="session")
def thin_client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin directory of a fresh environment with `millrace[client]` from a wheel, and nothing else."""
    place = tmp_path_factory.mktemp("client")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(place), str(ROOT)], timeout_s=600)
    (wheel,) = place.glob("millrace-*.whl")
    run([sys.executable, "-m", "venv", "--without-pip", str(place / "venv")])
    bin_ = place / "venv" / "bin"
    run([*pip, "--python", str(bin_ / "python"), "install", "--quiet", f"{wheel}[client]"], timeout_s=600)
    return bin_


def _problem(command: list[str], *, timeout_s: float = 60.0) -> str | None:
    """What is wrong with a command that does not end well; None if it does."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    said = (done.stderr or done.stdout).strip()
    return (said.splitlines() or [f"exit code {done.returncode}"])[-1] if done.returncode else None
