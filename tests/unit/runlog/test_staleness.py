"""What a run's events say of the age of its rollouts, by environment."""

from millrace.runlog.run_status import RunStatus
from millrace.v1 import event_pb2


def status_of(*batches: dict[str, float], steps: tuple[dict[str, float], ...] = ()) -> RunStatus:
    status = RunStatus()
    for number, metrics in enumerate(batches):
        status.apply(event_pb2.Event(batch_committed=event_pb2.BatchCommitted(step=number, metrics=metrics)))
    for number, metrics in enumerate(steps):
        status.apply(event_pb2.Event(step_completed=event_pb2.StepCompleted(step=number, metrics=metrics)))
    return status


def test_groups_that_came_too_late_are_counted_by_environment() -> None:
    first = {"batch/dropped/stale/org/slow": 3.0, "stale_share/org/slow/mean": 0.5, "stale_share/quick/mean": 0.0}
    second = {"batch/dropped/stale/org/slow": 1.0, "stale_share/org/slow/mean": 0.31}
    second |= {"stale_share/org/slow/slowest_quarter": 0.8, "stale_share/quick/slowest_quarter": 0.0}
    found = status_of(first, second).staleness
    assert found["org/slow"].lost == "4 groups dropped as stale (31% of its last ones, 80% of the slowest quarter)"
    assert found["org/slow"].is_much and not found["quick"].is_much
    assert found["quick"].words == "" and found["quick"].share == 0.0


def test_the_age_of_what_was_trained_is_that_of_the_newest_step_and_the_largest_of_any() -> None:
    steps = ({"staleness/a/mean": 2.0, "staleness/a/max": 3.0}, {"staleness/a/mean": 0.0, "staleness/a/max": 0.0})
    found = status_of(steps=steps).staleness
    assert (found["a"].mean, found["a"].largest) == (0.0, 3.0) and found["a"].words == "0.0 steps, at most 3"


def test_other_metrics_and_too_many_environments_are_left_alone() -> None:
    names = ("staleness/mean", "staleness/max", "stale_share//mean", "batch/dropped/stale/", "reward/a/mean")
    status = status_of(dict.fromkeys(names, 1.0), steps=(dict.fromkeys(names, 1.0),))
    assert not status.staleness
    assert len(status_of({f"batch/dropped/stale/e{n}": 1.0 for n in range(2000)}).staleness) == 1000
