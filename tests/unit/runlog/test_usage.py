import pytest

from millrace.runlog.run_status import RunStatus
from millrace.runlog.usage import MAX_SPANS, AcceleratorUsage
from millrace.v1 import event_pb2, run_pb2


def test_use_is_what_was_held_by_how_long() -> None:
    usage = AcceleratorUsage()
    usage.change(4, 100.0)
    assert (usage.held, usage.seconds(110.0)) == (4, 40.0)
    usage.change(1, 110.0)
    usage.change(0, 120.0)
    assert (usage.held, usage.seconds(500.0)) == (0, 50.0)


def test_of_a_window_only_the_part_within_counts() -> None:
    usage = AcceleratorUsage()
    usage.change(2, 100.0)
    usage.change(3, 200.0)
    assert usage.seconds(300.0, since=150.0) == pytest.approx(2 * 50 + 3 * 100)
    assert usage.seconds(300.0, since=250.0) == pytest.approx(3 * 50)
    assert usage.seconds(300.0, since=300.0) == 0


def test_a_clock_that_is_behind_takes_nothing_away() -> None:
    """Events of one run come from several machines."""
    usage = AcceleratorUsage()
    usage.change(2, 100.0)
    usage.change(2, 90.0)
    usage.change(0, 110.0)
    usage.change(1, 105.0)
    assert usage.seconds(120.0) == pytest.approx(2 * 10 + 10)


def test_any_number_of_changes_keeps_the_sum_and_bounded_memory() -> None:
    usage = AcceleratorUsage()
    for number in range(10 * MAX_SPANS):
        usage.change(1 + number % 2, 2.0 * number)
        usage.change(0, 2.0 * number + 1)
    assert usage.seconds(1e6) == pytest.approx(10 * MAX_SPANS * 1.5)
    assert len(usage.spans) <= MAX_SPANS


def event(at: float, **body) -> event_pb2.Event:
    made = event_pb2.Event(writer="orchestrator", **body)
    made.time.FromNanoseconds(int(at * 1e9))
    return made


def changed(at: float, state: run_pb2.RunState) -> event_pb2.Event:
    return event(at, state_changed=event_pb2.StateChanged(new_state=state))


def assigned(at: float, trainer: int, replicas: int) -> event_pb2.Event:
    body = event_pb2.WorkersAssigned(trainer_accelerators=trainer, replica_accelerators=replicas)
    return event(at, workers_assigned=body)


REST = (run_pb2.RUN_STATE_PAUSED, run_pb2.RUN_STATE_QUEUED, run_pb2.RUN_STATE_FAILED, run_pb2.RUN_STATE_SUCCEEDED)


@pytest.mark.parametrize("rest", REST)
def test_a_run_uses_what_its_log_says_until_it_rests(rest: run_pb2.RunState) -> None:
    status = RunStatus()
    for each in (
        changed(0.0, run_pb2.RUN_STATE_STARTING),
        assigned(10.0, 2, 0),
        assigned(20.0, 2, 3),
        # Its orchestrator was killed; the next one finds other replicas. The workers were the run's meanwhile.
        changed(30.0, run_pb2.RUN_STATE_STARTING),
        assigned(40.0, 2, 1),
        changed(50.0, rest),
        # What the run still has while it is given back.
        assigned(51.0, 2, 0),
    ):
        status.apply(each)
    assert status.usage.held == 0
    assert status.usage.seconds(1e9) == pytest.approx(2 * 10 + 5 * 20 + 3 * 10)
