"""The worker's state machine, with jobs that end in every way."""

import functools
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
from torch import nn

from millrace.errors import CapacityError, FencedError, InternalError, NotFoundError, PermissionDeniedError
from millrace.internal.v1.worker_service_pb2 import Assignment, HeartbeatResponse, TrainerStatus
from millrace.rpc.health import PROCESS, HealthBoard
from millrace.telemetry import waits
from millrace.trainer import meters
from millrace.trainer import worker as worker_module
from millrace.trainer.gang.agreement import Failure, encode_result
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.log.background import StopRequested
from millrace.trainer.publish.plan import PublishPlan, plan_publishing
from millrace.trainer.worker import TrainerWorker
from millrace_testing.polling import block_until


class Clock:
    """Monotonic seconds that a test can move."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def board(clock: Clock) -> HealthBoard:
    return HealthBoard(clock=clock)


@pytest.fixture
def worker(clock: Clock, board: HealthBoard) -> TrainerWorker:
    return TrainerWorker(board=board, clock=clock)


@pytest.fixture
def start(worker: TrainerWorker) -> Iterator[Callable[[Callable[[str], None]], None]]:
    threads: list[threading.Thread] = []

    def start(job: Callable[[str], None]) -> None:
        threads.append(threading.Thread(target=worker.run, args=(job,), kwargs={"gang": Gang()}, daemon=True))
        threads[-1].start()

    yield start
    worker.stop()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def _assign(worker: TrainerWorker, *uids: str) -> None:
    worker.on_answer(HeartbeatResponse(assignments=[Assignment(run_uid=uid) for uid in uids]))


def _until(worker: TrainerWorker, condition: Callable[[TrainerStatus], bool]) -> TrainerStatus:
    ends = time.monotonic() + 60
    while not condition(status := worker.report().trainer):
        assert time.monotonic() < ends, f"still {status}"
        time.sleep(0.01)
    return status


def test_tries_that_get_to_no_step_are_one_wait_with_cause_and_remedy(
    worker: TrainerWorker, start: Callable[..., None]
) -> None:
    tries: list[str] = []
    may_go_on = threading.Event()

    def job(uid: str) -> None:
        tries.append(uid)
        if not may_go_on.is_set():
            raise CapacityError(
                "cannot write /there: 10 bytes are needed, 3 are free", remedy="free disk space", retry_after_s=0.01
            )
        worker.on_progress(1)

    def found() -> list[waits.Wait]:
        return [wait for wait in waits.snapshot("trainer-0") if "a try of run run-a" in wait.reason]

    start(job)
    _assign(worker, "run-a")
    # Each try collects garbage, which takes seconds in a large process on a busy machine.
    block_until(lambda: len(tries) > 3 and found(), timeout_s=60)
    [wait] = found()
    assert "10 bytes are needed, 3 are free; free disk space" in wait.reason and wait.run == "run-a"
    num_tries = len(tries)
    block_until(lambda: len(tries) > num_tries + 2, timeout_s=60)
    [later] = found()
    assert later.age_s > wait.age_s, "the same one all the time"
    may_go_on.set()
    _until(worker, lambda status: status.is_finished)
    assert found() == []


@pytest.mark.parametrize("reason", ["REDIS_DENIED", "STORE_DENIED"])
def test_a_right_that_storage_takes_away_ends_no_run(
    worker: TrainerWorker, start: Callable[..., None], reason: str
) -> None:
    tries: list[str] = []

    def job(uid: str) -> None:
        tries.append(uid)
        if len(tries) < 3:
            raise PermissionDeniedError("the key may not be read", reason=reason, retry_after_s=0.01)

    start(job)
    _assign(worker, "run-a")
    status = _until(worker, lambda status: status.is_finished or bool(status.error_reason))
    assert (len(tries), status.error_reason) == (3, "")


def test_what_a_run_may_not_read_of_a_disk_ends_it(worker: TrainerWorker, start: Callable[..., None]) -> None:
    def job(uid: str) -> None:
        raise PermissionDeniedError("the model's directory may not be read", reason="DIRECTORY_UNUSABLE")

    start(job)
    _assign(worker, "run-a")
    assert _until(worker, lambda status: bool(status.error_reason)).error_reason == "DIRECTORY_UNUSABLE"


def test_a_run_is_worked_on_once_and_reported_until_the_assignment_ends(
    worker: TrainerWorker, start: Callable[..., None]
) -> None:
    jobs: list[str] = []

    def job(uid: str) -> None:
        jobs.append(uid)
        worker.on_epoch(7)
        worker.on_progress(3)

    start(job)
    _assign(worker, "run-a")
    status = _until(worker, lambda status: status.is_finished)
    assert (status.run_uid, status.epoch, status.step, status.error_reason) == ("run-a", 7, 3, "")
    time.sleep(0.5)
    assert jobs == ["run-a"]
    _assign(worker)
    _until(worker, lambda status: status.run_uid == "")
    _assign(worker, "run-b")
    _until(worker, lambda status: status.is_finished and status.run_uid == "run-b")
    assert jobs == ["run-a", "run-b"]


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_of_a_run_is_gone_when_its_end_is_reported(
    fails: bool, worker: TrainerWorker, start: Callable[..., None]
) -> None:
    """A model is held by its own blocks, as one is whose activations are checkpointed: it lives until garbage goes."""
    models: list[weakref.ref[nn.Module]] = []

    def job(uid: str) -> None:
        model = nn.Linear(2, 2)
        model.__dict__["forward"] = functools.partial(model.forward)
        models.append(weakref.ref(model))
        if fails:
            raise NotFoundError("no model", reason="MODEL_NOT_FOUND")

    gc.disable()  # or it might go by chance
    try:
        start(job)
        _assign(worker, "a")
        _until(worker, lambda status: bool(status.is_finished or status.error_reason))
        _assign(worker)
        _until(worker, lambda status: not status.run_uid)
        assert models[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("is_assigned", [True, False])
def test_an_idle_trainer_is_woken(
    worker: TrainerWorker, start: Callable[..., None], monkeypatch: pytest.MonkeyPatch, is_assigned: bool
) -> None:
    monkeypatch.setattr(worker_module, "IDLE_LOOK_S", 3600.0)
    begun = threading.Event()
    start(lambda uid: begun.set())
    time.sleep(0.1)  # it waits
    if is_assigned:
        _assign(worker, "run-a")
        assert begun.wait(10)
    worker.stop()  # the fixture waits for the end of its thread


@pytest.mark.parametrize(
    ("error", "reason", "message"),
    [
        (NotFoundError("no model at /x", reason="MODEL_NOT_FOUND", remedy="set model.name"), "MODEL_NOT_FOUND", "/x"),
        (RuntimeError("out of memory"), "INTERNAL", "RuntimeError: out of memory"),
    ],
)
def test_an_error_for_the_owner_is_reported_and_not_repeated(
    worker: TrainerWorker, start: Callable[..., None], error: Exception, reason: str, message: str
) -> None:
    calls: list[str] = []
    exported = meters.registry_of(lambda: worker.is_working)
    before = exported.get_sample_value("millrace_trainer_runs_failed_total")
    assert before is not None, "it stands at 0 before the first failure, else an alert on its increase misses that one"

    def job(uid: str) -> None:
        calls.append(uid)
        raise error

    start(job)
    _assign(worker, "run-a")
    status = _until(worker, lambda status: bool(status.error_reason))
    assert status.error_reason == reason and message in status.error_message and not status.is_finished
    time.sleep(0.5)
    assert calls == ["run-a"]
    _assign(worker)
    assert _until(worker, lambda status: status.run_uid == "").error_reason == ""
    assert exported.get_sample_value("millrace_trainer_runs_failed_total") == before + 1


def test_a_fenced_job_is_let_go_and_tried_again_while_assigned(
    worker: TrainerWorker, start: Callable[..., None]
) -> None:
    calls: list[str] = []

    def job(uid: str) -> None:
        calls.append(uid)
        if len(calls) == 1:
            raise FencedError("a newer epoch exists")

    start(job)
    _assign(worker, "run-a")
    _until(worker, lambda status: status.is_finished)
    assert calls == ["run-a", "run-a"]


def test_another_assignment_takes_the_job_away(worker: TrainerWorker, start: Callable[..., None]) -> None:
    jobs: list[str] = []

    def job(uid: str) -> None:
        jobs.append(uid)
        while uid == "run-a":
            if worker.should_stop():
                raise StopRequested
            time.sleep(0.01)

    start(job)
    _assign(worker, "run-a")
    _until(worker, lambda status: status.run_uid == "run-a")
    assert not worker.should_stop()
    _assign(worker, "run-b")
    _until(worker, lambda status: status.is_finished and status.run_uid == "run-b")
    assert jobs == ["run-a", "run-b"]


def test_an_orchestrator_that_restarts_does_not_cost_the_run(
    worker: TrainerWorker, start: Callable[..., None], clock: Clock
) -> None:
    release = threading.Event()

    def job(uid: str) -> None:
        release.wait(10)

    start(job)
    _assign(worker, "run-a")
    _until(worker, lambda status: status.run_uid == "run-a")
    _assign(worker)  # it knows of no run yet
    assert not worker.should_stop()
    clock.ahead_s += 60
    assert worker.should_stop()
    assert worker.why_stopped() == "the orchestrator had no work for it for 30 s"
    _assign(worker, "run-b")
    assert worker.should_stop() and worker.why_stopped() == "the orchestrator gave it another run"
    worker.stopping.set()
    assert worker.why_stopped() == "its process was asked to end"
    worker.stopping.clear()
    _assign(worker, "run-a")
    release.set()


def test_health_runs_out_when_a_step_hangs(
    worker: TrainerWorker, start: Callable[..., None], clock: Clock, board: HealthBoard
) -> None:
    release, stepped = threading.Event(), threading.Event()

    def job(uid: str) -> None:
        worker.on_progress(1)
        stepped.set()
        release.wait(10)

    start(job)
    clock.ahead_s += 10_000
    assert board.is_serving(PROCESS)  # idle for long is healthy
    _assign(worker, "run-a")
    assert stepped.wait(10) and board.is_serving(PROCESS)
    clock.ahead_s += 1000
    assert not board.is_serving(PROCESS)
    worker.should_stop()  # it waits for a batch: alive
    assert board.is_serving(PROCESS)
    release.set()


class PeerGang(Gang):
    """Rank 1 of two, whose rank 0 says that there is a run to work on."""

    def __init__(self) -> None:
        super().__init__(rank=1, world_size=2)
        self.shown: tuple[str, str] | None = None

    def broadcast(self, data: bytes | None) -> bytes:
        return encode_result(lambda: "work run-a", rank=0)[0]

    def show_failure(self, *, reason: str, message: str) -> None:
        self.shown = reason, message


@pytest.mark.parametrize("end", ["signal", "time"])
def test_another_rank_waits_with_its_error_until_rank_0_has_reported(
    board: HealthBoard, clock: Clock, end: str
) -> None:
    peer, gang = TrainerWorker(board=board, clock=clock), PeerGang()
    ended: list[BaseException] = []

    def work() -> None:
        def job(uid: str) -> None:
            raise NotFoundError("no model at /x", reason="MODEL_NOT_FOUND")

        try:
            peer.run(job, gang=gang)
        except NotFoundError as error:
            ended.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(0.6)
    assert thread.is_alive()
    clock.ahead_s += 31  # rank 0 would be done with reporting now
    thread.join(0.6)
    assert thread.is_alive()
    if end == "signal":
        peer.stop()  # torchrun's SIGTERM, after rank 0 has ended
    else:
        clock.ahead_s += 31
    thread.join(10)
    assert not thread.is_alive() and len(ended) == 1
    assert gang.shown == ("MODEL_NOT_FOUND", str(ended[0]))


class LeadingGang(Gang):
    """Rank 0 of two, alone, until another rank is made to fail."""

    def __init__(self) -> None:
        super().__init__(rank=0, world_size=2)
        self.hear: Callable[[Failure], None] = lambda failure: None

    def broadcast(self, data: bytes | None) -> bytes:
        return data or b""

    def watch_failures(self, on_failure: Callable[[Failure], None]) -> None:
        self.hear = on_failure


def test_rank_0_reports_the_failure_of_another_rank_while_it_is_stuck_itself(board: HealthBoard, clock: Clock) -> None:
    leader, gang, release = TrainerWorker(board=board, clock=clock), LeadingGang(), threading.Event()
    thread = threading.Thread(
        target=leader.run, args=(lambda uid: release.wait(30),), kwargs={"gang": gang}, daemon=True
    )
    thread.start()
    failure = Failure(rank=1, reason="OUT_OF_MEMORY", message="there is not enough memory")
    gang.hear(failure)  # of no run of its own
    _assign(leader, "run-a")
    _until(leader, lambda status: status.run_uid == "run-a")
    for _ in range(2):
        gang.hear(failure)
    status = leader.report().trainer
    assert (status.error_reason, status.error_message) == ("OUT_OF_MEMORY", "rank 1: there is not enough memory")
    leader.stop()
    release.set()
    thread.join(10)
    assert not thread.is_alive()


def test_a_gang_that_is_refused_what_it_needs_shows_that_until_it_ends(board: HealthBoard, clock: Clock) -> None:
    leader, found = TrainerWorker(board=board, clock=clock), list[BaseException]()

    def job(uid: str) -> None:
        raise PermissionDeniedError("the store answers 403", reason="STORE_DENIED", remedy="renew the credentials")

    def work() -> None:
        try:
            leader.run(job, gang=LeadingGang())
        except PermissionDeniedError as error:
            found.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    _assign(leader, "run-a")

    def shown() -> list[waits.Wait]:
        return [each for each in waits.snapshot("trainer-0") if each.refusal is not None and each.run == "run-a"]

    block_until(shown, timeout_s=60)
    [wait] = shown()
    assert wait.refusal is not None and wait.refusal.reason == "STORE_DENIED"
    assert not leader.report().trainer.error_reason, "the run goes on once somebody has acted"
    leader.stop()
    thread.join(10)
    assert found and not shown()


@pytest.mark.parametrize(
    ("error", "is_reported"), [(ValueError("a bug"), True), (RuntimeError("Connection closed by peer"), False)]
)
def test_in_a_gang_an_error_that_no_dead_peer_causes_is_reported_and_another_starts_the_gang_anew(
    board: HealthBoard, clock: Clock, error: Exception, is_reported: bool
) -> None:
    peer, gang = TrainerWorker(board=board, clock=clock), PeerGang()
    peer.stop()  # it does not wait for rank 0

    def job(uid: str) -> None:
        raise error

    with pytest.raises(InternalError if is_reported else RuntimeError):
        peer.run(job, gang=gang)
    assert gang.shown == (
        ("INTERNAL", f"{type(error).__name__}: {error}; see the trainer's log") if is_reported else None
    )


@pytest.mark.parametrize(
    ("start_step", "start_lineage", "published", "is_strict", "expected"),
    [
        (0, 0, None, True, PublishPlan(lineage=0, first_version=0)),
        (4, 0, (0, 9), True, PublishPlan(lineage=0, first_version=4)),  # strict: published again, digests compared
        (0, 0, None, False, PublishPlan(lineage=0, first_version=0)),
        (4, 0, (0, 4), False, PublishPlan(lineage=0, first_version=5, is_continued=True)),
        (4, 1, (0, 4), False, PublishPlan(lineage=1, first_version=5)),  # saved while replaying: not that version
        (4, 1, (1, 6), False, PublishPlan(lineage=2, first_version=7)),
        (4, 0, (0, 3), False, PublishPlan(lineage=0, first_version=4)),
    ],
)
def test_what_a_resumed_trainer_publishes(
    start_step: int, start_lineage: int, published: tuple[int, int] | None, is_strict: bool, expected: PublishPlan
) -> None:
    plan = plan_publishing(start_step=start_step, start_lineage=start_lineage, published=published, is_strict=is_strict)
    assert plan == expected


@pytest.mark.parametrize(
    ("published", "lineage", "first_version"), [((0, 4), 1, 5), ((0, 9), 1, 10), ((2, 4), 3, 5), ((0, 3), 1, 4)]
)
def test_a_strict_run_with_other_ranks_begins_a_lineage(
    published: tuple[int, int], lineage: int, first_version: int
) -> None:
    plan = plan_publishing(start_step=4, start_lineage=0, published=published, is_strict=True, is_relaid=True)
    assert plan == PublishPlan(lineage=lineage, first_version=first_version)
    nothing = plan_publishing(start_step=0, start_lineage=0, published=None, is_strict=True, is_relaid=True)
    assert nothing == PublishPlan(lineage=0, first_version=0)
