import time
from dataclasses import replace

from orchestrator_builders import make_rollout

from millrace.orchestrator.groups import Arrival, Group, GroupTable
from millrace.orchestrator.tasks import TaskRef
from millrace.rollouts.types import RolloutStatus


def table_with(*ordinals: int, group_size: int = 2) -> GroupTable:
    table = GroupTable()
    for ordinal in ordinals:
        task = TaskRef(ordinal=ordinal, env="reverse-text", task_index=ordinal)
        table.open[ordinal] = Group(task=task, group_size=group_size, planned_step=0)
    return table


def test_a_group_is_finished_by_its_last_member() -> None:
    table = table_with(0)
    assert table.add(make_rollout(0, 1, group_size=2, entry_id="5-0")) is Arrival.OPEN
    assert table.add(make_rollout(0, 0, group_size=2, entry_id="6-0")) is Arrival.FINISHED
    assert [rollout.member for rollout in table.finished[0].rollouts()] == [0, 1]
    assert table.oldest_entry() == "5-0"


def test_late_and_foreign_rollouts_are_discarded_and_counted() -> None:
    table = table_with(0)
    table.add(make_rollout(0, 0, group_size=2, entry_id="1-0"))
    assert table.add(make_rollout(0, 0, group_size=2, attempt=1, entry_id="2-0")) is Arrival.DUPLICATE
    assert table.add(make_rollout(9, 0, group_size=2, entry_id="3-0")) is Arrival.DUPLICATE
    table.add(make_rollout(0, 1, group_size=2, entry_id="4-0"))
    assert table.add(make_rollout(0, 1, group_size=2, entry_id="5-0")) is Arrival.DUPLICATE
    assert table.num_duplicates == 3
    kept = table.remove(0)
    assert [(rollout.entry_id, rollout.is_duplicate) for rollout in kept] == [
        ("1-0", False),
        ("2-0", True),
        ("4-0", False),
        ("5-0", True),
    ]


def test_duplicates_that_a_predecessor_counted_are_not_counted_again() -> None:
    table = table_with(0)
    table.num_duplicates, table.counted_until = 5, "9-0"
    table.add(make_rollout(7, 0, entry_id="8-3"))
    table.add(make_rollout(7, 1, entry_id="9-0"))
    assert table.num_duplicates == 5
    table.add(make_rollout(7, 2, entry_id="10-0"))
    assert table.num_duplicates == 6


def test_a_lost_engine_is_no_failed_attempt_and_pauses_longer_each_time() -> None:
    table = table_with(0)
    group = table.open[0]
    table.add(make_rollout(0, 0, group_size=2, entry_id="1-0"))
    pauses = []
    for attempt in range(10):
        lost = make_rollout(0, 1, group_size=2, attempt=attempt, status=RolloutStatus.ENGINE_LOST)
        before = time.monotonic()
        assert table.add(lost) is Arrival.RETRY
        pauses.append(round(group.not_before - before, 1))
        group.next_attempt()
    assert group.num_failed_attempts == 0
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0, 15.0, 15.0]
    assert group.missing == [1], "the member that came back is kept"


def test_a_real_failure_beside_a_lost_engine_counts() -> None:
    table = table_with(0)
    table.add(make_rollout(0, 0, group_size=2, status=RolloutStatus.ENGINE_LOST))
    assert table.add(make_rollout(0, 1, group_size=2, status=RolloutStatus.TIMEOUT)) is Arrival.RETRY
    assert table.open[0].num_failed_attempts == 1


def test_two_plays_with_one_number_do_not_mix_in_a_group_that_is_scored_whole() -> None:
    table = table_with(0)
    table.open[0].is_scored_whole = True
    table.add(make_rollout(0, 0, group_size=2, env_server="a"))
    assert table.add(make_rollout(0, 1, group_size=2, env_server="b")) is Arrival.DUPLICATE
    assert table.add(make_rollout(0, 1, group_size=2, env_server="a")) is Arrival.FINISHED


def test_failed_members_are_played_again_once_then_the_ordinal_is_hopeless() -> None:
    table = table_with(0)
    failed = make_rollout(0, 1, group_size=2, status=RolloutStatus.ENV_ERROR)
    assert table.add(replace(failed, entry_id="1-0")) is Arrival.OPEN
    assert table.add(make_rollout(0, 0, group_size=2, entry_id="2-0")) is Arrival.RETRY
    group = table.open[0]
    assert group.missing == [1]
    group.next_attempt()
    again = make_rollout(0, 1, group_size=2, attempt=1, status=RolloutStatus.ENV_ERROR)
    assert table.add(replace(again, entry_id="3-0")) is Arrival.HOPELESS
    assert group.failure_reason() == "error"
    assert len(table.remove(0)) == 3, "failed attempts are archived, too"


def test_members_of_several_attempts_combine() -> None:
    table = table_with(0)
    table.add(make_rollout(0, 1, group_size=2, status=RolloutStatus.TIMEOUT, entry_id="1-0"))
    table.add(make_rollout(0, 0, group_size=2, entry_id="2-0"))
    table.open[0].next_attempt()
    assert table.add(make_rollout(0, 1, group_size=2, attempt=1, entry_id="3-0")) is Arrival.FINISHED
    assert [rollout.attempt for rollout in table.finished[0].rollouts()] == [0, 1]


def test_a_quarantined_task_is_hopeless_at_once() -> None:
    table = table_with(0)
    failed = make_rollout(0, 1, group_size=2, status=RolloutStatus.QUARANTINED)
    assert table.add(replace(failed, entry_id="1-0")) is Arrival.HOPELESS
    assert table.open[0].failure_reason() == "quarantined"


def test_the_oldest_entry_compares_ids_as_numbers() -> None:
    table = table_with(0, 1)
    table.add(make_rollout(0, 0, group_size=2, entry_id="10-2"))
    table.add(make_rollout(1, 0, group_size=2, entry_id="9-11"))
    assert table.oldest_entry() == "9-11"


def test_the_oldest_version_of_a_group_counts() -> None:
    table = table_with(0)
    assert table.open[0].min_policy_version is None
    table.add(make_rollout(0, 0, group_size=2, version=3, entry_id="1-0"))
    table.add(make_rollout(0, 1, group_size=2, version=2, entry_id="2-0"))
    assert table.finished[0].min_policy_version == 2


def test_a_lost_attempt_leaves_no_failures_behind() -> None:
    table = table_with(0, group_size=3)
    table.add(make_rollout(0, 1, group_size=3, status=RolloutStatus.ENV_ERROR, entry_id="1-0"))
    table.open[0].next_attempt()  # its env-server died
    assert table.add(make_rollout(0, 0, group_size=3, attempt=1, entry_id="2-0")) is Arrival.OPEN
    assert table.add(make_rollout(0, 2, group_size=3, attempt=1, entry_id="3-0")) is Arrival.OPEN, (
        "member 1 still plays"
    )
    assert table.add(make_rollout(0, 1, group_size=3, attempt=1, entry_id="4-0")) is Arrival.FINISHED


def test_a_group_that_is_scored_whole_never_mixes_attempts() -> None:
    table = table_with(0)
    table.open[0].is_scored_whole = True
    table.add(make_rollout(0, 0, group_size=2, entry_id="1-0"))
    table.open[0].next_attempt()
    assert table.open[0].missing == [0, 1]
    assert table.add(make_rollout(0, 1, group_size=2, entry_id="2-0")) is Arrival.DUPLICATE, "late, of attempt 0"
    assert table.add(make_rollout(0, 0, group_size=2, attempt=1, entry_id="3-0")) is Arrival.OPEN
    assert table.add(make_rollout(0, 1, group_size=2, attempt=1, entry_id="4-0")) is Arrival.FINISHED
    assert [rollout.entry_id for rollout in table.remove(0) if not rollout.is_duplicate] == ["3-0", "4-0"]
