"""Where a server of this process listens, and under which address others reach it.

A wildcard (`0.0.0.0`, `[::]`) is every interface of both families, as it is to gRPC: to a plain socket `0.0.0.0` is
those of IPv4 alone, and where a cluster has IPv6 only nobody would reach it. Hosts stand in addresses and URLs as
`parse_address` takes them, those of IPv6 in brackets; sockets and other programs take them bare.
"""

import functools
import socket

from millrace.telemetry.settings import Settings, bare_host, join_address, parse_address

_ANY_IPV4, _ANY_IPV6 = "0.0.0.0", "::"


def is_wildcard(host: str) -> bool:
    """Whether a server on `host` listens on every interface."""
    return bare_host(host) in ("", _ANY_IPV4, _ANY_IPV6)


def listening_host(host: str) -> str:
    """Return what a socket that shall listen on `host` is bound to: for a wildcard `::`, where there is IPv6."""
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
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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
    """Return where this machine itself reaches what listens on `host`, bare."""
    return "127.0.0.1" if is_wildcard(host) else bare_host(host)


def reachable_host(host: str) -> str:
    """Return the host under which others reach what listens on `host`: this machine's name for a wildcard."""
    return socket.gethostname() if is_wildcard(host) else host


def advertised(settings: Settings, port: int) -> str:
    """host:port for the registry: `MILLRACE_ADVERTISE`, or the listening host with the port that was taken."""
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
