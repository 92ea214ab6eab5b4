"""The only connections out of a worker of level `container`: to the engines that the env-server has it play with.

A worker's network has no device but loopback, on which every address of the world is. Where an engine is played with,
`init` of the worker listens at the engine's own address and port and hands the listening socket to the env-server,
which takes the connections and passes their bytes on. So environments call engines by the same URLs as everywhere, TLS
included; names are looked up in the worker's own /etc/hosts. Every other address refuses connections at once.
"""

import asyncio
import contextlib
import ipaddress
import json
import logging
import socket
from pathlib import Path
from urllib.parse import urlsplit

from millrace.decoding import decode_object
from millrace.env_server.engine_access import MAX_ATTEMPTS, retry_pause_s
from millrace.errors import CorruptObjectError
from millrace.telemetry import waits

logger = logging.getLogger(__name__)

_MAX_MESSAGE_BYTES = 4096
_ASK_S = 10.0
_CONNECT_S = 5.0
_CHUNK_BYTES = 1 << 16
_PORTS = {"http": 80, "https": 443}
# Where engines with names are, for their worker.
_NAMES = ipaddress.ip_network("127.77.0.0/16")


class DoorError(Exception):
    """The worker cannot be connected to that engine."""


class Door:
    """The connections of one worker to its engines, in one event loop."""

    def __init__(self, control: socket.socket, hosts: Path) -> None:
        """Take `control`, the socket to `init`, and `hosts`, the worker's /etc/hosts."""
        control.settimeout(_ASK_S)
        self._control = control
        self._hosts = hosts
        self._servers: dict[tuple[str, int], asyncio.Server] = {}
        self._names: dict[str, str] = {}
        self._opening = asyncio.Lock()
        self._passing: set[asyncio.Task[None]] = set()

    async def open(self, base_url: str) -> None:
        """Let the worker connect to the host and port of this URL until `close`; do nothing if it can already.

        Raises DoorError, and ConnectionError if the worker has ended.
        """
        parts = urlsplit(base_url)
        host, port = parts.hostname or "", parts.port or _PORTS.get(parts.scheme, 0)
        async with self._opening:
            address = self._address(host)
            if (address, port) in self._servers:
                return
            with waits.waiting(f"a way out of a worker to {host}:{port}", waits_on="env worker", deadline_s=_ASK_S):
                listener = await asyncio.to_thread(self._ask, address, port)

            def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                passing = asyncio.create_task(_pass_on(reader, writer, host, port), name=f"pass on to {host}:{port}")
                self._passing.add(passing)
                passing.add_done_callback(self._passing.discard)

            self._servers[address, port] = await asyncio.start_server(take, sock=listener)

    async def close(self) -> None:
        """Close all of the worker's connections to the outside, and the socket to `init`."""
        for server in self._servers.values():
            server.close()
        for passing in self._passing:
            passing.cancel()
        await asyncio.gather(*self._passing, return_exceptions=True)
        self._control.close()

    def _address(self, host: str) -> str:
        """Return the address at which the worker finds the host; a name is written into the worker's /etc/hosts."""
        if host == "localhost":
            return "127.0.0.1"
        with contextlib.suppress(ValueError):
            return str(ipaddress.ip_address(host))
        if host not in self._names:
            self._names[host] = str(_NAMES[len(self._names) + 1])
            with self._hosts.open("a") as file:
                file.write(f"{self._names[host]} {host}\n")
        return self._names[host]

    def _ask(self, address: str, port: int) -> socket.socket:
        """Have `init` listen at the address, and return its listening socket (blocking).

        Raise DoorError or ConnectionError.
        """
        try:
            self._control.send(json.dumps({"host": address, "port": port}).encode())
            data, files, _, _ = socket.recv_fds(self._control, _MAX_MESSAGE_BYTES, 1)
            if not data:
                raise ConnectionResetError("the worker has ended")
            problem = decode_object(data, what="the answer of init", reason="FRAME_UNREADABLE").get("problem")
        except (TimeoutError, CorruptObjectError) as error:
            raise DoorError(f"the worker has no way to {address}:{port}: {error}") from error
        if not files:
            raise DoorError(f"the worker has no way to {address}:{port}: {problem}")
        return socket.socket(fileno=files[0])


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int) -> None:
    """Connect to the engine and copy bytes both ways, until both sides have ended or one breaks off."""
    theirs: asyncio.StreamWriter | None = None
    try:
        answers, theirs = await _connect(host, port)
        async with asyncio.TaskGroup() as group:
            group.create_task(_copy(reader, theirs))
            group.create_task(_copy(answers, writer))
        theirs.close()
        writer.close()  # what was written is still sent
    except* OSError as errors:
        # The worker sees what it would see without us: its connection breaks off.
        why = "; ".join(str(error) for error in errors.exceptions)
        logger.info("an engine's connection broke off", extra={"engine": f"{host}:{port}", "error": why})
    finally:
        for end in (writer, theirs):
            if end is not None and not end.is_closing():
                end.transport.abort()


async def _connect(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the engine, as often as the worker itself would try without confinement. Raises OSError."""
    with waits.shared(f"{waits.COUNT} connections to the engine at {host}:{port}", waits_on=f"{host}:{port}"):
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                async with asyncio.timeout(_CONNECT_S):
                    return await asyncio.open_connection(host, port)
            except OSError:
                if attempt == MAX_ATTEMPTS:
                    raise
            await asyncio.sleep(retry_pause_s(attempt))
    raise AssertionError("unreachable: the last attempt returns or raises")


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    writer.write_eof()
