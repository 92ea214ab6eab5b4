"""The bounds of HTTP servers: a client that trickles, floods or does not read is cut off, and keeps no other out."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator

import httpx
import pytest

from millrace.errors import UnavailableError
from millrace.rpc.http_server import MAX_HEADER_BYTES, HttpBounds, HttpServer
from millrace.rpc.tls import ServerFiles
from millrace_testing.certificates import Authority
from millrace_testing.patience import patient
from millrace_testing.polling import until

REQUEST_S = 1.0
ASK = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
BIG = b"x" * (32 << 20)  # more than the sockets of both ends hold


class App:
    """Answers at once; `/slow` when it is told to; `/big` with more than fits into sockets."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.began = 0
        self.ended = 0

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        self.began += 1
        try:
            if scope["path"] == "/slow":
                await self.go_on.wait()
            if scope["path"] == "/body":
                while (await receive()).get("more_body"):
                    pass
            body = BIG if scope["path"] == "/big" else b"ok"
            length = str(len(body)).encode()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
            await send({"type": "http.response.body", "body": body})
        finally:
            self.ended += 1


@contextlib.asynccontextmanager
async def serving(app: App, *, tls: ServerFiles | None = None, **bounds) -> AsyncIterator[HttpServer]:
    base = {"connections": 8, "request_s": REQUEST_S, "idle_s": 30.0, "message_bytes": 1 << 20, "shutdown_s": 1.0}
    every = HttpBounds(**{**base, **bounds})
    server = await HttpServer.start(app, "127.0.0.1", 0, tls=tls, bounds=every, field="MILLRACE_TEST_LISTEN")
    try:
        yield server
    finally:
        app.go_on.set()
        await server.stop()


async def trickle(
    server: HttpServer,
    begin: bytes,
    more: bytes = b"x",
    *,
    every_s: float = 0.1,
    connected: asyncio.Semaphore | None = None,
) -> float:
    """Return sends `begin`, then `more` again and again; returns after how many seconds the server hung up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    loop = asyncio.get_running_loop()
    began = loop.time()
    if connected is not None:
        connected.release()
    ended = asyncio.create_task(reader.read(-1))
    with contextlib.suppress(ConnectionError):
        writer.write(begin)
        while not ended.done():
            writer.write(more)
            await writer.drain()
            await asyncio.wait({ended}, timeout=every_s)
    await asyncio.gather(ended, return_exceptions=True)
    writer.close()
    return loop.time() - began


@pytest.mark.parametrize("is_tls", [False, True])
async def test_a_hundred_tricklers_keep_nobody_out_and_end(tmp_path, is_tls: bool):
    """Half-open TLS handshakes count from the first byte, too, of which uvicorn knows nothing."""
    tls, context, scheme, begin = None, False, "http", b"GET / HTTP/1.1\r\nX: "
    if is_tls:
        authority = Authority(tmp_path)
        pair = authority.issue("server")
        tls, scheme = ServerFiles(cert=pair.cert, key=pair.key), "https"
        context, begin = ssl.create_default_context(cafile=str(authority.path)), b"\x16\x03\x01\x02\x00"
    async with serving(App(), tls=tls) as server:
        connected = asyncio.Semaphore(0)
        held = [asyncio.create_task(trickle(server, begin, connected=connected)) for _ in range(100)]
        for _ in held:
            await connected.acquire()
        for _ in range(5):
            async with httpx.AsyncClient(verify=context, timeout=patient(5.0)) as client:
                assert (await client.get(f"{scheme}://localhost:{server.port}/")).text == "ok"
            await asyncio.sleep(0.1)
        async with asyncio.timeout(30):
            seconds = await asyncio.gather(*held)
        assert max(seconds) < patient(REQUEST_S + 2.0)


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"", b""),  # says nothing
        (ASK, b"x"),  # begins a second request and does not end it
        (b"POST / HTTP/1.1\r\nContent-Length: 900000\r\n\r\n", b"x"),  # trickles a body that has been answered
        (b"GET /big HTTP/1.1\r\n\r\n", b""),  # asks, and does not read
    ],
)
async def test_what_does_not_get_ahead_is_cut_off(begin, more):
    async with serving(App()) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 10)
        writer.write(begin)
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            while loop.time() - began < patient(REQUEST_S + 5.0):
                if more:
                    writer.write(more)
                    await writer.drain()
                elif not begin:
                    await asyncio.wait_for(reader.readexactly(1), patient(REQUEST_S + 5.0))
                else:
                    writer.write(b"\r\n")  # between two requests, and shows when the connection has gone
                    await writer.drain()
                await asyncio.sleep(0.05)
        writer.close()


async def test_headers_and_bodies_have_a_size():
    app = App()
    async with serving(app, request_s=30.0) as server:
        header = b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 100
        assert await trickle(server, header, b"Y: " + b"z" * 4096 + b"\r\n", every_s=0.001) < patient(20.0)
        assert app.began == 0 and MAX_HEADER_BYTES < 1 << 20
        framed = b"POST /body HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
        assert await trickle(server, framed, b"1;" + b"e" * 8192 + b"\r\nx\r\n", every_s=0.001) < patient(20.0)
        trailers = framed + b"0\r\n"
        assert await trickle(server, trailers, b"T: " + b"z" * 8192 + b"\r\n", every_s=0.001) < patient(20.0)


async def test_who_comes_when_every_place_is_busy_waits_for_one():
    app = App()
    url_of = "http://127.0.0.1:{}".format
    async with serving(app, connections=4) as server, httpx.AsyncClient(timeout=patient(20.0)) as client:
        asked = [asyncio.create_task(client.get(f"{url_of(server.port)}/slow")) for _ in range(4)]
        await until(lambda: app.began >= 4, timeout_s=patient(10.0))
        asked += [asyncio.create_task(client.get(f"{url_of(server.port)}/slow")) for _ in range(4)]
        await asyncio.sleep(2 * REQUEST_S)
        assert app.began == 4 and not any(one.done() for one in asked), "an answer takes as long as it takes"
        app.go_on.set()
        assert {(await one).text for one in asked} == {"ok"}


async def test_an_exchange_has_an_end_where_it_is_bounded():
    app = App()
    async with serving(app, exchange_s=REQUEST_S) as server, httpx.AsyncClient(timeout=patient(20.0)) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get(f"http://127.0.0.1:{server.port}/slow")


async def test_the_end_gives_answers_their_time_and_closes_the_rest():
    app = App()
    async with serving(app) as server, httpx.AsyncClient(timeout=patient(20.0)) as client:
        asked = asyncio.create_task(client.get(f"http://127.0.0.1:{server.port}/slow"))
        silent, writer = await asyncio.open_connection("127.0.0.1", server.port)
        await until(lambda: app.began, timeout_s=patient(10.0))
        stopping = asyncio.create_task(server.stop())
        assert await asyncio.wait_for(silent.read(), patient(5.0)) == b""
        app.go_on.set()
        assert (await asked).text == "ok"
        await stopping
        writer.close()


async def test_an_answer_that_does_not_come_holds_up_no_end():
    app = App()
    async with serving(app) as server, httpx.AsyncClient(timeout=patient(20.0)) as client:
        asked = asyncio.create_task(client.get(f"http://127.0.0.1:{server.port}/slow"))
        await until(lambda: app.began, timeout_s=patient(10.0))
        async with asyncio.timeout(patient(6.0)):
            await server.stop()
        with pytest.raises(httpx.HTTPError):
            (await asked).raise_for_status()
        assert app.ended == 1


async def test_an_address_that_is_taken_is_named_with_its_variable():
    async with serving(App()) as server:
        with pytest.raises(UnavailableError, match=rf"127\.0\.0\.1:{server.port}: Address already in use") as caught:
            await HttpServer.start(App(), "127.0.0.1", server.port, tls=None, bounds=server.bounds, field="MILLRACE_X")
        assert "MILLRACE_X" in caught.value.remedy
