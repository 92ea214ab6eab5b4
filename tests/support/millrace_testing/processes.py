"""The processes of a test, wherever their parents are: by a variable that the first was given, or where they work."""

import contextlib
from pathlib import Path

import psutil


def bearing(variable: str, value: str, *, works_in: Path | None = None) -> list[psutil.Process]:
    """Return all living processes that were started with this value of the variable, or work below the directory.

    The directory is for those that overwrite their environment, as Redis does.
    """
    mark = f"{variable}={value}".encode()
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # it ended meanwhile
            # psutil's environ() reads up to the first empty entry, and a process that sets its title begins with one.
            is_ours = mark in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            is_there = works_in is not None and Path(process.cwd()).is_relative_to(works_in)
            if (is_ours or is_there) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def env_workers_of(pid: int) -> list[int]:
    """Return process ids of the environment workers of an env-server: the copies of its template."""
    templates = [
        child for child in psutil.Process(pid).children() if "millrace.env_server.workers.starter" in child.cmdline()
    ]
    return [worker.pid for template in templates for worker in template.children()]
