"""What users asked of a run: to pause, to go on, to end. The intents in the store say so, whoever acknowledged them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from millrace.runlog import Intent, Names
from millrace.runlog.intents import read_intents
from millrace.storage import ObjectStore

POLL_S = 2.0
"""How old what is known of a run's wishes may be: another replica may have acknowledged a new one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a run shall do. A cancellation is for good; of pause and resume the last one counts."""

    is_cancelled: bool = False
    is_paused: bool = False
    reason: str = ""
    """Why it shall pause or end, in the words of whoever asked."""

    def then(self, intents: Sequence[Intent]) -> "Wish":
        """The wish after further intents, in order; kinds of a newer release change nothing."""
        wish = self
        for intent in intents:
            reason = str(intent.payload.get("reason") or "")
            if intent.kind == "cancel":
                wish = Wish(is_cancelled=True, reason=reason)
            elif intent.kind in ("pause", "resume", "reopen") and not wish.is_cancelled:
                wish = Wish(is_paused=intent.kind == "pause", reason=reason)
        return wish


@dataclass(slots=True)
class _Known:
    wish: Wish
    sequence: int
    read: float


class WishBook:
    """The wishes of runs, read from the store when what is known is older than `POLL_S`."""

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._known: dict[str, _Known] = {}

    async def read(self, uid: str) -> Wish:
        """What the run shall do."""
        known = self._known.setdefault(uid, _Known(Wish(), 0, float("-inf")))
        now = time.monotonic()
        if now - known.read >= POLL_S:
            intents = await read_intents(self._store, Names(self._prefix, uid), after=known.sequence)
            known.wish, known.read = known.wish.then(intents), now
            known.sequence = intents[-1].sequence if intents else known.sequence
        return known.wish

    def expire(self, uid: str) -> None:
        """A wish was written just now: read it at the next look."""
        if uid in self._known:
            self._known[uid].read = float("-inf")

    def forget(self, uid: str) -> None:
        """The run has ended."""
        self._known.pop(uid, None)
