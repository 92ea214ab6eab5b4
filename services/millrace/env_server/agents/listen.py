"""Where workers listen for agents: variables of the env-server, which its workers inherit.

`MILLRACE_AGENT_LISTEN` is `HOST` or `HOST:FIRST-LAST`, with a port for each worker; `MILLRACE_AGENT_HOST` is the name
by which agents in containers or on other hosts reach it. The connection is not encrypted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from millrace.errors import InvalidSpecError, Violation
from millrace.rpc.access import is_loopback
from millrace.telemetry.settings import Settings

LISTEN_VARIABLE = "MILLRACE_AGENT_LISTEN"
HOST_VARIABLE = "MILLRACE_AGENT_HOST"
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentListen:
    """Where workers listen for agents."""

    host: str = _LOOPBACK
    ports: Sequence[int] = (0,)
    advertised_host: str = _LOOPBACK
    """The host in the addresses that agents get."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "AgentListen":
        """Read from a process's variables where workers listen for agents; by default on loopback, at any free port.

        Raises InvalidSpecError, also for an address beyond loopback without MILLRACE_INSECURE, because requests are in
        plain text.
        """
        text = environ.get(LISTEN_VARIABLE, "").strip() or _LOOPBACK
        host, _, ports = text.rpartition(":") if text.count(":") == 1 else (text.strip("[]"), "", "")
        first, _, last = ports.partition("-")
        numbers = [first, last or first] if ports else ["0", "0"]
        if not host or not all(number.isdecimal() and int(number) < 65536 for number in numbers):
            message = "must be HOST, HOST:PORT or HOST:FIRST-LAST, such as 172.17.0.1:20000-20099"
            raise InvalidSpecError([Violation(field=LISTEN_VARIABLE, value=text, message=message)])
        found = range(int(numbers[0]), int(numbers[1]) + 1)
        if not found:
            message = "the last port must not be below the first"
            raise InvalidSpecError([Violation(field=LISTEN_VARIABLE, value=text, message=message)])
        advertised = environ.get(HOST_VARIABLE, "").strip()
        if not advertised and host in ("0.0.0.0", "::"):
            message = f"listens on every address, so {HOST_VARIABLE} must say by which one agents reach it"
            raise InvalidSpecError([Violation(field=LISTEN_VARIABLE, value=text, message=message)])
        if not is_loopback(host) and not Settings.from_env(environ).insecure:
            message = (
                "agents reach it in plain text, the token of their rollout included; on a network that is protected "
                "otherwise, such as a bridge of containers, set MILLRACE_INSECURE=1, or leave this variable out"
            )
            raise InvalidSpecError([Violation(field=LISTEN_VARIABLE, value=text, message=message)])
        return cls(host=host, ports=found, advertised_host=advertised or host)
