"""A proxy in front of an S3 server that fails on command: per operation and key, in every way that a network can.

    with FaultProxy(s3_endpoint) as proxy:
        fault = proxy.add(Fault(Effect.LOSE_ANSWER, method="PUT", key="*/manifest.json", times=1))
        store = S3Store(bucket=..., endpoint=proxy.endpoint)
        ...
        assert fault.struck == 1

It speaks HTTP/1.1 by hand on the client's side, because the point is to break it: half a body, no answer, a reset.
Faults strike in the order in which they were added; the first that matches is the one that a request suffers.
"""

import asyncio
import contextlib
import fnmatch
import socket
import struct
import threading
import time
import urllib.parse
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

import aiohttp
import yarl

_RECEIVE_BUFFER_BYTES = 16 << 10  # small, so that a slow reader here is a slow network there
_BACKEND_S = 60.0
_POLL_S = 0.02
_CHUNKS_PER_S = 20.0
_HOP_BY_HOP = frozenset({"connection", "transfer-encoding", "expect", "content-length", "keep-alive", "date", "server"})


class Effect(StrEnum):
    """What happens to a request."""

    ANSWER = "answer"
    """The proxy answers with `status` and `code`; the backend never hears of it."""
    HANG = "hang"
    """The request is taken and nothing ever comes back, until the fault is removed; then the connection is cut."""
    STORE_AND_HANG = "store_and_hang"
    """The backend does it, and nothing ever comes back."""
    DELAY = "delay"
    """The request reaches the backend `seconds` later."""
    SLOW = "slow"
    """Request and answer pass at `rate` bytes per second."""
    RESET = "reset"
    """The connection is reset before anything is read of the body."""
    CUT_REQUEST = "cut_request"
    """Half of the body is read, then the connection is cut; the backend never hears of it."""
    TORN_WRITE = "torn_write"
    """Half of the body is stored as if it were the whole, then the connection is cut: a store that checks nothing."""
    LOSE_ANSWER = "lose_answer"
    """The backend does it, and the connection is cut before the answer."""
    CUT_ANSWER = "cut_answer"
    """The answer promises its whole length and ends in the middle."""
    DAMAGE_ANSWER = "damage_answer"
    """One bit of the answer's body is flipped."""


@dataclass(slots=True, kw_only=True)
class Fault:
    """One programmed fault; `method` is PUT, GET, HEAD, DELETE, POST, LIST or *, `key` a glob over bucket/key."""

    effect: Effect
    method: str = "*"
    key: str = "*"
    times: int | None = None
    """How often it strikes; None until it is removed."""
    skip: int = 0
    """How many matching requests pass before."""
    every: int = 1
    """Strikes at each so-manieth matching request."""
    status: int = 503
    code: str = "SlowDown"
    seconds: float = 0.0
    rate: float = 0.0
    seen: int = 0
    struck: int = 0
    hit: threading.Event = field(default_factory=threading.Event)
    """Set when it has struck first: a hanging request hangs now."""
    over: threading.Event = field(default_factory=threading.Event)

    async def hang(self) -> None:
        """Hang until the fault is removed."""
        self.hit.set()
        await self.pause(float("inf"))

    async def pause(self, seconds: float) -> None:
        """Pause for that long, or until the fault is removed."""
        ends = time.monotonic() + seconds
        while not self.over.is_set() and time.monotonic() < ends:
            await asyncio.sleep(_POLL_S)

    def takes(self, request: "Request") -> bool:
        """Return whether this fault applies to the request; if so, count it."""
        if self.times is not None and self.struck >= self.times:
            return False
        if self.method not in ("*", request.method) or not fnmatch.fnmatchcase(request.key, self.key):
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        self.seen += 1
        if self.seen % self.every:
            return False
        self.struck += 1
        return True


@dataclass(slots=True, kw_only=True)
class Request:
    """One request as the proxy saw it."""

    method: str
    key: str
    target: str
    headers: dict[str, str]
    began: float
    effect: Effect | None = None
    status: int = 0
    """What the backend or the proxy answered; 0 if nothing did."""


class FaultProxy:
    """A proxy in front of an S3 server, running in its own thread from `__enter__` to `__exit__`."""

    def __init__(self, backend: str, *, port: int = 0) -> None:
        self._backend = backend.rstrip("/")
        self._port = port
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="fault proxy", daemon=True)
        self._ready = threading.Event()
        self._session: aiohttp.ClientSession | None = None
        self.requests: list[Request] = []

    @property
    def endpoint(self) -> str:
        """Return the proxy's URL, which clients use in place of the backend's."""
        return f"http://127.0.0.1:{self._port}"

    def add(self, fault: Fault) -> Fault:
        """Add a fault, and return it so that the test can read `struck`."""
        with self._lock:
            self._faults.append(fault)
        return fault

    def remove(self, fault: Fault) -> None:
        """Remove a fault; connections that hang in it are cut."""
        with self._lock:
            self._faults.remove(fault)
        fault.over.set()

    def clear(self) -> None:
        """Remove all faults."""
        for fault in list(self._faults):
            self.remove(fault)

    def count(self, method: str = "*", key: str = "*") -> int:
        """Return how many requests matched a method and a key glob."""
        return sum(method in ("*", r.method) and fnmatch.fnmatchcase(r.key, key) for r in list(self.requests))

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._ready.wait(10):
            raise TimeoutError("the fault proxy did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._main())
        self._loop.close()

    async def _main(self) -> None:
        self._stopping = asyncio.Event()
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        listener.bind(("127.0.0.1", self._port))
        self._port = listener.getsockname()[1]
        timeout = aiohttp.ClientTimeout(total=_BACKEND_S)
        async with aiohttp.ClientSession(auto_decompress=False, timeout=timeout) as self._session:
            server = await asyncio.start_server(self._serve, sock=listener, limit=_RECEIVE_BUFFER_BYTES)
            self._ready.set()
            await self._stopping.wait()
            server.close()
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError, aiohttp.ClientError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                request = _parse(head)
                with self._lock:
                    fault = next((fault for fault in self._faults if fault.takes(request)), None)
                request.effect = None if fault is None else fault.effect
                self.requests.append(request)
                goes_on = await self._handle(request, fault, reader, writer)
                if fault is not None:
                    fault.hit.set()
                if not goes_on:
                    break
        _cut(writer)

    async def _handle(
        self, request: Request, fault: Fault | None, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Serve one request; False if the connection is to be cut."""
        effect = request.effect
        if effect is Effect.RESET:
            return False
        if "expect" in request.headers:
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        length = int(request.headers.get("content-length", 0))
        rate = fault.rate if fault is not None and effect is Effect.SLOW else 0.0
        wanted = length // 2 if effect is Effect.CUT_REQUEST else length
        body = await _receive(reader, wanted, rate=rate)
        if effect is Effect.CUT_REQUEST:
            return False
        if fault is not None and effect is Effect.HANG:
            await fault.hang()
            return False
        if fault is not None and effect is Effect.ANSWER:
            request.status = fault.status
            answer = f"<Error><Code>{fault.code}</Code><Message>injected</Message></Error>".encode()
            await _send(writer, request, fault.status, {"Content-Type": "application/xml"}, answer, rate=0)
            return True
        if fault is not None and effect is Effect.DELAY:
            await fault.pause(fault.seconds)
        if effect is Effect.TORN_WRITE:
            body = body[: length // 2]
        status, headers, answer = await self._ask_backend(request, body)
        request.status = status
        if fault is not None and effect is Effect.STORE_AND_HANG:
            await fault.hang()
            return False
        if effect in (Effect.TORN_WRITE, Effect.LOSE_ANSWER):
            return False
        if effect is Effect.DAMAGE_ANSWER and answer:
            answer = bytes([answer[0] ^ 1]) + answer[1:]
        cut_at = len(answer) // 2 if effect is Effect.CUT_ANSWER else None
        await _send(writer, request, status, headers, answer, rate=rate, cut_at=cut_at)
        return cut_at is None

    async def _ask_backend(self, request: Request, body: bytes) -> tuple[int, dict[str, str], bytes]:
        assert self._session is not None
        headers = {name: value for name, value in request.headers.items() if name not in _HOP_BY_HOP}
        url = yarl.URL(self._backend + request.target, encoded=True)
        method = "GET" if request.method == "LIST" else request.method
        async with self._session.request(method, url, data=body, headers=headers) as response:
            kept = {k: v for k, v in response.headers.items() if k.lower() not in _HOP_BY_HOP}
            if method == "HEAD":
                kept["Content-Length"] = response.headers.get("Content-Length", "0")
            return response.status, kept, await response.read()


def _parse(head: bytes) -> Request:
    first, *lines = head.decode("latin-1").strip().split("\r\n")
    method, target, _ = first.split(" ")
    path, _, query = target.partition("?")
    key = urllib.parse.unquote(path).lstrip("/")
    if method == "GET" and "list-type=2" in query:
        method = "LIST"
        prefix = urllib.parse.parse_qs(query, keep_blank_values=True).get("prefix", [""])[0]
        key = f"{key.rstrip('/')}/{prefix}"
    pairs = (line.partition(":") for line in lines)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    return Request(method=method, key=key, target=target, headers=headers, began=time.monotonic())


async def _receive(reader: asyncio.StreamReader, length: int, *, rate: float) -> bytes:
    parts: list[bytes] = []
    missing = length
    while missing > 0:
        data = await reader.read(min(missing, max(1, int(rate / _CHUNKS_PER_S)) if rate else missing))
        if not data:
            raise ConnectionResetError
        parts.append(data)
        missing -= len(data)
        if rate:
            await asyncio.sleep(len(data) / rate)
    return b"".join(parts)


async def _send(
    writer: asyncio.StreamWriter,
    request: Request,
    status: int,
    headers: dict[str, str],
    body: bytes,
    *,
    rate: float,
    cut_at: int | None = None,
) -> None:
    if request.method == "HEAD":
        body = b""
    lines = [f"HTTP/1.1 {status} Injected", *(f"{name}: {value}" for name, value in headers.items())]
    if "Content-Length" not in headers:
        lines.append(f"Content-Length: {len(body)}")
    writer.write("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n")
    shown = body if cut_at is None else body[:cut_at]
    step = max(1, int(rate / _CHUNKS_PER_S)) if rate else max(1, len(shown))
    for start in range(0, len(shown), step):
        writer.write(shown[start : start + step])
        await writer.drain()
        if rate:
            await asyncio.sleep(step / rate)
    await writer.drain()


def _cut(writer: asyncio.StreamWriter) -> None:
    """Reset the connection: unsent data is discarded, and the client sees an error instead of an orderly end."""
    with contextlib.suppress(OSError, ValueError):
        sock: socket.socket = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
