"""Which tasks are suspects, and when an environment is dangerous or hopeless."""

import random
import time

from millrace.env_server.workers import probes
from millrace.env_server.workers.probes import DANGEROUS, HOPELESS, RECENT_S, WINDOW, TaskTrials


def test_a_suspect_is_cleared_or_quarantined() -> None:
    trials = TaskTrials()
    assert not trials.is_suspect("a")
    trials.suspect("a")
    assert trials.is_suspect("a") and not trials.is_suspect("b")
    trials.clear("a")
    assert not trials.is_suspect("a") and not trials.quarantine_reason("a")
    trials.quarantine("b", "it ends workers", end="exit code 3")
    assert trials.quarantine_reason("b") == "it ends workers" and trials.quarantined == {"b": "it ends workers"}
    trials.clear("b")
    assert trials.quarantine_reason("b"), "what ended a worker alone is not cleared by a late rollout"


def test_untried_tasks_of_a_dangerous_environment_are_suspects() -> None:
    trials = TaskTrials()
    trials.clear("good")
    for number in range(DANGEROUS):
        assert not trials.is_suspect("new")
        trials.quarantine(f"bad {number}", "…", end="exit code 3")
    assert trials.is_dangerous and trials.is_suspect("new") and not trials.is_suspect("good")
    for number in range(WINDOW):
        trials.clear(f"fine {number}")
    assert not trials.is_suspect("new"), "that was long ago"


def test_an_environment_of_which_every_task_kills_is_hopeless_soon() -> None:
    trials = TaskTrials()
    for number in range(HOPELESS):
        assert not trials.hopeless(num_probing=0)
        trials.quarantine(f"t{number}", "…", end="killed by SIGSEGV")
    assert not trials.hopeless(num_probing=HOPELESS), "those under way may be good"
    text = trials.hopeless(num_probing=3)
    assert text.startswith("8 of the last 8 tasks that were tried ended their worker, alone in it (")
    assert "task t0: killed by SIGSEGV" in text and "task t7: killed by SIGSEGV" in text


def test_one_bad_task_in_five_is_not_hopeless() -> None:
    for seed in range(20):
        dice, trials = random.Random(seed), TaskTrials()
        for number in range(300):
            if dice.random() < 0.2:
                trials.quarantine(f"t{number}", "…", end="exit code 3")
            else:
                trials.clear(f"t{number}")
            assert not trials.hopeless(num_probing=0)


def test_a_task_counts_once_however_often_it_is_played() -> None:
    trials = TaskTrials()
    for number in range(HOPELESS):
        trials.quarantine(f"bad {number}", "…", end="exit code 3")
    for _ in range(100):
        trials.clear("the same")
    assert trials.hopeless(num_probing=0)


def test_tasks_that_stand_where_others_ended_count_as_these() -> None:
    trials, end = (
        TaskTrials(),
        "blocked: one call has waited for 20 s in its event loop (x.py:8 in hard), peak memory 9 MiB",
    )
    for number in range(HOPELESS // 2 - 1):
        trials.quarantine(f"t{number}", "…", end=end)
    assert trials.ended_at("x.py:8 in hard") and not trials.ended_at("x.py:9 in hard") and not trials.ended_at("")
    assert not trials.hopeless(num_probing=9, num_blocked=9), "a slow call is no dead one: few have been ended"
    trials.quarantine("one more", "…", end=end)
    assert not trials.hopeless(num_probing=9, num_blocked=3), "most may be good"
    assert trials.hopeless(num_probing=4, num_blocked=4).endswith("; 4 more are blocked where these were")


def test_while_tasks_of_a_blocked_worker_are_not_settled_new_ones_are_suspects(monkeypatch) -> None:
    trials = TaskTrials()
    trials.clear("good")
    trials.suspect("died beside it")
    assert not trials.is_suspect("new")
    trials.suspect("stood beside it", was_blocked=True)
    assert trials.is_suspect("new") and not trials.is_suspect("good")
    trials.clear("stood beside it")
    assert not trials.is_suspect("new")
    trials.suspect("blocks", was_blocked=True)
    trials.quarantine("blocks", "…", end="blocked")
    assert not trials.is_suspect("new"), "one alone makes no environment dangerous"
    trials.suspect("never played again", was_blocked=True)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + RECENT_S + 1)
    assert not trials.is_suspect("new")


def test_of_the_tasks_that_ended_well_the_last_ones_are_remembered(monkeypatch) -> None:
    """What is remembered does not grow with the run."""
    monkeypatch.setattr(probes, "MAX_CLEARED", 10)
    trials = TaskTrials()
    for number in range(100):
        trials.clear(f"t{number}")
    for number in range(DANGEROUS):
        trials.quarantine(f"bad{number}", "it ended its worker", end="killed")
    assert trials.is_dangerous
    assert [number for number in range(100) if not trials.is_suspect(f"t{number}")] == list(range(90, 100))
