"""The desired state of a run, as its users asked for it: to pause, to go on, to end; folded from the stored intents."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from millrace.runlog import Intent, Names
from millrace.runlog.records.intents import read_intents
from millrace.storage import ObjectStore

POLL_S = 2.0
"""How old what is known of a run's intents may be: another replica may have acknowledged a new one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredState:
    """What a run shall do. A cancellation is for good; of pause and resume the last one counts."""

    is_cancelled: bool = False
    is_paused: bool = False
    reason: str = ""
    """Why it shall pause or end, in the words of the user."""

    def after(self, intents: Sequence[Intent]) -> "DesiredState":
        """The desired state after further intents, in order; kinds of a newer release change nothing."""
        desired = self
        for intent in intents:
            reason = str(intent.payload.get("reason") or "")
            if intent.kind == "cancel":
                desired = DesiredState(is_cancelled=True, reason=reason)
            elif intent.kind in ("pause", "resume", "reopen") and not desired.is_cancelled:
                desired = DesiredState(is_paused=intent.kind == "pause", reason=reason)
        return desired


@dataclass(slots=True)
class _Known:
    desired: DesiredState
    sequence: int
    read: float


class DesiredStates:
    """The desired states of runs, read from the store when what is known is older than `POLL_S`."""

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._known: dict[str, _Known] = {}

    async def read(self, uid: str) -> DesiredState:
        """What the run shall do."""
        known = self._known.setdefault(uid, _Known(DesiredState(), 0, float("-inf")))
        now = time.monotonic()
        if now - known.read >= POLL_S:
            intents = await read_intents(self._store, Names(self._prefix, uid), after=known.sequence)
            new = [each for each in intents if each.sequence > known.sequence]  # another look may have been faster
            known.desired, known.read = known.desired.after(new), now
            known.sequence = new[-1].sequence if new else known.sequence
        return known.desired

    def expire(self, uid: str) -> None:
        """An intent was written just now: read it at the next look."""
        if uid in self._known:
            self._known[uid].read = float("-inf")

    def forget(self, uid: str) -> None:
        """The run has ended."""
        self._known.pop(uid, None)
