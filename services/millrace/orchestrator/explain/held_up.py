"""Which runs get nowhere because what they need answers and refuses, and for how long: a bound for those who wait.

    waits of a run with a refusal ──▶ no new step meanwhile ──▶ HELD_UP_S ──▶ `problem`: WatchRun ends with it

A full disk, a Redis that became a replica, rights that were taken away: somebody has to act. The run itself stays as
its log has it and goes on once it can. docs/decisions/refusals.md says why it is not ended.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from millrace.errors import HELD_UP, RefusedError
from millrace.orchestrator.explain.why import components
from millrace.orchestrator.runs.catalog import RunView
from millrace.orchestrator.workers import WorkerRegistry
from millrace.telemetry.waits import Wait
from millrace.v1 import run_pb2

HELD_UP_S = 50.0
"""How long a run may be refused without getting ahead before those who wait for it are told: with what comes behind it,
within a minute."""
LOOK_S = 1.0
GAP_S = 5.0
"""Between two tries nothing is refused; a pause that lasts longer says that it is over."""


@dataclass(slots=True, kw_only=True)
class _Refused:
    """A run that was refused something."""

    since: float
    seen: float
    kind: str
    """Of the service that waits."""
    wait: Wait


class HeldUp:
    """Looks at every open run once per second. Refusals are those of waits of this process and of workers."""

    def __init__(self, registry: WorkerRegistry, *, owner: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`owner` names this orchestrator."""
        self._registry = registry
        self._owner = owner
        self._clock = clock
        self._refused: dict[str, _Refused] = {}
        self._furthest: dict[str, tuple[tuple[bool, int, int], float]] = {}

    async def run(self, views: Callable[[], Iterable[RunView]]) -> None:
        """Look at the runs that `views` gives; ends by cancellation."""
        # unregistered wait: a periodic look, which awaits nothing else
        while True:
            await asyncio.sleep(LOOK_S)
            self.look(views())

    def look(self, views: Iterable[RunView]) -> None:
        """Note of each open run whether something refuses it."""
        now = self._clock()
        uids = set[str]()
        for view in views:
            if view.record.uid and not view.is_terminal:
                uids.add(view.record.uid)
                self._look_at(view, now)
        for known in (self._refused, self._furthest):
            for uid in known.keys() - uids:
                del known[uid]

    def problem(self, uid: str) -> RefusedError | None:
        """Return why a run gets nowhere, once it has lasted; None while it may still."""
        found, now = self._refused.get(uid), self._clock()
        if found is None or found.wait.refusal is None or now - found.since < HELD_UP_S:
            return None
        refusal = found.wait.refusal
        return RefusedError(
            f"{refusal.message} (for {now - found.since:.0f} s)",
            reason=HELD_UP,
            remedy=refusal.remedy or None,
            metadata={"cause": refusal.reason, "component": found.kind},
        )

    def _look_at(self, view: RunView, now: float) -> None:
        uid, progress = view.record.uid, view.run.progress
        is_begun = view.run.state != run_pb2.RUN_STATE_QUEUED
        furthest = (is_begun, progress.step, progress.policy_version)
        before, moved_at = self._furthest.setdefault(uid, (furthest, now))
        if furthest > before:
            self._furthest[uid], moved_at = (furthest, now), now
            self._refused.pop(uid, None)
        known = self._refused.get(uid)
        if (found := self._find(uid)) is not None:
            kind, wait = found
            since = max(now - wait.age_s, moved_at) if known is None else known.since
            self._refused[uid] = _Refused(since=since, seen=now, kind=kind, wait=wait)
        elif known is not None and now - known.seen > GAP_S:
            del self._refused[uid]

    def _find(self, uid: str) -> tuple[str, Wait] | None:
        """Return the longest refused wait of a run, and whose it is; of several alike all have to be refused."""
        by_kind: dict[str, list[Wait | None]] = {}
        for component in components(uid, self._registry, owner=self._owner):
            refused = [wait for wait in component.waits if wait.refusal is not None]
            by_kind.setdefault(component.kind, []).append(max(refused, key=lambda wait: wait.age_s, default=None))
        found = [(kind, wait) for kind, waits in by_kind.items() if all(waits) for wait in waits if wait is not None]
        return max(found, key=lambda each: each[1].age_s, default=None)
