"""The trainer of a stack as a gang of four on this machine's CPUs; one on GPUs is started in the same way.

`LocalStack(modules={…, "trainer": "millrace_testing.trainer.four_ranks"})` runs it.
"""

import os
import sys

from millrace.local.directory import free_port

RANKS = 4


def main() -> None:
    """Become torchrun."""
    where = ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    gang = ["-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", *where, "-m", "millrace.trainer.main"]
    os.execv(sys.executable, [sys.executable, *gang])


if __name__ == "__main__":
    main()
