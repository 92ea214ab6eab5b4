"""Real gRPC servers on loopback, in this process."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc.aio
import pytest

from millrace.rpc.serve import Shutdown, serve
from millrace_testing.protected_servers import Place


class Running:
    """A server under test."""

    def __init__(self) -> None:
        self.port = 0
        self.stopping = asyncio.Event()
        self.draining: asyncio.Event | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


@contextlib.asynccontextmanager
async def run_server(register: Callable, *, address: str = "127.0.0.1:0", **options) -> AsyncIterator[Running]:
    """`serve` in a task until the block ends."""
    running = Running()
    started = asyncio.Event()

    def on_started(port: int) -> None:
        running.port = port
        started.set()

    def remember(server: grpc.aio.Server, draining: asyncio.Event) -> list[str]:
        running.draining = draining
        return register(server, draining)

    shutdown = Shutdown(drain_s=options.pop("drain_s", 0.0), grace_s=options.pop("grace_s", 1.0))
    options = {"shutdown": shutdown, "handle_signals": False, **options}
    task = asyncio.create_task(serve(address, remember, on_started=on_started, stopping=running.stopping, **options))
    waiter = asyncio.create_task(started.wait())
    await asyncio.wait((task, waiter), timeout=20, return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()
    try:
        if task.done():
            await task
        yield running
    finally:
        running.stopping.set()
        await asyncio.wait_for(task, 20)


@pytest.fixture
def running_server():
    return run_server


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)
