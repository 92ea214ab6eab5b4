"""A root directory of a worker's own (level `container`): what `VisibleFiles` shows, read-only, and a private /tmp."""

import ctypes
import os
import platform
import struct
from pathlib import Path

from millrace.env_server.isolation.system import libc, named
from millrace.env_server.isolation.visible import VisibleFiles

_RDONLY, _NOSUID, _NODEV, _NOEXEC, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
# The same number on every architecture that has it (Linux 5.12).
_MOUNT_SETATTR = 442
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_DEVICES = ("null", "zero", "full", "random", "urandom")
_DEVICE_LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1"}
_DEVICE_LINKS |= {"stderr": "/proc/self/fd/2"}
# Shared memory is memory: more of it is not to be had than a worker with little of it needs.
_SHM_BYTES = 256 << 20


def enter_root(visible: VisibleFiles, directory: str) -> None:
    """Make it and go there. `directory` holds `root` (empty), `tmp` (the worker's) and `hosts`.

    Of a process with a mount namespace of its own and the right to mount in it. Raises OSError, which names the step.
    """
    root = f"{directory}/root"
    _mount("", "/", flags=_REC | _PRIVATE)
    _mount("tmpfs", root, kind="tmpfs", options="mode=755,size=4m")
    bound = _show(visible, root)
    for name in ("proc", "tmp", "dev", "dev/shm"):
        os.makedirs(f"{root}/{name}", exist_ok=True)
    for name in (*(f"dev/{name}" for name in _DEVICES), "etc/hosts"):
        Path(root, name).parent.mkdir(parents=True, exist_ok=True)
        Path(root, name).touch()
    for name, target in _DEVICE_LINKS.items():
        os.symlink(target, f"{root}/dev/{name}")
    _bind(f"{directory}/hosts", f"{root}/etc/hosts")
    _hide(visible, bound)
    _make_read_only(root)
    for name in _DEVICES:
        _bind(f"/dev/{name}", f"{root}/dev/{name}")
    _mount("tmpfs", f"{root}/dev/shm", kind="tmpfs", flags=_NOSUID | _NODEV, options=f"mode=1777,size={_SHM_BYTES}")
    _bind(f"{directory}/tmp", f"{root}/tmp")
    with named("show processes (in a container whose /proc is masked it takes systempaths=unconfined)"):
        _mount("proc", f"{root}/proc", kind="proc", flags=_NOSUID | _NODEV | _NOEXEC)
    _change_root(root)


def _show(visible: VisibleFiles, root: str) -> list[tuple[str, str]]:
    """Bind what is shown, where it lies and where it was named: (what, where) of each."""
    bound: list[tuple[str, str]] = []
    for path in sorted(visible.shown, key=len):
        real = os.path.realpath(path)
        if not os.path.exists(real):
            continue
        for place in dict.fromkeys([real, os.path.normpath(path)]):
            target = f"{root}{place}"
            inside = next((where for _, where in bound if os.path.realpath(target).startswith(f"{where}/")), None)
            if inside is not None and os.path.exists(target):
                continue  # it is shown already, as part of something else
            os.makedirs(target if os.path.isdir(real) else os.path.dirname(target), exist_ok=True)
            if not os.path.isdir(real):
                Path(target).touch()
            _bind(real, target)
            bound.append((real, target))
    return bound


def _hide(visible: VisibleFiles, bound: list[tuple[str, str]]) -> None:
    """Cover what is hidden wherever it would be seen: a directory by an empty one, a file by nothing."""
    for path in visible.hidden:
        real = os.path.realpath(path)
        for what, where in bound:
            if real != what and not real.startswith(f"{what}/"):
                continue
            place = f"{where}{real[len(what) :]}"
            if os.path.isdir(place):
                _mount("tmpfs", place, kind="tmpfs", flags=_NOSUID | _NODEV, options="mode=000,size=4k")
            elif os.path.exists(place):
                _bind("/dev/null", place)


def _make_read_only(root: str) -> None:
    """The mount and all that are mounted in it."""
    attributes = struct.pack("QQQQ", _RDONLY | _NOSUID, 0, 0, 0)
    with named("make the root directory read-only (Linux 5.12)"):
        libc(
            "syscall",
            ctypes.c_long(_MOUNT_SETATTR),
            ctypes.c_int(_AT_FDCWD),
            root.encode(),
            ctypes.c_uint(_AT_RECURSIVE),
            attributes,
            ctypes.c_size_t(len(attributes)),
        )


def _change_root(root: str) -> None:
    """From now on nothing outside has a name."""
    machine = platform.machine()
    with named(f"change the root directory ({machine})"):
        if machine not in _PIVOT_ROOT:
            raise OSError(0, "the number of pivot_root is not known here")
        os.chdir(root)
        libc("syscall", ctypes.c_long(_PIVOT_ROOT[machine]), b".", b".")
        libc("umount2", b".", _MNT_DETACH)
        os.chdir("/")


def _bind(what: str, where: str) -> None:
    _mount(what, where, flags=_BIND | _REC)


def _mount(what: str, where: str, *, kind: str = "", flags: int = 0, options: str = "") -> None:
    with named(f"mount {kind or what} at {where}"):
        libc("mount", what.encode(), where.encode(), kind.encode() or None, ctypes.c_ulong(flags), options.encode())
