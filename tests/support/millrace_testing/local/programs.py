"""Programs that a supervisor starts: obedient ones, stubborn ones, and ones that start others."""

import os
import sys
from pathlib import Path

from millrace.processes.supervisor import ProcessSpec, tail
from millrace_testing.polling import until

OBEDIENT = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)
# A grandchild in a session of its own that ignores SIGTERM: neither the group nor a polite request reaches it.
PARENT = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], start_new_session=True)
print("up", child.pid, flush=True)
time.sleep(600)
"""


def spec(name: str, code: str, directory: Path, **options) -> ProcessSpec:
    return ProcessSpec(
        name=name,
        argv=[sys.executable, "-c", code],
        env=dict(os.environ),
        log_path=directory / f"{name}.log",
        **options,
    )


async def until_up(directory: Path, *names: str) -> None:
    await until(lambda: all("up" in "".join(tail(directory / f"{name}.log")) for name in names), timeout_s=20)
