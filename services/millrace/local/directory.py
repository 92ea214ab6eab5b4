"""A stack's directory, which one stack has at a time, and its ports.

The lock is the kernel's, on an open file that all processes of the stack share: the supervisor, its reaper, every
service, and Redis (`Supervisor.lock`). So while a stack has the lock no other process writes to the append-only
file, store and spool. The processes of a killed stack end by themselves within seconds (its reaper ends them, or each
service itself); a new stack waits for that, and then kills those that are left, such as a process that is stopped by a
signal.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import os
import random
import secrets
import signal
import struct
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

import psutil

from millrace.errors import InvalidStateError, UnavailableError
from millrace.processes import reaper, table
from millrace.rpc.reach import bound_socket
from millrace.telemetry import waits

LEAVING_S = reaper.TERM_GRACE_S + table.KILL_WAIT_S + 4.0
"""Seconds that the processes of a killed stack may take to end by themselves."""
KILL_WAIT_S = 5.0
"""Seconds that they may take to end after a SIGKILL."""
BEGIN_S = 2.0
"""Seconds that a stack that has just got the lock may take to write its identity."""
_POLL_S = 0.1


# The id of a stack, in the environment of every process of it: its supervisor and its directory.
#
# It is in the environment of foreign code as well, so it names the directory by a digest only.


@dataclass(frozen=True, slots=True, kw_only=True)
class StackId:
    """The id of a stack; as text `{pid}-{start ticks}-{digest of the directory}-{random}`."""

    supervisor: int
    """Process id."""
    start_ticks: int
    """When the supervisor started: another process may get its number later."""
    place: str
    """Digest of the directory's absolute path."""
    random: str

    @classmethod
    def new(cls, directory: Path) -> Self:
        """Make a new id for a stack in `directory` that this process supervises."""
        ticks = table.start_ticks(os.getpid())
        return cls(supervisor=os.getpid(), start_ticks=ticks, place=place_of(directory), random=secrets.token_hex(8))

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse the text of a stack's id; return None if the text is not such an id."""
        match text.split("-"):
            case [pid, ticks, place, random] if pid.isdecimal() and ticks.isdecimal():
                return cls(supervisor=int(pid), start_ticks=int(ticks), place=place, random=random)
        return None

    def __str__(self) -> str:
        return f"{self.supervisor}-{self.start_ticks}-{self.place}-{self.random}"

    @property
    def is_supervised(self) -> bool:
        """Return whether the process that supervises the stack still runs."""
        return table.is_running(self.supervisor) and table.start_ticks(self.supervisor) == self.start_ticks


def place_of(directory: Path) -> str:
    """Return the digest of a directory's resolved path that ids of its stacks contain."""
    return hashlib.sha256(os.fsencode(directory.resolve())).hexdigest()[:16]


async def hold_directory(directory: Path, stack: StackId, *, note: Callable[[str], None]) -> IO[str]:
    """Lock the directory for a stack of this process, end the processes that a killed stack left, and return the locked
    file.

    The lock lasts until the file is closed in every process that has it open. `note` gets messages on the processes
    that are waited for or ended. Raises InvalidStateError (STACK_RUNNING) if another stack runs there.
    """
    # Not truncated: until the lock is ours, its text is the id of the stack that has it.
    file = (directory / ".lock").open("a+")
    try:
        await _take(file, directory, note)
        # At once: a stack that still waits for the one before would otherwise take this one for its rest, and end it.
        file.truncate(0)
        file.write(str(stack))
        file.flush()
        await _sweep(directory, note)
    except BaseException:  # the lock goes with the file, then raises
        file.close()
        raise
    return file


async def _take(file: IO[str], directory: Path, note: Callable[[str], None]) -> None:
    """Lock the file once no process of a killed stack has it locked; kill those that do not end by themselves.

    `note` gets messages on them. Raises InvalidStateError if another stack runs there, or they cannot be ended.
    """
    began, is_noted, is_killed = time.monotonic(), False, False
    deadline_s = LEAVING_S + KILL_WAIT_S
    with waits.waiting("the processes of the stack before to end", waits_on="operator", deadline_s=deadline_s):
        while not _try(file):
            age_s = time.monotonic() - began
            before = StackId.parse(_read(file))
            # The other stack has just got the lock, and has not written its id yet.
            if before is None and age_s < BEGIN_S:
                await asyncio.sleep(_POLL_S)
                continue
            # In a thread: it reads files of every process of the machine.
            left = await asyncio.to_thread(holders, file)
            if StackId.parse(_read(file)) != before:
                continue  # another stack has got the lock meanwhile: these are its own
            if before is None or before.is_supervised or age_s > deadline_s or (is_killed and not left):
                raise _taken(directory, before, left)
            if not is_noted:
                note(f"waiting for what the killed stack (pid {before.supervisor}) has left behind: {_named(left)}")
                is_noted = True
            if age_s > LEAVING_S and not is_killed:
                note(f"ending what the killed stack (pid {before.supervisor}) has left behind: {_named(left)}")
                table.send(left, signal.SIGKILL)
                is_killed = True
            await asyncio.sleep(_POLL_S)


async def _sweep(directory: Path, note: Callable[[str], None]) -> None:
    """Kill processes that carry the id of a stack of this directory but do not hold its lock, such as environments'
    workers.

    `note` gets a message on them. Raises InvalidStateError if one belongs to a stack that runs, or cannot be ended.
    """
    ends = time.monotonic() + KILL_WAIT_S
    is_noted = False
    with waits.waiting("leftovers of the stack before to end", waits_on="operator", deadline_s=KILL_WAIT_S):
        while left := await asyncio.to_thread(_marked, directory):
            alive = next((stack for stack in left.values() if stack.is_supervised), None)
            if alive is not None or time.monotonic() > ends:
                raise _taken(directory, alive, set(left))
            if not is_noted:
                note(f"ending what a killed stack has left behind: {_named(set(left))}")
                is_noted = True
            table.send(set(left), signal.SIGKILL)
            await asyncio.sleep(_POLL_S)


def _try(file: IO[str]) -> bool:
    """Lock the file and return True; return False if another process has it locked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(file: IO[str]) -> str:
    """Return the whole text of the file, without blanks at its ends."""
    file.seek(0)
    return file.read().strip()


def holders(file: IO[str]) -> set[int]:
    """Return the ids of the other processes that hold the lock of the file; processes that only have it open do not
    count.

    Processes of other users cannot be seen, and are missing.
    """
    file_stat = os.fstat(file.fileno())
    found: set[int] = set()
    for entry in Path("/proc").glob("[0-9]*"):
        if int(entry.name) != os.getpid() and _holds(entry, file_stat):
            found.add(int(entry.name))
    return found


def _holds(process: Path, wanted: os.stat_result) -> bool:
    """Return whether a process, by its directory in /proc, holds a lock of the file with this device and inode."""
    try:
        for descriptor in (process / "fd").iterdir():
            try:
                it = descriptor.stat()
                if (it.st_dev, it.st_ino) != (wanted.st_dev, wanted.st_ino):
                    continue
                # fdinfo lists the locks of an open file: a stack that only waits has the file open, and no lock.
                if "FLOCK" in (process / "fdinfo" / descriptor.name).read_text():
                    return True
            except OSError:  # a socket, or closed meanwhile
                continue
    except OSError:  # it has ended, or is another user's
        return False
    return False


def _marked(directory: Path) -> dict[int, StackId]:
    """Return the running processes whose environment has the id of a stack of this directory, with the id."""
    place, found = place_of(directory), {}
    for pid in psutil.pids():
        stack = StackId.parse(table.mark_of(pid, table.STACK_MARK))
        if stack is not None and stack.place == place and pid != os.getpid() and table.is_running(pid):
            found[pid] = stack
    return found


def _taken(directory: Path, stack: StackId | None, left: set[int]) -> InvalidStateError:
    """Return the error that the directory is in use: by a stack that runs, or by the processes `left` of another
    one.
    """
    if stack is not None and stack.is_supervised:
        return InvalidStateError(
            f"another stack (pid {stack.supervisor}) runs in {directory}",
            reason="STACK_RUNNING",
            remedy="end it with Ctrl-C, or choose another directory (for `millrace sft`: another run.name)",
        )
    return InvalidStateError(
        f"{directory} is in use by what another stack has left behind: {_named(left)}",
        reason="STACK_RUNNING",
        remedy="end these processes, or choose another directory",
    )


def _named(pids: set[int]) -> str:
    """Return the processes in words: `pid 4711 (valkey-server), …`."""
    if not pids:
        return "processes that cannot be seen from here (of another user, container or machine)"
    return ", ".join(f"pid {pid} ({_command(pid)})" for pid in sorted(pids))


def _command(pid: int) -> str:
    """Return the name of a process's module or program."""
    try:
        words = psutil.Process(pid).cmdline()
    except psutil.Error:
        words = []
    module = words[2] if words[1:2] == ["-m"] and len(words) > 2 else "".join(words[:1])
    return Path(module).name or "ended meanwhile"


# Ports of the one-machine stack: free ones where none is configured, a clear error for those that are taken.

# Below the range that Linux takes outgoing connections from (32768 on): services bind ten seconds after the choice.
_RANGE = (20000, 32000)
_TRIES = 200
_HELD_S = 180.0  # as long as a service may take until it has bound the port that was given out for it
_TIME = struct.Struct("<d")
_LOCK_S, _LOCK_AGAIN_S = 1.0, 0.01


def is_free(host: str, port: int) -> bool:
    """Return whether a server could listen on this host and port now."""
    try:
        bound_socket(host, port).close()
    except OSError:
        return False
    return True


def free_ports(count: int, *, host: str = "127.0.0.1", but: Collection[int] = ()) -> list[int]:
    """Return `count` distinct ports that are free now and were not given out to a process of this user a short time
    ago.

    Ports in `but` are not returned. A foreign program may still take one before it is bound. Raises UnavailableError if
    not enough are found.
    """
    chosen: list[int] = []
    with _given_out() as times:
        for _ in range(_TRIES):
            port = random.randrange(*_RANGE)
            # In this order: to bind a socket costs most.
            if port not in chosen and port not in but and not _is_held(times, port) and is_free(host, port):
                chosen.append(port)
                if len(chosen) == count:
                    _hold(times, chosen)
                    return chosen
    raise UnavailableError(
        f"found no {count} free ports on {host} between {_RANGE[0]} and {_RANGE[1]} in {_TRIES} tries",
        reason="NO_FREE_PORT",
        remedy="end other servers on this machine",
    )


@contextlib.contextmanager
def _given_out() -> Iterator[int | None]:
    """Yield the descriptor of the locked file with the time at which each port was given out; None if it cannot be had.

    Two stacks that start at once choose a dozen ports each, seconds before they bind them.
    """
    path = Path(tempfile.gettempdir()) / f"millrace-ports-{os.getuid()}"
    try:
        # O_NOFOLLOW, because everybody may write to this directory: a link of another user is refused.
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:  # a read-only machine, or another user's file: chance alone keeps stacks apart
        yield None
        return
    try:
        yield file if _is_locked(file) else None
    finally:
        os.close(file)


def _is_locked(file: int) -> bool:
    """Lock the file and return True; return False if another process has it locked for longer than `_LOCK_S`."""
    ends = time.monotonic() + _LOCK_S
    # unregistered wait: a second at most, before anything is started
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= ends:
                return False
            time.sleep(_LOCK_AGAIN_S)
        else:
            return True


def _is_held(times: int | None, port: int) -> bool:
    """Return whether a port was given out within the last `_HELD_S`; `times` is the file of `_given_out`."""
    if times is None:
        return False
    found = os.pread(times, _TIME.size, (port - _RANGE[0]) * _TIME.size)
    # A time that has not come yet was written before the clock was set back: such a port counts as free.
    return len(found) == _TIME.size and 0 <= time.time() - _TIME.unpack(found)[0] < _HELD_S


def _hold(times: int | None, ports: list[int]) -> None:
    """Record in the file `times` that these ports are given out now; nothing without the file."""
    if times is not None:
        with contextlib.suppress(OSError):  # a full disk
            for port in ports:
                os.pwrite(times, _TIME.pack(time.time()), (port - _RANGE[0]) * _TIME.size)


def free_port(host: str = "127.0.0.1") -> int:
    """Return one port on `host` that is free now; UnavailableError if none is found."""
    return free_ports(1, host=host)[0]


def require_free(host: str, port: int, *, purpose: str, option: str) -> None:
    """Raise UnavailableError if a server could not listen on this host and port now.

    The error names the port's `purpose`, and the `option` of the command that changes the port.
    """
    if is_free(host, port):
        return
    raise UnavailableError(
        f"port {port} on {host} is in use; it is needed for {purpose}",
        reason="PORT_IN_USE",
        remedy=f"end the program that listens there, or choose another port with {option}",
        metadata={"host": host, "port": str(port)},
    )
