"""A run's log as traces, sent by the exporter's process to a collector that listens on this machine."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs millrace[otel]")

from millrace.processes.channel import pack_frame, receive_frame
from millrace.readers.exports.of_run import traces_wanted
from millrace.readers.exports.traces import trace_id
from millrace.storage.local import LocalStore
from millrace.v1 import event_pb2, run_pb2
from millrace_testing.collector import Collector, collecting
from millrace_testing.dashboard import NAMES, SECRET, UID, RunWriter

pytestmark = pytest.mark.computes

STEPS = 3


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting(Collector()) as collector:
        yield collector


@pytest.fixture
def run(tmp_path: Path) -> RunWriter:
    """Return a run that took its last minute for three steps."""
    return RunWriter(store=LocalStore(tmp_path / "store"), clock=time.time() - 60)


def end(run: RunWriter) -> None:
    changed = event_pb2.StateChanged(new_state=run_pb2.RUN_STATE_SUCCEEDED, chain_hash="f" * 64)
    run.archive((run.clock + 60, event_pb2.Event(state_changed=changed)))


def start(run: RunWriter, **variables: str) -> subprocess.Popen[bytes]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "millrace.readers.exports.traces"],
        env={**clean, "OTEL_EXPORTER_OTLP_TIMEOUT": "1", **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    order = {"store_url": run.store.uri("").rstrip("/"), "prefix": NAMES.prefix, "uid": UID, "run": "letters-1"}
    process.stdin.write(pack_frame(json.dumps(order).encode()))
    process.stdin.flush()
    return process


def reports(process: subprocess.Popen[bytes], until: str) -> list[dict]:
    """Return what it says, up to a state."""
    assert process.stdout is not None
    found: list[dict] = []
    while not found or found[-1]["state"] != until:
        report = receive_frame(process.stdout.read, most=1 << 20)
        assert report is not None, f"it ended: {found}"
        found.append(json.loads(report))
    return found


def export(run: RunWriter, collector: Collector, **variables: str) -> list[dict]:
    """Export a run that has ended."""
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, **variables}
    with start(run, **variables) as process:
        found = reports(process, "done")
        process.kill()
    return found


def write(run: RunWriter) -> None:
    for step in range(STEPS):
        run.step(step)
    end(run)


def test_one_trace_leads_from_a_task_to_the_version_that_came_of_it(run: RunWriter, collector: Collector) -> None:
    write(run)
    said = export(run, collector, OTEL_RESOURCE_ATTRIBUTES="deployment.environment=test")
    assert collector.resources[0]["service.name"] == "millrace"
    assert collector.resources[0]["deployment.environment"] == "test"
    assert said[-1]["rows"] == len(collector.spans) == STEPS * (1 + 1 + 4 * 3 + 1 + 1 + 1 + 1)
    own = [span for span in collector.spans if span.trace_id == trace_id(UID, 1).to_bytes(16)]
    by_id = {span.span_id: span for span in own}
    assert len(by_id) == len(own) == len(collector.spans) // STEPS

    def path(name: str) -> list[str]:
        span = next(span for span in own if span.name == name)
        found = [span.name]
        while span.parent_span_id:
            span = by_id[span.parent_span_id]
            found.append(span.name)
        return found

    assert path("generation") == ["generation", "rollout 0", "task 1", "step 1"]
    assert path("environment") == ["environment", "rollout 0", "task 1", "step 1"]
    for name in ("batch 1", "training step 1", "publish version 2", "serve version 2 on inference-1"):
        assert path(name) == [name, "step 1"]
    times = {span.name: (span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9) for span in own}
    taken = {name: round(end - begin, 3) for name, (begin, end) in times.items()}
    assert (taken["rollout 0"], taken["generation"], taken["environment"]) == (2.0, 1.5, 0.5)
    assert (taken["batch 1"], taken["training step 1"], taken["publish version 2"]) == (0.05, 1.0, 0.1)
    assert times["step 1"] == (times["task 1"][0], times["publish version 2"][1])
    failed = next(span for span in own if span.name == "rollout 3")
    assert failed.status.code == 2 and failed.status.message.startswith("ToolError: ")
    attributes = {item.key: item.value for item in failed.attributes}
    assert attributes["millrace.status"].string_value == "env_error" and attributes["millrace.step"].int_value == 1


def test_a_second_export_makes_the_same_spans(run: RunWriter, collector: Collector) -> None:
    write(run)
    export(run, collector)
    first = {span.SerializeToString() for span in collector.spans}
    collector.spans.clear()
    export(run, collector, OTEL_SERVICE_NAME="mine", OTEL_EXPORTER_OTLP_COMPRESSION="gzip")
    assert {span.SerializeToString() for span in collector.spans} == first
    assert collector.resources[-1]["service.name"] == "mine"


def test_what_a_collector_did_not_take_comes_when_it_does(run: RunWriter, collector: Collector) -> None:
    run.step(0)
    collector.status = 401
    with start(run, OTEL_EXPORTER_OTLP_ENDPOINT=collector.url) as process:
        said = reports(process, "waiting")[-1]
        assert said["reason"] == "TRACES_UNREACHABLE" and "401" in said["text"]
        for step in range(1, STEPS):
            run.step(step)
        end(run)
        collector.status = 200
        assert process.stdin is not None
        process.stdin.write(pack_frame(b"end"))
        process.stdin.flush()
        reports(process, "done")
        process.kill()
    assert sorted(span.name for span in collector.spans if not span.parent_span_id) == ["step 0", "step 1", "step 2"]
    assert len({span.span_id for span in collector.spans}) == len(collector.spans)


def test_what_was_told_long_ago_is_left_out(run: RunWriter, collector: Collector) -> None:
    run.clock -= 3600
    write(run)
    assert export(run, collector)[-1]["rows"] == 0 and not collector.spans


@pytest.mark.parametrize(
    ("variable", "value"), [("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"), ("OTEL_TRACES_SAMPLER_ARG", "x")]
)
def test_a_setting_that_is_not_understood_is_named(
    run: RunWriter, collector: Collector, variable: str, value: str
) -> None:
    settings = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_TRACES_SAMPLER": "traceidratio", variable: value}
    with start(run, **settings) as process:
        said = reports(process, "waiting")[-1]
        process.kill()
    assert f"{variable} is '{value}'" in said["text"] and said["reason"] == "TRACES_UNREACHABLE"


def test_the_sampler_leaves_out_whole_traces(run: RunWriter, collector: Collector) -> None:
    write(run)
    export(run, collector, OTEL_TRACES_SAMPLER="parentbased_traceidratio", OTEL_TRACES_SAMPLER_ARG="0.5")
    kept = [step for step in range(STEPS) if trace_id(UID, step) % (1 << 64) < 1 << 63]
    assert {span.trace_id for span in collector.spans} == {trace_id(UID, step).to_bytes(16) for step in kept}
    collector.spans.clear()
    export(run, collector, OTEL_TRACES_SAMPLER="always_off")
    assert not collector.spans


def test_secrets_are_masked(run: RunWriter, collector: Collector) -> None:
    run.env = f"env {SECRET}"
    write(run)
    export(run, collector)
    assert collector.spans and SECRET.encode() not in b"".join(span.SerializeToString() for span in collector.spans)


@pytest.mark.parametrize(
    ("variables", "is_wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, False),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, False),
    ],
)
def test_the_usual_variables_say_whether_traces_are_sent(variables: dict[str, str], is_wanted: bool) -> None:
    assert traces_wanted(variables) is is_wanted
