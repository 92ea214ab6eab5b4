"""The reader of a run's log: one value for each metric and step, and every sample with its advantage."""

import pytest

from millrace.readers.exports.metrics import MetricFollower, points, read_metrics
from millrace.readers.exports.samples import read_samples
from millrace.runlog.names import Names
from millrace.v1 import event_pb2

UID = "01a205f04e00c6b2d345401dca64"
NAMES = Names("millrace", UID)


def evaluation(step: int, reward: float) -> event_pb2.Event:
    figures = {"share": 1.0, "pass@4": 0.5}
    body = event_pb2.EvalCompleted(
        env="letters", step=step, reward_mean=reward, num_rollouts=4, metrics=figures, skipped=[1]
    )
    return event_pb2.Event(eval_completed=body)


def test_each_metric_has_one_value_at_each_step(stored_run) -> None:
    found = {(metric, step): value for metric, step, value in points(read_metrics(stored_run.store, NAMES))}
    assert {step for metric, step in found if metric == "loss/mean"} == {0, 1, 2}
    assert [found["reward/mean", step] for step in range(3)] == [0.0, 0.25, 0.5]
    assert found["batch/dropped/stale", 1] == 2.0 and found["batch/dropped_groups", 1] == 2.0
    assert found["reward/letters", 2] == 0.5 and found["batch/letters", 2] == 1.0
    assert (found["seq_len/mean", 0], found["seq_len/max", 0], found["time/step", 0]) == (4.0, 4.0, 2.0)


def test_a_step_that_is_computed_again_keeps_its_first_value(stored_run) -> None:
    again = event_pb2.StepCompleted(step=2, reward_mean=9.0, metrics={"loss/mean": 9.0})
    stored_run.archive(event_pb2.Event(step_completed=again), evaluation(2, 0.75))
    found = list(points(read_metrics(stored_run.store, NAMES)))
    assert ("loss/mean", 2, 0.5 / 3) in found and len({each[:2] for each in found}) == len(found)
    assert ("eval/letters/reward/mean", 2, 0.75) in found and ("eval/letters/metrics/share", 2, 1.0) in found
    assert ("eval/letters/pass@4", 2, 0.5) in found and ("eval/letters/num_skipped", 2, 1.0) in found


def test_a_follower_reads_what_is_new_and_the_order_never_changes(stored_run) -> None:
    follower = MetricFollower(stored_run.store, NAMES)
    first = follower.read()
    assert follower.read() == []
    stored_run.commit(3)
    stored_run.archive(*stored_run.step(3))
    second = follower.read()
    assert [row.key for row in second] == ["batch/3", "step/3"]
    assert first + second == read_metrics(stored_run.store, NAMES)


def test_a_rebuilt_log_repeats_nothing(stored_run) -> None:
    """A rebuild archives again what it kept, under cursors of a new generation."""
    before = read_metrics(stored_run.store, NAMES)
    kept = [event for step in range(3) for event in stored_run.step(step)]
    stored_run.archive(*kept, generation=2, first=0)
    stored_run.archive(*stored_run.step(3), generation=2, first=len(kept))
    after = read_metrics(stored_run.store, NAMES)
    assert after[: len(before)] == before and [row.step for row in after[len(before) :]] == [3, 3]


@pytest.mark.parametrize("lost", [False, True])
def test_samples_have_what_was_asked_answered_and_learned(stored_run, lost: bool) -> None:
    if lost:
        for info in list(stored_run.store.list(f"{NAMES.batches}00000001/")):
            stored_run.store.delete(info.key)
    samples = list(read_samples(stored_run.store, NAMES, step=1))
    assert [each.advantage for each in samples] == ([None, None] if lost else [-0.5, 0.5])
    columns = samples[1].to_json()
    assert (columns["prompt"], columns["environment"], columns["version_min"]) == ("user: task 1", "letters", 1)
    assert columns["answer"] == "task 1, reversed"
    assert columns["completion"].startswith("<b>1</b>") and columns["reward"] == 1.0
    assert len(list(read_samples(stored_run.store, NAMES))) == 6


def test_an_archive_that_no_header_names_is_not_read(stored_run) -> None:
    """An orchestrator that was killed before its commit leaves one."""
    (key,) = (info.key for info in stored_run.store.list(f"{NAMES.root}rollouts/00000001/"))
    stored_run.store.put(NAMES.rollout_data(1, 2, "other") + "rollouts.pb.zst", stored_run.store.get(key))
    assert len(list(read_samples(stored_run.store, NAMES, step=1))) == 2
