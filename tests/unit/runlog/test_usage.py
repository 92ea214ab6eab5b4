import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.runlog.run_status import RunStatus
from millrace.runlog.usage import LAPSE_S, MAX_SPANS, SEEN_S, AcceleratorUsage
from millrace.v1 import event_pb2, run_pb2


def test_use_is_what_was_held_by_how_long() -> None:
    usage = AcceleratorUsage()
    usage.change(4, 100.0)
    assert (usage.held, usage.seconds(110.0)) == (4, 40.0)
    usage.change(1, 110.0)
    usage.change(0, 120.0)
    assert (usage.held, usage.seconds(500.0)) == (0, 50.0)


def test_what_nobody_says_any_more_is_not_counted() -> None:
    usage = AcceleratorUsage()
    usage.change(2, 100.0, by="o1")
    usage.change(2, 130.0, by="o1")
    assert usage.seconds(130.0 + LAPSE_S) == 2 * (30.0 + LAPSE_S), "the next word may be on its way"
    assert usage.seconds(131.0 + LAPSE_S) == 2 * 30.0
    usage.change(2, 140.0, by="o2")
    usage.change(0, 150.0, by="o2")
    assert usage.seconds(1e9) == 2 * 30.0 + 2 * 10.0, "nothing between the words of two processes"
    usage.change(1, 200.0, by="o2")
    usage.change(1, 201.0 + LAPSE_S, by="o2")
    assert usage.seconds(201.0 + LAPSE_S) == 80.0, "it was stopped for a while"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 200), st.integers(0, 300), st.integers(0, 8)), min_size=1, max_size=8))
def test_use_is_exact_over_kills_but_for_the_last_words(drives: list[tuple[int, int, int]]) -> None:
    """Each drive lasts, is killed, and leaves the deployment down for a while; it speaks every `SEEN_S` until then."""
    usage, now, used, lost = AcceleratorUsage(), 0.0, 0.0, 0.0
    for number, (lasts, down, accelerators) in enumerate(drives):
        for spoken in range(0, lasts, int(SEEN_S)):
            usage.change(accelerators, now + spoken, by=f"o{number}")
        used += accelerators * lasts
        lost += accelerators * SEEN_S
        now += lasts + down
    usage.change(0, now, by="last")
    assert used - lost <= usage.seconds(now) <= used


def test_of_a_window_only_the_part_within_counts() -> None:
    usage = AcceleratorUsage()
    usage.change(2, 100.0)
    usage.change(3, 150.0)
    assert usage.seconds(200.0, since=125.0) == pytest.approx(2 * 25 + 3 * 50)
    assert usage.seconds(200.0, since=175.0) == pytest.approx(3 * 25)
    assert usage.seconds(200.0, since=200.0) == 0


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


def event(at: float, *, writer: str = "orchestrator", **body) -> event_pb2.Event:
    made = event_pb2.Event(writer=writer, **body)
    made.time.FromNanoseconds(int(at * 1e9))
    return made


def changed(at: float, state: run_pb2.RunState, **more) -> event_pb2.Event:
    return event(at, state_changed=event_pb2.StateChanged(new_state=state), **more)


def assigned(at: float, trainer: int, replicas: int, **more) -> event_pb2.Event:
    body = event_pb2.WorkersAssigned(trainer_accelerators=trainer, replica_accelerators=replicas)
    return event(at, workers_assigned=body, **more)


REST = (run_pb2.RUN_STATE_PAUSED, run_pb2.RUN_STATE_QUEUED, run_pb2.RUN_STATE_FAILED, run_pb2.RUN_STATE_SUCCEEDED)


@pytest.mark.parametrize("rest", REST)
def test_a_run_uses_what_its_log_says_until_it_rests(rest: run_pb2.RunState) -> None:
    status = RunStatus()
    for each in (
        changed(0.0, run_pb2.RUN_STATE_STARTING),
        assigned(10.0, 2, 0),
        assigned(20.0, 2, 3),
        assigned(25.0, 2, 3),
        # Its orchestrator was killed; the next one finds other replicas.
        changed(30.0, run_pb2.RUN_STATE_STARTING, writer="next"),
        assigned(40.0, 2, 1, writer="next"),
        changed(50.0, rest, writer="next"),
        # What the run still has while it is given back.
        assigned(51.0, 2, 0, writer="next"),
    ):
        status.apply(each)
    assert status.usage.held == 0
    assert status.usage.seconds(1e9) == pytest.approx(2 * 10 + 5 * 5 + 3 * 10)
