"""Level `container`: a worker in process, mount, network, IPC and host name namespaces of its own, without a daemon.

    env-server or template ── outer ── init (pid 1 of the namespaces) ── worker (pid 2)

`outer` is the process that the env-server knows: it ends as the worker ended, and with it everything inside. `init`
reaps what the worker leaves behind, and makes the listening sockets by which engines are reached (`door`).

A process that may administer the system (root) makes the namespaces as such, and the worker runs as another user. One
that may not makes a user namespace, in which it is itself and nobody else exists.
"""

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import struct
from collections.abc import Sequence
from typing import NoReturn

from millrace.decoding import decode_object
from millrace.env_server.isolation import capabilities
from millrace.env_server.isolation.mounts import enter_root
from millrace.env_server.isolation.system import libc, named, prctl
from millrace.env_server.isolation.visible import VisibleFiles
from millrace.errors import CorruptObjectError

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (1 << bit for bit in (17, 26, 27, 28, 29, 30))
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_SYS_ADMIN, _NET_ADMIN, _SETUID, _SETGID = 21, 12, 7, 6
DIRECTORY = "/tmp"
"""The worker's own, inside."""
_MAX_MESSAGE_BYTES = 4096
_BACKLOG = 1024
_SETUP_FAILED = 71


def is_administrator() -> bool:
    """Whether this process may make namespaces without a user namespace, and become another user in them."""
    return capabilities.has({_SYS_ADMIN, _NET_ADMIN, _SETUID, _SETGID})


def enter(visible: VisibleFiles, directory: str, *, control: int, keep: Sequence[int]) -> None:
    """Become a worker in namespaces of its own; returns in the worker, with `keep` and the standard files open.

    This process must have one thread. `control` is a socket (SOCK_SEQPACKET) on which `init` takes requests. Raises
    OSError if the kernel refuses a namespace; what fails later ends the process, and its reason is on standard error.
    """
    uid, gid = os.geteuid(), os.getegid()
    is_admin = is_administrator()
    with named("make namespaces (the kernel, a seccomp profile, AppArmor or user.max_user_namespaces forbids it)"):
        flags = _NEWNS | _NEWUTS | _NEWIPC | _NEWPID | _NEWNET | (0 if is_admin else _NEWUSER)
        libc("unshare", flags)
    if not is_admin:
        _map_user(uid, gid)
    told, tell = os.pipe()
    if (init := os.fork()) != 0:
        _be_outer(init, told, close=[tell, control, *keep])
    os.close(told)
    try:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        enter_root(visible, directory)
        _start_network()
        worker = os.fork()
    except OSError as error:
        os.write(2, f"millrace env worker: {error.strerror or error}\n".encode())
        os._exit(_SETUP_FAILED)
    if worker != 0:
        _be_init(worker, tell, control, close=keep)
    os.close(tell)
    os.close(control)
    os.setsid()


def _map_user(uid: int, gid: int) -> None:
    with named("map the user of this process into a user namespace"):
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def _be_outer(init: int, told: int, *, close: Sequence[int]) -> NoReturn:
    """Wait, and end as the worker did."""
    for file in close:
        os.close(file)
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _guard()
    said = os.read(told, 64)
    _, how = os.waitpid(init, 0)
    code = int(said) if said else os.waitstatus_to_exitcode(how)
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _be_init(worker: int, tell: int, control: int, *, close: Sequence[int]) -> NoReturn:
    """Reap, and listen where the env-server asks, until the worker has ended; then the kernel ends what is left."""
    for file in close:
        os.close(file)
    _guard()
    asked = socket.socket(fileno=control)
    pidfd = os.pidfd_open(worker)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.register(asked, select.POLLIN)
    while True:
        # Orphans become zombies that count until somebody reaps them: now and then does.
        for file, _ in poll.poll(1000):
            if file == asked.fileno() and not _answer(asked):
                poll.unregister(asked)
        while True:
            try:
                pid, how = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                os._exit(_SETUP_FAILED)
            if pid == worker:
                os.write(tell, str(os.waitstatus_to_exitcode(how)).encode())
                os._exit(0)
            if pid == 0:
                break


def _guard() -> None:
    """No powers, and nobody may look into this process: what the worker runs must not take it over."""
    capabilities.drop(keep=frozenset())
    prctl(_PR_SET_DUMPABLE, 0)


def _answer(asked: socket.socket) -> bool:
    """Make one listening socket and hand it over; False when nobody asks any more."""
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
        socket.send_fds(asked, [b"{}"], [listener.fileno()])
    return True


def _listen(host: str, port: int) -> socket.socket:
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
    """Loopback, which answers for every address of the world: `init` listens there for the engines."""
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
    is_up, set_flags = 0x1 | 0x40, 0x8914
    fcntl.ioctl(device, set_flags, struct.pack("16sh14x", b"lo", is_up))


def _route(family: int) -> None:
    """`ip route add local default dev lo table local`, by netlink."""
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
