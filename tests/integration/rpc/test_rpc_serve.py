"""The life of a server: ports, drains, signals, health, reflection, probe."""

import asyncio
import gc
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from millrace.errors import InvalidSpecError, UnavailableError
from millrace.rpc import probe
from millrace.rpc.channel import call, open_channel, stream
from millrace.rpc.health import HealthBoard
from millrace.v1 import run_service_pb2 as pb
from millrace.v1.run_service_pb2_grpc import RunServiceServicer, RunServiceStub, add_RunServiceServicer_to_server
from millrace_testing.patience import patient
from millrace_testing.polling import until

NAME = "millrace.v1.RunService"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class Watching(RunServiceServicer):
    """A watch that ends itself when the server drains, and a slow call."""

    def __init__(self, draining: asyncio.Event) -> None:
        self.draining = draining
        self.got_call = asyncio.Event()

    async def WatchRun(self, request, context):
        yield pb.WatchRunResponse()
        await self.draining.wait()
        raise UnavailableError("draining; watch again with the last cursor", reason="DRAINING")

    async def GetRun(self, request, context):
        self.got_call.set()
        await asyncio.sleep(0.4)
        return pb.GetRunResponse()


def register(server, draining):
    add_RunServiceServicer_to_server(Watching(draining), server)
    return [NAME]


async def check(address: str, name: str) -> int:
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=60)).status


async def test_a_second_server_on_the_same_port_fails_with_address_and_remedy(running_server) -> None:
    async with running_server(register) as first:
        with pytest.raises(UnavailableError) as caught:
            async with running_server(register, address=first.address):
                pass
        assert await check(first.address, NAME) == SERVING
    assert first.address in caught.value.message
    assert "Address already in use" in caught.value.message
    assert "MILLRACE_LISTEN" in str(caught.value)
    assert caught.value.exit_code == 5


def freed(caplog: pytest.LogCaptureFixture) -> list[bool]:
    """For each line of gRPC about a server that was freed and had never been started, whether the line holds it."""
    gc.collect()
    return [bool(record.args) for record in caplog.records if "__dealloc__" in str(record.msg)]


async def test_a_server_leaves_none_behind_that_was_never_started(running_server, caplog) -> None:
    gc.collect()  # what other tests have left
    with caplog.at_level(logging.DEBUG):
        async with running_server(register):
            pass
        assert freed(caplog) == []


async def test_a_line_about_a_server_that_is_being_freed_does_not_hold_it(caplog) -> None:
    gc.collect()
    with caplog.at_level(logging.DEBUG):
        grpc.aio.server()
        assert freed(caplog) == [False]


async def test_a_stopped_server_frees_its_port(running_server) -> None:
    async with running_server(register) as first:
        address = first.address
    async with running_server(register, address=address) as second:
        assert second.address == address


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:99999"])
async def test_a_malformed_address_is_a_usage_error(running_server, address: str) -> None:
    with pytest.raises(InvalidSpecError, match="MILLRACE_LISTEN"):
        async with running_server(register, address=address):
            pass


async def test_an_open_watch_does_not_hold_up_the_end(running_server) -> None:
    async with running_server(register, grace_s=30.0) as server, open_channel(server.address) as channel:
        responses = stream(RunServiceStub(channel).WatchRun, pb.WatchRunRequest(), timeout_s=30)
        await anext(responses)
        began = time.monotonic()
        server.stopping.set()
        with pytest.raises(UnavailableError, match="watch again with the last cursor") as caught:
            await anext(responses)
        assert caught.value.reason == "DRAINING"
    assert time.monotonic() - began < 5


async def test_a_call_under_way_finishes_within_the_grace(running_server) -> None:
    watching = Watching(asyncio.Event())

    def serves(server, draining):
        add_RunServiceServicer_to_server(watching, server)
        return [NAME]

    async with running_server(serves, grace_s=60.0) as server, open_channel(server.address) as channel:
        pending = asyncio.create_task(call(RunServiceStub(channel).GetRun, pb.GetRunRequest(), timeout_s=60))
        await asyncio.wait_for(watching.got_call.wait(), 60)
        server.stopping.set()
        assert await pending == pb.GetRunResponse()


async def test_while_draining_health_says_no_and_calls_still_work(running_server) -> None:
    async with running_server(register, drain_s=patient(2.0)) as server, open_channel(server.address) as channel:
        stub = RunServiceStub(channel)
        await call(stub.GetRun, pb.GetRunRequest())
        server.stopping.set()

        async def says_no() -> bool:
            return await check(server.address, NAME) == NOT_SERVING

        await until(says_no)
        assert await check(server.address, "") == NOT_SERVING
        assert not server.draining.is_set()
        await call(stub.GetRun, pb.GetRunRequest())


async def test_names_start_not_serving_until_the_board_says_ready(running_server) -> None:
    board = HealthBoard()
    async with running_server(register, health_board=board) as server:
        assert await check(server.address, "") == SERVING
        assert await check(server.address, NAME) == NOT_SERVING
        board.set_ready(NAME)
        assert await check(server.address, NAME) == SERVING
        board.set_unready(NAME, "the model is gone")
        assert await check(server.address, NAME) == NOT_SERVING


async def test_liveness_fails_when_the_loop_makes_no_progress(running_server) -> None:
    board = HealthBoard()
    async with running_server(register, health_board=board) as server:
        board.expect_progress("", within_s=(within_s := patient(1.0)))
        assert await check(server.address, "") == SERVING
        await asyncio.sleep(1.5 * within_s)
        assert await check(server.address, "") == NOT_SERVING
        board.touch("")
        assert await check(server.address, "") == SERVING


async def test_a_health_watch_sees_changes_and_ends_with_the_drain(running_server) -> None:
    board = HealthBoard()
    seen = []
    async with (
        running_server(register, health_board=board, grace_s=30.0) as server,
        open_channel(server.address) as channel,
    ):
        request = health_pb2.HealthCheckRequest(service=NAME)
        began = time.monotonic()
        async for response in stream(health_pb2_grpc.HealthStub(channel).Watch, request, timeout_s=30):
            seen.append(response.status)
            if seen == [NOT_SERVING]:
                board.set_ready(NAME)
            if seen == [NOT_SERVING, SERVING]:
                server.stopping.set()
    assert seen == [NOT_SERVING, SERVING, NOT_SERVING]
    assert time.monotonic() - began < 10


async def test_an_unknown_name_is_not_found(running_server) -> None:
    async with running_server(register) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(server.address, "nobody")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_the_services(running_server) -> None:
    async with running_server(register) as server, open_channel(server.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        async for response in stub.ServerReflectionInfo(ask, timeout=10):
            names = {service.name for service in response.list_services_response.service}
    assert names == {NAME, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


async def test_an_error_at_the_start_frees_the_port(running_server) -> None:
    def broken(port: int) -> None:
        raise RuntimeError(f"cannot write the port file for {port}")

    from millrace.rpc.serve import Shutdown, serve

    with pytest.raises(RuntimeError, match="port file") as caught:
        await serve(
            "127.0.0.1:0", register, shutdown=Shutdown(drain_s=0, grace_s=0), on_started=broken, handle_signals=False
        )
    port = int(str(caught.value).rsplit(" ", 1)[1])
    async with running_server(register, address=f"127.0.0.1:{port}"):
        pass


async def run_probe(*args: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "millrace.rpc.probe",
        *args,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode or 0, output.decode()


async def test_probe_tells_serving_from_not_serving_and_unknown(running_server) -> None:
    board = HealthBoard()
    async with running_server(register, health_board=board) as server:
        board.set_ready(NAME)
        assert await run_probe(server.address, NAME) == (0, "SERVING\n")
        board.set_unready(NAME, "test")
        assert await run_probe(server.address, NAME) == (1, "NOT_SERVING\n")
        code, text = await run_probe(server.address, "nobody")
        assert code == 3
        assert f"{server.address} has no service 'nobody'" in text


def test_probe_of_nobody_and_of_nonsense(unused_tcp_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert probe.main([f"127.0.0.1:{unused_tcp_port}", "--timeout", "5"]) == 5
    assert f"127.0.0.1:{unused_tcp_port}" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        probe.main(["nowhere"])
    assert caught.value.code == 2
    assert "host:port" in capsys.readouterr().err


SERVER = textwrap.dedent(
    """
    import asyncio, sys
    from millrace.rpc.serve import Shutdown, serve
    from millrace.telemetry import logging
    from millrace.v1 import run_service_pb2 as pb
    from millrace.v1.run_service_pb2_grpc import RunServiceServicer, add_RunServiceServicer_to_server

    class Stuck(RunServiceServicer):
        async def GetRun(self, request, context):
            print("called", flush=True)
            await asyncio.sleep(600)

    def register(server, draining):
        add_RunServiceServicer_to_server(Stuck(), server)
        return ["millrace.v1.RunService"]

    logging.setup("test")
    def on_started(port):
        print(port, flush=True)

    shutdown = Shutdown(drain_s=0, grace_s=float(sys.argv[1]))
    asyncio.run(serve("127.0.0.1:0", register, shutdown=shutdown, on_started=on_started))
    print("orderly end", flush=True)
    """
)


@pytest.fixture
def start_process(tmp_path: Path):
    processes: list[subprocess.Popen[str]] = []

    def start(grace_s: float) -> tuple[subprocess.Popen[str], str]:
        script = tmp_path / "server.py"
        script.write_text(SERVER)
        process = subprocess.Popen([sys.executable, str(script), str(grace_s)], stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        return process, f"127.0.0.1:{int(process.stdout.readline())}"

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process_in_order(start_process, signum: int) -> None:
    process, _ = start_process(10.0)
    os.kill(process.pid, signum)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert output == "orderly end\n"


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
async def test_a_second_signal_exits_at_once(start_process, signum: int, code: int) -> None:
    process, address = start_process(60.0)
    async with open_channel(address) as channel:
        pending = asyncio.create_task(call(RunServiceStub(channel).GetRun, pb.GetRunRequest(), timeout_s=60))
        assert await asyncio.to_thread(process.stdout.readline) == "called\n"
        os.kill(process.pid, signum)
        await asyncio.sleep(0.5)
        assert process.poll() is None  # the call is under way, and the grace is a minute
        os.kill(process.pid, signum)
        began = time.monotonic()
        assert await asyncio.to_thread(process.wait, 20) == code
        assert time.monotonic() - began < 5
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)


async def test_calls_that_wait_for_a_late_event_loop_are_answered_all(running_server) -> None:
    """By itself gRPC ends some of them with CANCELLED, from the 1,001st on: heartbeats of a fleet would be lost."""
    number, asleep_s = 2500, 1.5

    class Late(RunServiceServicer):
        is_late = False

        async def GetRun(self, request, context):
            if not self.is_late:
                self.is_late = True
                time.sleep(asleep_s)  # the event loop stands still, as under a long computation
            return pb.GetRunResponse()

    def serves(server, draining):
        add_RunServiceServicer_to_server(Late(), server)
        return [NAME]

    def ask(address: str) -> list[grpc.StatusCode]:
        with grpc.insecure_channel(address) as channel:
            stub = RunServiceStub(channel)
            calls = [stub.GetRun.future(pb.GetRunRequest(), timeout=60) for _ in range(number)]
            return [each.code() for each in calls]

    async with running_server(serves) as running:
        codes = await asyncio.to_thread(ask, running.address)
    assert codes == [grpc.StatusCode.OK] * number
