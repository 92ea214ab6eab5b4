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
        """Prepare the connections of one worker to its engines.

        `control` is the socket to the worker's `init`, from which listening sockets are got; `hosts` is the file that
        the worker has as /etc/hosts.
        """
        control.settimeout(_ASK_S)
        self._control = control
        self._hosts = hosts
        self._servers: dict[tuple[str, int], asyncio.Server] = {}
        self._names: dict[str, str] = {}
        self._opening = asyncio.Lock()
        self._passing: set[asyncio.Task[None]] = set()

    async def open(self, base_url: str) -> None:
        """Let the confined worker connect to the host and port of `base_url` until `close`; do nothing if it can
        already.

        Raises DoorError, and ConnectionError if the worker has ended.
        """
        parts = urlsplit(base_url)
        host, port = parts.hostname or "", parts.port or _PORTS.get(parts.scheme, 0)
        # One at a time: messages on the control socket have no ids, so the next answer is that of the last request.
        async with self._opening:
            address = self._address(host)
            if (address, port) in self._servers:
                return
            with waits.waiting(f"a way out of a worker to {host}:{port}", waits_on="env worker", deadline_s=_ASK_S):
                listener = await asyncio.to_thread(self._ask, address, port)

            def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                """Pass on a connection of the worker to the engine, in a task."""
                passing = asyncio.create_task(_pass_on(reader, writer, host, port), name=f"pass on to {host}:{port}")
                self._passing.add(passing)
                passing.add_done_callback(self._passing.discard)

            self._servers[address, port] = await asyncio.start_server(take, sock=listener)

    async def close(self) -> None:
        """Close all of the worker's connections to engines, and the socket to its `init`."""
        for server in self._servers.values():
            server.close()
        for passing in self._passing:
            passing.cancel()
        await asyncio.gather(*self._passing, return_exceptions=True)
        self._control.close()

    def _address(self, host: str) -> str:
        """Return the IP address at which the worker finds `host`.

        A name gets a loopback address of its own, which is written into the worker's /etc/hosts.
        """
        if host == "localhost":
            return "127.0.0.1"
        with contextlib.suppress(ValueError):
            return str(ipaddress.ip_address(host))
        if host not in self._names:
            # An address of 127/8 for each name, so that two engines with names can have the same port.
            self._names[host] = str(_NAMES[len(self._names) + 1])
            with self._hosts.open("a") as file:
                file.write(f"{self._names[host]} {host}\n")
        return self._names[host]

    def _ask(self, address: str, port: int) -> socket.socket:
        """Have the worker's `init` listen at the address, inside its namespace, and return the listening socket
        (blocking).

        Raises DoorError, or ConnectionError if the worker has ended.
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
    """Connect to the engine at `host` and copy bytes between it and the worker's connection, until both sides have
    ended.

    `reader` and `writer` are the worker's connection. If the connection to the engine cannot be made or breaks off, the
    worker's is reset, and nothing is raised.
    """
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
                # A reset, not an orderly end: the worker must not take half an answer for a whole one.
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
    """Copy bytes from one connection to another until the first ends, then end the other's sending side."""
    while data := await reader.read(_CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    writer.write_eof()
