"""Gangs on this machine: ranks that torchrun starts and that run to their end."""

import os
import subprocess
import sys
from typing import Any

from millrace.local.redis import free_port


def torchrun(module: str, *arguments: str, world_size: int = 2, timeout_s: float = 500, **variables: str) -> None:
    """Run a module at so many ranks, with these environment variables; one rank runs without torchrun.

    AssertionError with what was written to standard error if a rank fails.
    """
    command = ["-m", module, *arguments]
    if world_size > 1:  # --standalone needs a name of this machine that resolves
        gang = ["-m", "torch.distributed.run", f"--nproc-per-node={world_size}", "--master-addr=127.0.0.1"]
        command = [*gang, f"--master-port={free_port()}", *command]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables}
    ended = subprocess.run([sys.executable, *command], env=environ, capture_output=True, text=True, timeout=timeout_s)
    assert ended.returncode == 0, ended.stderr[-4000:]


def train_gang(recorder: Any, *, stop_at: str = "") -> None:
    """Train the recorded run with two ranks, to its end or until the step `stop_at`."""
    store = recorder.store_url.removeprefix("file://")
    arguments = [recorder.redis_url, store, recorder.prefix, recorder.uid, stop_at]
    torchrun("millrace_testing.trainer.gang_rank", *arguments)
