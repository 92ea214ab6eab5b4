"""Gangs on this machine that torchrun starts and that run to their end."""

import os
import subprocess
import sys
from typing import Any

from millrace.local.redis import free_port


def train_gang(recorder: Any, *, stop_at: str = "", **environ: str) -> None:
    """Train the recorded run with two ranks, to its end or until the step `stop_at`; `environ` is added to ours.

    AssertionError with what was written to standard error if a rank fails.
    """
    # --standalone needs a name of this machine that resolves
    gang = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1"]
    gang += [f"--master-port={free_port()}", "-m", "millrace_testing.trainer.gang_rank"]
    store = recorder.store_url.removeprefix("file://")
    command = [sys.executable, *gang, recorder.redis_url, store, recorder.prefix, recorder.uid, stop_at]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environ}
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr[-4000:]
