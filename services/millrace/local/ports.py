"""Ports of the one-machine stack: free ones for what nobody configured, a clear error for those that are taken."""

import contextlib
import fcntl
import os
import random
import struct
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from millrace.errors import UnavailableError
from millrace.rpc.reach import bound_socket

# Below the range that Linux takes outgoing connections from (32768 on): services bind ten seconds after the choice.
_RANGE = (20000, 32000)
_TRIES = 200
_HELD_S = 180.0  # as long as a service may take until it has bound the port that was given out for it
_TIME = struct.Struct("<d")
_LOCK_S, _LOCK_AGAIN_S = 1.0, 0.01


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    try:
        bound_socket(host, port).close()
    except OSError:
        return False
    return True


def free_ports(count: int, *, host: str = "127.0.0.1", but: Collection[int] = ()) -> list[int]:
    """Distinct ports that are free now, and that no other process of this user was given a short time ago.

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
    """The locked file with the time at which each port of the range was given out; None if there can be none.

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
    """One port that was free a moment ago."""
    return free_ports(1, host=host)[0]


def require_free(host: str, port: int, *, purpose: str, option: str) -> None:
    """UnavailableError naming the port, what it is for and the option that changes it, if it is taken."""
    if is_free(host, port):
        return
    raise UnavailableError(
        f"port {port} on {host} is in use; it is needed for {purpose}",
        reason="PORT_IN_USE",
        remedy=f"end the program that listens there, or choose another port with {option}",
        metadata={"host": host, "port": str(port)},
    )
