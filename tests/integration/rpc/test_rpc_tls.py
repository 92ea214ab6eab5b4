"""TLS and mTLS on real servers, and servers that must not listen without them."""

import asyncio

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millrace.client import Client
from millrace.errors import InvalidSpecError, UnavailableError
from millrace.rpc.access import ClientAccess
from millrace.rpc.probe import probe
from millrace.telemetry.settings import Settings
from millrace_testing.certificates import Authority, Pair
from millrace_testing.protected_servers import NAMES, SOON_S, heartbeat, list_runs, refused, serving


async def test_plain_text_client_of_a_tls_server(running_server, place):
    async with serving(running_server, place.settings()) as (running, runs, _):
        error = await refused(running.address, place.client(tls_ca=None), expected=UnavailableError)
        assert error.reason == "HUNG_UP"
        assert "MILLRACE_TLS_CA" in (error.remedy or "")
        assert runs.calls == 0


async def test_tls_client_of_a_plain_text_server(running_server, place):
    async with serving(running_server, place.settings(tls_cert=None, tls_key=None)) as (running, _, _):
        error = await refused(running.address, place.client(), expected=UnavailableError)
        assert error.reason == "TLS_NOT_SPOKEN"


@pytest.mark.parametrize(
    ("server", "client", "reason"),
    [
        ({"days": -1}, {}, "TLS_CERTIFICATE_EXPIRED"),
        ({"hosts": ("elsewhere.example",)}, {}, "TLS_NAME_MISMATCH"),
        ({}, {"other_ca": True}, "TLS_NOT_TRUSTED"),
    ],
)
async def test_clients_refuse_wrong_certificates(running_server, place, server, client, reason):
    pair = place.authority.issue("wrong", **server)
    settings = place.settings(tls_cert=str(pair.cert), tls_key=str(pair.key))
    options = {"tls_ca": str(Authority(place.directory, "other").path)} if client else {}
    async with serving(running_server, settings) as (running, runs, _):
        error = await refused(running.address, place.client(**options), expected=UnavailableError)
        assert error.reason == reason
        assert error.remedy
        assert runs.calls == 0


async def test_a_client_may_expect_another_name(running_server, place):
    pair = place.authority.issue("named", hosts=("millrace.internal",))
    async with serving(running_server, place.settings(tls_cert=str(pair.cert), tls_key=str(pair.key))) as (run, _, _):
        await list_runs(run.address, place.client(tls_server_name="millrace.internal"))


async def test_mtls_lets_in_who_has_a_certificate_of_the_ca(running_server, place):
    other = Authority(place.directory / "other", "other-ca")
    settings = place.settings(tls_client_ca=str(place.authority.path), tokens_file=None, worker_token_file=None)

    def showing(pair: Pair | None) -> ClientAccess:
        files = {} if pair is None else {"tls_cert": str(pair.cert), "tls_key": str(pair.key)}
        return place.client(token_file=None, **files)

    async with serving(running_server, settings) as (running, runs, workers):
        good = place.authority.issue("client")
        await list_runs(running.address, showing(good))
        await heartbeat(running.address, showing(good))
        for bad in (None, other.issue("foreign"), place.authority.issue("old", days=-1)):
            error = await refused(running.address, showing(bad), expected=UnavailableError)
            assert error.reason == "HUNG_UP"
        assert (runs.calls, workers.calls) == (1, 1)


async def test_mtls_does_not_replace_the_tokens_that_are_set(running_server, place):
    settings = place.settings(tls_client_ca=str(place.authority.path))
    pair = place.authority.issue("client")
    files = {"tls_cert": str(pair.cert), "tls_key": str(pair.key)}
    async with serving(running_server, settings) as (running, _, _):
        await list_runs(running.address, place.client(**files))
        await refused(running.address, place.client(**files, token_file=None))


async def test_certificates_are_renewed_without_a_restart(running_server, place):
    """The server's at its next handshake, the client's trust at its next call; half a renewal changes nothing."""
    async with serving(running_server, place.settings()) as (running, _, _):
        new = Authority(place.directory / "new", "new-ca")
        fresh = new.issue("fresh")
        async with Client(running.address, access=place.client()) as old_client:
            await old_client.runs.list()
            place.server.cert.write_bytes(fresh.cert.read_bytes())  # the key of the old one: does not fit
            await list_runs(running.address, place.client())
            place.server.key.write_bytes(fresh.key.read_bytes())
            await list_runs(running.address, place.client(tls_ca=str(new.path)))
            await old_client.runs.list()  # its connection is from before
            place.authority.path.write_bytes(new.path.read_bytes())  # the client's CA file changes under it
            await old_client.runs.list()
            await list_runs(running.address, place.client())


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({}, ["MILLRACE_LISTEN", "MILLRACE_TOKENS_FILE", "MILLRACE_WORKER_TOKEN_FILE"]),
        ({"tls_cert", "tls_key"}, ["MILLRACE_TOKENS_FILE", "MILLRACE_WORKER_TOKEN_FILE"]),
        ({"tls_cert", "tls_key", "tokens_file"}, ["MILLRACE_WORKER_TOKEN_FILE"]),
        ({"tokens_file", "worker_token_file"}, ["MILLRACE_LISTEN"]),
    ],
)
async def test_unprotected_servers_beyond_loopback_do_not_start(running_server, place, settings, fields):
    whole = place.settings()
    chosen = Settings(**{name: getattr(whole, name) for name in settings})
    with pytest.raises(InvalidSpecError) as caught:
        async with serving(running_server, chosen, address="0.0.0.0:0"):
            pytest.fail("it started")
    assert [violation.field for violation in caught.value.violations] == fields
    assert "MILLRACE_INSECURE=1" in (caught.value.remedy or "")
    if "MILLRACE_LISTEN" in fields:
        assert caught.value.violations[0].value == "0.0.0.0:0"


async def test_beyond_loopback_with_protection_or_with_the_flag(running_server, place):
    async with serving(running_server, place.settings(), address="0.0.0.0:0") as (running, _, _):
        await list_runs(running.address, place.client())
    async with serving(running_server, Settings(insecure=True), address="0.0.0.0:0") as (running, _, _):
        await list_runs(running.address, ClientAccess.plain())


async def test_the_plain_health_port_tells_the_health_and_nothing_else(running_server, place):
    from millrace.local.redis import free_port

    address = f"127.0.0.1:{free_port()}"
    async with serving(running_server, place.settings(health_listen=address)):
        assert await asyncio.to_thread(probe, address, access=ClientAccess.plain())
        async with grpc.aio.insecure_channel(address) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            answer = await check(health_pb2.HealthCheckRequest(service=NAMES[0]), timeout=SOON_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            for method in ("/millrace.v1.RunService/ListRuns", "/grpc.reflection.v1alpha.ServerReflection/X"):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary(method)(b"", timeout=SOON_S)
                assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
