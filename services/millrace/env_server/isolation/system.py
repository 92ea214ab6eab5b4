"""Calls of the C library, with errors that say what was tried."""

import contextlib
import ctypes
import os
import platform
import struct
from collections.abc import Collection, Iterable, Iterator
from typing import Any


def libc(function: str, *args: Any) -> int:
    """Call it. Raises OSError if it returns something negative."""
    result = getattr(ctypes.CDLL(None, use_errno=True), function)(*args)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(result)


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process. Raises OSError."""
    libc("prctl", option, ctypes.c_ulong(value), 0, 0, 0)


@contextlib.contextmanager
def named(step: str) -> Iterator[None]:
    """Say in the error what could not be done."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"cannot {step}: {error.strerror}") from error


# Which powers of root a worker keeps where the env-server is root: those that programs in containers have, at most.
#
# With the others it could raise its own limits, read the memory of processes around it, or mount file systems. At
# level `container` it keeps none.

KEPT = frozenset({0, 1, 3, 4, 5, 6, 7, 10, 18, 31})
"""chown, dac_override, fowner, fsetid, kill, setgid, setuid, net_bind_service, sys_chroot, setfcap."""
_MAX_CAPABILITY = 63
_PR_CAPBSET_DROP = 24
_VERSION_3 = 0x20080522


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    """One half (32 capabilities) of the three sets."""

    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def has(wanted: Collection[int]) -> bool:
    """Whether this process has all of these in effect."""
    _, sets = _own()
    return all(sets[one // 32].effective & (1 << (one % 32)) for one in wanted)


def drop(*, keep: Collection[int] = KEPT) -> None:
    """Give up all others, for this process and what it starts. Raises OSError."""
    header, sets = _own()
    if not any(half.permitted for half in sets):
        return
    for capability in range(_MAX_CAPABILITY + 1):
        if capability not in keep:
            with contextlib.suppress(OSError):  # unknown to this kernel, or not ours to give up
                prctl(_PR_CAPBSET_DROP, capability)
    for index, half in enumerate(sets):
        kept = sum(1 << (capability % 32) for capability in keep if capability // 32 == index)
        half.effective &= kept
        half.permitted &= kept
        half.inheritable = 0
    libc("capset", ctypes.byref(header), sets)


def _own() -> tuple[_Header, "ctypes.Array[_Sets]"]:
    header, sets = _Header(_VERSION_3, 0), (_Sets * 2)()
    libc("capget", ctypes.byref(header), sets)
    return header, sets


# Linux' Landlock for a worker: rules that a process puts on itself and its children, without being root.
#
# Needs Linux 6.7 for rules of TCP connections and 6.12 for those of signals; `version` tells. System calls by number,
# as the C library has no functions for them.

CONNECT_VERSION = 4
"""From this version on TCP connections can be limited to ports."""
_SCOPE_VERSION = 6
# The same numbers on every architecture that has them.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ASK_VERSION = 1
_RULE_NET_PORT = 2
_FS_MAKE_BLOCK = 1 << 11
_NET_CONNECT = 1 << 1
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1 << 0, 1 << 1


def version() -> int:
    """Version of Landlock that the kernel offers; 0 if it has none."""
    if platform.system() != "Linux":
        return 0
    with contextlib.suppress(OSError):
        return libc("syscall", _CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_ASK_VERSION))
    return 0


def restrict(*, connect_ports: Iterable[int] | None) -> bool:
    """Keep this thread, and what it starts, from the processes around it, and from other TCP ports than these.

    Nothing outside can be traced, read by /proc (environment, memory, open files) or signalled any more, nor reached by
    an abstract Unix socket. `connect_ports` None leaves connections alone. Returns False where the kernel has no
    Landlock. Raises OSError if it refuses, or has none of the rules that `connect_ports` needs.
    """
    has = version()
    if connect_ports is not None and has < CONNECT_VERSION:
        raise OSError(f"this kernel cannot limit connections (Landlock {has}, needed is {CONNECT_VERSION})")
    if not has:
        return False
    # A rule set must handle something: nobody may make block devices. What it keeps from others comes with any.
    attributes = struct.pack("Q", _FS_MAKE_BLOCK)
    if has >= CONNECT_VERSION:
        attributes += struct.pack("Q", 0 if connect_ports is None else _NET_CONNECT)
    if has >= _SCOPE_VERSION:
        attributes += struct.pack("Q", _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS)
    rules = libc("syscall", _CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    try:
        for port in connect_ports or ():
            rule = struct.pack("QQ", _NET_CONNECT, port)
            libc("syscall", _ADD_RULE, rules, _RULE_NET_PORT, rule, ctypes.c_uint32(0))
        libc("syscall", _RESTRICT_SELF, rules, ctypes.c_uint32(0))
    finally:
        with contextlib.suppress(OSError):
            os.close(rules)
    return True
