import asyncio
import time

import pytest

from millrace.internal.v1 import policy_service_pb2
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


class Clock:
    """Stands in for the module `time` of the registry."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(workers, "time", made)
    return made


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


def test_a_silent_worker_gets_nothing_new_and_is_lost_later(clock: Clock) -> None:
    registry, gone = registry_with("a"), []
    registry.on_lost.append(lambda record, reason: gone.append((record.worker_id, reason)))
    clock.now += workers.QUIET_S + 1
    kind = WorkerKind.ENV_SERVER
    assert (ids(registry.accepting(kind)), ids(registry.alive(kind)), gone) == ([], ["a"], [])
    clock.now += workers.LEASE_S - workers.QUIET_S
    assert (ids(registry.alive(kind)), gone) == ([], [("a", "WORKER_LOST")])


def test_a_worker_that_leaves_gets_nothing_new_and_is_gone_soon_after_its_last_word(clock: Clock) -> None:
    registry, kind = registry_with("a"), WorkerKind.ENV_SERVER
    registry.heartbeat(ws.HeartbeatRequest(worker_id="a", is_leaving=True))
    assert (ids(registry.accepting(kind)), ids(registry.alive(kind))) == ([], ["a"])
    clock.now += workers.LEAVING_LEASE_S + 0.5
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


def replicas_with(*runs: str) -> WorkerRegistry:
    """A registry of replicas `i0`, `i1`, …, each of which serves a run, or none."""
    registry = WorkerRegistry()
    for number, uid in enumerate(runs):
        registry.register(ws.Worker(worker_id=f"i{number}", kind=ws.WORKER_KIND_INFERENCE))
        status = policy_service_pb2.PolicyStatus(run_uid=uid)
        registry.heartbeat(ws.HeartbeatRequest(worker_id=f"i{number}", policy=status))
    return registry


def test_runs_share_the_replicas(clock: Clock) -> None:
    """The first one to look does not take them all, as soon as others have a trainer."""
    registry = replicas_with(*[""] * 7)
    for uid in ("a", "b"):
        registry.register(ws.Worker(worker_id=f"t{uid}", kind=ws.WORKER_KIND_TRAINER))
        assert registry.claim(WorkerKind.TRAINER, uid, limit=1) == 1
    assert [registry.claim(WorkerKind.INFERENCE, uid) for uid in ("a", "b", "a")] == [4, 3, 4]
    alone = replicas_with(*[""] * 7)
    assert alone.claim(WorkerKind.INFERENCE, "a") == 7


@pytest.mark.parametrize(("replicas", "runs"), [(4, 3), (6, 4), (16, 10), (3, 3), (2, 3)])
def test_no_run_is_without_a_replica_if_there_are_enough(clock: Clock, replicas: int, runs: int) -> None:
    registry = replicas_with(*[""] * replicas)
    uids = [f"run-{number}" for number in range(runs)]
    for uid in uids:
        registry.register(ws.Worker(worker_id=f"t-{uid}", kind=ws.WORKER_KIND_TRAINER))
        registry.claim(WorkerKind.TRAINER, uid, limit=1)
    had = [registry.claim(WorkerKind.INFERENCE, uid) for uid in reversed(uids)]
    assert sum(had) == replicas and max(had) - min(had) <= 1


def test_a_replica_waits_for_the_run_that_it_serves_while_a_successor_claims_it(clock: Clock) -> None:
    registry, kind = replicas_with("theirs", "ended", ""), WorkerKind.INFERENCE
    registry.going_on = frozenset({"mine", "theirs"})
    registry.claim(kind, "mine")
    assert ids(registry.owned(kind, "mine")) == ["i1", "i2"]
    registry.claim(kind, "theirs")
    assert ids(registry.owned(kind, "theirs")) == ["i0"]
    late = replicas_with("theirs")
    late.going_on = registry.going_on
    clock.now += workers.HOME_S + 1
    late.heartbeat(ws.HeartbeatRequest(worker_id="i0"))
    assert late.claim(kind, "mine") == 1, "nobody came for it"


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


def beat(registry: WorkerRegistry, name: str, **report) -> None:
    registry.heartbeat(ws.HeartbeatRequest(worker_id=name, **report))


def test_a_heartbeat_wakes_others_only_with_what_they_may_wait_for() -> None:
    registry = registry_with("a", kind=ws.WORKER_KIND_INFERENCE)
    status = policy_service_pb2.PolicyStatus(run_uid="run", has_version=True, version=3)
    beat(registry, "a", policy=status)
    heard = registry.revision
    for number in range(100):
        status.num_requests = number
        beat(registry, "a", policy=status, num_playing=number)
    assert registry.revision == heard
    status.version = 4
    beat(registry, "a", policy=status)
    beat(registry, "a", policy=status, is_leaving=True)
    assert registry.revision == heard + 2


def test_a_worker_whose_heartbeats_wait_for_this_process_is_not_lost(clock: Clock) -> None:
    registry, kind = registry_with(*"abcd"), WorkerKind.ENV_SERVER
    for _ in range(3):  # each heartbeat waits for longer than a lease, and they are taken in turn
        for name in "abcd":
            clock.now += workers.LEASE_S / 2
            beat(registry, name)
            assert ids(registry.alive(kind)) == list("abcd")
    clock.now += workers.LEASE_S
    for _ in range(workers.LOST_ROUNDS + 1):
        clock.now += workers.HEARTBEAT_S
        for name in "abc":
            beat(registry, name)
    assert ids(registry.alive(kind)) == list("abc"), "the others were heard again and again"


def test_a_worker_that_somebody_saw_silent_is_news_when_it_speaks_again(clock: Clock) -> None:
    """Lists of workers that take work are kept until `revision` moves: else it would be left out for ever."""
    registry = registry_with("a", "b")
    clock.now += workers.QUIET_S + 1  # this process stood still, and `keep_pulse` has not run since
    assert ids(registry.accepting(WorkerKind.ENV_SERVER)) == []
    seen = registry.revision
    registry.heartbeat(ws.HeartbeatRequest(worker_id="a"))
    assert ids(registry.accepting(WorkerKind.ENV_SERVER)) == ["a"] and registry.revision > seen
    seen = registry.revision
    registry.heartbeat(ws.HeartbeatRequest(worker_id="a"))
    assert registry.revision == seen, "and only then"


@pytest.mark.parametrize("num_left", [1, 3, 10])
def test_workers_that_die_together_are_lost_in_time_where_fewer_survive(clock: Clock, num_left: int) -> None:
    registry = registry_with(*(f"w{n}" for n in range(4 * num_left)))
    alive = [f"w{n}" for n in range(num_left)]
    for _ in range(int(workers.LEASE_S) + 5):
        clock.now += 1.0
        for name in alive:
            registry.heartbeat(ws.HeartbeatRequest(worker_id=name))
    assert set(ids(registry.alive(WorkerKind.ENV_SERVER))) == set(alive)


def test_all_workers_are_lost_where_nobody_is_heard(clock: Clock) -> None:
    registry = registry_with("a", "b")
    clock.now += workers.LEASE_S + 1
    assert not registry.alive(WorkerKind.ENV_SERVER)


def test_many_workers_speak_less_often_and_their_silence_counts_from_when_they_should_have_spoken(clock: Clock) -> None:
    number = 4 * workers.HEARTBEATS_PER_S
    registry = registry_with(*(f"{each:04d}" for each in range(number)))
    trainer = registry.register(ws.Worker(worker_id="t", kind=ws.WORKER_KIND_TRAINER))
    beat(registry, "0000")
    [first, *_] = registry.alive(WorkerKind.ENV_SERVER)
    assert trainer.interval_s == workers.HEARTBEAT_S, "others wait for what it reports"
    shortest, longest = (4.0 * factor for factor in workers.INTERVAL_SPREAD)
    assert shortest * 0.99 < first.interval_s < longest * 1.01
    assert first.lease_ends - clock.now == pytest.approx(workers.LEASE_S + first.interval_s - workers.HEARTBEAT_S)
    clock.now += first.interval_s + workers.QUIET_S - workers.HEARTBEAT_S - 0.1
    assert first.takes_work
    clock.now += 0.2
    assert not first.takes_work


def test_heartbeats_that_were_answered_together_do_not_come_together_again(clock: Clock) -> None:
    number = 4 * workers.HEARTBEATS_PER_S
    registry = registry_with(*(f"{each:04d}" for each in range(number)))
    for each in range(number):
        beat(registry, f"{each:04d}")
    due = sorted(record.last_seen + record.interval_s for record in registry.alive(WorkerKind.ENV_SERVER))
    assert sum(due) / number - clock.now == pytest.approx(4.0, rel=0.05)
    tenths = [sum(at <= each < at + 0.1 for each in due) for at in due]
    assert max(tenths) < 0.1 * number


async def test_who_waits_for_workers_hears_that_one_fell_silent_and_that_it_is_back(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setattr(workers, "PULSE_S", 0.01)
    monkeypatch.setattr(workers, "STOOD_STILL_S", 1e9)
    registry = registry_with("a")
    looking = asyncio.create_task(registry.keep_pulse())
    for change in (lambda: setattr(clock, "now", clock.now + workers.QUIET_S + 1), lambda: beat(registry, "a")):
        changed = registry.changed
        change()
        await asyncio.wait_for(changed.wait(), 10)
    looking.cancel()


def test_a_worker_does_not_hear_of_a_reserved_run_until_it_is_announced_unless_it_reports_it() -> None:
    registry = registry_with("new", kind=ws.WORKER_KIND_TRAINER)
    registry.reserve("r")
    assert registry.claim(WorkerKind.TRAINER, "r", limit=1) == 1
    record = registry.by_id["new"]
    record.news.clear()
    assert not list(registry.assignments(record)) and registry.claim(WorkerKind.TRAINER, "other", limit=1) == 0
    record.take(ws.HeartbeatRequest(trainer=ws.TrainerStatus(run_uid="r")))
    assert [each.run_uid for each in registry.assignments(record)] == ["r"]
    record.take(ws.HeartbeatRequest(trainer=ws.TrainerStatus()))
    registry.announce("r")
    assert record.news.is_set() and [each.run_uid for each in registry.assignments(record)] == ["r"]


def test_a_run_that_is_given_up_is_reserved_no_more() -> None:
    registry = registry_with("a", kind=ws.WORKER_KIND_TRAINER)
    registry.reserve("r")
    registry.release("r")
    registry.claim(WorkerKind.TRAINER, "r", limit=1)
    assert [each.run_uid for each in registry.assignments(registry.by_id["a"])] == ["r"]
