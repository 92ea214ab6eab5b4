"""What Prometheus hears of a run: counts that begin at 0, and how long nothing is committed, with any orchestrator."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from millrace.errors import CorruptObjectError, UnavailableError
from millrace.internal.v1 import worker_service_pb2 as ws
from millrace.orchestrator import meters, run_meters, tenants
from millrace.orchestrator.catalog import RunView
from millrace.orchestrator.drive.batch_metrics import batch_metrics
from millrace.orchestrator.events import RunEvents
from millrace.orchestrator.run_meters import RunMeters
from millrace.orchestrator.tenants import SeenRuns, UsageReader
from millrace.orchestrator.workers import WorkerRegistry
from millrace.runlog.names import Names
from millrace.runlog.records.run_record import RunRecord
from millrace.storage.local import LocalStore
from millrace.v1 import event_pb2, run_pb2
from millrace_testing.orchestrator.builders import make_play, make_rollout

STARTING, RUNNING, PAUSED = run_pb2.RUN_STATE_STARTING, run_pb2.RUN_STATE_RUNNING, run_pb2.RUN_STATE_PAUSED
SINCE = "millrace_orchestrator_seconds_since_batch"


def _view(name: str, *, kind: str = "RL") -> RunView:
    record = RunRecord(
        uid=f"uid-{name}",
        name=name,
        kind=kind,
        config={"max_steps": 3},
        run_hash="",
        request_id="",
        create_time="2026-01-01T00:00:00Z",
        code_version="1",
        labels={},
    )
    return RunView(record)


def _event(at: float, **body: object) -> event_pb2.Event:
    event = event_pb2.Event(writer="orchestrator-0", **body)  # type: ignore[arg-type]
    event.time.FromNanoseconds(int(at * 1e9))
    return event


def _state(view: RunView, at: float, state: run_pb2.RunState) -> None:
    view.apply(_event(at, state_changed=event_pb2.StateChanged(new_state=state)))


def _batch(view: RunView, at: float, step: int) -> None:
    view.apply(_event(at, batch_committed=event_pb2.BatchCommitted(step=step)))


def _exported(*views: RunView, workers: WorkerRegistry | None = None) -> CollectorRegistry:
    catalog, manager = SimpleNamespace(views=list(views)), SimpleNamespace(driven=list)
    usage = UsageReader(SimpleNamespace(), "millrace")  # type: ignore[arg-type]
    return meters.registry_of(manager, catalog, workers or WorkerRegistry(), usage)  # type: ignore[arg-type]


def test_the_use_of_gpus_is_exported_by_the_short_names_of_workers() -> None:
    """A name that is new at every start would be another series each time."""
    workers = WorkerRegistry()
    workers.register(ws.Worker(worker_id="trainer-host-1-9f3ac1d2", kind=ws.WORKER_KIND_TRAINER))
    gpu = ws.GpuUse(index=3, memory_used_bytes=5, memory_total_bytes=8, utilization=0.5)
    workers.heartbeat(ws.HeartbeatRequest(worker_id="trainer-host-1-9f3ac1d2", gpus=[gpu]))
    found, labels = _exported(workers=workers), {"worker": "trainer-1", "gpu": "3"}
    prefix = "millrace_orchestrator_gpu"
    for name, value in (("utilization_ratio", 0.5), ("memory_used_bytes", 5.0), ("memory_bytes", 8.0)):
        assert found.get_sample_value(f"{prefix}_{name}", labels) == value
    assert found.get_sample_value(f"{prefix}_power_watts", labels) is None, "the driver does not say"


async def test_what_tenants_use_is_exported_once_all_runs_are_read(tmp_path) -> None:
    own, theirs = _view("own"), _view("acme.theirs")
    theirs.record = replace(theirs.record, uid="uid-theirs", tenant="acme")
    runs = {view.record.uid: view for view in (own, theirs)}

    async def list_names() -> list[tuple[str, str]]:
        return [(uid, view.record.name) for uid, view in runs.items()]

    async def read_listed(listed: Sequence[tuple[str, str]]) -> list[RunView]:
        return [runs[uid] for uid, _ in listed]

    catalog = SimpleNamespace(views=list(runs.values()), list_names=list_names, read_listed=read_listed)
    store = LocalStore(tmp_path)
    usage = UsageReader(store, "millrace")
    exported = meters.registry_of(SimpleNamespace(driven=list), catalog, WorkerRegistry(), usage)  # type: ignore[arg-type]
    for view in runs.values():
        store.put(Names("millrace", view.record.uid).run_json, b"{}")
        _state(view, 100.0, RUNNING)
        for at in (100.0, 110.0):
            used = event_pb2.WorkersAssigned(trainer_accelerators=2, replica_accelerators=1)
            view.apply(_event(at, workers_assigned=used))
        _state(view, 110.0, run_pb2.RUN_STATE_PAUSED)
    labels = {"tenant": "acme"}
    assert exported.get_sample_value("millrace_tenant_accelerator_seconds", labels) is None, "nothing is read"
    assert [each.tenant for each in await usage.read(SeenRuns(catalog, ""))] == ["", "acme"]  # type: ignore[arg-type]
    assert exported.get_sample_value("millrace_tenant_accelerator_seconds", labels) == 30.0
    assert exported.get_sample_value("millrace_tenant_tokens", labels | {"kind": "sampled"}) == 0.0
    assert exported.get_sample_value("millrace_tenant_stored_bytes", labels) == 2.0
    assert exported.get_sample_value("millrace_tenant_accelerator_seconds", {"tenant": ""}) is None
    # What a tenant asks for changes no total, and a run that was deleted is in none.
    del runs[theirs.record.uid]
    assert not await usage.read(SeenRuns(catalog, "acme"))  # type: ignore[arg-type]
    assert exported.get_sample_value("millrace_tenant_stored_bytes", labels) == 2.0
    await usage.read(SeenRuns(catalog, ""))  # type: ignore[arg-type]
    assert exported.get_sample_value("millrace_tenant_stored_bytes", labels) is None


async def test_a_pass_over_many_ended_runs_goes_on_where_the_last_one_was_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = {f"{number:028x}": _view(f"run-{number}") for number in range(2 * tenants.PAGE)}
    looked: list[str] = []
    hangs = asyncio.Event()

    async def list_names() -> list[tuple[str, str]]:
        return [(uid, view.record.name) for uid, view in runs.items()]

    async def read_listed(listed: Sequence[tuple[str, str]]) -> list[RunView]:
        if looked and not hangs.is_set():
            await hangs.wait()
        looked.extend(uid for uid, _ in listed)
        return [runs[uid] for uid, _ in listed]

    for uid, view in runs.items():
        view.record = replace(view.record, uid=uid)
        _state(view, 100.0, run_pb2.RUN_STATE_SUCCEEDED)
    # Nothing of them stays in memory, as of the oldest of many.
    seen = SeenRuns(SimpleNamespace(views=[], list_names=list_names, read_listed=read_listed), "")  # type: ignore[arg-type]
    usage = UsageReader(LocalStore(tmp_path), "millrace")
    monkeypatch.setattr(tenants, "READ_S", 0.5)
    with pytest.raises(UnavailableError, match=f"^{tenants.PAGE} of {len(runs)} runs are read"):
        await usage.read(seen)
    monkeypatch.setattr(tenants, "READ_S", 60.0)
    hangs.set()
    (first, second) = [await usage.read(seen) for _ in range(2)]
    assert first == second and first[0].num_runs == len(runs)
    assert looked == list(runs), "each was looked at once"


def test_a_run_that_cannot_be_read_counts_as_damaged_until_it_can() -> None:
    sick, healthy = _view("sick"), _view("healthy")
    for view in (sick, healthy):
        _state(view, 100.0, RUNNING)
    exported = _exported(sick, healthy)

    def counted() -> dict[str, float | None]:
        return {state: exported.get_sample_value("millrace_runs", {"state": state}) for state in ("damaged", "running")}

    assert counted() == {"damaged": 0.0, "running": 2.0}
    sick.damage = CorruptObjectError("header 3 cannot be read", reason="BATCH_CORRUPT")
    assert counted() == {"damaged": 1.0, "running": 1.0}
    sick.damage = None
    assert counted() == {"damaged": 0.0, "running": 2.0}


def test_a_new_drive_does_not_make_a_stall_young() -> None:
    view = _view("again-and-again")
    _state(view, 90.0, STARTING)
    assert view.status.batches.moved is None, "a large model may load for long"
    _state(view, 100.0, RUNNING)
    assert view.status.batches.moved == 100.0
    _batch(view, 200.0, 0)
    for crash in range(5):
        _state(view, 300.0 + crash, STARTING)
        assert view.status.batches.moved == 200.0
        _state(view, 300.5 + crash, RUNNING)
        assert view.status.batches.moved == 200.0
    _batch(view, 400.0, 1)
    assert view.status.batches.moved == 400.0


def test_a_pause_and_the_last_batch_are_no_stall() -> None:
    view = _view("paused")
    _state(view, 100.0, RUNNING)
    _batch(view, 200.0, 0)
    _state(view, 300.0, PAUSED)
    assert view.status.batches.moved is None
    _state(view, 90000.0, STARTING)
    assert view.status.batches.moved is None
    _state(view, 90001.0, RUNNING)
    assert view.status.batches.moved == 90001.0
    _batch(view, 90002.0, 2)
    assert view.status.batches.moved is None, "batch 2 is the last of three"
    _state(view, 90003.0, STARTING)
    _state(view, 90004.0, RUNNING)
    assert view.status.batches.moved is None


def test_an_orchestrator_that_claims_a_run_goes_on_counting() -> None:
    view = _view("claimed")
    _state(view, time.time() - 4000, RUNNING)
    _batch(view, time.time() - 3000, 0)
    events = RunEvents(SimpleNamespace(), run="claimed")  # type: ignore[arg-type]
    events.resume(view.status)
    assert events.state == RUNNING
    counted = events.meters
    for state in (STARTING, RUNNING):
        counted.state_changed(state)
        assert counted.seconds_since_batch == pytest.approx(3000, abs=60)
    counted.batch_committed(num_trained=1, dropped={}, filtered={}, num_tokens=1)
    assert counted.seconds_since_batch == pytest.approx(0, abs=60)


def test_a_run_that_nobody_drives_still_stalls() -> None:
    view, evaluation, fresh = _view("between"), _view("evaluation", kind="EVAL"), _view("queued")
    for each in (view, evaluation):
        _state(each, time.time() - 2000, RUNNING)
    exported = _exported(view, evaluation, fresh)
    assert exported.get_sample_value(SINCE, {"run": "between"}) == pytest.approx(2000, abs=60)
    assert exported.get_sample_value(SINCE, {"run": "evaluation"}) is None
    assert exported.get_sample_value(SINCE, {"run": "queued"}) is None
    _state(view, time.time(), run_pb2.RUN_STATE_CANCELLED)
    assert exported.get_sample_value(SINCE, {"run": "between"}) is None


def test_counts_of_a_run_begin_at_0_in_the_first_look_at_it() -> None:
    view = _view("from-0")
    names = ("leases_acquired", "drives_failed", "batches_committed", "batch_tokens")
    exported = _exported(view)
    first = {metric.name: metric for metric in exported.collect()}  # one look: what a scrape gets
    for name in names:
        samples = first[f"millrace_orchestrator_{name}"].samples
        assert [s.value for s in samples if s.labels == {"run": "from-0"} and s.name.endswith("_total")] == [0.0], name
    run_meters.drive_failed("from-0")
    assert exported.get_sample_value("millrace_orchestrator_drives_failed_total", {"run": "from-0"}) == 1
    run_meters.forget("from-0")
    _state(view, time.time(), run_pb2.RUN_STATE_FAILED)
    assert exported.get_sample_value("millrace_orchestrator_drives_failed_total", {"run": "from-0"}) is None


def test_a_batch_says_by_environment_what_its_rewards_are_and_why_rollouts_ended() -> None:
    plays = [make_play(0, group_size=2), make_play(1, group_size=2)]
    for play, rewards in zip(plays, ([1.0, 1.0], [0.0, 1.0]), strict=True):
        for member, reward in enumerate(rewards):
            made = make_rollout(play.task.ordinal, member, reward=reward, group_size=2)
            play.add(replace(made, is_truncated=reward == 0.0, stop_condition=f"reason-{member}"))
    env, exported, counted = plays[0].task.env, _exported(_view("rewarded")), RunMeters("rewarded")
    metrics = batch_metrics(plays, seq_len=1000, stale={}, shares={})
    for _ in range(9):  # gauges are of the newest batch, stops are counted
        counted.trained(plays, step=1, metrics=metrics)

    def value(name: str, **labels: str) -> float | None:
        return exported.get_sample_value(f"millrace_orchestrator_{name}", {"run": "rewarded", "env": env, **labels})

    assert value("reward", stat="mean") == 0.75 and value("reward", stat="group_std") == 0.25
    assert value("reward", stat="std") == pytest.approx(0.433, abs=1e-3)
    assert (value("solved_groups_ratio", by="all"), value("solved_groups_ratio", by="none")) == (0.5, 0.0)
    assert value("truncated_rollouts_ratio") == 0.25
    assert value("rollout_stops_total", reason="reason-0") == 18.0
    run_meters.forget("rewarded")
    assert value("reward", stat="mean") is None and value("rollout_stops_total", reason="reason-0") is None


@pytest.mark.parametrize("kind", ["env-server", "inference", "trainer"])
@pytest.mark.parametrize("reason", ["WORKER_LOST", "WORKER_REPLACED"])
def test_lost_workers_are_counted_from_0(kind: str, reason: str) -> None:
    labels = {"kind": kind, "reason": reason}
    assert _exported().get_sample_value("millrace_orchestrator_workers_lost_total", labels) is not None


@pytest.mark.parametrize(
    ("failed_in", "counted"), [("trainer", "trainer"), ("env-server", "env-server"), ("", "orchestrator")]
)
def test_failed_runs_are_counted_by_who_says_why(failed_in: str, counted: str) -> None:
    def value() -> float:
        found = _exported().get_sample_value("millrace_orchestrator_runs_failed_total", {"component": counted})
        assert found is not None
        return found

    before = value()
    RunMeters("fails").state_changed(run_pb2.RUN_STATE_FAILED, failed_in=failed_in)
    assert value() == before + 1
