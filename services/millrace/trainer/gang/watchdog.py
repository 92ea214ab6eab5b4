"""Ends a rank whose peer has died, even where it is blocked in C and hears no signal.

A collective of NCCL does not see that a peer was killed: it spins, and Python runs no signal handler meanwhile. So each
rank says in the gang's store which process it is, and a thread of each looks whether the others on its machine live.
When one is gone that has not left in order, this rank has `GRACE_S` to fail by itself; then its communicators are
aborted, which makes the collective raise; where that does not help, the process ends. What started the gang starts
it anew. That a rank of another machine is gone is for torchrun's agents to see, which end all ranks.

A rank that is stopped (SIGSTOP) lives; the roll call names it. While the store does not answer nobody is taken for
dead: where a rank hosts it, and not torchrun, what started the ranks sees the death of that one.
"""

import contextlib
import json
import logging
import os
import socket
import threading
from collections.abc import Callable
from datetime import timedelta

import psutil
import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import Store

from millrace.decoding import decode_object
from millrace.errors import CorruptObjectError
from millrace.processes.table import start_ticks

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
GRACE_S = 10.0
"""How long a rank may take to fail by itself, and tell why, once a peer is dead."""
ABORT_S = 5.0
"""How long it may take from the abort of its communicators to its end."""
EXIT_CODE = 1
_STORE_S = 10.0
_MAX_BYTES = 1000
_Process = tuple[int, int]
"""Its id, and when it began in ticks since boot: jumps of the clock do not change it."""


def abort_communicators() -> None:
    """Make every collective of NCCL that is under way raise; gloo's see a dead peer themselves."""
    if dist.is_initialized() and torch.cuda.is_available():
        dist.distributed_c10d._abort_process_group()  # documented nowhere, and what torch's own restarts use


class PeerWatch:
    """Watches the ranks on this rank's machine. One per process of a gang."""

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        abort: Callable[[], None] = abort_communicators,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        """`store` is this object's own. `abort` and `end` are the last two means, in this order."""
        store.set_timeout(timedelta(seconds=_STORE_S))
        self._store = store
        self._rank = rank
        self._unknown = set(range(world_size)) - {rank}
        self._here: dict[int, _Process] = {}
        self._abort = abort
        self._end = end
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peer-watch", daemon=True)

    def start(self) -> None:
        """Say which process this rank is, and begin to watch, in a thread."""
        own = {"pid": os.getpid(), "began": start_ticks(os.getpid()), "host": _machine()}
        self._store.set(_key(self._rank), json.dumps(own))
        self._thread.start()

    def leave(self) -> None:
        """This rank ends in order, and watches nobody from now on."""
        if not self._left.is_set():
            self._left.set()
            with contextlib.suppress(dist.DistError):  # the store ends with the rank that made it
                self._store.set(_key(self._rank) + "/left", "1")

    def _run(self) -> None:
        while not self._left.wait(PERIOD_S):
            try:
                self._learn()
                dead = next((rank for rank, process in self._here.items() if self._is_dead(rank, process)), None)
            except dist.DistError:  # the roll call tells of it
                continue
            if dead is not None:
                self._fail(dead)
                return

    def _learn(self) -> None:
        """Who is on this machine, as far as they have said so."""
        for rank in sorted(self._unknown):
            if not self._store.check([_key(rank)]):
                continue
            self._unknown.discard(rank)
            with contextlib.suppress(CorruptObjectError, KeyError, TypeError, ValueError):
                data = self._store.get(_key(rank))
                said = decode_object(data, what="a rank", reason="SIGN_DAMAGED", max_bytes=_MAX_BYTES)
                if said["host"] == _machine():
                    self._here[rank] = (int(said["pid"]), int(said["began"]))

    def _is_dead(self, rank: int, process: _Process) -> bool:
        """Whether a rank is gone, and did not say that it goes."""
        pid, began = process
        try:
            started = start_ticks(pid)  # 0 where it cannot be read, which says nothing of the process
            is_same = psutil.pid_exists(pid) if started == 0 else started == began
            is_alive = is_same and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            is_alive = False
        return not is_alive and not self._store.check([_key(rank) + "/left"])

    def _fail(self, dead: int) -> None:
        pid = self._here[dead][0]
        if self._left.wait(GRACE_S):
            return
        logger.error("a rank of the gang is dead and this one is stuck: it ends", extra={"dead": dead, "pid": pid})
        # A thread of its own: an abort that hangs must not keep the process alive.
        threading.Thread(target=self._abort, name="abort of the communicators", daemon=True).start()
        if not self._left.wait(ABORT_S):
            self._end(EXIT_CODE)


def _key(rank: int) -> str:
    return f"process/{rank}"


def _machine() -> str:
    """What ranks that see each other's processes have in common: host and namespace of process ids."""
    return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid') if os.path.exists('/proc/self/ns/pid') else ''}"
