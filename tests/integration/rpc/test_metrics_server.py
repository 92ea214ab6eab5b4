"""GET /metrics of a service: the numbers, who gets them, and that nobody can hold the server up."""

import asyncio
import contextlib
import socket
import ssl
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import Counter

from millrace.errors import InvalidSpecError, UnavailableError
from millrace.rpc import metrics_server as module
from millrace.rpc.access import ServerAccess
from millrace.rpc.metrics_server import MAX_CONNECTIONS, metrics_server
from millrace.rpc.tokens import engine_token, new_token, token_line
from millrace.telemetry import waits
from millrace.telemetry.metrics import Family, StateCollector, make_registry
from millrace.telemetry.settings import Settings
from millrace_testing.certificates import Authority

PLAIN = ServerAccess()
LOCAL = "127.0.0.1:0"
ANSWER_S = 20.0


async def get(port: int, path: str = "/metrics", *, token: str = "", context: ssl.SSLContext | None = None):
    """Status and text."""

    def ask() -> tuple[int, str]:
        url = f"http{'s' if context else ''}://localhost:{port}{path}"
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S, context=context) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    return await asyncio.to_thread(ask)


def registry(*collectors):
    return make_registry("trainer", collectors)


async def test_it_serves_what_is_counted_and_what_is_looked_up():
    counted = Counter("millrace_test_total", "Counted.", ["run"], registry=None)
    counted.labels("a").inc(3)
    family, threads = Family("millrace_test_seconds", "Looked up.", ("who",)), []

    def read(sheet):
        threads.append(threading.get_ident())
        sheet.put(family, 1.5, "b")

    async with metrics_server(LOCAL, registry(counted, StateCollector([family], read)), access=PLAIN) as port:
        status, text = await get(port)
    assert status == 200
    assert 'millrace_test_total{run="a"} 3.0' in text
    assert 'millrace_test_seconds{who="b"} 1.5' in text
    assert 'millrace_build_info{service="trainer",version=' in text
    assert "process_resident_memory_bytes" in text
    assert threads == [threading.get_ident()], "the numbers are read where they change: on the loop"


async def test_waits_by_component_of_a_bounded_set():
    held = [
        waits.waiting("a", waits_on="inference-host7-4127-9f3ac1d2", deadline_s=1e-9),
        waits.waiting("b", waits_on="http://10.0.0.1:8000/v1", deadline_s=1e-9),
        waits.waiting("c", waits_on="redis"),
        waits.waiting("d", waits_on="env worker reverse#3", deadline_s=1e-9),
        waits.waiting("e", waits_on="something else", deadline_s=1e-9),
    ]
    with contextlib.ExitStack() as stack:
        for wait in held:
            stack.enter_context(wait)
        async with metrics_server(LOCAL, registry(), access=PLAIN) as port:
            _, text = await get(port)
    overdue = {line for line in text.splitlines() if line.startswith("millrace_waits_overdue{")}
    found = {line.partition('waits_on="')[2].partition('"')[0]: float(line.rpartition(" ")[2]) for line in overdue}
    assert found["inference"] == 2 and found["env worker"] == 1 and found["other"] == 1
    assert found["redis"] == 0 and found["trainer"] == 0, "a wait without a deadline is never overdue"
    assert 'millrace_wait_oldest_seconds{service="trainer",waits_on="redis"} 0.0\n' not in text


async def test_without_an_address_nothing_listens():
    before = threading.active_count()
    async with metrics_server(None, registry(), access=PLAIN) as port:
        assert port == 0 and threading.active_count() == before


@pytest.fixture
def secured(tmp_path: Path):
    """Access with TLS and every kind of token; the tokens by kind."""
    authority = Authority(tmp_path)
    pair = authority.issue("server")
    tokens = {"worker": new_token(), "alice": new_token(), "prometheus": new_token()}
    files = {name: tmp_path / name for name in tokens}
    files["worker"].write_text(tokens["worker"])
    files["alice"].write_text(token_line(tokens["alice"], "alice"))
    files["prometheus"].write_text(tokens["prometheus"])
    settings = Settings(
        tls_cert=str(pair.cert),
        tls_key=str(pair.key),
        worker_token_file=str(files["worker"]),
        tokens_file=str(files["alice"]),
        metrics_token_file=str(files["prometheus"]),
    )
    return ServerAccess.of(settings), ssl.create_default_context(cafile=str(authority.path)), tokens


async def test_tls_and_a_token_are_demanded(secured):
    access, context, tokens = secured
    async with metrics_server("0.0.0.0:0", registry(), access=access) as port:
        for token in tokens.values():
            assert (await get(port, token=token, context=context))[0] == 200
        refused = [await get(port, path, context=context) for path in ("/metrics", "/no/such/path")]
        wrong = (new_token(), engine_token(tokens["worker"]))
        refused += [await get(port, token=token, context=context) for token in wrong]
        assert {status for status, _ in refused} == {401}
        assert {text for _, text in refused} == {"a valid bearer token is required\n"}, "it tells nothing else"
        with pytest.raises((OSError, urllib.error.URLError)):
            await get(port, token=tokens["worker"])  # plain text
        assert (await get(port, "/", token=tokens["worker"], context=context))[0] == 404


def test_the_scrapers_token_opens_nothing_else(secured):
    access, _, tokens = secured
    assert access.admit_http("/metrics", f"Bearer {tokens['prometheus']}").name
    for path in ("/v1/models", "/v1/chat/completions", "/update_weights"):
        with pytest.raises(Exception, match="bearer token is required"):
            access.admit_http(path, f"Bearer {tokens['prometheus']}")
    for method in ("/millrace.v1.RunService/ListRuns", "/millrace.internal.v1.WorkerService/Heartbeat"):
        with pytest.raises(Exception, match="bearer token is required"):
            access.admit(method, [("authorization", f"Bearer {tokens['prometheus']}")])


def test_an_engine_that_knows_only_the_scrapers_token_asks_for_it(tmp_path: Path):
    token, file = new_token(), tmp_path / "token"
    file.write_text(token)
    access = ServerAccess.of(Settings(metrics_token_file=str(file)))
    assert access.admit_http("/metrics", f"Bearer {token}").name
    with pytest.raises(Exception, match="bearer token is required"):
        access.admit_http("/metrics", None)
    access.admit_http("/v1/models", None)


async def test_beyond_loopback_it_does_not_start_unprotected():
    with pytest.raises(InvalidSpecError, match="MILLRACE_METRICS_LISTEN"):
        async with metrics_server("0.0.0.0:0", registry(), access=PLAIN):
            raise AssertionError("it listens")
    async with metrics_server("0.0.0.0:0", registry(), access=ServerAccess(is_insecure=True)) as port:
        assert (await get(port))[0] == 200


async def test_a_taken_port_is_named():
    async with metrics_server(LOCAL, registry(), access=PLAIN) as port:
        with pytest.raises(UnavailableError, match=str(port)) as caught:
            async with metrics_server(f"127.0.0.1:{port}", registry(), access=PLAIN):
                raise AssertionError("it listens")
        assert "MILLRACE_METRICS_LISTEN" in caught.value.remedy


TRICKLERS = 100


@contextlib.contextmanager
def tricklers(port: int, *, begin: bytes):
    """Connections that send `begin`, then a byte of a header every sometimes; yields them."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(TRICKLERS)]
        for one in held:
            with contextlib.suppress(ConnectionError):  # it had to go already
                one.send(begin)
        over = threading.Event()

        def trickle() -> None:
            while not over.wait(0.05):
                for one in held:
                    with contextlib.suppress(OSError):
                        one.send(b"G", socket.MSG_DONTWAIT)

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            yield held
        finally:
            over.set()
            thread.join()


def is_closed(one: socket.socket) -> bool:
    one.settimeout(ANSWER_S)
    try:
        return one.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("is_tls", [False, True])
async def test_a_hundred_tricklers_keep_no_scraper_out(secured, monkeypatch, is_tls: bool):
    monkeypatch.setattr(module, "REQUEST_S", 2.0)
    access, context, tokens = secured if is_tls else (PLAIN, None, {"worker": ""})
    # Of TLS's first message, whose length says that more is to come; of HTTP's header.
    begin = b"\x16\x03\x01\x02\x00" if is_tls else b"GET /metrics HTTP/1.1\r\nX: "
    before = threading.active_count()
    async with metrics_server(LOCAL, registry(), access=access) as port:
        with tricklers(port, begin=begin) as held:
            for _ in range(5):
                status, _ = await get(port, token=tokens["worker"], context=context)
                assert status == 200
            assert threading.active_count() - before <= MAX_CONNECTIONS + 8, "each connection would have a thread"
            for one in held:
                assert await asyncio.to_thread(is_closed, one), "too many at once, or too slow"
        assert (await get(port, token=tokens["worker"], context=context))[0] == 200


async def test_a_loop_that_stands_still_fails_the_scrape(monkeypatch):
    monkeypatch.setattr(module, "ANSWER_S", 0.2)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    free, stood = threading.Event(), threading.Event()

    async def serve(ready: asyncio.Future[int], over: asyncio.Event) -> None:
        async with metrics_server(LOCAL, registry(), access=PLAIN) as port:
            ready.get_loop().call_soon_threadsafe(ready.set_result, port)
            await over.wait()

    def stand_still() -> None:
        stood.set()
        free.wait(ANSWER_S)

    over = asyncio.Event()
    ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    serving = asyncio.run_coroutine_threadsafe(serve(ready, over), loop)
    try:
        async with asyncio.timeout(ANSWER_S):
            port = await ready
        loop.call_soon_threadsafe(stand_still)
        await asyncio.to_thread(stood.wait, ANSWER_S)
        status, text = await get(port)
        assert status == 503 and "does not answer" in text
        free.set()
        monkeypatch.setattr(module, "ANSWER_S", ANSWER_S)
        assert (await get(port))[0] == 200
    finally:
        free.set()
        loop.call_soon_threadsafe(over.set)
        await asyncio.wrap_future(serving)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def test_numbers_that_cannot_be_read_are_an_error_and_no_end():
    def read(sheet):
        raise ValueError("boom")

    async with metrics_server(LOCAL, registry(StateCollector([], read)), access=PLAIN) as port:
        assert await get(port) == (500, "the metrics could not be read; the service's log says why\n")
        assert (await get(port))[0] == 500
