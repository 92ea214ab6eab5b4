"""CPU seconds of a command and of everything that it has started, by process of Millrace."""

from collections import defaultdict
from collections.abc import Mapping

import psutil

NAMES = {
    "millrace.processes.fork_server": "fork server: imports of the four services",
    "millrace.env_server.workers.starter": "template of env workers: imports of verifiers",
    "millrace.env_server.workers.env_worker": "env worker",
    "millrace.processes.reaper": "reaper",
    "millrace.readers.dashboard.reader": "dashboard",
    "millrace.orchestrator.main": "orchestrator",
    "millrace.env_server.main": "env-server",
    "millrace.inference.main": "engine",
    "millrace.trainer.main": "trainer",
    "valkey-server": "Redis",
    "millrace.cli": "command",
}


def name_of(words: str) -> str:
    """What a process is, by its command line."""
    return next((name for word, name in NAMES.items() if word in words), "others")


def difference(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """What was used between two looks."""
    return {name: seconds - before.get(name, 0.0) for name, seconds in now.items()}


def cpu_by_process(root: int) -> dict[str, float]:
    """CPU seconds, user and system, of a process and of everything below it, with what it has waited for."""
    used: defaultdict[str, float] = defaultdict(float)
    top = psutil.Process(root)
    for process in [top, *top.children(recursive=True)]:
        try:
            words, times = " ".join(process.cmdline()), process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        used[name_of(words)] += times.user + times.system + times.children_user + times.children_system
    return dict(used)
