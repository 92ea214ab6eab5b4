"""Traces of a run arrive at an OpenTelemetry collector, from the task to the version; and no run waits for it."""

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs millrace[otel]")

from millrace.cli.session import follow
from millrace.client import Client
from millrace.config.load import validate_document
from millrace.orchestrator.drive import housekeeping
from millrace.readers.exports import of_run
from millrace.readers.exports import of_run as keeper
from millrace.readers.exports.traces import span_id, trace_id
from millrace.rpc.channel import call
from millrace.telemetry import waits
from millrace.v1 import run_pb2, run_service_pb2
from millrace_testing.collector import Collector, collecting
from millrace_testing.lanes import one_by_default
from millrace_testing.orchestrator.runs import CONFIG, bodies, states, watch
from millrace_testing.polling import until

STEPS = 3


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
    with collecting(Collector()) as collector:
        yield collector


async def create(stack) -> run_pb2.Run:
    await stack.env_server()
    await stack.inference()
    document = validate_document({**CONFIG, "max_steps": STEPS}).resolved_json()
    request = run_service_pb2.CreateRunRequest(kind=run_pb2.RUN_KIND_RL, config_json=document)
    return (await call(stack.runs.CreateRun, request)).run


async def test_spans_arrive_though_their_exporter_was_killed_and_each_has_one_id(
    stack, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{collector.url}/v1/traces")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20abc")
    trainer = await stack.trainer()
    trainer.hold.clear()
    run = await create(stack)
    await until(lambda: collector.named("batch 0"), what="the first batch")
    (process,) = (each for each in psutil.Process().children() if each.cmdline()[-1:] == [of_run.TRACES.module])
    os.killpg(process.pid, signal.SIGKILL)
    trainer.hold.set()
    events = await watch(stack, run)
    assert states(events)[-1] == "SUCCEEDED"
    assert "TRACES_EXPORTER_DIED" in {each.reason for each in bodies(events, "warning")}
    await until(lambda: collector.named(f"batch {STEPS - 1}"), what="the last batch")
    for step in range(STEPS):
        found = {(span.trace_id, span.span_id) for span in collector.named(f"batch {step}")}
        assert found == {(trace_id(run.uid, step).to_bytes(16), span_id(run.uid, step, "batch").to_bytes(8))}
    assert collector.headers[0]["authorization"] == "Bearer abc"


def all_batches(collector: Collector) -> bool:
    return all(collector.named(f"batch {step}") for step in range(STEPS))


@pytest.mark.long
async def test_what_a_run_that_has_ended_leaves_is_sent_though_its_orchestrator_stops_that_moment(
    stack, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a stack of `millrace rl` does; here before the run is sealed, so before anybody let the exports finish."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setattr(keeper, "STOP_S", 30.0)
    collector.status = 503
    sealing = asyncio.Event()

    async def seal(*_: object) -> None:
        sealing.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(housekeeping.Housekeeper, "seal", seal)
    await stack.trainer()
    await create(stack)
    async with asyncio.timeout(60):
        await sealing.wait()
    assert not all_batches(collector)
    collector.status = 200
    await stack.kill_orchestrator()
    assert all_batches(collector)


async def test_a_run_that_has_ended_is_held_until_its_traces_are_sent_and_why_says_so(
    stack, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow the collector is: the command with a stack of its own stays as long."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
    collector.answers.clear()
    await stack.trainer()
    run = await create(stack)
    assert states(await watch(stack, run))[-1] == "SUCCEEDED"
    wanted = "the collector of traces to take the rest of the run"
    client, noted = Client(stack.address), []
    async with client:

        async def is_told() -> bool:
            found = await client.runs.explain(run.name)
            return [wait.reason for wait in found.waits] == [wanted] and wanted in found.summary

        await until(is_told, what="the wait of an ended run")
        staying = asyncio.create_task(follow.until_given_back(client, run.name, note=noted.append))
        await until(lambda: noted, what="a note to who waits")
        assert wanted in noted[0] and not staying.done() and not all_batches(collector)
        collector.answers.set()
        await staying
        assert all_batches(collector)
        assert not (await client.runs.explain(run.name)).waits


@pytest.mark.parametrize("kind", one_by_default(["down", "refusing"]))
async def test_a_run_goes_on_while_no_collector_takes_its_traces(
    stack, collector: Collector, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(of_run, "TRACES", replace(of_run.TRACES, finish_s=0.5))
    monkeypatch.setattr(keeper, "STOP_S", 0.5)
    collector.status = 401
    url = collector.url
    if kind == "down":
        with socket.create_server(("127.0.0.1", 0)) as closed:
            url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
    trainer = await stack.trainer()
    trainer.hold.clear()
    run = await create(stack)
    told = asyncio.create_task(watch(stack, run, timeout_s=100))

    def waiting() -> bool:
        return any("collector of traces: " in wait.reason and wait.run == run.uid for wait in waits.snapshot("me"))

    await until(waiting, what="a named wait")
    trainer.hold.set()
    events = await told
    assert states(events)[-1] == "SUCCEEDED" and not collector.spans
    (warning,) = (each for each in bodies(events, "warning") if each.reason == "TRACES_UNREACHABLE")
    assert "the run goes on without it" in warning.message
    if kind == "refusing":
        assert "401" in warning.message and collector.refused
