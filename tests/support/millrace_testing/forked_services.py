"""Services that are forked from a process which has imported what they need, as a stack forks its own.

    python -m millrace_testing.forked_services MODULE

Importing torch and transformers takes longer than what a test does with a service that it kills and starts again.
"""

import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

from millrace.local.stack import NEEDS
from millrace.processes.fork_server import become
from millrace.telemetry import faults


class ForkedService:
    """A service's process, with the part of `subprocess.Popen` that tests use."""

    def __init__(self, host: "ServiceHost", pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._host = host
        self._descriptor = os.pidfd_open(pid)  # the host reaps it when it is asked for the code
        self._reaping = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit code if the process has ended."""
        return self._look(0)

    def wait(self, timeout: float) -> int:
        """Wait for the exit code; raise TimeoutExpired after that many seconds."""
        if (code := self._look(timeout)) is None:
            raise subprocess.TimeoutExpired(self._host.module, timeout)
        return code

    def kill(self) -> None:
        """Kill the process unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _look(self, timeout_s: float) -> int | None:
        if self.returncode is None and select.select([self._descriptor], [], [], timeout_s)[0]:
            with self._reaping:  # another thread may wait for it as well
                if self.returncode is None:
                    self.returncode = self._host.ask({"ended": self.pid})
        return self.returncode

    def __del__(self) -> None:
        os.close(self._descriptor)


class ServiceHost:
    """The process that forks, started with the first service."""

    def __init__(self, module: str) -> None:
        """Take `module`, one of `local.preloads.NEEDS`."""
        self.module = module
        self._process: subprocess.Popen[str] | None = None
        self._asking = threading.Lock()

    def start(self, environ: dict[str, str], log: Path) -> ForkedService:
        """Return a service with these variables, whose output is added to a file."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, self.module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
        return ForkedService(self, self.ask({"environ": environ, "log": str(log)}))

    def ask(self, question: dict[str, Any]) -> int:
        """Return what the process answers."""
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        with self._asking:
            print(json.dumps(question), file=self._process.stdin, flush=True)
            return int(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.communicate(timeout=60)


def main(module: str) -> None:
    """Fork, and tell of ends, as the lines of standard input ask, until it ends."""
    for need in NEEDS[module]:
        importlib.import_module(need)
    gc.freeze()
    for line in sys.stdin:
        asked = json.loads(line)
        if "ended" in asked:
            answer = os.waitstatus_to_exitcode(os.waitpid(asked["ended"], 0)[1])
        else:
            answer = os.fork() or _become(module, asked["environ"], Path(asked["log"]))
        print(answer, flush=True)


def _become(module: str, environ: dict[str, str], log: Path) -> NoReturn:
    with log.open("ab") as output, Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    faults.DIRECTORY = environ.get(faults.VARIABLE)  # it was read at the import
    become({"env": environ, "argv": [sys.executable, "-m", module], "module": module, "marks": []})


if __name__ == "__main__":
    main(sys.argv[1])
