"""TLS, mTLS and bearer tokens on real servers: who gets in, what others hear, what changes without a restart."""

import asyncio
import contextlib
import datetime
import io
import logging
import time
from pathlib import Path

import grpc
import grpc.aio
import pytest
from certificates import Authority, Pair
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from millrace.client import Client
from millrace.errors import InvalidSpecError, InvalidStateError, UnauthenticatedError, UnavailableError
from millrace.internal.v1 import worker_service_pb2 as worker_pb2
from millrace.internal.v1 import worker_service_pb2_grpc
from millrace.rpc.access import ClientAccess, ServerAccess
from millrace.rpc.channel import call, open_channel, stream
from millrace.rpc.probe import probe
from millrace.rpc.tokens import new_token, token_line
from millrace.rpc.worker import WorkerAgent
from millrace.telemetry import logging as millrace_logging
from millrace.telemetry.settings import Settings
from millrace.v1 import run_service_pb2 as pb
from millrace.v1.run_service_pb2_grpc import RunServiceServicer, RunServiceStub, add_RunServiceServicer_to_server

NAMES = ["millrace.v1.RunService", "millrace.internal.v1.WorkerService"]
SOON_S = 10.0


class Runs(RunServiceServicer):
    """Answers every unary call it implements, and streams until it is told to end."""

    def __init__(self) -> None:
        self.calls = 0
        self.next = asyncio.Event()

    async def ListRuns(self, request, context):
        self.calls += 1
        return pb.ListRunsResponse()

    async def WatchRun(self, request, context):
        self.calls += 1
        while True:
            yield pb.WatchRunResponse()
            await self.next.wait()
            self.next.clear()


class Workers(worker_service_pb2_grpc.WorkerServiceServicer):
    calls = 0

    async def RegisterWorker(self, request, context):
        self.calls += 1
        return worker_pb2.RegisterWorkerResponse(heartbeat_seconds=0.05, lease_seconds=5)

    async def Heartbeat(self, request, context):
        self.calls += 1
        return worker_pb2.HeartbeatResponse()


class Place:
    """Certificates, token files and settings of one deployment, in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.authority = Authority(directory / "ca")
        self.server = self.authority.issue("server")
        self.tokens = directory / "tokens"
        self.workers = directory / "workers"
        self.mine = directory / "mine"
        self.token, self.worker_token = new_token(), new_token()
        self.accept(self.token)
        self.mine.write_text(self.token + "\n")
        self.workers.write_text(self.worker_token + "\n")

    def accept(self, *tokens: str, expires: datetime.datetime | None = None) -> None:
        lines = [token_line(token, f"user{i}", expires=expires) for i, token in enumerate(tokens)]
        self.tokens.write_text("# accepted tokens\n" + "\n".join(lines) + "\n")

    def settings(self, **more) -> Settings:
        base = {
            "tls_cert": str(self.server.cert),
            "tls_key": str(self.server.key),
            "tokens_file": str(self.tokens),
            "worker_token_file": str(self.workers),
        }
        return Settings(**{**base, **more})

    def client(self, **more) -> ClientAccess:
        return ClientAccess.public(
            Settings(**{"tls_ca": str(self.authority.path), "token_file": str(self.mine), **more})
        )

    def peer(self, **more) -> ClientAccess:
        base = {"tls_ca": str(self.authority.path), "worker_token_file": str(self.workers)}
        return ClientAccess.internal(Settings(**{**base, **more}))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@contextlib.asynccontextmanager
async def serving(running_server, settings: Settings, **options):
    runs, workers = Runs(), Workers()

    def register(server, draining):
        add_RunServiceServicer_to_server(runs, server)
        worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(workers, server)
        return NAMES

    async with running_server(register, access=ServerAccess.of(settings), **options) as running:
        yield running, runs, workers


async def list_runs(address: str, access: ClientAccess) -> None:
    async with Client(address, access=access) as client:
        await client.runs.list()


async def heartbeat(address: str, access: ClientAccess) -> None:
    async with open_channel(address, access=access) as channel:
        stub = worker_service_pb2_grpc.WorkerServiceStub(channel)
        await call(stub.Heartbeat, worker_pb2.HeartbeatRequest(), timeout_s=SOON_S)


async def refused(address: str, access: ClientAccess, *, expected=UnauthenticatedError):
    """The error of a ListRuns, which must come soon."""
    began = time.monotonic()
    with pytest.raises(expected) as caught:
        await list_runs(address, access)
    assert time.monotonic() - began < SOON_S
    return caught.value


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
        async with asyncio.timeout(SOON_S):
            while runs.calls == 0:
                await asyncio.sleep(0.01)
        place.accept(new_token())
        runs.next.set()
        with pytest.raises(UnauthenticatedError):
            async with asyncio.timeout(SOON_S):
                await watching


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
            await _until(lambda: workers.calls > 2)
            fresh = new_token()
            place.workers.write_text(fresh)  # servers first: the worker is refused until it has the new token too
            await _until(lambda: known.silence_s > 0.5)
            assert not life.done()
            mine.write_text(fresh)
            await _until(lambda: known.silence_s < 0.3)
            stopping.set()
            await life


async def _until(condition) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():
            await asyncio.sleep(0.02)


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
