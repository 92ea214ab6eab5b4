"""Connections to engines and teachers notice that the other machine is gone."""

import asyncio
import socket

import aiohttp
from aiohttp import web

from millrace.env_server.engine_access import make_session
from millrace.rpc.reach import GONE_S, IDLE_S


async def test_a_connection_to_an_engine_is_looked_after():
    app, seen = web.Application(), asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await seen.wait()
        return response

    app.router.add_get("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        async with make_session() as session, session.get(url, timeout=aiohttp.ClientTimeout(10)) as response:
            assert response.connection is not None and response.connection.transport is not None
            connection = response.connection.transport.get_extra_info("socket")
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            if hasattr(socket, "TCP_KEEPIDLE"):
                assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == IDLE_S
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * GONE_S
            seen.set()
    finally:
        await runner.cleanup()
