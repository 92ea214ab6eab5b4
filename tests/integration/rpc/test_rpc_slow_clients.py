"""A gRPC server under a hundred connections that never become one: calls are answered, and the connections end."""

import asyncio
import contextlib

import pytest
from certificates import Authority
from grpc_health.v1 import health_pb2, health_pb2_grpc
from patience import patient

from millrace.rpc import serve as module
from millrace.rpc.access import ClientAccess, ServerAccess
from millrace.rpc.channel import open_channel
from millrace.telemetry.settings import Settings

CLIENTS = 100
HANDSHAKE_S = 3.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
CLIENT_HELLO = b"\x16\x03\x01\x02\x00" + bytes(512)


async def trickle(port: int, data: bytes) -> float:
    """Sends a byte now and then and never all of them; returns after how many seconds the server hung up."""
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


@pytest.mark.parametrize("is_tls", [False, True])
async def test_half_open_connections_hold_nobody_up_and_end(running_server, tmp_path, monkeypatch, is_tls: bool):
    options = [(name, value) for name, value in module.SERVER_OPTIONS if "handshake" not in name]
    options.append(("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)))
    monkeypatch.setattr(module, "SERVER_OPTIONS", options)
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
