"""`millrace` commands with the fake services of this folder, as processes, and what they leave behind."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil

from millrace_testing import processes


def environment(directory: Path, **more: str) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("MILLRACE_")}
    return {
        **clean,
        "FAKE_FLAG": str(directory / "created"),
        "FAKE_TEST": str(directory),  # finds every process of this test, whatever its parent is
        **more,
    }


def leftovers(directory: Path) -> list[psutil.Process]:
    """Return the processes of this test that are still there, found by their environment or, for Redis, by where
    they work.
    """
    return processes.bearing("FAKE_TEST", str(directory), works_in=directory)


def start(project: Path, *arguments: str, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "millrace_testing.local.fake_cli", *arguments],
        cwd=project,
        env=environment(project, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], timeout: float = 90) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def run(project: Path, *arguments: str, **more: str) -> tuple[int, str, str]:
    return finish(start(project, *arguments, **more))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
