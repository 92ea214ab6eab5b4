"""Which powers of root a worker keeps where the env-server is root: those that programs in containers have, at most.

With the others it could raise its own limits, read the memory of processes around it, or mount file systems. At level
`container` it keeps none.
"""

import contextlib
import ctypes
import os
from collections.abc import Collection

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
    """Give the others up, for this process and all that it starts. Nothing for who has none. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = _own()
    if not any(half.permitted for half in sets):
        return
    for capability in range(_MAX_CAPABILITY + 1):
        if capability not in keep:
            with contextlib.suppress(OSError):  # unknown to this kernel, or not ours to give up
                _check(libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0))
    for index, half in enumerate(sets):
        kept = sum(1 << (capability % 32) for capability in keep if capability // 32 == index)
        half.effective &= kept
        half.permitted &= kept
        half.inheritable = 0
    _check(libc.capset(ctypes.byref(header), sets))


def _own() -> tuple[_Header, "ctypes.Array[_Sets]"]:
    header, sets = _Header(_VERSION_3, 0), (_Sets * 2)()
    _check(ctypes.CDLL(None, use_errno=True).capget(ctypes.byref(header), sets))
    return header, sets


def _check(result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
