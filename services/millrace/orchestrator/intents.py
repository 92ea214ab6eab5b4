"""CancelRun, PauseRun and ResumeRun: an intent is durable before it is acknowledged.

ResumeRun of a run that has FAILED reopens it, in this order: the intent, a new epoch of the orchestrator, which
fences out the driver before, and the create-only record that its closing header does not end it
(`runlog/records/revisions.py`). The next driver begins another copy of its log, says in an event that it is QUEUED
again, and drives it. A process that dies in between leaves either a run that is still FAILED, or one that any
orchestrator goes on with.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from millrace.errors import (
    CorruptObjectError,
    InvalidSpecError,
    InvalidStateError,
    MillraceError,
    NotFoundError,
    Violation,
)
from millrace.orchestrator.catalog import RunView
from millrace.runlog import Intent, Names
from millrace.runlog.names import check_request_id
from millrace.runlog.records.numbered import create_epoch, read_intents, write_intent
from millrace.runlog.records.revisions import find_closing, has_ended, load_reopenings, reopen
from millrace.runlog.records.run_record import require_exists
from millrace.runlog.run_status import state_name
from millrace.storage import ObjectStore
from millrace.telemetry import faults
from millrace.v1 import run_pb2

ROLE = "orchestrator"
"""Role whose epochs fence those who drive a run."""


# The desired state of a run, as its users asked for it: to pause, to go on, to end; folded from the stored intents.

PREEMPT = "preempt"
"""Kind of the intent of an orchestrator, not of a user, that a run pauses for another one."""
_UNSAID = object()
MAX_REASON_CHARS = 2000
POLL_S = 2.0
"""How old what is known of a run's intents may be: another replica may have acknowledged a new one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredState:
    """What a run shall do. A cancellation is for good; of pause and resume the last one counts."""

    is_cancelled: bool = False
    is_paused: bool = False
    reason: str = ""
    """Why it shall pause or end, in the words of the user."""
    preempted_epoch: int = 0
    """Last epoch of a driver that is to pause the run for another one and queue it again; 0 for none."""
    preempted_for: str = ""
    """Which run that is, what it needs, and what the pause costs, in words."""
    retention: Mapping[str, Any] = field(default_factory=dict)
    """What the user has put in the place of the config's keys of retention."""

    def after(self, intents: Sequence[Intent]) -> "DesiredState":
        """Return the desired state after further intents, in order.

        Unknown kinds change nothing, and a cancellation stays.
        """
        desired = self
        for intent in intents:
            reason = str(intent.payload.get("reason") or "")
            asked = intent.payload.get("retention")
            retention = {**desired.retention, **(asked if isinstance(asked, dict) else {})}
            if intent.kind == "cancel":
                desired = DesiredState(is_cancelled=True, reason=reason, retention=retention)
            elif intent.kind in ("pause", "resume", "reopen") and not desired.is_cancelled:
                desired = DesiredState(is_paused=intent.kind == "pause", reason=reason, retention=retention)
            elif intent.kind == PREEMPT:
                epoch = intent.payload.get("epoch")
                number = epoch if isinstance(epoch, int) else 0
                desired = replace(desired, preempted_epoch=number, preempted_for=reason)
        return desired


@dataclass(slots=True)
class _Known:
    desired: DesiredState
    sequence: int
    read: float


class DesiredStates:
    """The desired states of runs, read from the store when what is known is older than `POLL_S`."""

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        """Make an empty cache of what runs shall do; their intents are in `store`, below `prefix`."""
        self._store = store
        self._prefix = prefix
        self._known: dict[str, _Known] = {}

    async def read(self, uid: str) -> DesiredState:
        """Return what the run with this uid shall do, read anew from the store if what is known is older than
        `POLL_S`.
        """
        known = self._known.setdefault(uid, _Known(DesiredState(), 0, float("-inf")))
        now = time.monotonic()
        if now - known.read >= POLL_S:
            intents = await read_intents(self._store, Names(self._prefix, uid), after=known.sequence)
            # A look that ran at the same time may have taken some of them already.
            new = [each for each in intents if each.sequence > known.sequence]
            known.desired, known.read = known.desired.after(new), now
            known.sequence = new[-1].sequence if new else known.sequence
        return known.desired

    def expire(self, uid: str) -> None:
        """Have the next `read` of a run ask the store, because an intent was written just now."""
        if uid in self._known:
            self._known[uid].read = float("-inf")

    def forget(self, uid: str) -> None:
        """Drop what is known of a run that has ended."""
        self._known.pop(uid, None)


class IntentCalls:
    """Writes what users ask for as intents, each once however often it is repeated."""

    def __init__(
        self, *, store: ObjectStore, prefix: str, owner: str, on_intent: Callable[[str], Awaitable[None]]
    ) -> None:
        """Make the writer of users' intents into `store`, below `prefix`, the deployment's.

        `owner`, this orchestrator, is recorded with a new epoch; `on_intent` is called with the uid of a run with a new
        intent.
        """
        self._owner = owner
        self._store = store
        self._prefix = prefix
        self._on_intent = on_intent

    async def cancel(self, view: RunView, *, reason: str, request_id: str) -> None:
        """Write the intent to end the run, unless it is cancelled already or has that intent.

        `reason` is the user's, `request_id` identifies the request. InvalidStateError if the run ended otherwise, or is
        DAMAGED and the store does not show that it is open.
        """
        if view.run.state == run_pb2.RUN_STATE_CANCELLED:
            return
        await self._require_open(view, "cancel")
        if not (await self._desired(view)).is_cancelled:
            await self._write(view, "cancel", {"reason": reason, "request_id": request_id})

    async def pause(self, view: RunView, *, reason: str, request_id: str) -> None:
        """Write the intent to pause the run, unless it shall pause already.

        `reason` is the user's, `request_id` identifies the request. InvalidStateError if the run is about to end, has
        ended, or is DAMAGED and the store does not show that it is open.
        """
        await self._require_open(view, "pause")
        desired = await self._desired(view)
        if desired.is_cancelled or view.run.state == run_pb2.RUN_STATE_STOPPING:
            why = "it is being cancelled" if desired.is_cancelled else "every step is done"
            raise InvalidStateError(
                f"run {view.record.name!r} is about to end: {why}",
                reason="RUN_STOPPING",
                remedy="nothing is left to pause",
            )
        if not desired.is_paused:
            await self._write(view, "pause", {"reason": reason, "request_id": request_id})

    async def resume(
        self, view: RunView, *, request_id: str, retention: Mapping[str, int | None] = MappingProxyType({})
    ) -> None:
        """Write the intent that a paused run goes on, or reopen a failed one; else nothing, unless `retention` changes.

        `retention` has the new values of keys of the retention rule, None for no limit; `request_id` identifies the
        request. Raises InvalidStateError if the run ended otherwise, was cancelled before it failed, is DAMAGED, or is
        being deleted.
        """
        if view.damage is not None:
            raise _damaged(view, view.damage, "resume")
        await self._require_kept(view)
        if view.has_failed:
            await self._reopen(view, request_id, retention)
            return
        await self._require_open(view, "resume")
        desired = await self._desired(view)
        if desired.is_paused or any(desired.retention.get(key, _UNSAID) != value for key, value in retention.items()):
            await self._write(view, "resume", {"request_id": request_id, "retention": dict(retention)})

    async def _reopen(self, view: RunView, request_id: str, retention: Mapping[str, int | None]) -> None:
        """Reopen a failed run: write the intent, a new epoch, and the record that its closing header does not end it.

        `retention` has new values of keys of the retention rule. Does nothing if this request or another one has
        reopened the run. Raises InvalidStateError if it was cancelled before.
        """
        names = Names(self._prefix, view.record.uid)
        intents = await read_intents(self._store, names)
        if DesiredState().after(intents).is_cancelled:
            raise InvalidStateError(
                f"run {view.record.name!r} was asked to end before it failed, and a cancellation is for good",
                reason="RUN_CANCELLED",
                remedy="`millrace run fork` starts a new run at one of its steps",
            )
        closing = await asyncio.to_thread(find_closing, self._store, names)
        # Without a closing header that counts, the run has been reopened already.
        if closing is None or await self._was_done(names, intents, request_id):
            return  # this request, or another one, has reopened it
        # The closing header is named, so that a request that is repeated after another failure is not done twice.
        payload = {"request_id": request_id, "closing_sha256": closing.sha256, "retention": dict(retention)}
        await write_intent(self._store, names, "reopen", payload)
        faults.reach(faults.Point.ORCHESTRATOR_REOPEN_INTENT, step=closing.step)
        # Before the record: the previous driver is fenced out when the closing header loses its meaning.
        epoch = await create_epoch(self._store, names, ROLE, self._owner)
        await asyncio.to_thread(reopen, self._store, names, closing, epoch=epoch.number, owner=self._owner)
        faults.reach(faults.Point.ORCHESTRATOR_REOPENED, step=closing.step)
        # After the record: either a deletion sees it and is refused, or its tombstone is seen here.
        await self._require_kept(view)
        view.reopen()
        await self._on_intent(view.record.uid)

    async def _require_open(self, view: RunView, verb: str) -> None:
        """Raise InvalidStateError if the run has ended, or is DAMAGED and the store does not show that it is open.

        `verb` names the intent.
        """
        if view.is_terminal:
            state = state_name(view.status.state)
            raise InvalidStateError(
                f"run {view.record.name!r} has already ended as {state}",
                reason="RUN_ENDED",
                remedy=f"nothing is left to {verb}",
                metadata={"state": state},
            )
        # The events of a damaged run may lack its end, and an intent of an ended run would come after its seal.
        if view.damage is not None and not await self._is_open(view.record.uid):
            raise _damaged(view, view.damage, verb)

    async def _is_open(self, uid: str) -> bool:
        """Return whether the headers in the store show that the run has not ended; False for an unknown uid, ""."""
        try:
            return bool(uid) and not await asyncio.to_thread(has_ended, self._store, Names(self._prefix, uid))
        except CorruptObjectError:
            return False

    async def _require_kept(self, view: RunView) -> None:
        """Raise InvalidStateError if the run is being deleted, or is deleted."""
        try:
            await asyncio.to_thread(require_exists, self._store, Names(self._prefix, view.record.uid))
        except NotFoundError as error:
            raise InvalidStateError(
                f"run {view.record.name!r} is being deleted",
                reason="RUN_DELETED",
                remedy="ask again in a moment if the run is still listed: its deletion may be refused",
            ) from error

    async def _was_done(self, names: Names, intents: Sequence[Intent], request_id: str) -> bool:
        """Return whether the request with this id reopened the run before, which has failed again since.

        False without an id.
        """
        asked = {i.payload.get("closing_sha256") for i in intents if i.payload.get("request_id") == request_id}
        records = await asyncio.to_thread(load_reopenings, self._store, names)
        return bool(request_id) and any(record.closing_sha256 in asked for record in records)

    async def _desired(self, view: RunView) -> DesiredState:
        """Return the desired state of the run after all intents in the store."""
        return DesiredState().after(await read_intents(self._store, Names(self._prefix, view.record.uid)))

    async def _write(self, view: RunView, kind: str, payload: dict[str, Any]) -> None:
        """Write an intent of this kind, with its `payload`, into the run's log in the store, then call `on_intent`."""
        await write_intent(self._store, Names(self._prefix, view.record.uid), kind, payload)
        await self._on_intent(view.record.uid)


def _damaged(view: RunView, damage: MillraceError, verb: str) -> InvalidStateError:
    """Make the error for a run that cannot be read, so that no intent could be followed.

    `damage` is why it cannot be read, `verb` names the intent.
    """
    name = view.record.name
    return InvalidStateError(
        f"run {name!r} is DAMAGED, and nothing can come of it to {verb} it: {damage.message}",
        reason="RUN_DAMAGED",
        remedy=f"`millrace run audit {name}` says what is damaged, `millrace run repair {name}` what can be "
        "restored from what; the run goes on by itself when it can be read",
        metadata={"state": "DAMAGED", "damage": damage.reason},
    )


def check_intent(reason: str, request_id: str) -> None:
    """Raise InvalidSpecError if a user's reason is too long, or the request id malformed."""
    if len(reason) > MAX_REASON_CHARS:
        message = f"must have at most {MAX_REASON_CHARS} characters"
        raise InvalidSpecError([Violation(field="reason", value=f"{len(reason)} characters", message=message)])
    if request_id:
        check_request_id(request_id)
