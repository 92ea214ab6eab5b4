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
    assert table.add(make_rollout(0, 1, group_size=2), entry_id="5-0") is Arrival.OPEN
    assert table.add(make_rollout(0, 0, group_size=2), entry_id="6-0") is Arrival.FINISHED
    assert [rollout.member for rollout in table.finished[0].rollouts()] == [0, 1]
    assert table.oldest_entry() == "5-0"


def test_late_and_foreign_rollouts_are_discarded_and_counted() -> None:
    table = table_with(0)
    table.add(make_rollout(0, 0, group_size=2), entry_id="1-0")
    assert table.add(make_rollout(0, 0, group_size=2, attempt=1), entry_id="2-0") is Arrival.DUPLICATE
    assert table.add(make_rollout(9, 0, group_size=2), entry_id="3-0") is Arrival.DUPLICATE
    table.add(make_rollout(0, 1, group_size=2), entry_id="4-0")
    assert table.add(make_rollout(0, 1, group_size=2), entry_id="5-0") is Arrival.DUPLICATE
    assert table.num_duplicates == 3
    assert len(table.remove(0)) == 2


def test_failed_members_are_played_again_once_then_the_ordinal_is_hopeless() -> None:
    table = table_with(0)
    failed = make_rollout(0, 1, group_size=2, status=RolloutStatus.ENV_ERROR)
    assert table.add(failed, entry_id="1-0") is Arrival.OPEN
    assert table.add(make_rollout(0, 0, group_size=2), entry_id="2-0") is Arrival.RETRY
    group = table.open[0]
    assert group.missing == [1]
    group.next_attempt()
    again = make_rollout(0, 1, group_size=2, attempt=1, status=RolloutStatus.ENV_ERROR)
    assert table.add(again, entry_id="3-0") is Arrival.HOPELESS
    assert group.failure_reason() == "error"
    assert len(table.remove(0)) == 3, "failed attempts are archived, too"


def test_members_of_several_attempts_combine() -> None:
    table = table_with(0)
    table.add(make_rollout(0, 1, group_size=2, status=RolloutStatus.TIMEOUT), entry_id="1-0")
    table.add(make_rollout(0, 0, group_size=2), entry_id="2-0")
    table.open[0].next_attempt()
    assert table.add(make_rollout(0, 1, group_size=2, attempt=1), entry_id="3-0") is Arrival.FINISHED
    assert [rollout.attempt for rollout in table.finished[0].rollouts()] == [0, 1]


def test_a_quarantined_task_is_hopeless_at_once() -> None:
    table = table_with(0)
    failed = make_rollout(0, 1, group_size=2, status=RolloutStatus.QUARANTINED)
    assert table.add(failed, entry_id="1-0") is Arrival.HOPELESS
    assert table.open[0].failure_reason() == "quarantined"


def test_the_oldest_entry_compares_ids_as_numbers() -> None:
    table = table_with(0, 1)
    table.add(make_rollout(0, 0, group_size=2), entry_id="10-2")
    table.add(make_rollout(1, 0, group_size=2), entry_id="9-11")
    assert table.oldest_entry() == "9-11"


def test_the_oldest_version_of_a_group_counts() -> None:
    table = table_with(0)
    assert table.open[0].min_policy_version is None
    table.add(make_rollout(0, 0, group_size=2, version=3), entry_id="1-0")
    table.add(make_rollout(0, 1, group_size=2, version=2), entry_id="2-0")
    assert table.finished[0].min_policy_version == 2


def test_a_lost_attempt_leaves_no_failures_behind() -> None:
    table = table_with(0, group_size=3)
    table.add(make_rollout(0, 1, group_size=3, status=RolloutStatus.ENV_ERROR), entry_id="1-0")
    table.open[0].next_attempt()  # its env-server died
    assert table.add(make_rollout(0, 0, group_size=3, attempt=1), entry_id="2-0") is Arrival.OPEN
    assert table.add(make_rollout(0, 2, group_size=3, attempt=1), entry_id="3-0") is Arrival.OPEN, (
        "member 1 still plays"
    )
    assert table.add(make_rollout(0, 1, group_size=3, attempt=1), entry_id="4-0") is Arrival.FINISHED


def test_a_group_that_is_scored_whole_never_mixes_attempts() -> None:
    table = table_with(0)
    table.open[0].is_scored_whole = True
    table.add(make_rollout(0, 0, group_size=2), entry_id="1-0")
    table.open[0].next_attempt()
    assert table.open[0].missing == [0, 1]
    assert table.add(make_rollout(0, 1, group_size=2), entry_id="2-0") is Arrival.DUPLICATE, "late, of attempt 0"
    assert table.add(make_rollout(0, 0, group_size=2, attempt=1), entry_id="3-0") is Arrival.OPEN
    assert table.add(make_rollout(0, 1, group_size=2, attempt=1), entry_id="4-0") is Arrival.FINISHED
