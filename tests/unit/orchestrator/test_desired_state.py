import asyncio
from typing import Any

import pytest

from millrace.orchestrator import intents as intent_calls
from millrace.orchestrator.intents import DesiredState, DesiredStates
from millrace.runlog import Intent, Names


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


async def test_a_slow_look_at_the_store_does_not_bring_back_what_a_later_one_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pause and a resume, one after the other: each is looked for as soon as it is acknowledged."""
    go_on = asyncio.Event()
    written = intents("pause")

    async def read(store: object, names: Names, *, after: int) -> list[Intent]:
        found = [intent for intent in written if intent.sequence > after]
        if len(written) == 1:
            await go_on.wait()
        return found

    monkeypatch.setattr(intent_calls, "read_intents", read)
    store: Any = None
    states = DesiredStates(store, "t")
    slow = asyncio.create_task(states.read("r1"))
    await asyncio.sleep(0)
    written.extend(intents("pause", "resume")[1:])
    assert not (await states.read("r1")).is_paused
    go_on.set()
    assert not (await slow).is_paused
    assert not (await states.read("r1")).is_paused
