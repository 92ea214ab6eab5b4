"""Every error class through a real server and back; what is not ours; and what must not get out."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from millrace import errors
from millrace.errors import InvalidSpecError, MillraceError, Violation
from millrace.rpc.channel import call, open_channel, stream
from millrace.rpc.interceptors import REQUEST_ID_KEY
from millrace.rpc.status import MAX_VIOLATIONS
from millrace.telemetry import logging as millrace_logging
from millrace.v1 import run_service_pb2 as pb
from millrace.v1.run_service_pb2_grpc import RunServiceServicer, RunServiceStub, add_RunServiceServicer_to_server

NAME = "millrace.v1.RunService"


class Service(RunServiceServicer):
    """Raises what the test puts into `error`; CreateRun echoes; the rest is not overridden."""

    error: BaseException | None = None
    hang = False
    calls = 0

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def GetRun(self, request, context):
        self.calls += 1
        if self.hang:
            await asyncio.sleep(60)
        if self.error is not None:
            raise self.error
        return pb.GetRunResponse()

    async def WatchRun(self, request, context):
        self.calls += 1
        yield pb.WatchRunResponse()
        yield pb.WatchRunResponse()
        if self.error is not None:
            raise self.error
        if self.hang:
            try:
                await asyncio.sleep(60)
            finally:
                self.left.set()

    async def ListRuns(self, request, context):
        await context.abort(grpc.StatusCode.OUT_OF_RANGE, "cursor too old")


@pytest.fixture
async def service(running_server) -> AsyncIterator[tuple[Service, RunServiceStub]]:
    servicer = Service()

    def register(server, draining):
        add_RunServiceServicer_to_server(servicer, server)
        return [NAME]

    async with running_server(register) as server, open_channel(server.address) as channel:
        yield servicer, RunServiceStub(channel)


def make(cls: type[MillraceError]) -> MillraceError:
    more = {"reason": "SOME_REASON", "remedy": "dö this\nthen that", "metadata": {"run": "x", "count": "3"}}
    if issubclass(cls, InvalidSpecError):
        violations = [
            Violation(field="trainer.optim.lr", value="-1", message="must be > 0", source="rl.toml:12"),
            Violation(field="seq_len", message="is missing"),
            Violation(field="env.0.id", value="", message="must not be empty"),
        ]
        return cls(violations, **more)
    return cls("no rün x\nanywhere: 100 %", **more)


def state(error: MillraceError) -> dict:
    return {key: value for key, value in error.__dict__.items() if key != "request_id"}


@pytest.mark.parametrize("cls", list(errors.error_classes()), ids=lambda cls: cls.__name__)
async def test_unary_round_trip(cls: type[MillraceError], service) -> None:
    servicer, stub = service
    servicer.error = make(cls)
    with pytest.raises(MillraceError) as caught:
        await call(stub.GetRun, pb.GetRunRequest(), timeout_s=10)
    assert type(caught.value) is cls
    assert state(caught.value) == state(make(cls))
    assert str(caught.value) == str(make(cls))
    assert caught.value.request_id


@pytest.mark.parametrize("cls", list(errors.error_classes()), ids=lambda cls: cls.__name__)
async def test_stream_round_trip_after_responses(cls: type[MillraceError], service) -> None:
    servicer, stub = service
    servicer.error = make(cls)
    seen = 0
    with pytest.raises(MillraceError) as caught:
        async for _ in stream(stub.WatchRun, pb.WatchRunRequest(), timeout_s=10):
            seen += 1
    assert seen == 2
    assert type(caught.value) is cls
    assert state(caught.value) == state(make(cls))


async def test_retry_delay_of_the_raiser_arrives(service) -> None:
    servicer, stub = service
    servicer.error = errors.CapacityError("full", retry_after_s=0.25)
    with pytest.raises(errors.CapacityError) as caught:
        await call(stub.GetRun, pb.GetRunRequest())
    assert caught.value.retry_after_s == 0.25


async def test_a_message_of_an_invalid_spec_that_is_its_own_arrives(service) -> None:
    servicer, stub = service
    servicer.error = InvalidSpecError([Violation(field="a", message="b")], message="the config does not parse")
    with pytest.raises(InvalidSpecError) as caught:
        await call(stub.GetRun, pb.GetRunRequest())
    assert caught.value.message == "the config does not parse"
    assert caught.value.violations == servicer.error.violations


async def test_many_violations_arrive_bounded_and_say_so(service) -> None:
    servicer, stub = service
    long = "\N{GRINNING FACE}" * 3000
    servicer.error = InvalidSpecError(
        [Violation(field=f"f{n}", value=long, message=long, source=long) for n in range(1000)], remedy=long
    )
    with pytest.raises(InvalidSpecError) as caught:
        await call(stub.GetRun, pb.GetRunRequest())
    found = caught.value.violations
    assert len(found) == MAX_VIOLATIONS
    assert found[0].field == "f0"
    assert found[0].message.endswith("…")
    assert found[-1].message == f"and {1000 - MAX_VIOLATIONS + 1} more violations"


async def test_a_class_that_the_client_does_not_know_arrives_as_its_parent(service) -> None:
    servicer, stub = service

    class NewerError(errors.NotFoundError):
        pass

    servicer.error = NewerError("gone", reason="NEWER")
    with pytest.raises(errors.NotFoundError) as caught:
        await call(stub.GetRun, pb.GetRunRequest())
    assert (type(caught.value), caught.value.reason) == (errors.NotFoundError, "NEWER")


@pytest.mark.parametrize("method", ["GetRun", "WatchRun"])
async def test_a_defect_is_internal_without_internals_and_logged_with_its_traceback(
    service, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    servicer, stub = service
    servicer.error = ZeroDivisionError("secret table at 0xdeadbeef")
    with caplog.at_level(logging.ERROR), pytest.raises(errors.InternalError) as caught:
        if method == "GetRun":
            await call(stub.GetRun, pb.GetRunRequest())
        else:
            async for _ in stream(stub.WatchRun, pb.WatchRunRequest(), timeout_s=10):
                pass
    error = caught.value
    assert "deadbeef" not in str(error.__dict__)
    assert error.message == f"internal error in /{NAME}/{method}"
    assert error.request_id in (error.remedy or "")
    (record,) = [record for record in caplog.records if record.getMessage() == "call failed by a defect"]
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError


async def test_the_request_id_of_the_caller_is_kept_and_logged(service, capsys: pytest.CaptureFixture[str]) -> None:
    servicer, stub = service
    servicer.error = errors.NotFoundError("no")
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        millrace_logging.setup("test", level="INFO", environ={})
        with millrace_logging.bind(request_id="outer-42"), pytest.raises(errors.NotFoundError) as caught:
            await call(stub.GetRun, pb.GetRunRequest())
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    assert caught.value.request_id == "outer-42"
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "call failed" in line]
    assert "request_id=outer-42" in line
    assert "code=NOT_FOUND" in line
    assert f"method=/{NAME}/GetRun" in line


async def test_a_malformed_request_id_is_replaced(service) -> None:
    servicer, stub = service
    servicer.error = errors.NotFoundError("no")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.GetRun(pb.GetRunRequest(), timeout=5, metadata=((REQUEST_ID_KEY, "a b; INJECTED level=ERROR"),))
    assert "INJECTED" not in str(caught.value.trailing_metadata())


async def test_a_call_past_its_deadline_is_unavailable_and_says_who_and_how_long(service) -> None:
    servicer, stub = service
    servicer.hang = True
    with pytest.raises(errors.UnavailableError) as caught:
        await call(stub.GetRun, pb.GetRunRequest(), timeout_s=0.2, to="the orchestrator")
    assert caught.value.reason == "DEADLINE_EXCEEDED"
    assert "the orchestrator did not answer within 0.2 s" in str(caught.value)


async def test_a_stub_called_without_a_deadline_gets_the_channels(service, running_server) -> None:
    servicer, _ = service
    servicer.hang = True

    def register(server, draining):
        add_RunServiceServicer_to_server(servicer, server)
        return [NAME]

    async with running_server(register) as server, open_channel(server.address, default_timeout_s=0.2) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(RunServiceStub(channel).GetRun(pb.GetRunRequest()), 10)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_method_that_is_not_implemented_says_so(service) -> None:
    _, stub = service
    with pytest.raises(errors.InternalError) as caught:
        await call(stub.CancelRun, pb.CancelRunRequest(), to="the orchestrator")
    assert caught.value.reason == "UNIMPLEMENTED"
    assert "same release" in str(caught.value)


async def test_a_handlers_own_abort_keeps_its_code(service) -> None:
    _, stub = service
    with pytest.raises(errors.InvalidStateError, match="cursor too old") as caught:
        await call(stub.ListRuns, pb.ListRunsRequest())
    assert caught.value.reason == "OUT_OF_RANGE"


async def test_unavailable_is_tried_again_and_others_are_not(service) -> None:
    servicer, stub = service
    servicer.error = errors.UnavailableError("redis is away")
    with pytest.raises(errors.UnavailableError, match="redis is away"):
        await call(stub.GetRun, pb.GetRunRequest())
    assert servicer.calls == 5
    servicer.calls, servicer.error = 0, errors.InternalError("x")
    with pytest.raises(errors.InternalError):
        await call(stub.GetRun, pb.GetRunRequest())
    assert servicer.calls == 1


async def test_nobody_there_names_the_address_and_a_remedy(unused_tcp_port: int) -> None:
    address = f"127.0.0.1:{unused_tcp_port}"
    async with open_channel(address) as channel:
        with pytest.raises(errors.UnavailableError) as caught:
            await call(
                RunServiceStub(channel).GetRun, pb.GetRunRequest(), timeout_s=20, to=f"the orchestrator at {address}"
            )
    assert caught.value.reason == "UNREACHABLE"
    assert address in caught.value.message
    assert "check that it is running" in str(caught.value)


async def test_leaving_a_stream_early_cancels_it(service) -> None:
    servicer, stub = service
    servicer.hang = True
    async with contextlib.aclosing(stream(stub.WatchRun, pb.WatchRunRequest())) as responses:
        await anext(responses)
        await anext(responses)
        assert not servicer.left.is_set()
    await asyncio.wait_for(servicer.left.wait(), 10)


def test_a_malformed_address_is_named() -> None:
    with pytest.raises(InvalidSpecError, match=r"host:port.*got nowhere"):
        open_channel("nowhere")
