"""Whose turn it is on devices that trainer and replicas share, over real gRPC: replicas sleep before a trainer's."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import pytest

from millrace.backoff import Backoff
from millrace.errors import InvalidStateError, MillraceError, UnavailableError
from millrace.internal.v1 import policy_service_pb2 as pb
from millrace.internal.v1 import policy_service_pb2_grpc, worker_service_pb2
from millrace.orchestrator import workers
from millrace.orchestrator.drive import trainer_watch
from millrace.orchestrator.drive.trainer_watch import DeviceTurns
from millrace.orchestrator.workers import WorkerKind, WorkerRegistry
from millrace.rpc.status import abort
from millrace.telemetry import waits
from millrace_testing.polling import until

RUN = "run1"
BUSY = UnavailableError("it takes another policy", reason="UPDATING")
LOADING = InvalidStateError("its vLLM is not up yet", reason="ENGINE_NOT_READY")


@dataclass
class Replica(policy_service_pb2_grpc.PolicyServiceServicer):
    """Sleeps and wakes as it is asked; answers with the errors of `fails` first."""

    address: str = ""
    is_asleep: bool = False
    asked: list[str] = field(default_factory=list)
    fails: list[MillraceError] = field(default_factory=list)
    going_on: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.going_on.set()

    async def PauseGeneration(self, request: Any, context: Any) -> Any:
        assert request.frees_memory and (request.run_uid, request.epoch) == (RUN, 3)
        await self._note("sleep", context)
        self.is_asleep = True
        return pb.PauseGenerationResponse(status=pb.PolicyStatus(is_asleep=True))

    async def ResumeGeneration(self, request: Any, context: Any) -> Any:
        assert request.takes_memory and request.epoch == 3
        await self._note("wake", context)
        self.is_asleep = False
        return pb.ResumeGenerationResponse(status=pb.PolicyStatus())

    async def _note(self, what: str, context: Any) -> None:
        self.asked.append(what)
        await self.going_on.wait()
        if self.fails:
            await abort(context, self.fails.pop(0))


class Place:
    """A registry with two replicas and a trainer, and the turns of their run."""

    def __init__(self, replicas: list[Replica]) -> None:
        self.registry, self.replicas = WorkerRegistry(), replicas
        self.num_evals = 0
        self.turns = DeviceTurns(run_uid=RUN, epoch=3, registry=self.registry, is_evaluating=lambda: self.num_evals > 0)
        for number, replica in enumerate(replicas):
            self.register(f"inf{number}", worker_service_pb2.WORKER_KIND_INFERENCE, replica.address)
        self.register("t", worker_service_pb2.WORKER_KIND_TRAINER, "")

    def register(self, name: str, kind: Any, address: str) -> None:
        self.registry.register(worker_service_pb2.Worker(worker_id=name, kind=kind, address=address))
        self.registry.claim(WorkerKind.INFERENCE, RUN)
        self.registry.claim(WorkerKind.TRAINER, RUN)

    def hear(self, turn: int, name: str = "t", *, is_last: bool = False, **status: Any) -> None:
        """The trainer's heartbeat; its lease runs out soon after its last one."""
        status = worker_service_pb2.TrainerStatus(run_uid=RUN, device_turn=turn, **status)
        report = worker_service_pb2.HeartbeatRequest(worker_id=name, trainer=status, is_leaving=is_last)
        self.registry.heartbeat(report)

    def lent(self, name: str = "t") -> int:
        """Return the turn that the trainer is told to have."""
        [assignment] = self.registry.assignments(self.registry.by_id[name])
        return assignment.device_turn

    @property
    def asleep(self) -> list[bool]:
        return [replica.is_asleep for replica in self.replicas]


@pytest.fixture
async def place(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    monkeypatch.setattr(trainer_watch, "RETRIES", Backoff(0.02, 0.1))
    monkeypatch.setattr(workers, "LEAVING_LEASE_S", 0.1)
    servers, replicas = [], []
    for _ in range(2):
        replica, server = Replica(), grpc.aio.server()
        policy_service_pb2_grpc.add_PolicyServiceServicer_to_server(replica, server)
        replica.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        servers.append(server)
        replicas.append(replica)
    yield Place(replicas)
    for server in servers:
        await server.stop(None)


@pytest.fixture
async def running(place: Place) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(place.turns.run())
    yield task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_every_replica_sleeps_before_the_trainer_has_a_turn_and_wakes_behind_it(place, running) -> None:
    place.replicas[1].fails = [BUSY, LOADING]
    for turn in (1, 2):
        place.hear(turn)
        await until(lambda turn=turn: place.lent() == turn, timeout_s=10)
        assert place.asleep == [True, True]
        place.hear(0)
        await until(lambda: place.asleep == [False, False], timeout_s=10)
        assert place.lent() == 0
    assert place.replicas[0].asked == ["sleep", "wake"] * 2
    assert place.replicas[1].asked == [*["sleep"] * 3, "wake", "sleep", "wake"]


async def test_turns_that_follow_at_once_are_told_apart_while_replicas_sleep_on(place, running) -> None:
    place.hear(1)
    await until(lambda: place.lent() == 1, timeout_s=10)
    place.hear(2)
    await until(lambda: place.lent() == 2, timeout_s=10)
    assert [replica.asked for replica in place.replicas] == [["sleep"], ["sleep"]]


async def test_an_evaluation_ends_before_a_turn_and_the_wait_is_visible(place, running) -> None:
    place.num_evals = 1
    place.hear(1)
    await until(lambda: [w for w in waits.snapshot("me") if "an evaluation to end" in w.reason], timeout_s=10)
    assert place.lent() == 0 and place.asleep == [False, False]
    place.num_evals = 0
    await until(lambda: place.lent() == 1, timeout_s=10)
    place.num_evals = 1  # begun while they sleep: it waits for the trainer, not the trainer for it
    place.hear(2)
    await until(lambda: place.lent() == 2, timeout_s=10)


async def test_a_trainer_that_dies_leaves_no_replica_asleep_and_its_successor_asks_anew(place, running) -> None:
    place.hear(1)
    await until(lambda: place.lent() == 1, timeout_s=10)
    place.hear(1, is_last=True)
    await until(lambda: place.asleep == [False, False], timeout_s=10)
    place.register("t2", worker_service_pb2.WORKER_KIND_TRAINER, "")
    place.hear(1, "t2")
    await until(lambda: place.lent("t2") == 1, timeout_s=10)
    assert place.asleep == [True, True]


async def test_a_replica_that_joins_during_a_turn_sleeps_and_one_that_its_predecessor_put_to_sleep_wakes(place) -> None:
    late = place.replicas[1]
    place = Place(place.replicas[:1])
    asleep = pb.PolicyStatus(is_asleep=True)
    place.registry.heartbeat(worker_service_pb2.HeartbeatRequest(worker_id="inf0", policy=asleep))
    place.hear(0)
    task = asyncio.create_task(place.turns.run())
    await until(lambda: place.replicas[0].asked == ["wake"], timeout_s=10)
    place.hear(1)
    await until(lambda: place.lent() == 1, timeout_s=10)
    place.replicas.append(late)
    place.register("inf1", worker_service_pb2.WORKER_KIND_INFERENCE, late.address)
    await until(lambda: place.asleep == [True, True], timeout_s=10)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    place.hear(0)
    await place.turns.leave()
    assert place.asleep == [False, False]


async def test_a_replica_that_can_never_sleep_ends_the_run_with_its_reason(place, running) -> None:
    place.replicas[0].fails = [InvalidStateError("vLLM was started without its sleep mode", reason="SLEEP_NOT_ENABLED")]
    place.hear(1)
    with pytest.raises(InvalidStateError, match="without its sleep mode"):
        await asyncio.wait_for(running, 10)
    assert place.lent() == 0


async def test_a_replica_that_was_started_anew_while_it_slept_is_awake(place, running) -> None:
    place.hear(1)
    await until(lambda: place.lent() == 1, timeout_s=10)
    place.replicas[0].fails = [LOADING]
    place.hear(0)
    await until(lambda: place.replicas[1].asked == ["sleep", "wake"], timeout_s=10)
    place.hear(2)  # the next turn waits until it is up, and asks it anew
    await until(lambda: place.lent() == 2, timeout_s=10)
    assert place.replicas[0].asked == ["sleep", "wake", "sleep"]


async def test_a_wake_whose_answer_is_lost_does_not_count_as_sleep(place, running) -> None:
    place.hear(1)
    await until(lambda: place.lent() == 1, timeout_s=10)
    place.replicas[0].fails = [BUSY] * 1000
    place.hear(0)
    await until(lambda: len(place.replicas[0].asked) > 3, timeout_s=10)
    place.replicas[0].is_asleep = False  # it did wake
    place.hear(2)
    await asyncio.sleep(0.3)
    assert place.lent() == 0
    place.replicas[0].fails = []
    await until(lambda: place.lent() == 2, timeout_s=10)
    assert place.asleep == [True, True]


async def test_a_successor_goes_on_with_a_turn_although_an_evaluation_begins(place) -> None:
    place.replicas[0].is_asleep = place.replicas[1].is_asleep = True
    for name in ("inf0", "inf1"):
        asleep = pb.PolicyStatus(is_asleep=True)
        place.registry.heartbeat(worker_service_pb2.HeartbeatRequest(worker_id=name, policy=asleep))
    place.num_evals = 1
    task = asyncio.create_task(place.turns.run())
    await asyncio.sleep(0.1)
    assert [replica.asked for replica in place.replicas] == [[], []], "nobody has heard what the trainer does"
    place.hear(7)
    await until(lambda: place.lent() == 7, timeout_s=10)
    assert [replica.asked for replica in place.replicas] == [["sleep"], ["sleep"]], "which prolongs it"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_gang_that_failed_in_its_turn_has_the_devices_until_it_ends(place, running) -> None:
    place.hear(1)
    await until(lambda: place.lent() == 1, timeout_s=10)
    place.hear(1, error_reason="OUT_OF_MEMORY")
    await asyncio.sleep(0.2)
    assert place.asleep == [True, True]
    place.hear(1, is_last=True, error_reason="OUT_OF_MEMORY")
    await until(lambda: place.asleep == [False, False], timeout_s=10)


async def test_replicas_are_asked_together(place, running) -> None:
    place.replicas[0].going_on.clear()
    place.hear(1)
    await until(lambda: [replica.asked for replica in place.replicas] == [["sleep"], ["sleep"]], timeout_s=10)
    assert place.lent() == 0
    place.replicas[0].going_on.set()
    await until(lambda: place.lent() == 1, timeout_s=10)


async def test_a_turn_of_the_orchestrator_before_goes_on_at_the_end_of_a_run(place, monkeypatch) -> None:
    monkeypatch.setattr(trainer_watch, "LEAVE_S", 0.3)
    asleep = pb.PolicyStatus(is_asleep=True)
    place.registry.heartbeat(worker_service_pb2.HeartbeatRequest(worker_id="inf0", policy=asleep))
    place.hear(4)
    await place.turns.leave()
    assert "wake" not in place.replicas[0].asked


async def test_no_turn_begins_at_the_end_of_a_run(place) -> None:
    place.hear(1)
    await place.turns.leave()
    assert place.lent() == 0 and [replica.asked for replica in place.replicas] == [[], []]


async def test_replicas_whose_trainer_works_on_are_left_asleep_at_the_end(place, running, monkeypatch, caplog) -> None:
    place.hear(1)
    await until(lambda: place.lent() == 1, timeout_s=10)
    running.cancel()
    monkeypatch.setattr(trainer_watch, "LEAVE_S", 0.1)
    await place.turns.leave()
    assert place.asleep == [True, True] and "replicas were left asleep" in caplog.text
