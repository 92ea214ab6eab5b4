import time

from millrace.internal.v1 import worker_service_pb2 as ws
from millrace.orchestrator import workers
from millrace.orchestrator.workers import WorkerKind, WorkerRegistry


def registry_with(*names: str, kind: int = ws.WORKER_KIND_ENV_SERVER, slot: str = "") -> WorkerRegistry:
    registry = WorkerRegistry()
    for name in names:
        registry.register(ws.Worker(worker_id=name, kind=kind, slot=slot))
    return registry


def ids(records) -> list[str]:
    return [record.worker_id for record in records]


def silence(registry: WorkerRegistry, name: str, seconds: float) -> None:
    record = next(record for record in registry.records() if record.worker_id == name)
    record.last_seen = time.monotonic() - seconds


def test_a_successor_in_its_slot_replaces_a_worker_at_once() -> None:
    registry, gone = registry_with("a", slot="host/1"), []
    registry.on_lost.append(lambda record, reason: gone.append((record.worker_id, reason)))
    registry.register(ws.Worker(worker_id="b", kind=ws.WORKER_KIND_ENV_SERVER, slot="host/2"))
    registry.register(ws.Worker(worker_id="c", kind=ws.WORKER_KIND_ENV_SERVER, slot="host/1"))
    assert ids(registry.alive(WorkerKind.ENV_SERVER)) == ["b", "c"]
    assert gone == [("a", "WORKER_REPLACED")]
    assert registry.heartbeat(ws.HeartbeatRequest(worker_id="a")) is None, "it has to register again"


def test_workers_without_a_slot_replace_nobody() -> None:
    assert ids(registry_with("a", "b").alive(WorkerKind.ENV_SERVER)) == ["a", "b"]


def test_a_silent_worker_gets_nothing_new_and_is_lost_later() -> None:
    registry, gone = registry_with("a"), []
    registry.on_lost.append(lambda record, reason: gone.append((record.worker_id, reason)))
    silence(registry, "a", workers.QUIET_S + 1)
    kind = WorkerKind.ENV_SERVER
    assert (ids(registry.accepting(kind)), ids(registry.alive(kind)), gone) == ([], ["a"], [])
    silence(registry, "a", workers.LEASE_S + 1)
    assert (ids(registry.alive(kind)), gone) == ([], [("a", "WORKER_LOST")])


def test_a_worker_that_leaves_gets_nothing_new_and_is_gone_soon_after_its_last_word() -> None:
    registry, kind = registry_with("a"), WorkerKind.ENV_SERVER
    registry.heartbeat(ws.HeartbeatRequest(worker_id="a", is_leaving=True))
    assert (ids(registry.accepting(kind)), ids(registry.alive(kind))) == ([], ["a"])
    silence(registry, "a", workers.LEAVING_LEASE_S + 0.5)
    assert not registry.alive(kind)


def test_the_run_of_a_trainer_that_leaves_goes_to_another() -> None:
    kind = WorkerKind.TRAINER
    registry = registry_with("a", kind=ws.WORKER_KIND_TRAINER)
    assert registry.claim(kind, "run", limit=1) == 1
    registry.heartbeat(ws.HeartbeatRequest(worker_id="a", is_leaving=True))
    assert registry.claim(kind, "run", limit=1) == 0
    registry.register(ws.Worker(worker_id="b", kind=ws.WORKER_KIND_TRAINER))
    assert registry.claim(kind, "run", limit=1) == 1
    assert ids(registry.owned(kind, "run")) == ["a", "b"]


def test_assignments_say_which_copy_of_the_log_redis_holds() -> None:
    registry = registry_with("a")
    registry.set_watermark("run", 4)
    registry.set_log_instance("run", "2.abc")
    record = registry.records()[0]
    assert [(a.run_uid, a.resolved_below, a.log_instance) for a in registry.assignments(record)] == [
        ("run", 4, "2.abc")
    ]
    registry.release("run")
    assert not list(registry.assignments(record)), "driven elsewhere, or not at all: nothing is known of it"


def test_workers_let_go_of_paused_and_ended_runs_for_a_while() -> None:
    registry = registry_with("a")
    record = registry.records()[0]
    registry.retire("paused", has_ended=False)
    registry.retire("ended", has_ended=True)
    assert registry.retired_runs() == ["paused", "ended"]
    marks = {a.run_uid: a.is_over for a in registry.assignments(record)}
    assert marks == {"ended": True}, "rollouts of a paused run are kept"
    registry.claim(WorkerKind.TRAINER, "paused")
    assert registry.retired_runs() == ["ended"], "it was resumed"


def test_the_retired_runs_are_bounded() -> None:
    registry = registry_with("a")
    for number in range(workers.MAX_RETIRED + 10):
        registry.retire(f"run-{number}", has_ended=True)
    told = registry.retired_runs()
    assert len(told) == workers.MAX_RETIRED and told[-1] == f"run-{workers.MAX_RETIRED + 9}"
