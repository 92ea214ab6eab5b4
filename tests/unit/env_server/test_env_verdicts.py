"""Which tasks are suspects, and when an environment is dangerous or hopeless."""

import random

from millrace.env_server.workers.verdicts import DANGEROUS, HOPELESS, WINDOW, Verdicts


def test_a_suspect_is_cleared_or_quarantined() -> None:
    verdicts = Verdicts()
    assert not verdicts.is_suspect("a")
    verdicts.suspect("a")
    assert verdicts.is_suspect("a") and not verdicts.is_suspect("b")
    verdicts.clear("a")
    assert not verdicts.is_suspect("a") and not verdicts.why_not("a")
    verdicts.quarantine("b", "it ends workers", end="exit code 3")
    assert verdicts.why_not("b") == "it ends workers" and verdicts.quarantined == {"b": "it ends workers"}
    verdicts.clear("b")
    assert verdicts.why_not("b"), "what ended a worker alone is not cleared by a late rollout"


def test_untried_tasks_of_a_dangerous_environment_are_suspects() -> None:
    verdicts = Verdicts()
    verdicts.clear("good")
    for number in range(DANGEROUS):
        assert not verdicts.is_suspect("new")
        verdicts.quarantine(f"bad {number}", "…", end="exit code 3")
    assert verdicts.is_dangerous and verdicts.is_suspect("new") and not verdicts.is_suspect("good")
    for number in range(WINDOW):
        verdicts.clear(f"fine {number}")
    assert not verdicts.is_suspect("new"), "that was long ago"


def test_an_environment_of_which_every_task_kills_is_hopeless_soon() -> None:
    verdicts = Verdicts()
    for number in range(HOPELESS):
        assert not verdicts.hopeless(num_probing=0)
        verdicts.quarantine(f"t{number}", "…", end="killed by SIGSEGV")
    assert not verdicts.hopeless(num_probing=HOPELESS), "those under way may be good"
    text = verdicts.hopeless(num_probing=3)
    assert text.startswith("8 of the last 8 tasks that were tried ended their worker, alone in it (")
    assert "task t0: killed by SIGSEGV" in text and "task t7: killed by SIGSEGV" in text


def test_one_bad_task_in_five_is_not_hopeless() -> None:
    for seed in range(20):
        dice, verdicts = random.Random(seed), Verdicts()
        for number in range(300):
            if dice.random() < 0.2:
                verdicts.quarantine(f"t{number}", "…", end="exit code 3")
            else:
                verdicts.clear(f"t{number}")
            assert not verdicts.hopeless(num_probing=0)


def test_a_task_counts_once_however_often_it_is_played() -> None:
    verdicts = Verdicts()
    for number in range(HOPELESS):
        verdicts.quarantine(f"bad {number}", "…", end="exit code 3")
    for _ in range(100):
        verdicts.clear("the same")
    assert verdicts.hopeless(num_probing=0)
