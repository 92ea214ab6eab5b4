"""When a process is started again, and when it is killed: the arithmetic."""

import signal

from millrace.local import keeper
from millrace.local.keeper import Answer, AnswerHistory, ExitKind, LivenessAction, RestartHistory


def test_the_cause_of_a_death():
    assert [ExitKind.of(0), ExitKind.of(1), ExitKind.of(-signal.SIGKILL), ExitKind.of(-signal.SIGSEGV)] == [
        *(ExitKind.ORDERLY, ExitKind.CRASHED, ExitKind.KILLED, ExitKind.CRASHED),
    ]


def test_backoff_grows_until_a_crash_loop():
    lives = RestartHistory()
    seen = [lives.end(float(second), ExitKind.CRASHED) for second in range(5)]
    assert [round(each.delay_s, 2) for each in seen] == [0.2, 0.6, 1.8, 5.4, 10.0]
    assert [each.is_hopeless for each in seen] == [False] * 4 + [True]
    assert seen[-1].short_lives == 5


def test_kills_from_outside_are_borne_four_times_as_long():
    lives = RestartHistory()
    seen = [lives.end(float(second), ExitKind.KILLED) for second in range(20)]
    assert [each.is_hopeless for each in seen] == [False] * 19 + [True]
    assert [round(seen[index].delay_s, 2) for index in (0, 3, 7, 11, 19)] == [0.2, 0.2, 0.6, 1.8, 10.0]


def test_a_long_life_after_it_was_ready_starts_the_count_anew():
    lives = RestartHistory()
    for start in range(0, 1000, 100):
        lives.begin()
        lives.ready(start + 60.0)
        assert not lives.end(start + 90.0, ExitKind.CRASHED).is_hopeless, "30 s since it was ready"
    for start in range(1000, 1400, 100):
        lives.begin()
        lives.ready(start + 61.0)
        verdict = lives.end(start + 90.0, ExitKind.CRASHED)
    assert verdict.is_hopeless, "29 s since it was ready, four times after one"
    assert lives.restarts == 14


def test_an_orderly_end_is_restarted_at_once_and_is_no_crash():
    lives = RestartHistory()
    for _ in range(20):
        lives.ready(1.0)
        verdict = lives.end(2.0, ExitKind.ORDERLY)
        assert (verdict.delay_s, verdict.is_hopeless) == (0.0, False)
    for _ in range(5):
        verdict = lives.end(3.0, ExitKind.ORDERLY)
    assert verdict.is_hopeless, "exit code 0 before it was ever ready is a crash like another"


def silence(
    history: AnswerHistory, *, since: float, until: float, answer=Answer.SILENT, is_certain=True
) -> dict[LivenessAction, float]:
    """Return the first time of each verdict while every check of the period gets this answer."""
    first: dict[LivenessAction, float] = {}
    now = since
    while now <= until:
        first.setdefault(history.hear(answer, now, is_certain=is_certain), now)
        now += keeper.PERIOD_S + keeper.CHECK_TIMEOUT_S
    return first


def test_silence_is_named_then_ends_in_a_kill():
    first = silence(AnswerHistory(0.0), since=5.0, until=60.0)
    assert 10 <= first[LivenessAction.NAME] <= 17 and 30 <= first[LivenessAction.KILL] <= 40


def test_an_answer_forgets_all_failures():
    history = AnswerHistory(0.0)
    assert LivenessAction.KILL not in silence(history, since=5.0, until=27.0)
    assert history.hear(Answer.SERVING, 30.0, is_certain=True) is LivenessAction.FINE
    first = silence(history, since=35.0, until=90.0)
    assert first[LivenessAction.NAME] >= 40 and first[LivenessAction.KILL] >= 60


def test_nobody_is_killed_while_the_machine_may_be_to_blame():
    assert set(silence(AnswerHistory(0.0), since=5.0, until=300.0, is_certain=False)) == {
        LivenessAction.FINE,
        LivenessAction.NAME,
    }
    slept = AnswerHistory(0.0)
    assert slept.hear(Answer.SILENT, 3600.0, is_certain=True) is LivenessAction.FINE, "the laptop was closed"
    assert slept.hear(Answer.SILENT, 3605.0, is_certain=True) is LivenessAction.FINE


def test_who_says_that_it_is_sick_gets_longer():
    first = silence(AnswerHistory(0.0), since=5.0, until=100.0, answer=Answer.SICK)
    assert first[LivenessAction.NAME] <= 17 and 60 <= first[LivenessAction.KILL] <= 67
