from millrace.orchestrator.wishes import Wish
from millrace.runlog import Intent


def intents(*kinds: str) -> list[Intent]:
    return [Intent(sequence=i, kind=kind, payload={"reason": kind[0]}, time="") for i, kind in enumerate(kinds, 1)]


def test_of_pause_and_resume_the_last_one_counts() -> None:
    assert not Wish().then(intents()).is_paused
    assert Wish().then(intents("pause")) == Wish(is_paused=True, reason="p")
    assert not Wish().then(intents("pause", "resume")).is_paused
    assert Wish().then(intents("pause", "resume", "pause")).is_paused


def test_a_cancellation_is_for_good() -> None:
    wish = Wish().then(intents("pause", "cancel", "pause", "resume"))
    assert (wish.is_cancelled, wish.is_paused, wish.reason) == (True, False, "c")


def test_what_comes_later_is_added_to_what_is_known() -> None:
    assert Wish(is_paused=True).then(intents("update_config")).is_paused, "other kinds change nothing"
    assert not Wish(is_paused=True).then(intents("resume")).is_paused
