"""Linux' Landlock for a worker: rules that a process puts on itself and its children, without being root.

Needs Linux 6.7 for rules of TCP connections and 6.12 for those of signals; `version` tells. System calls by number, as
the C library has no functions for them.
"""

import contextlib
import ctypes
import os
import platform
import struct
from collections.abc import Iterable

from millrace.env_server.isolation.system import libc

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
