"""Bearer tokens on real servers: who gets in, what others hear, what changes without a restart."""

import asyncio
import datetime
import io
import logging
import time
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from millrace.client import Client
from millrace.errors import InvalidStateError, PermissionDeniedError, UnauthenticatedError, UnavailableError
from millrace.internal.v1 import worker_service_pb2 as worker_pb2
from millrace.rpc.channel import open_channel, stream
from millrace.rpc.probe import probe
from millrace.rpc.tokens import new_token, token_line
from millrace.rpc.worker import WorkerAgent
from millrace.telemetry import logging as millrace_logging
from millrace.telemetry.settings import Settings
from millrace.v1 import run_service_pb2 as pb
from millrace.v1.run_service_pb2_grpc import RunServiceStub
from millrace_testing.polling import until
from millrace_testing.protected_servers import SOON_S, heartbeat, list_runs, refused, serving


async def test_tls_and_the_right_token_let_calls_in_and_health_stays_open(running_server, place):
    async with serving(running_server, place.settings()) as (running, runs, workers):
        await list_runs(running.address, place.client())
        await heartbeat(running.address, place.peer())
        assert (runs.calls, workers.calls) == (1, 1)
        no_token = place.client(token_file=None)
        assert await asyncio.to_thread(probe, running.address, access=no_token)


async def test_every_refusal_is_the_same_and_tells_nothing(running_server, place):
    """Unknown, malformed, expired and foreign tokens, methods that exist or not: one answer, and no handler runs."""
    expired, foreign = new_token(), new_token()
    past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=1)
    place.tokens.write_text(token_line(place.token, "alice") + "\n" + token_line(expired, "bob", expires=past) + "\n")
    headers = [
        (),
        (("authorization", f"Bearer {foreign}"),),
        (("authorization", f"Bearer {expired}"),),
        (("authorization", place.token),),
        (("authorization", f"Basic {place.token}"),),
        (("authorization", f"Bearer {place.token}"), ("authorization", f"Bearer {place.token}")),
        (("authorization", f"Bearer {place.worker_token}"),),
        (("authorization", "Bearer "),),
    ]
    public = ["ListRuns", "GetRun", "CreateRun", "WatchRun"]
    answers = set()
    async with serving(running_server, place.settings()) as (running, runs, workers):
        credentials = place.client().channel_credentials()
        async with grpc.aio.secure_channel(running.address, credentials) as channel:

            async def ask(method: str, metadata) -> None:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary(method)(b"", metadata=metadata, timeout=SOON_S)
                names = sorted(key for key, _ in caught.value.trailing_metadata() or ())
                answers.add((caught.value.code(), caught.value.details(), tuple(names)))

            for metadata in headers:
                for method in public:
                    await ask(f"/millrace.v1.RunService/{method}", metadata)
            for metadata in (*headers[:6], *headers[7:]):
                await ask("/no.such.Service/Method", metadata)
                await ask("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", metadata)
                await ask("/millrace.v1.RunService/NoSuchMethod", metadata)
                await ask("/millrace.internal.v1.WorkerService/Heartbeat", metadata)
            await ask("/millrace.internal.v1.WorkerService/Heartbeat", headers[0])
            mine = (("authorization", f"Bearer {place.token}"),)
            await ask("/millrace.internal.v1.WorkerService/RegisterWorker", mine)  # a user is no worker
        assert (runs.calls, workers.calls) == (0, 0)
    assert len(answers) == 1
    code, details, _ = answers.pop()
    assert (code, details) == (grpc.StatusCode.UNAUTHENTICATED, "a valid bearer token is required")


async def test_a_valid_token_sees_what_does_not_exist(running_server, place):
    async with (
        serving(running_server, place.settings()) as (running, _, _),
        open_channel(running.address, access=place.client()) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/no.such.Service/Method")(b"", timeout=SOON_S)
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def reflected(channel: grpc.aio.Channel, *, metadata=()) -> list[str]:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    call_ = stub.ServerReflectionInfo(iter([request]), metadata=metadata, timeout=SOON_S)
    return [service.name async for answer in call_ for service in answer.list_services_response.service]


async def test_reflection_needs_a_token(running_server, place):
    async with serving(running_server, place.settings()) as (running, _, _):
        credentials = place.client().channel_credentials()
        async with grpc.aio.secure_channel(running.address, credentials) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await reflected(channel)
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
            assert "millrace.v1.RunService" in await reflected(
                channel, metadata=(("authorization", f"Bearer {place.token}"),)
            )


async def test_tokens_are_added_and_revoked_without_a_restart(running_server, place):
    other = new_token()
    theirs = place.directory / "theirs"
    theirs.write_text(other)
    async with serving(running_server, place.settings()) as (running, _, _):
        await list_runs(running.address, place.client())
        await refused(running.address, place.client(token_file=str(theirs)))
        place.accept(other)
        await list_runs(running.address, place.client(token_file=str(theirs)))
        await refused(running.address, place.client())
        place.tokens.unlink()  # nobody, rather than everybody
        await refused(running.address, place.client(token_file=str(theirs)))
        place.accept(place.token)
        await list_runs(running.address, place.client())
        async with Client(running.address, access=place.client()) as client:  # one channel, and its file changes
            await client.runs.list()
            place.accept(other)
            with pytest.raises(UnauthenticatedError):
                await client.runs.list()
            place.mine.write_text(other)
            await client.runs.list()


async def test_a_token_for_reading_reads_and_hears_why_it_does_not_write(running_server, place):
    place.tokens.write_text(token_line(place.token, "eve", may_write=False) + "\n")
    async with serving(running_server, place.settings()) as (running, _, _):
        async with Client(running.address, access=place.client()) as client:
            await client.runs.list()
            with pytest.raises(PermissionDeniedError, match="this token may only read") as caught:
                await client.runs.cancel("letters-1")
        assert caught.value.reason == "READ_ONLY_TOKEN" and "--read-only" in (caught.value.remedy or "")


async def test_a_malformed_line_does_not_keep_a_revocation_from_working(running_server, place, caplog):
    async with serving(running_server, place.settings()) as (running, _, _):
        secret = new_token()
        place.tokens.write_text(f"{secret}\n")  # somebody pasted the token instead of its line
        with caplog.at_level(logging.ERROR, logger="millrace"):
            await refused(running.address, place.client())
        assert "secret file is wrong" in caplog.text
        assert secret not in caplog.text


@pytest.mark.parametrize("how", ["revoked", "expires"])
async def test_a_stream_ends_with_its_token(running_server, place, how):
    if how == "expires":
        soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=3)
        place.accept(place.token, expires=soon)
    async with (
        serving(running_server, place.settings()) as (running, runs, _),
        open_channel(running.address, access=place.client()) as channel,
    ):
        stub = RunServiceStub(channel)
        answers = stream(stub.WatchRun, pb.WatchRunRequest(name="runs/x"), timeout_s=30)
        assert await anext(answers) == pb.WatchRunResponse()
        runs.next.set()
        assert await anext(answers) == pb.WatchRunResponse()
        if how == "revoked":
            place.accept(new_token())
            runs.next.set()
            with pytest.raises(UnauthenticatedError):
                await anext(answers)
            return
        began = time.monotonic()
        with pytest.raises(UnauthenticatedError):
            while time.monotonic() - began < 20:
                runs.next.set()
                await anext(answers)


async def test_a_watching_client_ends_with_its_token_and_does_not_try_for_ever(running_server, place):
    async with (
        serving(running_server, place.settings()) as (running, runs, _),
        Client(running.address, access=place.client()) as client,
    ):
        watching = asyncio.create_task(anext(client.runs.watch("runs/x")))
        await until(lambda: runs.calls != 0, timeout_s=SOON_S)
        place.accept(new_token())
        runs.next.set()
        with pytest.raises(UnauthenticatedError):
            async with asyncio.timeout(SOON_S):
                await watching


def test_tokens_are_not_sent_in_plain_text_beyond_this_machine(place):
    with pytest.raises(InvalidStateError) as caught:
        open_channel("orchestrator.example:50051", access=place.client(tls_ca=None))
    assert "--tls-ca" in (caught.value.remedy or "")
    assert place.token not in str(caught.value)


async def test_a_worker_without_a_valid_token_ends_at_once_and_one_that_was_known_waits(running_server, place):
    async with serving(running_server, place.settings()) as (running, _, workers):

        def agent(access_file: Path, monkey: pytest.MonkeyPatch) -> WorkerAgent:
            monkey.setenv("MILLRACE_TLS_CA", str(place.authority.path))
            monkey.setenv("MILLRACE_WORKER_TOKEN_FILE", str(access_file))
            return WorkerAgent(
                running.address,
                worker_pb2.Worker(worker_id="w", kind=worker_pb2.WORKER_KIND_TRAINER),
                worker_pb2.HeartbeatRequest,
                lambda reply: None,
            )

        wrong = place.directory / "wrong"
        wrong.write_text(new_token())
        with pytest.MonkeyPatch.context() as monkey:
            with pytest.raises(UnauthenticatedError):
                async with asyncio.timeout(SOON_S):
                    await agent(wrong, monkey).run(asyncio.Event())
            mine = place.directory / "worker"
            mine.write_text(place.worker_token)
            known, stopping = agent(mine, monkey), asyncio.Event()
            life = asyncio.create_task(known.run(stopping))
            await until(lambda: workers.calls > 2, timeout_s=SOON_S)
            fresh = new_token()
            place.workers.write_text(fresh)  # servers first: the worker is refused until it has the new token too
            await until(lambda: known.silence_s > 0.5, timeout_s=SOON_S)
            assert not life.done()
            mine.write_text(fresh)
            await until(lambda: known.silence_s < 0.3, timeout_s=SOON_S)
            stopping.set()
            await life


async def test_no_secret_reaches_a_log_or_an_error(running_server, place, capfd):
    """All of the log at DEBUG, of refused and of accepted calls, and what gRPC writes itself."""
    foreign = place.directory / "foreign"
    foreign.write_text(new_token())
    text = io.StringIO()
    millrace_logging.setup("test", level="DEBUG", json_lines=True, stream=text)
    try:
        async with serving(running_server, place.settings()) as (running, _, _):
            await list_runs(running.address, place.client())
            error = await refused(running.address, place.client(token_file=str(foreign)))
            await refused(running.address, place.client(tls_ca=None), expected=UnavailableError)
            place.accept(new_token())
            await refused(running.address, place.client())
    finally:
        logging.getLogger().handlers.clear()
        logging.getLogger().setLevel(logging.WARNING)
    out, err = capfd.readouterr()
    everything = text.getvalue() + out + err + repr(error) + str(error)
    assert "call refused" in everything
    for secret in (place.token, place.worker_token, foreign.read_text()):
        assert secret not in everything
        assert secret.removeprefix("mrt_")[:20] not in everything
    assert "PRIVATE KEY" not in everything
    assert place.token not in repr(Settings(token=place.token))
