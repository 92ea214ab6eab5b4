"""The embedded engine's HTTP server under a hundred connections that never become a request."""

import asyncio
import contextlib

import aiohttp
import pytest

from millrace.inference.http import server as module
from millrace.inference.http.server import HttpApi, start_http
from millrace_testing.patience import patient

TRICKLERS = 100
REQUEST_S = 2.0


async def trickle(port: int, connected: asyncio.Semaphore) -> float:
    """Return begins a header that does not end; returns after how many seconds the server hung up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    loop = asyncio.get_running_loop()
    began = loop.time()
    connected.release()
    ended = asyncio.create_task(reader.read(-1))
    with contextlib.suppress(ConnectionError):
        writer.write(b"POST /v1/completions HTTP/1.1\r\nX: ")
        while not ended.done():
            writer.write(b"x")
            await writer.drain()
            await asyncio.wait({ended}, timeout=0.2)
    await asyncio.gather(ended, return_exceptions=True)
    writer.close()
    return loop.time() - began


@pytest.mark.parametrize("connections", [16, 4096])
async def test_they_end_and_generation_goes_on(served, monkeypatch, connections: int):
    monkeypatch.setattr(module, "MAX_CONNECTIONS", connections)
    monkeypatch.setattr(module, "REQUEST_S", REQUEST_S)
    server = await start_http(HttpApi(served.engine, served.slot), "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.port}"
    connected = asyncio.Semaphore(0)
    held = [asyncio.create_task(trickle(server.port, connected)) for _ in range(TRICKLERS)]
    for _ in held:
        await connected.acquire()
    for _ in range(5):
        async with (
            aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(patient(10.0))) as session,
            session.post("/v1/completions", json={"prompt": "a", "max_tokens": 4}) as answer,
        ):
            assert answer.status == 200 and (await answer.json())["choices"]
        await asyncio.sleep(0.1)
    async with asyncio.timeout(60):
        assert max(await asyncio.gather(*held)) < patient(REQUEST_S + 3.0)
    await server.stop()


async def test_the_bounds_are_those_that_the_docs_say():
    assert (module.REQUEST_S, module.IDLE_S, module.MAX_CONNECTIONS) == (10.0, 75.0, 4096)
