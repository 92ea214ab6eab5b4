"""Workers are called shortly, and keep what they are called."""

from millrace.internal.v1 import worker_service_pb2 as ws
from millrace.orchestrator.dashboard_source import host_of
from millrace.orchestrator.worker_names import Numbered, WorkerNames
from millrace.orchestrator.workers import WorkerRegistry

REPLICA = ws.WORKER_KIND_INFERENCE


def register(registry: WorkerRegistry, worker_id: str, kind: ws.WorkerKind, slot: str = "") -> None:
    registry.register(ws.Worker(worker_id=worker_id, kind=kind, slot=slot))


def test_workers_are_numbered_by_kind_in_the_order_in_which_they_came() -> None:
    names = WorkerNames()
    b, x, a, c = (
        Numbered(*each, "") for each in (("b", "trainer"), ("x", "inference"), ("a", "trainer"), ("c", "trainer"))
    )
    assert names.of([b, x, a]) == {"b": "trainer-1", "x": "inference-1", "a": "trainer-2"}
    assert names.of([x, a]) == {"x": "inference-1", "a": "trainer-2"}, "who stays keeps its name"
    assert names.of([x, a, c])["c"] == "trainer-1", "and the next takes what is free"


def test_a_successor_has_the_name_of_its_place() -> None:
    registry = WorkerRegistry()
    for number in (1, 2, 3):
        register(registry, f"old-{number}", REPLICA, slot=f"host/{number}")
    registry.names()
    register(registry, "other", REPLICA)
    register(registry, "new", REPLICA, slot="host/2")
    assert registry.names() == {
        "old-1": "inference-1", "old-3": "inference-3", "other": "inference-4", "new": "inference-2",
    }  # fmt: skip


def test_successors_have_the_names_of_their_places_in_whatever_order_and_however_late_they_come() -> None:
    names = WorkerNames()
    first, second = (Numbered(f"old-{number}", "trainer", f"host/{number}") for number in (1, 2))
    names.of([first, second])
    assert names.of([]) == {}, "a look when both are gone"
    late = [Numbered(f"new-{number}", "trainer", f"host/{number}") for number in (2, 1)]
    assert names.of(late[:1]) == {"new-2": "trainer-2"}
    assert names.of(late) == {"new-2": "trainer-2", "new-1": "trainer-1"}


def test_a_number_that_another_worker_has_got_meanwhile_is_not_given_twice() -> None:
    names = WorkerNames()
    names.of([Numbered("old", "trainer", "host/1")])
    names.of([])
    other, new = Numbered("other", "trainer", "host/9"), Numbered("new", "trainer", "host/1")
    assert names.of([other]) == {"other": "trainer-1"}
    assert names.of([other, new]) == {"other": "trainer-1", "new": "trainer-2"}


def test_the_host_stands_in_the_id() -> None:
    assert host_of("trainer-node-7-412-9f3ac1d2", "trainer") == "node-7"
    assert host_of("mine", "inference") == ""
