"""Ranks that are forked from one process: `python -m millrace_testing.trainer.forked_ranks MODULE COUNT PATH…`.

That process has imported the module, torch included, so it is paid for once; torchrun and each of its ranks import it
anew. A rank calls the module's `main` with the paths and has the variables that torchrun would give it.
"""

import importlib
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from millrace.local.redis import die_with_parent, free_port


def run_ranks(module: str, *paths: Path, count: int, timeout_s: float, **variables: str) -> None:
    """Run `main` of a module at so many ranks. AssertionError with what they wrote if one fails."""
    command = [sys.executable, "-m", __name__, module, str(count), *map(str, paths)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=timeout_s)
    assert ended.returncode == 0, ended.stderr[-4000:]


def main(module: str, count: int, paths: list[Path]) -> int:
    """Fork the ranks and wait for them; 1 if one failed, which ends the others."""
    work = importlib.import_module(module).main
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    own |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    ranks = {_fork(work, paths, {**own, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(count)}
    code = 0
    while ranks:
        pid, status = os.wait()
        ranks.remove(pid)
        if status:
            code = 1
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    return code


def _fork(work: Callable[..., None], paths: list[Path], variables: dict[str, str]) -> int:
    """Return the process id of a rank."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        die_with_parent()
        os.environ.update(variables)
        work(*paths)
        code = 0
    except BaseException:  # noqa: BLE001 - the edge of a process
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), [Path(path) for path in sys.argv[3:]]))
