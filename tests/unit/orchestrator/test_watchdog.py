"""The watchdog and `explain` over a registry whose time the test makes."""

import time

import pytest

from millrace.internal.v1 import worker_service_pb2 as ws
from millrace.orchestrator import watchdog as watchdog_module
from millrace.orchestrator import workers
from millrace.orchestrator.catalog import RunView
from millrace.orchestrator.watchdog import Watchdog
from millrace.orchestrator.why import explain, stood_still
from millrace.orchestrator.workers import WorkerKind, WorkerRegistry
from millrace.rpc.worker import from_proto
from millrace.runlog.records.run_record import RunRecord
from millrace.runlog.redis.connection import OUTAGES, Outage
from millrace.telemetry import waits
from millrace.telemetry.waits import METER, Meter
from millrace.v1 import event_pb2, run_pb2

UID, OWNER = "r-1", "orchestrator-0"


class Events:
    """What the watchdog told."""

    def __init__(self) -> None:
        self.warnings: list[tuple[str, str]] = []
        self.waits: list[waits.Wait] = []

    async def warning(self, reason: str, message: str) -> None:
        self.warnings.append((reason, message))

    async def wait_reported(self, wait: waits.Wait) -> None:
        self.waits.append(wait)

    @property
    def reasons(self) -> list[str]:
        return [reason for reason, _ in self.warnings]


class World:
    """A registry and a watchdog on one clock that only the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.registry, self.events, self.at = WorkerRegistry(), Events(), 0
        self.frozen: set[str] = set()
        self.meter = Meter(clock=lambda: self.now)
        self.meter.begin()
        self.reported: dict[str, event_pb2.Wait | None] = {}
        self.dog = Watchdog(
            run_uid=UID,
            owner=OWNER,
            registry=self.registry,
            events=self.events,  # type: ignore[arg-type]
            progress=lambda: self.at,
            clock=lambda: self.now,
            meter=self.meter,
        )

    def add(self, worker_id: str, kind: ws.WorkerKind, *, slot: str = "", waits_for: event_pb2.Wait | None = None):
        self.registry.register(ws.Worker(worker_id=worker_id, kind=kind, slot=slot))
        self.reported[worker_id] = waits_for
        self.beat(worker_id)
        if kind != ws.WORKER_KIND_ENV_SERVER:
            self.registry.claim(self.registry.by_id[worker_id].kind, UID)

    def beat(self, worker_id: str) -> None:
        request = ws.HeartbeatRequest(worker_id=worker_id)
        if (wait := self.reported[worker_id]) is not None:
            request.waits.append(wait)
        if self.registry.heartbeat(request) is None:
            self.registry.register(ws.Worker(worker_id=worker_id, kind=ws.WORKER_KIND_ENV_SERVER))
            self.registry.heartbeat(request)

    async def run(self, seconds: float, *, progress: bool = False) -> None:
        """Let time pass: heartbeats of who is not frozen, the registry's look, the watchdog's look."""
        for _ in range(round(seconds)):
            self.now += 1.0
            self.at += progress
            for worker_id in self.reported:
                if worker_id not in self.frozen:
                    self.beat(worker_id)
            self.registry.alive(WorkerKind.TRAINER)
            self.meter.tick()
            await self.dog.look()


@pytest.fixture
def world(monkeypatch):
    OUTAGES.clear()
    METER.found.clear()  # what other tests of this process have seen, on a clock that is not the world's
    METER.begin(is_ticking=lambda: False)
    made = World(monkeypatch)
    yield made
    OUTAGES.clear()


def trainer_waits() -> event_pb2.Wait:
    return event_pb2.Wait(owner="trainer-0", reason="batch 3", waits_on="orchestrator", age_seconds=4, run_uid=UID)


async def test_a_silent_env_server_is_named_once_and_once_when_it_is_back(world):
    world.add("trainer-0", ws.WORKER_KIND_TRAINER, waits_for=trainer_waits())
    world.add("env-server-a", ws.WORKER_KIND_ENV_SERVER)
    world.add("env-server-b", ws.WORKER_KIND_ENV_SERVER)
    await world.run(3, progress=True)
    world.frozen = {"env-server-a"}
    await world.run(25, progress=True)
    assert len(world.events.warnings) == 1
    reason, message = world.events.warnings[0]
    assert reason in ("WORKER_SILENT", "WORKER_LOST")
    assert message.startswith("env-server env-server-a has not answered for 1")
    world.frozen = set()
    await world.run(3, progress=True)
    assert world.events.reasons[1:] == ["WORKER_BACK"]
    assert "env-server env-server-a answers again, after 2" in world.events.warnings[1][1]
    assert world.events.waits == []
    await world.run(30, progress=True)
    assert len(world.events.warnings) == 2


async def test_a_replaced_worker_is_named_with_its_successor(world):
    world.add("env-server-a", ws.WORKER_KIND_ENV_SERVER, slot="host/1")
    await world.run(2)
    del world.reported["env-server-a"]
    world.add("env-server-b", ws.WORKER_KIND_ENV_SERVER, slot="host/1")
    await world.run(2)
    assert world.events.reasons == ["WORKER_REPLACED"]
    assert "env-server env-server-a ended and env-server-b took its place" in world.events.warnings[0][1]


async def test_no_progress_names_the_end_of_the_chain_at_growing_intervals_until_it_moves(world):
    world.add("trainer-0", ws.WORKER_KIND_TRAINER, waits_for=trainer_waits())
    await world.run(5, progress=True)
    await world.run(19)
    assert world.events.waits == []
    await world.run(2)
    (wait,) = world.events.waits
    assert (wait.owner, wait.reason) == ("orchestrator-0", "nobody: it works")
    await world.run(40)
    assert len(world.events.waits) == 2
    await world.run(3, progress=True)
    await world.run(20)
    assert len(world.events.waits) == 2  # it has seen that this run stands still at times
    await world.run(10)
    assert len(world.events.waits) == 3


async def test_an_overdue_wait_is_told_once_in_ten_minutes(world):
    late = event_pb2.Wait(owner="env-server-a", reason="3 rollouts", age_seconds=11, deadline_seconds=10, run_uid=UID)
    other = event_pb2.Wait(owner="env-server-a", reason="x", age_seconds=99, deadline_seconds=10, run_uid="r-2")
    world.add("env-server-a", ws.WORKER_KIND_ENV_SERVER, waits_for=late)
    await world.run(5, progress=True)
    late.reason = "2 rollouts"
    await world.run(5, progress=True)
    assert [wait.reason for wait in world.events.waits] == ["3 rollouts"]
    world.reported["env-server-a"] = other
    await world.run(2, progress=True)
    world.reported["env-server-a"] = late
    await world.run(300, progress=True)
    assert [wait.reason for wait in world.events.waits] == ["3 rollouts"]
    await world.run(300, progress=True)
    assert [wait.reason for wait in world.events.waits] == ["3 rollouts", "2 rollouts"]


async def test_what_a_silent_worker_said_last_is_not_held_against_its_disk(world):
    """Its waits grow old with its heartbeat; it is the silent worker that is named, not what it waited for."""
    disk = event_pb2.Wait(owner="env-server-a", reason="2 writes", waits_on="disk", age_seconds=2, deadline_seconds=10)
    world.add("trainer-0", ws.WORKER_KIND_TRAINER, waits_for=trainer_waits())
    world.add("env-server-a", ws.WORKER_KIND_ENV_SERVER, waits_for=disk)
    world.frozen = {"env-server-a"}
    with waits.of_run(UID), waits.waiting("8 of 8 groups", waits_on="env-server"):
        await world.run(9.0)
        assert world.events.waits == [] and world.events.warnings == []  # 11 s by now, had it gone on
        await world.run(13.0)
    assert world.events.reasons[0] in ("WORKER_SILENT", "WORKER_LOST")
    assert [wait.waits_on for wait in world.events.waits] == ["env-server-a"]  # no progress: the end of the chain


async def test_a_slow_run_is_not_stuck_at_every_step(world):
    world.add("trainer-0", ws.WORKER_KIND_TRAINER, waits_for=trainer_waits())
    for _ in range(40):
        await world.run(45)
        await world.run(1, progress=True)
    assert 1 <= len(world.events.waits) <= 3
    assert world.events.warnings == []


async def test_standstills_with_a_known_culprit_do_not_make_it_patient(world):
    world.add("trainer-0", ws.WORKER_KIND_TRAINER, waits_for=trainer_waits())
    world.add("env-server-a", ws.WORKER_KIND_ENV_SERVER)
    for turn in range(1, 4):
        world.frozen = {"env-server-a"}
        await world.run(22)
        world.frozen = set()
        await world.run(3, progress=True)
        assert len(world.events.waits) == turn


async def test_a_process_that_stood_still_blames_nobody(world):
    world.add("trainer-0", ws.WORKER_KIND_TRAINER, waits_for=trainer_waits())
    world.add("env-server-a", ws.WORKER_KIND_ENV_SERVER)
    await world.run(15)
    world.now += 40  # SIGSTOP, SIGCONT: nobody was heard, nothing was done, and a command seems to have taken long
    OUTAGES.append(Outage(address="127.0.0.1:1", began=world.now - 40, ended=world.now))
    await world.dog.look()
    for worker_id in ("trainer-0", "env-server-a"):
        world.beat(worker_id)
    await world.run(4)
    assert world.events.reasons == ["ORCHESTRATOR_STOOD_STILL"]
    assert "orchestrator orchestrator-0 stood still for 40 s" in world.events.warnings[0][1]
    assert world.events.waits == []


async def test_an_outage_that_outlasts_its_own_standstill_is_told_without_it(world):
    await world.run(10, progress=True)
    world.now += 20
    OUTAGES.append(Outage(address="127.0.0.1:1", began=world.now - 20, ended=world.now + 7))
    await world.run(12, progress=True)
    assert world.events.reasons == ["ORCHESTRATOR_STOOD_STILL", "REDIS_SILENT"]
    assert world.events.warnings[1][1] in [
        f"Redis at 127.0.0.1:1 did not answer for {s} s" for s in (6, 7)
    ]  # 27 s less 20, to a tick


async def test_explain_says_for_a_minute_that_this_process_stood_still(world):
    world.add("trainer-0", ws.WORKER_KIND_TRAINER, waits_for=trainer_waits())
    assert stood_still(OWNER, meter=world.meter) == ""
    await world.run(5)
    world.now += 14
    await world.run(4)
    said = stood_still(OWNER, meter=world.meter)
    assert said.startswith(f"orchestrator {OWNER} stood still for 14 s until 3 s ago (it was frozen")
    await world.run(60)
    assert stood_still(OWNER, meter=world.meter) == ""


async def test_an_outage_of_redis_is_told_when_it_is_over(world):
    await world.run(10, progress=True)
    OUTAGES.append(Outage(address="127.0.0.1:1", began=world.now - 8, ended=world.now))
    OUTAGES.append(Outage(address="127.0.0.1:1", began=world.now - 4, ended=world.now + 0.1))
    await world.run(5, progress=True)
    assert world.events.warnings == [("REDIS_SILENT", "Redis at 127.0.0.1:1 did not answer for 8 s")]


async def test_the_number_of_events_is_bounded(world):
    for turn in range(200):
        world.reported = {}
        late = event_pb2.Wait(owner="env-server-a", reason=f"a{'b' * turn}", age_seconds=11, deadline_seconds=10)
        world.add("env-server-a", ws.WORKER_KIND_ENV_SERVER, waits_for=late)
        await world.run(1, progress=True)
    assert len(world.events.waits) == watchdog_module.MAX_EVENTS


def view(state: run_pb2.RunState) -> RunView:
    record = RunRecord(
        uid=UID,
        name="mine",
        kind="RL",
        config={},
        run_hash="",
        request_id="",
        create_time="2026-01-01T00:00:00Z",
        code_version="",
        labels={},
    )
    made = RunView(record)
    made.status.state = state
    return made


def summary(world: World, state: run_pb2.RunState = run_pb2.RUN_STATE_RUNNING, **options) -> str:
    return explain(view(state), world.registry, owner=OWNER, **options).summary


async def test_explain_says_what_is_special_of_the_state(world):
    assert summary(world, run_pb2.RUN_STATE_SUCCEEDED) == "run mine has ended as SUCCEEDED"
    assert summary(world, run_pb2.RUN_STATE_PAUSED).startswith("paused: nothing works on it until `millrace run resume")
    assert summary(world, run_pb2.RUN_STATE_QUEUED) == "queued: no trainer worker is free (none is registered)"
    world.add("trainer-9", ws.WORKER_KIND_TRAINER)
    world.registry.release(UID)
    assert summary(world, run_pb2.RUN_STATE_QUEUED).startswith("queued: a trainer is free")
    world.registry.claim(WorkerKind.TRAINER, "r-other")
    named = summary(world, run_pb2.RUN_STATE_QUEUED, name_of={"r-other": "theirs"}.__getitem__)
    assert named == "queued: no trainer worker is free (trainer-9 has run theirs); see: millrace run why theirs"
    assert summary(world).startswith("no trainer is assigned to the run (trainer-9 has run r-other)")
    world.registry.release("r-other")
    world.registry.claim(WorkerKind.TRAINER, UID)
    named = summary(world, run_pb2.RUN_STATE_QUEUED)
    assert named.startswith("queued: a trainer is free"), "a run never waits for itself"


async def test_explain_names_environments_that_lose_many_groups_as_stale(world):
    seen = view(run_pb2.RUN_STATE_RUNNING)
    late = {"batch/dropped/stale/slow": 4.0, "stale_share/slow/mean": 0.31, "stale_share/slow/slowest_quarter": 0.8}
    few = {"batch/dropped/stale/quick": 1.0, "stale_share/quick/mean": 0.1}
    seen.status.apply(event_pb2.Event(batch_committed=event_pb2.BatchCommitted(step=0, metrics=late | few)))
    said = explain(seen, world.registry, owner=OWNER).summary
    lost = "4 groups dropped as stale (31% of its last ones, 80% of the slowest quarter)"
    assert f"environment 'slow' is behind: {lost}" in said and "'quick'" not in said


async def test_explain_shows_waits_of_the_run_and_of_no_run_only(world):
    world.add("env-server-a", ws.WORKER_KIND_ENV_SERVER, waits_for=None)
    world.add("trainer-0", ws.WORKER_KIND_TRAINER, waits_for=trainer_waits())
    request = ws.HeartbeatRequest(worker_id="env-server-a")
    for run in ("", UID, "r-2"):
        request.waits.add(owner="env-server-a", reason=f"of {run or 'none'}", run_uid=run, age_seconds=1)
    world.registry.heartbeat(request)
    world.now += 2
    with waits.of_run("r-2"), waits.waiting("another run's"), waits.of_run(UID), waits.waiting("batch"):
        answer = explain(view(run_pb2.RUN_STATE_RUNNING), world.registry, owner=OWNER, note="old view")
    assert sorted((w.owner, w.reason) for w in answer.waits) == [
        ("env-server-a", "of none"),
        ("env-server-a", f"of {UID}"),
        (OWNER, "batch"),
        ("trainer-0", "batch 3"),
    ]
    assert [w.age_seconds for w in answer.waits] == sorted((w.age_seconds for w in answer.waits), reverse=True)
    assert answer.summary.startswith("old view; trainer-0 waits for batch 3, 6.0 s ← orchestrator-0 waits for batch")


async def test_a_lost_worker_is_explained_until_another_of_its_kind_serves(world):
    world.add("trainer-0", ws.WORKER_KIND_TRAINER, waits_for=trainer_waits())
    world.add("env-server-a", ws.WORKER_KIND_ENV_SERVER)
    world.frozen = {"env-server-a"}
    await world.run(14, progress=True)
    assert [record.worker_id for record in world.registry.records()] == ["trainer-0"]
    with waits.of_run(UID), waits.waiting("8 of 8 groups", waits_on="env-server"):
        gone = "env-server env-server-a has not answered for 14 s (frozen, or it or its machine is gone; it counts as"
        assert f" ← {gone} lost)" in summary(world)
        world.add("env-server-b", ws.WORKER_KIND_ENV_SERVER)
        assert summary(world).endswith("← env-server-b plays 0 rollouts")


async def test_waits_of_one_owner_that_are_alike_are_one_line(world):
    world.add("env-server-a", ws.WORKER_KIND_ENV_SERVER)
    request = ws.HeartbeatRequest(worker_id="env-server-a")
    for number in range(104):
        age_s = 1.7 if number == 50 else 0.5
        request.waits.add(owner="env-server-a", reason="the disk", waits_on="disk", age_seconds=age_s)
    request.waits.add(owner="env-server-a", reason="a tokenizer", age_seconds=1)
    world.registry.heartbeat(request)
    answer = explain(view(run_pb2.RUN_STATE_RUNNING), world.registry, owner=OWNER)
    assert [wait.reason for wait in answer.waits] == ["the disk (×104, oldest 1.7 s)", "a tokenizer"]
    assert answer.waits[0].age_seconds == 1.7


@pytest.mark.parametrize("number", [4, 64, 256])
async def test_the_look_of_each_second_reads_only_reports_of_workers_in_trouble(world, monkeypatch, number):
    """What it costs does not grow with the waits that a healthy fleet reports."""
    num_read = 0

    def read(messages):
        nonlocal num_read
        num_read += 1
        return from_proto(messages)

    monkeypatch.setattr(workers, "from_proto", read)
    for index in range(number):
        quiet = event_pb2.Wait(owner=f"e{index}", reason="a rollout", age_seconds=1.0, deadline_seconds=1e6)
        world.add(f"e{index}", ws.WORKER_KIND_ENV_SERVER, waits_for=quiet)
    stuck = event_pb2.Wait(owner="e-stuck", reason="a disk", age_seconds=30.0, deadline_seconds=5.0)
    world.add("e-stuck", ws.WORKER_KIND_ENV_SERVER, waits_for=stuck)
    await world.run(5, progress=True)
    assert num_read == 5 and [wait.owner for wait in world.events.waits] == ["e-stuck"]
