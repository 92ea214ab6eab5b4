"""TCP keep-alive: the kernel finds out that the other machine, or the network to it, is gone.

A peer that is killed resets its connections; one whose machine or network vanishes says nothing, and who waits for its
answer would wait until the deadline of the whole request.
"""

import socket
from typing import Any

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
    """Have the kernel look after a connection."""
    for level, option, value in SOCKET_OPTIONS:
        connection.setsockopt(level, option, value)


def kept_alive_socket(address: tuple[Any, ...]) -> socket.socket:
    """A socket for an entry of `getaddrinfo`: the `socket_factory` of an aiohttp connector."""
    family, kind, protocol = address[:3]
    connection = socket.socket(family=family, type=kind, proto=protocol)
    keep_alive(connection)
    return connection
