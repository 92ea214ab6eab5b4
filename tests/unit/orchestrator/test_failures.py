"""Failed rollouts: what is counted, what is told, when the run fails, and what a successor knows of it."""

import json
import time

import pytest

from millrace.decoding import Fields
from millrace.orchestrator.play import failures as failures_module
from millrace.orchestrator.play.failures import (
    Failures,
    RolloutsFailedError,
    Tally,
    decode_tally,
    encode_tally,
    remedy_of,
)
from millrace.rollouts.types import OWN_SAMPLING, Purpose, Rollout, RolloutError, RolloutStatus

OK, ENV_ERROR, TIMEOUT = RolloutStatus.OK, RolloutStatus.ENV_ERROR, RolloutStatus.TIMEOUT
SIZE = 4


def rollout(ordinal: int, member: int, status: RolloutStatus = ENV_ERROR, *, env: str = "math", **error) -> Rollout:
    failure = {
        "type": "ValueError",
        "message": "boom",
        "frames": "reward.py:12 in score\nreward.py:30 in parse",
    } | error
    return Rollout(
        run_uid="r",
        purpose=Purpose.TRAIN,
        ordinal=ordinal,
        member=member,
        attempt=0,
        group_size=SIZE,
        env=env,
        task_index=0,
        task_id="0",
        status=status,
        error=None if status is OK else RolloutError(**failure),
        samples=(),
    )


def played(counted: Failures, ordinal: int, *statuses: RolloutStatus, env: str = "math") -> None:
    """A group is played, and over."""
    for member, status in enumerate(statuses or [ENV_ERROR] * SIZE):
        counted.note(rollout(ordinal, member, status, env=env))
    counted.close(ordinal, has_failed=OK not in statuses)


def made(num_groups: int = 3, max_share: float = 0.9) -> Failures:
    return Failures(
        num_groups=num_groups, group_sizes=dict.fromkeys(("math", "code", "good"), SIZE), max_share=max_share
    )


def successor(of: Failures, *, is_reopened: bool = False, **options) -> Failures:
    """Return another orchestrator's, which has read what a header carries."""
    counted = made(**options)
    state = json.loads(json.dumps(encode_tally(of.tally)))
    counted.restore(decode_tally(Fields(state)), is_reopened=is_reopened)
    return counted


def test_the_first_failing_group_is_told_with_its_first_error() -> None:
    counted = made()
    for member in range(SIZE - 1):
        counted.note(rollout(0, member))
        assert not list(counted.report()), "its other members are still to come"
    counted.note(rollout(0, SIZE - 1))
    (count,) = counted.report()
    assert count.explain() == (
        "4 of 4 rollouts of environment 'math' failed (4 env_error); the first: ValueError: boom (at reward.py:30 in "
        "parse ← reward.py:12 in score); fix the environment or its reward function; `millrace env check` plays one "
        "task of it"
    )


def test_it_is_told_again_when_the_number_has_doubled_and_at_the_end() -> None:
    counted = made(num_groups=1000)
    told = []
    for ordinal in range(40):
        played(counted, ordinal)
        told += list(counted.report())
    assert [count.num_failed for count in told] == [4, 8, 16, 32, 64, 128]
    assert "ValueError: boom" in told[0].explain()
    assert told[1].explain() == "8 of 8 rollouts of environment 'math' failed by now (8 env_error)", "the rest was told"
    (last,) = counted.report(is_final=True)
    assert last.num_failed == 160 and "ValueError: boom" in last.explain()
    assert not list(counted.report(is_final=True))
    played(counted, 50, OK, OK, OK, OK)
    assert [count.num_rollouts for count in counted.report(is_final=True)] == [164], "what is shown is what is said"
    assert not list(counted.report(is_final=True))


def test_a_member_that_is_played_again_and_again_is_no_whole_group() -> None:
    counted = made(num_groups=1)
    for _ in range(SIZE):
        counted.note(rollout(0, 0))
    assert counted.error() is None and not list(counted.report()), "three members have not come back yet"
    for member in range(1, SIZE):
        counted.note(rollout(0, member))
    assert counted.error() is not None


def test_a_successor_does_not_repeat_what_was_told() -> None:
    counted = made(num_groups=1000)
    for ordinal in range(3):
        played(counted, ordinal)
    assert len(list(counted.report())) == 1
    after = successor(counted, num_groups=1000)
    played(after, 3)
    assert not list(after.report()), "16 of 16 are not twice the 12 that were told of"
    for ordinal in range(4, 6):
        played(after, ordinal)
    assert [count.num_failed for count in after.report()] == [24]
    assert [count.num_failed for count in successor(after, num_groups=1000).report(is_final=True)] == []
    played(after, 6)
    last = successor(after, num_groups=1000)
    assert [count.num_failed for count in last.report(is_final=True)] == [28], "24 of them were told of"
    resumed = successor(counted, num_groups=1000, is_reopened=True)
    played(resumed, 3)
    assert [count.num_failed for count in resumed.report()] == [16], "who resumed it wants to know at once"


def test_every_environment_is_told_of_by_itself() -> None:
    counted = made(num_groups=10)
    played(counted, 0, env="math")
    played(counted, 1, OK, OK, OK, TIMEOUT, env="code")
    played(counted, 2, OK, OK, OK, OK, env="good")
    found = {count.env: (count.num_failed, count.num_rollouts, count.num_recent_failed) for count in counted.report()}
    assert found == {"math": (4, 4, 4), "code": (1, 4, 1)}
    assert counted.describe() == "5 of 12 rollouts failed (4 env_error, 1 timeout)"


def test_the_run_fails_when_the_share_is_reached_over_the_window() -> None:
    counted = made(num_groups=3)
    for ordinal in range(2):
        played(counted, ordinal)
        assert counted.error() is None, "the window is not full"
    for member in range(SIZE):
        counted.note(rollout(2, member))
    error = counted.error()
    assert isinstance(error, RolloutsFailedError) and error.reason == "ROLLOUTS_FAILED"
    assert error.message.startswith(
        "12 of 12 rollouts of the last 3 groups failed, so the run cannot learn: environment 'math'"
    )
    assert "ValueError: boom" in error.message


def test_a_share_below_the_limit_and_an_old_failure_do_not_end_a_run() -> None:
    counted = made(num_groups=3, max_share=0.5)
    for ordinal in range(20):
        played(counted, ordinal, OK, OK, OK, ENV_ERROR)
        assert counted.error() is None
    played(counted, 20)
    assert counted.error() is not None, "1 + 1 + 4 of 12"
    played(counted, 21, OK, OK, OK, OK)
    assert counted.error() is None, "1 + 4 of 12 are left in the window"


@pytest.mark.parametrize(
    ("status", "is_infrastructure"),
    [(RolloutStatus.ENGINE_LOST, False), (RolloutStatus.CANCELLED, False), (RolloutStatus.MODEL_ERROR, True)],
)
def test_what_the_infrastructure_caused_never_counts(status: RolloutStatus, is_infrastructure: bool) -> None:
    counted = made(num_groups=1)
    for ordinal in range(10):
        for member in range(SIZE):
            counted.note(rollout(ordinal, member, status, is_infrastructure=is_infrastructure))
        counted.close(ordinal, has_failed=True)
    assert counted.error() is None and counted.describe() == "" and not list(counted.report(is_final=True))


def test_what_the_infrastructure_loses_is_told_with_its_error_until_it_works() -> None:
    counted, told = made(), []
    for ordinal in range(8):
        for member in range(SIZE):
            counted.note(
                rollout(ordinal, member, RolloutStatus.MODEL_ERROR, is_infrastructure=True, message="HTTP 503")
            )
        told.append(bool(counted.outage_report()))
    assert told == [True, True, False, True, False, False, False, True]
    assert counted.outage.startswith("32 rollouts in a row were lost to what they run on (32 model_error); the last: ")
    assert "HTTP 503" in counted.outage
    counted.note(rollout(9, 0, RolloutStatus.CANCELLED))
    assert counted.outage, "that says nothing"
    counted.note(rollout(9, 0, OK))
    assert not counted.outage and not counted.outage_report()
    for member in range(SIZE):
        counted.note(rollout(10, member, RolloutStatus.ENGINE_LOST))
    assert counted.outage_report(), "another outage"


@pytest.mark.parametrize("status", [RolloutStatus.WORKER_DIED, RolloutStatus.QUARANTINED, RolloutStatus.MODEL_ERROR])
def test_an_environment_that_ends_its_own_worker_counts_and_so_does_a_refusal(status: RolloutStatus) -> None:
    counted = made(num_groups=1)
    played(counted, 0, *[status] * SIZE)
    assert counted.error() is not None
    error = counted.error()
    assert error is not None and failures_module.REMEDIES[status] in (error.remedy or "")


@pytest.mark.parametrize("status", [RolloutStatus.TIMEOUT, RolloutStatus.MODEL_ERROR, RolloutStatus.PROMPT_TOO_LONG])
def test_a_remedy_names_keys_of_the_config_that_there_is(status: RolloutStatus) -> None:
    failed = rollout(0, 0, status)
    assert "orchestrator." in remedy_of(failed, of_evaluation=False)
    assert "orchestrator." not in remedy_of(failed, of_evaluation=True), "`millrace eval` has no such section"


def test_groups_that_come_to_nothing_hold_the_next_ones_back_until_one_is_good() -> None:
    counted, backoff = made(), failures_module.BACKOFF
    pauses = [min(backoff.first_s * backoff.factor**index, backoff.longest_s) for index in range(8)]
    assert pauses[-2] == pauses[-1] == backoff.longest_s
    for ordinal, pause in enumerate(pauses):
        before = time.monotonic()
        played(counted, ordinal)
        assert before + pause <= counted.not_before <= time.monotonic() + pause
    counted.note(rollout(9, 0, OK))
    assert counted.not_before == 0.0


def test_a_successor_counts_what_no_header_resolves_again_and_nothing_twice() -> None:
    first = made(num_groups=3)
    played(first, 0)
    first.note(rollout(1, 0))  # in play when the header is written, so that the stream still has it
    header = encode_tally(first.tally)
    for member in range(1, SIZE):
        first.note(rollout(1, member))
    other = made(num_groups=3)
    other.restore(decode_tally(Fields(json.loads(json.dumps(header)))), is_reopened=False)
    for member in range(SIZE):
        other.note(rollout(1, member))
    assert other.describe() == first.describe() == "8 of 8 rollouts failed (8 env_error)"
    played(other, 2)
    assert other.error() is not None, "the window was not begun anew"
    (count,) = other.environments()
    assert "ValueError: boom" in count.explain() and "reward.py:12" in count.explain()


def test_a_run_that_was_reopened_gets_a_new_window_and_keeps_its_totals() -> None:
    failed = made(num_groups=2)
    played(failed, 0)
    played(failed, 1)
    assert failed.error() is not None
    again = successor(failed, is_reopened=True, num_groups=2)
    assert again.error() is None
    played(again, 2, OK, OK, OK, OK)
    assert again.error() is None and again.describe() == "8 of 12 rollouts failed (8 env_error)"


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"environments": [], "groups": [{"env": "x", "num_rollouts": 1, "failed": {}}]},
        {"environments": [{"env": 1}], "groups": []},
        {"environments": [], "groups": [[]]},
    ],
)
def test_what_is_no_tally_is_refused(state: dict) -> None:
    with pytest.raises(ValueError):
        decode_tally(Fields(state))
    assert decode_tally(None) == Tally()


def test_an_environment_that_sets_what_nobody_computes_ends_the_run_at_once_and_is_named() -> None:
    counted = made()
    said = "environment 'math' sends `seed` = 7 of its own with a model call, which would give all the same"
    counted.note(rollout(0, 0, type=OWN_SAMPLING, message=said))
    error = counted.error()
    assert error is not None and error.reason == "ENV_SAMPLING_REFUSED" and str(error).startswith(said)
    assert not list(counted.report()) and not list(counted.report(is_final=True)), "the end of the run says it"
    assert made().error() is None
