"""Under which address others reach a server of this process."""

import socket

from millrace.telemetry.settings import Settings, parse_address


def is_wildcard(host: str) -> bool:
    """Whether a server on `host` listens on every interface."""
    return host in ("", "0.0.0.0", "::", "[::]")


def reachable_host(host: str) -> str:
    """The host under which others reach what listens on `host`: this machine's name for a wildcard."""
    return socket.gethostname() if is_wildcard(host) else host


def advertised(settings: Settings, port: int) -> str:
    """host:port for the registry: `MILLRACE_ADVERTISE`, or the listening host with the port that was taken."""
    if settings.advertise:
        return settings.advertise
    host, _ = parse_address(settings.require("listen"))
    return f"{reachable_host(host)}:{port}"
