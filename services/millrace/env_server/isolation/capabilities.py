"""Which powers of root a worker keeps where the env-server is root: those that programs in containers have, at most.

With the others it could raise its own limits, read the memory of processes around it, or mount file systems. At level
`container` it keeps none.
"""

import contextlib
import ctypes
from collections.abc import Collection

from millrace.env_server.isolation.system import libc, prctl

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
