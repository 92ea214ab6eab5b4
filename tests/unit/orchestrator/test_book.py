import asyncio
import time
from dataclasses import replace

import pytest

from millrace.orchestrator.play.book import Resolved
from millrace.orchestrator.play.play import Arrival
from millrace.rollouts.types import RolloutStatus
from millrace.runlog import Frontier
from millrace_testing.orchestrator.builders import archived, book_with, make_rollout


def test_a_group_is_finished_by_its_last_member() -> None:
    book = book_with(0)
    assert book.add(make_rollout(0, 1, group_size=2, entry_id="5-0")) is Arrival.OPEN
    assert book.add(make_rollout(0, 0, group_size=2, entry_id="6-0")) is Arrival.FINISHED
    assert [rollout.member for rollout in book.whole[0].rollouts()] == [0, 1]
    assert book.oldest_entry() == "5-0"


def test_late_and_foreign_rollouts_are_discarded_and_counted() -> None:
    book = book_with(0)
    book.add(make_rollout(0, 0, group_size=2, entry_id="1-0"))
    assert book.add(make_rollout(0, 0, group_size=2, attempt=1, entry_id="2-0")) is Arrival.DUPLICATE
    assert book.add(make_rollout(9, 0, group_size=2, entry_id="3-0")) is Arrival.DUPLICATE
    book.add(make_rollout(0, 1, group_size=2, entry_id="4-0"))
    assert book.add(make_rollout(0, 1, group_size=2, entry_id="5-0")) is Arrival.DUPLICATE
    assert book.num_duplicates == 3
    book.drop(book.whole, reason="surplus")
    assert [(rollout.entry_id, rollout.is_duplicate) for rollout in archived(book)] == [
        ("1-0", False),
        ("2-0", True),
        ("4-0", False),
        ("5-0", True),
    ]


def test_duplicates_that_a_predecessor_counted_are_not_counted_again() -> None:
    book = book_with(0)
    book.restore(step=1, frontier=Frontier(), num_duplicates=5, counted_until="9-0")
    book.add(make_rollout(7, 0, entry_id="8-3"))
    book.add(make_rollout(7, 1, entry_id="9-0"))
    assert book.num_duplicates == 5
    book.add(make_rollout(7, 2, entry_id="10-0"))
    assert book.num_duplicates == 6


def test_a_lost_engine_is_no_failed_attempt_and_pauses_longer_each_time() -> None:
    book = book_with(0)
    group = book.plays[0]
    book.add(make_rollout(0, 0, group_size=2, entry_id="1-0"))
    pauses = []
    for attempt in range(10):
        lost = make_rollout(0, 1, group_size=2, attempt=attempt, status=RolloutStatus.ENGINE_LOST)
        before = time.monotonic()
        assert book.add(lost) is Arrival.RETRY
        pauses.append(round(group.not_before - before, 1))
    assert group.num_failed_attempts == 0
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0, 15.0, 15.0]
    assert group.missing == [1], "the member that came back is kept"


def test_a_real_failure_beside_a_lost_engine_counts() -> None:
    book = book_with(0)
    book.add(make_rollout(0, 0, group_size=2, status=RolloutStatus.ENGINE_LOST))
    assert book.add(make_rollout(0, 1, group_size=2, status=RolloutStatus.TIMEOUT)) is Arrival.RETRY
    assert book.plays[0].num_failed_attempts == 1


def test_two_plays_with_one_number_do_not_mix_in_a_group_that_is_scored_whole() -> None:
    book = book_with(0, scored_whole=True)
    book.add(make_rollout(0, 0, group_size=2, env_server="a"))
    assert book.add(make_rollout(0, 1, group_size=2, env_server="b")) is Arrival.DUPLICATE
    assert book.add(make_rollout(0, 1, group_size=2, env_server="a")) is Arrival.FINISHED


def test_failed_members_are_played_again_once_then_the_ordinal_is_hopeless() -> None:
    book = book_with(0)
    failed = make_rollout(0, 1, group_size=2, status=RolloutStatus.ENV_ERROR)
    assert book.add(replace(failed, entry_id="1-0")) is Arrival.OPEN
    assert book.add(make_rollout(0, 0, group_size=2, entry_id="2-0")) is Arrival.RETRY
    group = book.plays[0]
    assert group.missing == [1]
    again = make_rollout(0, 1, group_size=2, attempt=1, status=RolloutStatus.ENV_ERROR)
    assert book.add(replace(again, entry_id="3-0")) is Arrival.HOPELESS
    assert group.reason == "error"
    assert len(archived(book)) == 3, "failed attempts are archived, too"


def test_members_of_several_attempts_combine() -> None:
    book = book_with(0)
    book.add(make_rollout(0, 1, group_size=2, status=RolloutStatus.TIMEOUT, entry_id="1-0"))
    book.add(make_rollout(0, 0, group_size=2, entry_id="2-0"))
    assert book.add(make_rollout(0, 1, group_size=2, attempt=1, entry_id="3-0")) is Arrival.FINISHED
    assert [rollout.attempt for rollout in book.whole[0].rollouts()] == [0, 1]


def test_a_quarantined_task_is_hopeless_at_once() -> None:
    book = book_with(0)
    failed = make_rollout(0, 1, group_size=2, status=RolloutStatus.QUARANTINED)
    assert book.add(replace(failed, entry_id="1-0")) is Arrival.HOPELESS
    assert [item.reason for item in book.pending] == ["quarantined"]


def test_the_oldest_entry_compares_ids_as_numbers() -> None:
    book = book_with(0, 1)
    book.add(make_rollout(0, 0, group_size=2, entry_id="10-2"))
    book.add(make_rollout(1, 0, group_size=2, entry_id="9-11"))
    assert book.oldest_entry() == "9-11"


def test_the_oldest_version_of_a_group_counts() -> None:
    book = book_with(0)
    assert book.plays[0].min_policy_version is None
    book.add(make_rollout(0, 0, group_size=2, version=3, entry_id="1-0"))
    book.add(make_rollout(0, 1, group_size=2, version=2, entry_id="2-0"))
    assert book.whole[0].min_policy_version == 2


def test_a_lost_attempt_leaves_no_failures_behind() -> None:
    book = book_with(0, group_size=3)
    book.add(make_rollout(0, 1, group_size=3, status=RolloutStatus.ENV_ERROR, entry_id="1-0"))
    book.plays[0].lose()  # its env-server died
    assert book.add(make_rollout(0, 0, group_size=3, attempt=1, entry_id="2-0")) is Arrival.OPEN
    assert book.add(make_rollout(0, 2, group_size=3, attempt=1, entry_id="3-0")) is Arrival.OPEN, "member 1 still plays"
    assert book.add(make_rollout(0, 1, group_size=3, attempt=1, entry_id="4-0")) is Arrival.FINISHED


def test_a_group_that_is_scored_whole_never_mixes_attempts() -> None:
    book = book_with(0, scored_whole=True)
    book.add(make_rollout(0, 0, group_size=2, entry_id="1-0"))
    book.plays[0].lose()
    assert book.plays[0].missing == [0, 1]
    assert book.add(make_rollout(0, 1, group_size=2, entry_id="2-0")) is Arrival.DUPLICATE, "late, of attempt 0"
    assert book.add(make_rollout(0, 0, group_size=2, attempt=1, entry_id="3-0")) is Arrival.OPEN
    assert book.add(make_rollout(0, 1, group_size=2, attempt=1, entry_id="4-0")) is Arrival.FINISHED
    book.drop(book.whole, reason="surplus")
    assert [rollout.entry_id for rollout in archived(book) if not rollout.is_duplicate] == ["3-0", "4-0"]


@pytest.mark.parametrize("error", [asyncio.CancelledError(), ValueError("a defect")])
def test_what_a_commit_that_did_not_end_would_have_resolved_is_in_the_closing_header(error: BaseException) -> None:
    book = book_with(0)
    for member in (0, 1):
        book.add(make_rollout(0, member, group_size=2, entry_id=f"{member + 1}-0"))
    book.settle([Resolved.of(book.plays[0], "")])
    with pytest.raises(type(error)), book.committing():
        raise error
    book.close("run_failed")
    assert [(item.ordinal, item.reason) for item in book.pending] == [(0, "run_failed")]
    assert len(archived(book)) == 2 and book.frontier == Frontier(resolved_below=1)


def test_the_closing_header_leaves_no_ordinal_open_that_a_predecessor_had_drawn() -> None:
    book = book_with(0, 2)
    book.close("cancelled")
    assert sorted((item.ordinal, item.reason) for item in book.pending) == [(n, "cancelled") for n in range(3)]
    archived(book)
    assert book.frontier == Frontier(resolved_below=3)
