"""A gRPC server under a hundred connections that never become one: calls are answered, and the connections end."""

import asyncio
import contextlib
import struct
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millrace.rpc import serve as module
from millrace.rpc.access import ClientAccess, ServerAccess
from millrace.rpc.channel import open_channel
from millrace.telemetry.settings import Settings
from millrace_testing.certificates import Authority
from millrace_testing.patience import patient

CLIENTS = 100
HANDSHAKE_S = 3.0
IDLE_S = 2.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
CLIENT_HELLO = b"\x16\x03\x01\x02\x00" + bytes(512)


async def trickle(port: int, data: bytes) -> float:
    """Return sends a byte sometimes and never all of them; returns after how many seconds the server hung up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    loop = asyncio.get_running_loop()
    began = loop.time()
    ended = asyncio.create_task(reader.read(-1))
    with contextlib.suppress(ConnectionError):
        for byte in data[:-1]:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.wait({ended}, timeout=0.3)
            if ended.done():
                break
    await asyncio.gather(ended, return_exceptions=True)
    writer.close()
    return loop.time() - began


def test_the_bound_is_what_servers_are_made_with():
    assert dict(module.SERVER_OPTIONS)["grpc.server_handshake_timeout_ms"] == module.HANDSHAKE_S * 1000 == 10_000
    assert dict(module.SERVER_OPTIONS)["grpc.max_connection_idle_ms"] == module.IDLE_S * 1000 == 120_000


def shortened(option: str, seconds: float) -> list[tuple[str, Any]]:
    """Return the options of servers with another bound."""
    assert option in dict(module.SERVER_OPTIONS)
    return [*((name, value) for name, value in module.SERVER_OPTIONS if name != option), (option, int(seconds * 1000))]


@pytest.mark.parametrize("is_tls", [False, True])
async def test_half_open_connections_hold_nobody_up_and_end(running_server, tmp_path, monkeypatch, is_tls: bool):
    monkeypatch.setattr(module, "SERVER_OPTIONS", shortened("grpc.server_handshake_timeout_ms", HANDSHAKE_S))
    access, client = ServerAccess(), ClientAccess.plain()
    if is_tls:
        authority = Authority(tmp_path)
        pair = authority.issue("server")
        access = ServerAccess.of(Settings(tls_cert=str(pair.cert), tls_key=str(pair.key)))
        client = ClientAccess.public(Settings(tls_ca=str(authority.path), tls_server_name="localhost"))
    async with running_server(lambda server, draining: [], access=access) as server:
        held = [asyncio.create_task(trickle(server.port, CLIENT_HELLO if is_tls else PREFACE)) for _ in range(CLIENTS)]
        async with open_channel(server.address, access=client) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for _ in range(5):
                await asyncio.sleep(0.2)
                answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=patient(5.0))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            seconds = await asyncio.wait_for(asyncio.gather(*held), 60)
            assert max(seconds) < patient(HANDSHAKE_S + 3.0), "trickling bytes must not prolong it"
            await health.Check(health_pb2.HealthCheckRequest(), timeout=patient(5.0))


def frame(kind: int, flags: int, stream: int, payload: bytes, *, length: int | None = None) -> bytes:
    """Return a frame of HTTP/2."""
    size = struct.pack(">I", len(payload) if length is None else length)
    return size[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


HEADERS, SETTINGS, CONTINUATION, ACK = 1, 4, 9, 1
ENDLESS = {
    "a frame whose bytes trickle": (frame(HEADERS, 0, 1, b"", length=10_000), b"\x82"),
    "frames that go on": (frame(HEADERS, 0, 1, b""), frame(CONTINUATION, 0, 1, b"")),
}


async def never_end(port: int, begin: bytes, more: bytes) -> float:
    """Return a header that trickles and does not end; returns after how many seconds the server hung up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    loop = asyncio.get_running_loop()
    began = loop.time()
    ended = asyncio.create_task(reader.read(-1))
    with contextlib.suppress(ConnectionError):
        writer.write(PREFACE + frame(SETTINGS, 0, 0, b"") + frame(SETTINGS, ACK, 0, b"") + begin)
        while not ended.done():
            writer.write(more)
            await writer.drain()
            await asyncio.wait({ended}, timeout=0.5)
    await asyncio.gather(ended, return_exceptions=True)
    writer.close()
    return loop.time() - began


async def test_headers_without_an_end_end_while_streams_and_later_calls_go_on(running_server, monkeypatch):
    """Without the bound such a connection stayed for as long as bytes came: it was still open after 300 s."""
    monkeypatch.setattr(module, "SERVER_OPTIONS", shortened("grpc.max_connection_idle_ms", IDLE_S))
    async with running_server(lambda server, draining: []) as server, open_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        watching = health.Watch(health_pb2.HealthCheckRequest(), timeout=60)
        assert (await watching.read()).status == health_pb2.HealthCheckResponse.SERVING
        held = [never_end(server.port, *parts) for parts in ENDLESS.values() for _ in range(CLIENTS // 2)]
        async with asyncio.timeout(60):
            assert max(await asyncio.gather(*held)) < patient(2 * IDLE_S + 3.0)
        assert not watching.done(), "a stream is no idleness"
        watching.cancel()
        await asyncio.sleep(1.5 * IDLE_S)
        answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=patient(5.0))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING, "over a new connection"
