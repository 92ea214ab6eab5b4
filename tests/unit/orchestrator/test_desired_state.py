from millrace.orchestrator.runs.desired_state import DesiredState
from millrace.runlog import Intent


def intents(*kinds: str) -> list[Intent]:
    return [Intent(sequence=i, kind=kind, payload={"reason": kind[0]}, time="") for i, kind in enumerate(kinds, 1)]


def test_of_pause_and_resume_the_last_one_counts() -> None:
    assert not DesiredState().after(intents()).is_paused
    assert DesiredState().after(intents("pause")) == DesiredState(is_paused=True, reason="p")
    assert not DesiredState().after(intents("pause", "resume")).is_paused
    assert DesiredState().after(intents("pause", "resume", "pause")).is_paused


def test_a_cancellation_is_for_good() -> None:
    desired = DesiredState().after(intents("pause", "cancel", "pause", "resume"))
    assert (desired.is_cancelled, desired.is_paused, desired.reason) == (True, False, "c")


def test_what_comes_later_is_added_to_what_is_known() -> None:
    assert DesiredState(is_paused=True).after(intents("update_config")).is_paused, "other kinds change nothing"
    assert not DesiredState(is_paused=True).after(intents("resume")).is_paused
