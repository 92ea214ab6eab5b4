"""Bytes that are no message, at every call of every service: INVALID_ARGUMENT, and no traceback in the log."""

import logging
from collections.abc import AsyncIterator, Iterator

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from grpc_health.v1 import health_pb2

from millrace.errors import InvalidSpecError
from millrace.internal.v1 import (
    env_service_pb2,
    env_service_pb2_grpc,
    policy_service_pb2,
    policy_service_pb2_grpc,
    worker_service_pb2,
    worker_service_pb2_grpc,
)
from millrace.rpc.channel import open_channel
from millrace.rpc.status import from_rpc_error
from millrace.v1 import run_service_pb2, run_service_pb2_grpc

OURS = [
    (run_service_pb2, run_service_pb2_grpc),
    (env_service_pb2, env_service_pb2_grpc),
    (policy_service_pb2, policy_service_pb2_grpc),
    (worker_service_pb2, worker_service_pb2_grpc),
]
MALFORMED = {
    "cut length": b"\x0a\xff\xff\xff\xff\x0f",
    "cut field": b"\x0a",
    "tag 0": b"\x00\x00",
    "open group": b"\x0b" * 200,
    "varint without an end": b"\x08" + b"\xff" * 12,
}


def services() -> Iterator[tuple[ServiceDescriptor, object]]:
    for messages, stubs in OURS:
        for service in messages.DESCRIPTOR.services_by_name.values():
            yield service, stubs


METHODS = [method for service, _ in services() for method in service.methods]


def servicer(service: ServiceDescriptor, stubs: object, *, is_made: bool) -> object:
    """Return each method counts as reached; without `is_made` none is overridden."""

    def unary(method: MethodDescriptor):
        async def handle(self, request, context):
            raise AssertionError(f"{method.full_name} was reached")

        return handle

    def stream(method: MethodDescriptor):
        async def handle(self, request, context):
            raise AssertionError(f"{method.full_name} was reached")
            yield

        return handle

    methods = {m.name: (stream if m.server_streaming else unary)(m) for m in service.methods if is_made}
    return type("Servicer", (getattr(stubs, f"{service.name}Servicer"),), methods)()


@pytest.fixture(params=[True, False], ids=["made", "not overridden"])
async def channel(request: pytest.FixtureRequest, running_server) -> AsyncIterator[grpc.aio.Channel]:
    def register(server: grpc.aio.Server, draining: object) -> list[str]:
        for service, stubs in services():
            add = getattr(stubs, f"add_{service.name}Servicer_to_server")
            add(servicer(service, stubs, is_made=request.param), server)
        return [service.full_name for service, _ in services()]

    async with running_server(register) as server, open_channel(server.address) as channel:
        yield channel


async def answer(channel: grpc.aio.Channel, path: str, data: bytes, *, kind: str) -> grpc.aio.AioRpcError:
    try:
        if kind == "unary_unary":
            await channel.unary_unary(path)(data, timeout=20)
        elif kind == "unary_stream":
            async for _ in channel.unary_stream(path)(data, timeout=20):
                pass
        else:
            async for _ in channel.stream_stream(path)(iter([data]), timeout=20):
                pass
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError(f"{path} took {data!r}")


def kind_of(method: MethodDescriptor) -> str:
    return "unary_stream" if method.server_streaming else "unary_unary"


async def test_every_call_answers_malformed_bytes_with_its_type(channel, caplog: pytest.LogCaptureFixture, request):
    is_made = request.node.callspec.params["channel"]
    with caplog.at_level(logging.DEBUG):
        for method in METHODS:
            path = f"/{method.containing_service.full_name}/{method.name}"
            for name, data in MALFORMED.items():
                error = await answer(channel, path, data, kind=kind_of(method))
                if not is_made:
                    assert error.code() is grpc.StatusCode.UNIMPLEMENTED, (path, name, error)
                    continue
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, (path, name, error)
                found = from_rpc_error(error)
                assert isinstance(found, InvalidSpecError)
                assert found.reason == "REQUEST_MALFORMED"
                assert f"{len(data)} bytes" in str(found)
    assert not [record for record in caplog.records if record.exc_info], "a traceback in the log"
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_health_and_reflection_do_the_same(channel, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.DEBUG):
        for path, kind in (
            ("/grpc.health.v1.Health/Check", "unary_unary"),
            ("/grpc.health.v1.Health/Watch", "unary_stream"),
            ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "stream_stream"),
        ):
            for data in MALFORMED.values():
                error = await answer(channel, path, data, kind=kind)
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, (path, data, error)
    assert not [record for record in caplog.records if record.exc_info], "a traceback in the log"
    check = channel.unary_unary(
        "/grpc.health.v1.Health/Check", response_deserializer=health_pb2.HealthCheckResponse.FromString
    )
    assert (await check(b"", timeout=20)).status == health_pb2.HealthCheckResponse.SERVING


async def test_a_message_above_the_servers_bound_says_so(channel):
    path = f"/{METHODS[0].containing_service.full_name}/{METHODS[0].name}"
    data = run_service_pb2.CreateRunRequest(config_json="x" * (5 << 20)).SerializeToString()
    error = from_rpc_error(await answer(channel, path, data, kind="unary_unary"))
    assert isinstance(error, InvalidSpecError) and error.reason == "MESSAGE_TOO_LARGE", error
