"""The trainer's turn on shared devices: asked for, waited for, and given back, whatever ends it."""

import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from millrace.errors import InvalidStateError
from millrace.internal.v1.worker_service_pb2 import Assignment, HeartbeatResponse, TrainerStatus
from millrace.rpc.health import HealthBoard
from millrace.telemetry import waits
from millrace.trainer import training
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.training import DeviceTurn
from millrace.trainer.worker import TrainerWorker

Work = Callable[[Callable[[], None]], TrainerStatus]


@pytest.fixture
def worker() -> TrainerWorker:
    return TrainerWorker(board=HealthBoard())


@pytest.fixture
def work(worker: TrainerWorker) -> Iterator[Callable[[Callable[[], None]], TrainerStatus]]:
    """Yield has the worker do a job of run `a`, and gives the status that it says behind it."""

    def work(job: Callable[[], None]) -> TrainerStatus:
        done, errors = threading.Event(), list[BaseException]()

        def run_job(uid: str) -> None:
            try:
                job()
            except AssertionError as error:
                errors.append(error)
            finally:
                done.set()

        lend(worker, 0)
        thread = threading.Thread(target=worker.run, args=(run_job,), kwargs={"gang": Gang()}, daemon=True)
        thread.start()
        assert done.wait(20) and not errors, errors
        ends = time.monotonic() + 10
        while not ((status := worker.report().trainer).is_finished or status.error_reason or worker.stopping.is_set()):
            assert time.monotonic() < ends
            time.sleep(0.005)
        worker.stop()
        thread.join(10)
        return status

    yield work
    worker.stop()


def lend(worker: TrainerWorker, turn: int) -> None:
    worker.on_answer(HeartbeatResponse(assignments=[Assignment(run_uid="a", device_turn=turn)]))


def asked(worker: TrainerWorker) -> int:
    return worker.report().trainer.device_turn


def lend_when_asked(worker: TrainerWorker, *turns: int) -> threading.Thread:
    """Return answers the turn that the trainer asks for with these, one after the other, as heartbeats do."""

    def answer() -> None:
        ends = time.monotonic() + 10
        while asked(worker) != turns[-1] and time.monotonic() < ends:
            time.sleep(0.005)
        for turn in turns:
            time.sleep(0.05)
            lend(worker, turn)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    return thread


def test_a_turn_is_asked_for_at_once_and_given_back_at_once(worker: TrainerWorker, work: Work) -> None:
    told: list[int] = []
    worker.heartbeat_soon = lambda: told.append(asked(worker))
    turn = DeviceTurn(Gang(), worker)

    def job() -> None:
        turn.begin()
        for number in (1, 2):
            thread = lend_when_asked(worker, number)
            with turn(number):
                assert asked(worker) == number and 0.05 <= turn.waited_s < 5
            assert asked(worker) == 0
            thread.join()

    assert work(job).is_finished
    assert told == [1, 0, 2, 0]


def test_a_gang_gives_them_back_once_every_rank_has_let_go(
    worker: TrainerWorker, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    gang = Gang()
    monkeypatch.setattr(training, "release_unused", lambda device: done.append(f"released in {asked(worker)}"))
    monkeypatch.setattr(gang, "barrier", lambda: done.append(f"all in {asked(worker)}"))

    def job() -> None:
        lend_when_asked(worker, 1)
        with DeviceTurn(gang, worker)(0):
            pass

    work(job)
    assert done == ["released in 1", "all in 1"] and asked(worker) == 0


def test_the_turn_before_is_not_taken_for_this_one(worker: TrainerWorker, work: Work) -> None:
    turn = DeviceTurn(Gang(), worker)

    def job() -> None:
        lend_when_asked(worker, 1)
        with turn(0):
            pass
        lend_when_asked(worker, 1, 0, 1, 2)  # answers to heartbeats of before
        with turn(1):
            assert turn.waited_s >= 0.2

    work(job)


def test_the_wait_is_visible_and_ends_when_the_run_is_to_be_released(worker: TrainerWorker, work: Work) -> None:
    seen: list[str] = []

    def stop() -> None:
        ends = time.monotonic() + 10
        while not seen and time.monotonic() < ends:
            seen.extend(each.reason for each in waits.snapshot("me") if "replicas to sleep" in each.reason)
            time.sleep(0.005)
        worker.stop()

    def job() -> None:
        threading.Thread(target=stop, daemon=True).start()
        with DeviceTurn(Gang(), worker)(0):
            raise AssertionError("it has no turn")

    work(job)
    assert seen and asked(worker) == 0
    assert not [each for each in waits.snapshot("me") if "replicas to sleep" in each.reason]


def test_a_policy_that_replicas_find_damaged_is_mended_before_they_sleep(worker: TrainerWorker, work: Work) -> None:
    republished: list[tuple[int, bytes]] = []

    class Republisher:
        def policy_to_republish(self, version: int) -> bytes | None:
            return None if republished else f"policy {version}".encode()

        def republish(self, policy: bytes) -> None:
            republished.append((asked(worker), policy))

    def job() -> None:
        lend_when_asked(worker, 1)
        with DeviceTurn(Gang(), worker, republisher=Republisher())(5):
            pass

    work(job)
    assert republished == [(1, b"policy 5")]


def test_an_error_gives_the_devices_back_once_what_it_held_is_free(worker: TrainerWorker, work: Work) -> None:
    freed: list[tuple[int, bool]] = []
    alive: list[Callable[[], object]] = []

    class Activations:
        pass

    def job() -> None:
        lend_when_asked(worker, 1)
        with DeviceTurn(Gang(), worker)(0):
            held = Activations()
            alive.append(weakref.ref(held))
            raise InvalidStateError("too little", reason="NO_ROOM")

    worker.free_devices = lambda: freed.append((asked(worker), alive[0]() is not None))
    status = work(job)
    assert freed == [(1, False)], "the turn is its own still, and the error's frames are gone"
    assert status.error_reason == "NO_ROOM" and asked(worker) == 0


def test_devices_of_its_own_are_not_asked_for(worker: TrainerWorker, work: Work) -> None:
    def job() -> None:
        with DeviceTurn(Gang(), None)(0):
            assert asked(worker) == 0

    work(job)
