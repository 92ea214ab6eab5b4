"""A stack's directory, which is one stack's at a time, and its ports.

The lock is one of the kernel's on an open file that everything of the stack shares: the supervisor, its reaper, every
service, and Redis (`Supervisor.kept_open`). So the holder of the lock knows that nobody writes to the same append-only
file, store and spool any more. What a killed stack has left behind ends by itself within seconds (its reaper sees to
it, or each service for itself); a new stack waits for that, and then ends what is still there, such as a process that
is stopped by a signal.
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
"""How long what a killed stack has left behind may take to end by itself."""
KILL_WAIT_S = 5.0
"""How long it may take to end after a SIGKILL."""
BEGIN_S = 2.0
"""How long a stack that has just got the lock may take to write its identity."""
_POLL_S = 0.1


# The id of a stack, which every process of it bears: who supervises it, and whose directory it works in.
#
# It is in the environment of foreign code as well, so it names the directory by a digest only.


@dataclass(frozen=True, slots=True, kw_only=True)
class StackId:
    """As text: `{pid}-{start ticks}-{digest of the directory}-{random}`."""

    supervisor: int
    """Process id."""
    start_ticks: int
    """When the supervisor started: another process may get its number later."""
    place: str
    """Digest of the directory's absolute path."""
    random: str

    @classmethod
    def new(cls, directory: Path) -> Self:
        """Return the id of a stack that this process supervises."""
        ticks = table.start_ticks(os.getpid())
        return cls(supervisor=os.getpid(), start_ticks=ticks, place=place_of(directory), random=secrets.token_hex(8))

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return none for what is no such id."""
        match text.split("-"):
            case [pid, ticks, place, random] if pid.isdecimal() and ticks.isdecimal():
                return cls(supervisor=int(pid), start_ticks=int(ticks), place=place, random=random)
        return None

    def __str__(self) -> str:
        return f"{self.supervisor}-{self.start_ticks}-{self.place}-{self.random}"

    @property
    def is_supervised(self) -> bool:
        """Return whether its supervisor lives."""
        return table.is_running(self.supervisor) and table.start_ticks(self.supervisor) == self.start_ticks


def place_of(directory: Path) -> str:
    """Return the identity of a directory, from its ids."""
    return hashlib.sha256(os.fsencode(directory.resolve())).hexdigest()[:16]


async def hold_directory(directory: Path, stack: StackId, *, note: Callable[[str], None]) -> IO[str]:
    """Lock the directory for a stack of this process; InvalidStateError (STACK_RUNNING) if another one lives there.

    `note` gets which process is waited for and which is ended.
    """
    file = (directory / ".lock").open("a+")
    try:
        await _take(file, directory, note)
        # At once: who still waits for the stack before would take this one for what that has left behind, and end it.
        file.truncate(0)
        file.write(str(stack))
        file.flush()
        await _sweep(directory, note)
    except BaseException:  # the lock goes with the file, then raises
        file.close()
        raise
    return file


async def _take(file: IO[str], directory: Path, note: Callable[[str], None]) -> None:
    """Lock the file, once nothing of a stack whose supervisor is dead holds it any more."""
    began, is_told, is_killed = time.monotonic(), False, False
    deadline_s = LEAVING_S + KILL_WAIT_S
    with waits.waiting("the processes of the stack before to end", waits_on="operator", deadline_s=deadline_s):
        while not _try(file):
            age_s = time.monotonic() - began
            before = StackId.parse(_read(file))
            if before is None and age_s < BEGIN_S:
                await asyncio.sleep(_POLL_S)
                continue
            left = await asyncio.to_thread(holders, file)
            if StackId.parse(_read(file)) != before:
                continue  # another stack has got the lock meanwhile: these are its own
            if before is None or before.is_supervised or age_s > deadline_s or (is_killed and not left):
                raise _taken(directory, before, left)
            if not is_told:
                note(f"waiting for what the killed stack (pid {before.supervisor}) has left behind: {_named(left)}")
                is_told = True
            if age_s > LEAVING_S and not is_killed:
                note(f"ending what the killed stack (pid {before.supervisor}) has left behind: {_named(left)}")
                table.send(left, signal.SIGKILL)
                is_killed = True
            await asyncio.sleep(_POLL_S)


async def _sweep(directory: Path, note: Callable[[str], None]) -> None:
    """End what bears the mark of a stack of this directory without holding its lock, such as environments' workers."""
    ends = time.monotonic() + KILL_WAIT_S
    is_told = False
    with waits.waiting("leftovers of the stack before to end", waits_on="operator", deadline_s=KILL_WAIT_S):
        while left := await asyncio.to_thread(_marked, directory):
            alive = next((stack for stack in left.values() if stack.is_supervised), None)
            if alive is not None or time.monotonic() > ends:
                raise _taken(directory, alive, set(left))
            if not is_told:
                note(f"ending what a killed stack has left behind: {_named(set(left))}")
                is_told = True
            table.send(set(left), signal.SIGKILL)
            await asyncio.sleep(_POLL_S)


def _try(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(file: IO[str]) -> str:
    file.seek(0)
    return file.read().strip()


def holders(file: IO[str]) -> set[int]:
    """Return the processes, of those that this one may look into, that hold the lock of the file (not only have it
    open).
    """
    wanted = os.fstat(file.fileno())
    found: set[int] = set()
    for entry in Path("/proc").glob("[0-9]*"):
        if int(entry.name) != os.getpid() and _holds(entry, wanted):
            found.add(int(entry.name))
    return found


def _holds(process: Path, wanted: os.stat_result) -> bool:
    try:
        for descriptor in (process / "fd").iterdir():
            try:
                it = descriptor.stat()
                if (it.st_dev, it.st_ino) != (wanted.st_dev, wanted.st_ino):
                    continue
                if "FLOCK" in (process / "fdinfo" / descriptor.name).read_text():
                    return True
            except OSError:  # a socket, or closed meanwhile
                continue
    except OSError:  # it has ended, or is another user's
        return False
    return False


def _marked(directory: Path) -> dict[int, StackId]:
    """Return the running processes whose environment names a stack of this directory."""
    place, found = place_of(directory), {}
    for pid in psutil.pids():
        stack = StackId.parse(table.mark_of(pid, table.STACK_MARK))
        if stack is not None and stack.place == place and pid != os.getpid() and table.is_running(pid):
            found[pid] = stack
    return found


def _taken(directory: Path, stack: StackId | None, left: set[int]) -> InvalidStateError:
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
    """Return the processes as `pid 4711 (valkey-server), …`."""
    if not pids:
        return "processes that cannot be seen from here (of another user, container or machine)"
    return ", ".join(f"pid {pid} ({_command(pid)})" for pid in sorted(pids))


def _command(pid: int) -> str:
    try:
        words = psutil.Process(pid).cmdline()
    except psutil.Error:
        words = []
    module = words[2] if words[1:2] == ["-m"] and len(words) > 2 else "".join(words[:1])
    return Path(module).name or "ended meanwhile"


# Ports of the one-machine stack: free ones for what nobody configured, a clear error for those that are taken.

# Below the range that Linux takes outgoing connections from (32768 on): services bind ten seconds after the choice.
_RANGE = (20000, 32000)
_TRIES = 200
_HELD_S = 180.0  # as long as a service may take until it has bound the port that was given out for it
_TIME = struct.Struct("<d")
_LOCK_S, _LOCK_AGAIN_S = 1.0, 0.01


def is_free(host: str, port: int) -> bool:
    """Return whether a server could listen there now."""
    try:
        bound_socket(host, port).close()
    except OSError:
        return False
    return True


def free_ports(count: int, *, host: str = "127.0.0.1", but: Collection[int] = ()) -> list[int]:
    """Return distinct ports that are free now, and that no other process of this user was given a short time ago.

    None of `but`: those are promised to somebody who has not bound them yet.
    A foreign program may still take one before it is bound: say so then.
    """
    chosen: list[int] = []
    with _given_out() as times:
        for _ in range(_TRIES):
            port = random.randrange(*_RANGE)
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
    """Provide the locked file with the time at which each port of the range was given out; None if there can be none.

    Two stacks that start at once choose a dozen ports each, seconds before they bind them.
    """
    path = Path(tempfile.gettempdir()) / f"millrace-ports-{os.getuid()}"
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:  # a read-only machine, or another user's file: chance alone keeps stacks apart
        yield None
        return
    try:
        yield file if _is_locked(file) else None
    finally:
        os.close(file)


def _is_locked(file: int) -> bool:
    """Take the lock, which is held for milliseconds; False where its holder stands still."""
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
    if times is None:
        return False
    found = os.pread(times, _TIME.size, (port - _RANGE[0]) * _TIME.size)
    return len(found) == _TIME.size and 0 <= time.time() - _TIME.unpack(found)[0] < _HELD_S


def _hold(times: int | None, ports: list[int]) -> None:
    if times is not None:
        with contextlib.suppress(OSError):  # a full disk
            for port in ports:
                os.pwrite(times, _TIME.pack(time.time()), (port - _RANGE[0]) * _TIME.size)


def free_port(host: str = "127.0.0.1") -> int:
    """Return one port that was free a moment ago."""
    return free_ports(1, host=host)[0]


def require_free(host: str, port: int, *, purpose: str, option: str) -> None:
    """Raise UnavailableError naming the port, its purpose and the option that changes it, if the port is taken."""
    if is_free(host, port):
        return
    raise UnavailableError(
        f"port {port} on {host} is in use; it is needed for {purpose}",
        reason="PORT_IN_USE",
        remedy=f"end the program that listens there, or choose another port with {option}",
        metadata={"host": host, "port": str(port)},
    )
