"""Level `container`: a worker in namespaces of its own, without a daemon, and the calls of the C library for it.

    env-server or template ── outer ── init (pid 1 of the namespaces) ── worker (pid 2)

`outer` is the process that the env-server knows: it ends as the worker ended, and with it everything inside. `init`
reaps the worker's orphans, and makes the listening sockets by which engines are reached (`door`).

A process that may administer the system (root) makes the namespaces as such, and the worker runs as another user. One
that may not makes a user namespace, in which it is itself and nobody else exists.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import platform
import select
import signal
import socket
import struct
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self
from urllib.parse import urlsplit

from millrace.decoding import decode_object
from millrace.env_server.interpreters import PYTHONS_VARIABLE
from millrace.errors import CorruptObjectError

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (1 << bit for bit in (17, 26, 27, 28, 29, 30))
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_SYS_ADMIN, _NET_ADMIN, _SETUID, _SETGID = 21, 12, 7, 6
DIRECTORY = "/tmp"
"""The worker's own directory, as it is named inside."""
_MAX_MESSAGE_BYTES = 4096
_BACKLOG = 1024
_SETUP_FAILED = 71


def is_administrator() -> bool:
    """Return whether this process has the capabilities to make namespaces without a user namespace, and to change
    its user there.
    """
    return has({_SYS_ADMIN, _NET_ADMIN, _SETUID, _SETGID})


# The part of the file system that a worker of level `container` sees: programs and what they need, nothing of ours.
#
# It is a list of what is shown, not of what is hidden: everything else does not exist there. It is shown read-only.

VISIBLE_VARIABLE = "MILLRACE_ENV_VISIBLE"
_OURS = "MILLRACE_"
# Of each worker's own, over what the machine has there.
_OWN = ("/tmp", "/dev", "/proc")
# Links to /usr on most systems, which are shown as what they lead to.
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
# Of /etc, what programs look up; not what services keep there.
_ETC = (
    *("passwd", "group", "nsswitch.conf", "host.conf", "gai.conf", "protocols", "services", "localtime", "timezone"),
    *("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "mime.types", "ssl/certs", "ssl/openssl.cnf"),
    *("ca-certificates", "pki/tls", "pki/ca-trust", "os-release", "debian_version", "locale.alias"),
)
# Caches of data sets and of certificates that an operator has named.
_NAMED = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleFiles:
    """Absolute paths that a worker sees; paths that do not exist when a worker starts are left out."""

    shown: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    """Paths that are covered, also where they are below a path that is shown."""

    def to_json(self) -> dict[str, Any]:
        """Return the paths as plain data, which the worker's process reads with `from_json`."""
        return {"shown": list(self.shown), "hidden": list(self.hidden)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read the shown and hidden paths from what `to_json` returned."""
        return cls(shown=tuple(map(str, values["shown"])), hidden=tuple(map(str, values["hidden"])))

    def with_shown(self, paths: Iterable[str]) -> Self:
        """Return these visible files with `paths` added to those shown, and removed from those hidden."""
        added = list(paths)
        hidden = tuple(path for path in self.hidden if path not in added)
        return type(self)(shown=tuple(dict.fromkeys([*self.shown, *added])), hidden=hidden)


def covered(files: VisibleFiles) -> list[str]:
    """Return the shown paths that exist but cannot be shown: they are below /tmp, /dev or /proc, which each worker
    has of its own.
    """
    found = [path for path in files.shown if os.path.exists(path)]
    return [
        path
        for path in found
        if any(Path(place).is_relative_to(own) for own in _OWN for place in (path, os.path.realpath(path)))
    ]


def visible_to_workers(environ: Mapping[str, str], visible: Sequence[str]) -> VisibleFiles:
    """Return the files that workers of this env-server see at level `container`.

    `environ` are the env-server's variables, and `visible` are paths that the operator adds. Modules are found where
    this process finds them, except in its working directory, which may be anything: an operator who wants it shown
    names it in PYTHONPATH.
    """
    search = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    modules = [path for path in sys.path if path and path != os.getcwd()]
    named = [path for name in _NAMED for path in environ.get(name, "").split(os.pathsep)]
    shown = [*_SYSTEM, *(f"/etc/{name}" for name in _ETC), sys.prefix, sys.base_prefix, *modules, *search]
    shown = [path for path in [*shown, *named, *visible] if os.path.isabs(path)]
    return VisibleFiles(shown=tuple(dict.fromkeys(shown)), hidden=tuple(_hidden(environ, shown)))


def _hidden(environ: Mapping[str, str], shown: Iterable[str]) -> list[str]:
    """Return every path that `MILLRACE_*` variables name: spool, scratch, store, files of Redis' URL, keys and tokens.

    The directory of a named file is hidden, too, unless a path of `shown` is in it: beside the URL of the one-machine
    stack's Redis are its password and its data.
    """
    found: list[str] = []
    for name, value in environ.items():
        path = urlsplit(value).path if value.startswith("file://") else value
        if (
            not name.startswith(_OURS)
            or name in (VISIBLE_VARIABLE, PYTHONS_VARIABLE)
            or not os.path.isabs(path)
            or path == "/"
        ):
            continue
        found.append(path)
        parent = Path(os.path.realpath(path)).parent
        if name.endswith("_FILE") and not any(Path(os.path.realpath(one)).is_relative_to(parent) for one in shown):
            found.append(str(parent))
    return list(dict.fromkeys(found))


def enter(visible: VisibleFiles, directory: str, *, control: int, keep: Sequence[int]) -> None:
    """Fork into new namespaces and return in the worker process, which has only the files `keep` and the standard ones.

    This process and its child stay as `outer` and `init`, and never return. This process must have one thread.
    `visible` and `directory` are for the worker's root directory (`enter_root`); on the socket `control`
    (SOCK_SEQPACKET) `init` takes requests. Raises OSError if the kernel refuses a namespace; a later failure ends the
    process, with its reason on standard error.
    """
    uid, gid = os.geteuid(), os.getegid()
    is_admin = is_administrator()
    with named("make namespaces (the kernel, a seccomp profile, AppArmor or user.max_user_namespaces forbids it)"):
        flags = _NEWNS | _NEWUTS | _NEWIPC | _NEWPID | _NEWNET | (0 if is_admin else _NEWUSER)
        libc("unshare", flags)
    if not is_admin:
        _map_user(uid, gid)
    receive, send = os.pipe()
    # A new pid namespace holds only children, so the first child is its pid 1.
    if (init := os.fork()) != 0:
        _be_outer(init, receive, close=[send, control, *keep])
    os.close(receive)
    try:
        # However `outer` ends, `init` is killed with it, and the kernel then kills everything in its pid namespace.
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        enter_root(visible, directory)
        _start_network()
        worker = os.fork()
    except OSError as error:
        os.write(2, f"millrace env worker: {error.strerror or error}\n".encode())
        os._exit(_SETUP_FAILED)
    if worker != 0:
        _be_init(worker, send, control, close=keep)
    os.close(send)
    os.close(control)
    os.setsid()


def _map_user(uid: int, gid: int) -> None:
    """Map this user and group to themselves in the new user namespace; no others exist there. Raises OSError."""
    with named("map the user of this process into a user namespace"):
        # In this order: without privileges gid_map may be written only once setgroups is denied (user_namespaces(7)).
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def _be_outer(init: int, receive: int, *, close: Sequence[int]) -> NoReturn:
    """Wait for the child `init`, then end this process as the worker ended: with its exit code or by its signal.

    `receive` is the reading end of the pipe into which `init` writes the worker's code, negative for a signal. The
    files `close` are closed first.
    """
    for file in close:
        os.close(file)
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _guard()
    status = os.read(receive, 64)
    _, how = os.waitpid(init, 0)
    # Without a code the worker was never started, or `init` was killed.
    code = int(status) if status else os.waitstatus_to_exitcode(how)
    # A signal's default action first, so that this process dies by the same signal as the worker.
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _be_init(worker: int, report: int, control: int, *, close: Sequence[int]) -> NoReturn:
    """Reap processes, and answer requests for listening sockets on `control`, until the process `worker` has ended.

    The worker's exit code is then written into the pipe `report`, and the kernel ends the processes that are left. The
    files `close` are closed first. Does not return.
    """
    for file in close:
        os.close(file)
    _guard()
    asked = socket.socket(fileno=control)
    # A descriptor that becomes readable when the worker ends, so that one poll waits for both.
    pidfd = os.pidfd_open(worker)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.register(asked, select.POLLIN)
    while True:
        # Orphans become zombies, which count against limits until they are reaped: once a second suffices.
        for file, _ in poll.poll(1000):
            if file == asked.fileno() and not _answer(asked):
                poll.unregister(asked)
        while True:
            try:
                pid, how = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                os._exit(_SETUP_FAILED)
            if pid == worker:
                os.write(report, str(os.waitstatus_to_exitcode(how)).encode())
                os._exit(0)
            if pid == 0:
                break


def _guard() -> None:
    """Drop all capabilities of this process and forbid its inspection, so that the worker's code cannot take it
    over.
    """
    drop(keep=frozenset())
    prctl(_PR_SET_DUMPABLE, 0)


def _answer(asked: socket.socket) -> bool:
    """Read one request for a host and port from `asked`, and send a socket that listens there, or the problem as JSON.

    Returns False once nobody can ask any more: the other end is closed.
    """
    try:
        data = asked.recv(_MAX_MESSAGE_BYTES)
    except OSError:
        return False
    if not data:
        return False
    try:
        request = decode_object(data, what="a request to a worker's init", reason="FRAME_UNREADABLE")
        listener = _listen(str(request["host"]), int(request["port"]))
    except (OSError, CorruptObjectError, KeyError, ValueError) as error:
        asked.send(json.dumps({"problem": str(error)}).encode())
        return True
    with listener:
        # The receiver gets a descriptor of its own; the one here is closed.
        socket.send_fds(asked, [b"{}"], [listener.fileno()])
    return True


def _listen(host: str, port: int) -> socket.socket:
    """Return a TCP socket that listens at the host's IP address and port; raise OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _start_network() -> None:
    """Bring up the loopback device of this network namespace and route every address to it.

    `init` can then listen at the addresses of engines, also at ports below 1024. Raises OSError, which names the step.
    """
    with named("start the loopback device"), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as device:
        _set_up(device)
    with named("route every address to the loopback device"):
        _route(socket.AF_INET)
    with contextlib.suppress(OSError):  # kernels without IPv6
        _route(socket.AF_INET6)
    with named("let a worker's engine have a port below 1024"):
        file = os.open("/proc/sys/net/ipv4/ip_unprivileged_port_start", os.O_WRONLY)
        with os.fdopen(file, "w") as stream:
            stream.write("0")


def _set_up(device: socket.socket) -> None:
    """Bring up the loopback device, by an ioctl on the socket `device`."""
    is_up, set_flags = 0x1 | 0x40, 0x8914
    fcntl.ioctl(device, set_flags, struct.pack("16sh14x", b"lo", is_up))


def _route(family: int) -> None:
    """Route every address of the family (AF_INET or AF_INET6) to loopback, by netlink; raise OSError.

    This is `ip route add local default dev lo table local`.
    """
    new_route, request_ack_create, table_local, by_boot, scope_host, kind_local, oif = 24, 0x405, 255, 3, 254, 2, 4
    attribute = struct.pack("=HHi", 8, oif, socket.if_nametoindex("lo"))
    route = struct.pack("=BBBBBBBBI", family, 0, 0, 0, table_local, by_boot, scope_host, kind_local, 0)
    size = 16 + len(route) + len(attribute)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        netlink.send(struct.pack("=IHHII", size, new_route, request_ack_create, 1, 0) + route + attribute)
        answer: bytes = netlink.recv(4096)
    code = struct.unpack_from("=i", answer, 16)[0]
    if code:
        raise OSError(-code, os.strerror(-code))


# The root directory of a worker (level `container`): the paths of `VisibleFiles`, read-only, and a private /tmp.

_RDONLY, _NOSUID, _NODEV, _NOEXEC, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
# The same number on every architecture that has it (Linux 5.12).
_MOUNT_SETATTR = 442
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_DEVICES = ("null", "zero", "full", "random", "urandom")
_DEVICE_LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1"}
_DEVICE_LINKS |= {"stderr": "/proc/self/fd/2"}
# Shared memory counts as memory: a worker gets no more of it than one that uses little of it needs.
_SHM_BYTES = 256 << 20


def enter_root(visible: VisibleFiles, directory: str) -> None:
    """Make a root directory with the visible files and make it this process's root.

    `directory` has `root` (empty), `tmp` (the worker's) and `hosts`. The process needs a mount namespace of its own and
    the right to mount in it. Raises OSError, which names the step.
    """
    root = f"{directory}/root"
    # Private, or mounts would be passed on to the machine's own namespace.
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
    # Before the devices and the worker's own directories are mounted, which stay writable.
    _make_read_only(root)
    for name in _DEVICES:
        _bind(f"/dev/{name}", f"{root}/dev/{name}")
    _mount("tmpfs", f"{root}/dev/shm", kind="tmpfs", flags=_NOSUID | _NODEV, options=f"mode=1777,size={_SHM_BYTES}")
    _bind(f"{directory}/tmp", f"{root}/tmp")
    with named("show processes (in a container whose /proc is masked it takes systempaths=unconfined)"):
        _mount("proc", f"{root}/proc", kind="proc", flags=_NOSUID | _NODEV | _NOEXEC)
    _change_root(root)


def _show(visible: VisibleFiles, root: str) -> list[tuple[str, str]]:
    """Mount every shown path by a bind mount below `root`, at its real place and at the place it was named by.

    Returns (real path, mount point) of each. Paths that do not exist, and those in one that is mounted, are left out.
    """
    bound: list[tuple[str, str]] = []
    # The shortest first, so that a directory is mounted before what is in it.
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
    """Cover hidden paths wherever one of the bind mounts `bound` shows them: directories by empty ones, files by
    /dev/null.

    `bound` is what `_show` returned.
    """
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
    """Make the mount at `root` and all mounts below it read-only. Raises OSError."""
    # The fields of `struct mount_attr`: flags to set, flags to clear, propagation, and a user namespace.
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
    """Make `root` the root directory and unmount the old one, so that no path leads outside. Raises OSError."""
    machine = platform.machine()
    with named(f"change the root directory ({machine})"):
        if machine not in _PIVOT_ROOT:
            raise OSError(0, "the number of pivot_root is not known here")
        os.chdir(root)
        # With the same directory twice the old root is mounted over the new one, and unmounted in the next line.
        libc("syscall", ctypes.c_long(_PIVOT_ROOT[machine]), b".", b".")
        libc("umount2", b".", _MNT_DETACH)
        os.chdir("/")


def _bind(what: str, where: str) -> None:
    """Mount the path `what` by a bind mount, with all mounts below it, at the path `where`."""
    _mount(what, where, flags=_BIND | _REC)


def _mount(what: str, where: str, *, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Call mount(2), where `what` is the source, `where` the mount point, `kind` the type of file system ("" for none).

    Raises OSError, which names the step.
    """
    with named(f"mount {kind or what} at {where}"):
        libc("mount", what.encode(), where.encode(), kind.encode() or None, ctypes.c_ulong(flags), options.encode())


# Calls of the C library, with errors that name what was tried.


def libc(function: str, *args: Any) -> int:
    """Call the C library's function of that name and return its result; raise OSError if that is negative."""
    result = getattr(ctypes.CDLL(None, use_errno=True), function)(*args)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(result)


def prctl(option: int, value: int) -> None:
    """Set the attribute `option` of this process by prctl(2). Raises OSError."""
    libc("prctl", option, ctypes.c_ulong(value), 0, 0, 0)


@contextlib.contextmanager
def named(step: str) -> Iterator[None]:
    """Raise an OSError of the block again with "cannot `step`" before its text."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"cannot {step}: {error.strerror}") from error


# The capabilities of root that a worker keeps where the env-server is root: at most those of programs in containers.
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


def has(capabilities: Collection[int]) -> bool:
    """Return whether all of these capabilities, by number, are in effect in this process."""
    _, sets = _own()
    return all(sets[one // 32].effective & (1 << (one % 32)) for one in capabilities)


def drop(*, keep: Collection[int] = KEPT) -> None:
    """Give up all capabilities but those numbered in `keep`, for this process and its children; raise OSError.

    Does nothing if the process has none.
    """
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
    """Return this process's capabilities as capget(2) gives them: the header, and the two halves of the sets."""
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
    """Return the version of Landlock that the kernel offers; 0 if it has none."""
    if platform.system() != "Linux":
        return 0
    with contextlib.suppress(OSError):
        return libc("syscall", _CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_ASK_VERSION))
    return 0


def restrict(*, connect_ports: Iterable[int] | None) -> bool:
    """Confine this thread, and what it starts, with Landlock; return whether the kernel has it.

    Processes outside can then not be traced, read by /proc (environment, memory, open files), signalled, or reached by
    an abstract Unix socket, as far as the kernel's version has it. TCP connections are allowed to `connect_ports`
    alone; None allows all. Raises OSError if the kernel refuses, or cannot limit ports and `connect_ports` is not None.
    """
    has = version()
    if connect_ports is not None and has < CONNECT_VERSION:
        raise OSError(f"this kernel cannot limit connections (Landlock {has}, needed is {CONNECT_VERSION})")
    if not has:
        return False
    # A rule set must handle some access: making block devices is one that no worker needs. The protection of other
    # processes comes with any rule set.
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
