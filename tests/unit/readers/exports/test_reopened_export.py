"""Exporters: a run that was reopened is exported, and an end that takes too long leaves nothing waiting."""

import asyncio
import time
from pathlib import Path

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs millrace[otel]")

from millrace.readers.exports.of_run import TRACES, Exporter
from millrace.storage.local import LocalStore
from millrace.v1 import event_pb2, run_pb2
from millrace_testing.collector import Collector, collecting
from millrace_testing.dashboard import NAMES, UID, RunWriter
from millrace_testing.polling import until


async def warn(reason: str, text: str) -> None:
    pytest.fail(f"{reason}: {text}")


async def test_what_a_reopened_run_writes_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunWriter(store=LocalStore(tmp_path / "store"), clock=time.time() - 60)
    run.step(0)
    failed = event_pb2.StateChanged(new_state=run_pb2.RUN_STATE_FAILED, chain_hash="f" * 64)
    run.archive((run.clock + 1, event_pb2.Event(state_changed=failed)))
    with collecting(Collector()) as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        exporter = Exporter("letters-1", TRACES, warn=warn)
        exporter.start(store_url=run.store.uri("").rstrip("/"), prefix=NAMES.prefix, uid=UID)
        try:
            await until(lambda: len(collector.spans) > 0, timeout_s=60)
            await asyncio.sleep(1.0)  # for an exporter that takes the end before for the end
            again = event_pb2.StateChanged(new_state=run_pb2.RUN_STATE_QUEUED)
            run.archive((run.clock + 2, event_pb2.Event(state_changed=again)))
            run.step(1)
            run.archive((run.clock + 3, event_pb2.Event(state_changed=failed)))
            await exporter.finish()
        finally:
            await exporter.close()
        assert {"training step 0", "training step 1"} <= {span.name for span in collector.spans}


async def test_a_rest_that_is_not_written_in_time_leaves_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(*_: object, **__: object) -> None:
        raise OSError("no process can be started")

    async def ignore(reason: str, text: str) -> None:
        pass

    monkeypatch.setattr("millrace.readers.exports.of_run.ChildLink.start", start)
    monkeypatch.setattr("millrace.readers.exports.of_run.STOP_S", 0.05)
    exporter = Exporter("letters-1", TRACES, warn=ignore)
    exporter.start()
    await exporter.close(has_ended=True)
    assert asyncio.all_tasks() == {asyncio.current_task()}
