"""Ports of the one-machine stack: free ones for what nobody configured, a clear error for those that are taken."""

import random
import socket

from millrace.errors import UnavailableError

# Below the range that Linux takes outgoing connections from (32768 on): services bind ten seconds after the choice.
_RANGE = (20000, 32000)
_TRIES = 200


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # TIME_WAIT of a stack before is no obstacle
        try:
            probe.bind((host.strip("[]"), port))
        except OSError:
            return False
    return True


def free_ports(count: int, *, host: str = "127.0.0.1") -> list[int]:
    """Distinct ports that are free now. Another program may still take one before it is bound: say so then."""
    chosen: list[int] = []
    for _ in range(_TRIES):
        port = random.randrange(*_RANGE)
        if port not in chosen and is_free(host, port):
            chosen.append(port)
            if len(chosen) == count:
                return chosen
    raise UnavailableError(
        f"found no {count} free ports on {host} between {_RANGE[0]} and {_RANGE[1]} in {_TRIES} tries",
        reason="NO_FREE_PORT",
        remedy="end other servers on this machine",
    )


def free_port(host: str = "127.0.0.1") -> int:
    """One port that was free a moment ago."""
    return free_ports(1, host=host)[0]


def require_free(host: str, port: int, *, purpose: str, option: str) -> None:
    """UnavailableError naming the port, what it is for and the option that changes it, if it is taken."""
    if is_free(host, port):
        return
    raise UnavailableError(
        f"port {port} on {host} is in use; it is needed for {purpose}",
        reason="PORT_IN_USE",
        remedy=f"end the program that listens there, or choose another port with {option}",
        metadata={"host": host, "port": str(port)},
    )
