"""Where a server of this process listens, and under which address others reach it.

A wildcard (`0.0.0.0`, `[::]`) is every interface of both families, as it is to gRPC: to a plain socket `0.0.0.0` is
those of IPv4 alone, and where a cluster has IPv6 only nobody would reach it. Hosts are in addresses and URLs as
`parse_address` takes them, those of IPv6 in brackets; sockets and other programs take them bare.
"""

import functools
import socket
from typing import Any

from millrace.telemetry.settings import Settings, bare_host, join_address, parse_address

_ANY_IPV4, _ANY_IPV6 = "0.0.0.0", "::"


def is_wildcard(host: str) -> bool:
    """Return whether a server on `host` listens on every interface: empty, `0.0.0.0` or `::`, also in brackets."""
    return bare_host(host) in ("", _ANY_IPV4, _ANY_IPV6)


def listening_host(host: str) -> str:
    """Return the address to bind for `host`, without brackets: for a wildcard `::` if the kernel has IPv6, else
    `0.0.0.0`.
    """
    if not is_wildcard(host):
        return bare_host(host)
    return _ANY_IPV6 if _has_ipv6() else _ANY_IPV4


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a TCP socket that is bound and does not listen yet; OSError says why it cannot be.

    A name is bound to the first of its addresses that this machine has, those of IPv4 first.
    """
    name, problem = listening_host(host), OSError(f"{host} has no address")
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, kind, protocol, _, where in sorted(found, key=lambda each: each[0] != socket.AF_INET):
        bound = socket.socket(family, kind, protocol)
        try:
            # A restarted server takes its port although connections of its predecessor are in TIME_WAIT.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # One socket takes both families for the wildcard alone; what the kernel does otherwise is a setting of the
            # machine (net.ipv6.bindv6only).
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(name != _ANY_IPV6))
            bound.bind(where)
        except OSError as error:
            bound.close()
            problem = error
        else:
            return bound
    raise problem


def own_host(host: str) -> str:
    """Return the address by which this machine itself reaches a listener on `host`, without brackets."""
    return "127.0.0.1" if is_wildcard(host) else bare_host(host)


def reachable_host(host: str) -> str:
    """Return the host under which others reach what listens on `host`: this machine's name for a wildcard."""
    return socket.gethostname() if is_wildcard(host) else host


def advertised(settings: Settings, port: int) -> str:
    """Return the host:port under which others reach this process, for its registration.

    It is `MILLRACE_ADVERTISE` if that is set, else the listening host with `port`, which is the one that was bound.
    """
    if settings.advertise:
        return settings.advertise
    host, _ = parse_address(settings.require("listen"))
    return join_address(reachable_host(host), port)


@functools.cache
def _has_ipv6() -> bool:
    """Return whether this machine's kernel has IPv6."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind((_ANY_IPV6, 0))
    except OSError:
        return False
    return True


# The stable name of a worker's place: a process that registers there is the successor of the one before.


def worker_slot(place: str) -> str:
    """Return the slot of a worker, such as `host7/127.0.0.1:50052`: this host and `place`.

    `place` is what one process at a time can have on the host: the address under which others reach a server, so
    that containers with one host name do not collide, or a directory. An empty place, or port 0, gives an empty
    slot: then a successor is another worker, and its predecessor is missed only when its lease ends.
    """
    is_none = not place or place.endswith(":0")  # port 0 is whatever was free: nobody's place
    return "" if is_none else f"{socket.gethostname()}/{place}"


# TCP keep-alive: the kernel finds out that the other machine, or the network to it, is gone.
#
# A peer that is killed resets its connections; one whose machine or network vanishes says nothing, and who waits for
# its answer would wait until the deadline of the whole request.

IDLE_S = 10
"""Silence after which the kernel asks the other side whether it is there; a long answer costs a packet each time."""
_PERIOD_S = 5
_PROBES = 4
GONE_S = IDLE_S + _PERIOD_S * _PROBES
"""Silence after which it counts as gone. The same holds for what was sent and not acknowledged: nothing is asked while
such data is on its way, and without a bound TCP sends it again for a quarter of an hour."""
_TIMES = {
    "TCP_KEEPIDLE": IDLE_S,
    "TCP_KEEPINTVL": _PERIOD_S,
    "TCP_KEEPCNT": _PROBES,
    "TCP_USER_TIMEOUT": 1000 * GONE_S,  # in milliseconds; Linux alone has it
}

SOCKET_OPTIONS: list[tuple[int, int, int]] = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *((socket.IPPROTO_TCP, getattr(socket, name), value) for name, value in _TIMES.items() if hasattr(socket, name)),
]
"""Level, option and value: a peer that is gone is noticed within about 30 s."""


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel probe a connection while it is silent, so that a vanished peer ends it within about 30 s."""
    for level, option, value in SOCKET_OPTIONS:
        connection.setsockopt(level, option, value)


def kept_alive_socket(address: tuple[Any, ...]) -> socket.socket:
    """Return an unconnected socket with TCP keep-alive: the `socket_factory` of an aiohttp connector.

    `address` is an entry of `getaddrinfo`; its family, kind and protocol are taken.
    """
    family, kind, protocol = address[:3]
    connection = socket.socket(family=family, type=kind, proto=protocol)
    keep_alive(connection)
    return connection
