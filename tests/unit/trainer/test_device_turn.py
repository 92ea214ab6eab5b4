"""The trainer's turn on shared devices: asked for, waited for, and given back, whatever ends it."""

import threading
import time

import pytest

from millrace.internal.v1.worker_service_pb2 import Assignment, HeartbeatResponse
from millrace.rpc.health import HealthBoard
from millrace.telemetry import waits
from millrace.trainer.device_turn import DeviceTurn
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.log.stop import StopRequested
from millrace.trainer.worker import TrainerWorker


@pytest.fixture
def worker() -> TrainerWorker:
    worker = TrainerWorker(board=HealthBoard())
    worker.hear(HeartbeatResponse(assignments=[Assignment(run_uid="a")]))
    worker._status = type(worker._status)(run_uid="a")  # as its job sets it
    return worker


def lend(worker: TrainerWorker, turn: int) -> None:
    worker.hear(HeartbeatResponse(assignments=[Assignment(run_uid="a", device_turn=turn)]))


def asked(worker: TrainerWorker) -> int:
    return worker.report().trainer.device_turn


def lend_when_asked(worker: TrainerWorker, *turns: int) -> threading.Thread:
    """Answers the turn that the trainer asks for with these, one after the other, as heartbeats do."""

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


def test_a_turn_is_asked_for_at_once_and_given_back_at_once(worker: TrainerWorker) -> None:
    told: list[int] = []
    worker.tell_soon = lambda: told.append(asked(worker))
    turn = DeviceTurn(Gang(), worker)
    for number in (1, 2):
        thread = lend_when_asked(worker, number)
        with turn():
            assert asked(worker) == number and 0.05 <= turn.waited_s < 5
        assert asked(worker) == 0
        thread.join()
    assert told == [1, 0, 2, 0]


def test_the_turn_before_is_not_taken_for_this_one(worker: TrainerWorker) -> None:
    turn = DeviceTurn(Gang(), worker)
    lend_when_asked(worker, 1)
    with turn():
        pass
    lend_when_asked(worker, 1, 0, 1, 2)  # answers to heartbeats of before
    with turn():
        assert turn.waited_s >= 0.2


def test_the_wait_is_visible_and_ends_when_the_run_is_to_be_released(worker: TrainerWorker) -> None:
    seen: list[str] = []

    def stop() -> None:
        ends = time.monotonic() + 10
        while not seen and time.monotonic() < ends:
            seen.extend(each.reason for each in waits.snapshot("me") if "replicas to sleep" in each.reason)
            time.sleep(0.005)
        worker.stop()

    threading.Thread(target=stop, daemon=True).start()
    with pytest.raises(StopRequested), DeviceTurn(Gang(), worker)():
        pytest.fail("it has no turn")
    assert seen and asked(worker) == 0
    assert not [each for each in waits.snapshot("me") if "replicas to sleep" in each.reason]


def test_an_error_gives_the_devices_back(worker: TrainerWorker) -> None:
    lend_when_asked(worker, 1)
    with pytest.raises(MemoryError), DeviceTurn(Gang(), worker)():
        raise MemoryError
    assert asked(worker) == 0


def test_devices_of_its_own_are_not_asked_for(worker: TrainerWorker) -> None:
    with DeviceTurn(Gang(), None)():
        assert asked(worker) == 0
