"""How long a run may be refused what it needs before those who wait are told, over a clock that the test moves."""

import time

import pytest

from millrace.errors import CapacityError, NotFoundError, PermissionDeniedError, RefusedError, UnavailableError
from millrace.internal.v1 import worker_service_pb2 as ws
from millrace.orchestrator.catalog import RunView
from millrace.orchestrator.why import GAP_S, HELD_UP_S, HeldUp
from millrace.orchestrator.workers import WorkerRegistry
from millrace.rpc.worker import to_proto
from millrace.runlog.records.run_record import RunRecord
from millrace.telemetry import waits
from millrace.telemetry.waits import Refusal, Wait
from millrace.v1 import event_pb2, run_pb2

UID, OWNER = "r-1", "orchestrator-0"
FULL = CapacityError("cannot write /x: 9 bytes are needed, 0 are free", reason="DISK_FULL", remedy="free space")


class World:
    """A run, its workers, and who looks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(waits, "REGISTRY", waits.WaitRegistry(clock=lambda: self.now))
        self.registry = WorkerRegistry()
        self.view = RunView(RunRecord.unreadable(UID, "mine"))
        self.held_up = HeldUp(self.registry, owner=OWNER, clock=lambda: self.now)
        self.says: dict[str, Exception | None] = {}

    def worker(self, name: str, kind: ws.WorkerKind, error: Exception | None) -> None:
        if name not in self.says:
            self.registry.register(ws.Worker(worker_id=name, kind=kind))
            self.registry.claim(self.registry.by_id[name].kind, UID, limit=1)
        self.says[name] = error

    def step(self) -> None:
        done = event_pb2.Event(cursor="1-1", writer="trainer-0", writer_sequence=1)
        done.step_completed.step = self.view.run.progress.step
        self.view.apply(done)

    def pass_by(self, seconds: float) -> None:
        for _ in range(round(seconds)):
            self.now += 1
            for name, error in self.says.items():
                found = [] if error is None else [Wait(owner=name, reason="x", run=UID, refusal=Refusal.of(error))]
                self.registry.heartbeat(ws.HeartbeatRequest(worker_id=name, waits=to_proto(found)))
            self.held_up.look([self.view])

    def problem(self) -> RefusedError | None:
        return self.held_up.problem(UID)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_a_lasting_refusal_is_told_with_its_cause_and_remedy(world: World) -> None:
    with waits.of_run(UID), waits.waiting("room", refusal=Refusal.of(FULL)):
        world.pass_by(HELD_UP_S - 5)
        assert world.problem() is None
        world.pass_by(10)
        problem = world.problem()
    assert problem is not None and problem.reason == "RUN_HELD_UP"
    assert problem.metadata == {"cause": "DISK_FULL", "component": "orchestrator"}
    assert "9 bytes are needed" in problem.message and problem.remedy == "free space"
    world.pass_by(GAP_S + 2)
    assert world.problem() is None


def test_tries_that_follow_one_another_are_one_refusal(world: World) -> None:
    for _ in range(8):
        with waits.of_run(UID), waits.waiting("room", refusal=Refusal.of(FULL)):
            world.pass_by(6)
        world.pass_by(2)
    assert world.problem() is not None


def test_a_run_that_gets_ahead_is_not_held_up(world: World) -> None:
    with waits.of_run(UID), waits.waiting("room for events", refusal=Refusal.of(FULL)):
        for _ in range(4):
            world.pass_by(HELD_UP_S - 20)
            world.step()
        assert world.problem() is None


@pytest.mark.parametrize("error", [UnavailableError("no answer"), NotFoundError("gone"), ValueError("x")])
def test_what_does_not_answer_is_an_outage(world: World, error: Exception) -> None:
    with waits.of_run(UID), waits.waiting("redis", refusal=Refusal.of(error)):
        world.pass_by(3 * HELD_UP_S)
        assert world.problem() is None


def test_what_a_trainer_is_refused_counts(world: World) -> None:
    world.worker("trainer-0", ws.WORKER_KIND_TRAINER, PermissionDeniedError("read-only", reason="STORE_DENIED"))
    world.pass_by(HELD_UP_S + 5)
    problem = world.problem()
    assert problem is not None and problem.metadata == {"cause": "STORE_DENIED", "component": "trainer"}


def test_one_of_several_env_servers_holds_nothing_up(world: World) -> None:
    world.worker("env-0", ws.WORKER_KIND_ENV_SERVER, FULL)
    world.worker("env-1", ws.WORKER_KIND_ENV_SERVER, None)
    world.pass_by(2 * HELD_UP_S)
    assert world.problem() is None
    world.worker("env-1", ws.WORKER_KIND_ENV_SERVER, FULL)
    world.pass_by(HELD_UP_S + 5)
    assert world.problem() is not None


def test_a_run_that_has_ended_is_forgotten(world: World) -> None:
    with waits.of_run(UID), waits.waiting("room", refusal=Refusal.of(FULL)):
        world.pass_by(HELD_UP_S + 5)
        assert world.problem() is not None
        end = event_pb2.Event(cursor="2-1", writer=OWNER, writer_sequence=1)
        end.state_changed.new_state = run_pb2.RUN_STATE_FAILED
        world.view.apply(end)
        world.pass_by(1)
    assert world.problem() is None
