"""`millrace run why`: what the processes of a run wait for, and runs that something refuses to carry on.

Everything here comes from memory (the registry's heartbeats, this process's waits, the view of the run that was read
last), so it answers while Redis or the object store does not.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from millrace.errors import HELD_UP, RefusedError
from millrace.orchestrator.catalog import RunView
from millrace.orchestrator.chain import REDIS, SILENT_S, STORE, Chain, Component, find_chain
from millrace.orchestrator.workers import WorkerKind, WorkerRecord, WorkerRegistry
from millrace.rpc.worker import to_proto
from millrace.runlog.run_status import ended_words, resumed_words
from millrace.telemetry import waits
from millrace.telemetry.waits import METER, Meter, Wait
from millrace.v1 import run_pb2, run_service_pb2

RECENT_S = 60.0
"""How long this process reports that it stood still: until then it may have caused other components' delays."""
NameOf = Callable[[str], str]
"""Name of a run by its uid; the uid itself if it is unknown, and empty if it is not to be named."""


def explain(
    view: RunView,
    registry: WorkerRegistry,
    *,
    owner: str,
    note: str = "",
    name_of: NameOf = str,
    is_held: bool = False,
    place: tuple[str, str] = ("", ""),
    tenant: str = "",
) -> run_service_pb2.ExplainRunResponse:
    """Return the waits of a run's processes, longest first, and a one-line summary of why it does not move.

    `owner` is this orchestrator. `note` says why the view may be old, "" if it is not. A run that has ended has waits
    only while this orchestrator still works on it (`is_held`): its exports write the rest. `name_of` gives a run's name
    for a uid. `place` is its place in the queue and why it waits there, in words (`RunQueue.words`). For a `tenant`
    what services do for others' runs is left out (`for_tenant`).
    """
    if view.is_terminal:
        last = _last_waits(view.record.uid, owner) if is_held else []
        ended = "; ".join(
            [ended_words(view.record.name, view.status), *(f"{wait.owner} waits for {wait.reason}" for wait in last)]
        )
        return run_service_pb2.ExplainRunResponse(waits=to_proto(last), summary=ended)
    uid = view.record.uid
    found = components(uid, registry, owner=owner)
    found = [for_tenant(each, uid) for each in found] if tenant else found
    shown = [wait for component in found for wait in _collapsed(component.waits)]
    shown.sort(key=lambda wait: -wait.age_s)
    summary = _summary(view, registry, found, owner=owner, name_of=name_of, place=place)
    return run_service_pb2.ExplainRunResponse(waits=to_proto(shown), summary=f"{note}; {summary}" if note else summary)


def _last_waits(uid: str, owner: str) -> list[Wait]:
    """Return the waits of this orchestrator, `owner`, that keep it from releasing the run `uid`, which has ended.

    If it has registered none, return one for the last objects of the run.
    """
    found = [wait for wait in waits.snapshot(owner) if wait.run == uid]
    return found or [Wait(owner=owner, reason="the last objects of the run to be written", run=uid)]


def unanswered(owner: str) -> str:
    """Return in words the longest wait of this process, `owner`, for Redis or the store; empty if both answer."""
    found = [wait for wait in waits.snapshot(owner) if wait.waits_on in (REDIS, STORE)]
    return f"it waits for {found[0].reason}, {found[0].age_s:.1f} s" if found else ""


def stood_still(owner: str, *, meter: Meter = METER) -> str:
    """Return in words when and for how long this process, `owner`, did not run last; empty if it always ran lately.

    Lately is within `RECENT_S`; times up to `SILENT_S` do not count.
    """
    now = time.monotonic()
    last = next((each for each in reversed(meter.found) if each.seconds > SILENT_S), None)
    if last is None or now - last.ended > RECENT_S:
        return ""
    when = f"for {last.seconds:.0f} s until {now - last.ended:.0f} s ago"
    return f"orchestrator {owner} stood still {when} (it was frozen, or its machine was overloaded)"


def chain_of(uid: str, registry: WorkerRegistry, *, owner: str, tenant: str = "") -> Chain:
    """Return the chain of waits of a run that this orchestrator, `owner`, drives, with what holds the run up at its
    end; for a `tenant` without what services do for others' runs.
    """
    found = components(uid, registry, owner=owner)
    return _chain([for_tenant(each, uid) for each in found] if tenant else found, owner=owner)


def for_tenant(component: Component, uid: str) -> Component:
    """Return a component of the run `uid` without what it does for other runs, which may be another tenant's.

    Of an orchestrator and an env-server, which work for several runs, the waits that name no run stay only if they are
    for Redis or the store.
    """
    if component.kind not in ("orchestrator", WorkerKind.ENV_SERVER):
        return component
    own = [wait for wait in component.waits if wait.run == uid or wait.waits_on in (REDIS, STORE)]
    is_env_server = component.kind == WorkerKind.ENV_SERVER
    return replace(component, waits=own, activity="plays rollouts" if is_env_server else component.activity)


def components(uid: str, registry: WorkerRegistry, *, owner: str, is_troubled: bool = False) -> list[Component]:
    """Return this orchestrator, `owner`, and the workers that serve the run `uid`, each with its waits for it or for no
    run.

    A lost worker is among them if no other one of its kind serves the run. With `is_troubled` return of the workers
    that are not lost only those with a wait that is refused or overdue: a look that costs little for a large fleet.
    """
    now = time.monotonic()
    own = _of_run(waits.snapshot(owner), uid)
    found = [Component(name=owner, kind="orchestrator", waits=own)]
    # A worker that announced its end and is silent has ended: nobody waits for it.
    here = [record for record in registry.records() if not (record.is_leaving and now - record.silent_since > SILENT_S)]
    here = [record for record in here if serves(record, uid)]
    shown = [each for each in here if each.is_troubled(now - each.silent_since)] if is_troubled else here
    found += [_component(record, uid, now) for record in shown]
    # A lost worker explains nothing where another one of its kind serves the run.
    present = {record.kind for record in here}
    for record in registry.lost.values():
        is_missed = record.kind not in present and not record.is_leaving
        if is_missed and serves(record, uid):
            found.append(_component(record, uid, now, is_lost=True))
    return found


def serves(record: WorkerRecord, uid: str) -> bool:
    """Return whether a worker serves the run `uid`: its trainer and replicas do, and every env-server."""
    if record.kind is WorkerKind.ENV_SERVER:
        return True
    return uid in (record.run_uid, record.reported)


def _component(record: WorkerRecord, uid: str, now: float, *, is_lost: bool = False) -> Component:
    """Return a worker as a component of the run `uid`, with its waits as old as they are now (monotonic `now`).

    `is_lost` says that its lease has run out.
    """
    age_s = max(0.0, now - record.silent_since)
    if age_s > SILENT_S:
        # A worker that this process could not hear, because it did not run itself, is not silent.
        age_s = max(0.0, age_s - METER.within(record.silent_since, now))
    waiting = [replace(wait, age_s=wait.age_s + age_s) for wait in _of_run(record.waits, uid)]
    return Component(
        name=record.worker_id,
        kind=record.kind,
        waits=waiting,
        silence_s=age_s,
        is_lost=is_lost,
        activity=_activity(record),
        url=record.worker.http_url,
        num_requests=record.policy.num_requests if record.policy is not None else None,
    )


def _collapsed(found: Sequence[Wait]) -> list[Wait]:
    """Merge an owner's waits that differ only in age into the oldest one, whose reason gets their number."""
    same: dict[tuple[str, str, str, float, str], list[Wait]] = {}
    for wait in found:
        key = (wait.owner, wait.reason, wait.waits_on, wait.deadline_s, wait.run)
        same.setdefault(key, []).append(wait)
    shown: list[Wait] = []
    for alike in same.values():
        oldest = max(alike, key=lambda wait: wait.age_s)
        times = f" (×{len(alike)}, oldest {oldest.age_s:.1f} s)" if len(alike) > 1 else ""
        shown.append(replace(oldest, reason=oldest.reason + times))
    return shown


def _of_run(found: Iterable[Wait], uid: str) -> list[Wait]:
    """Return the waits that are for this run or for no run."""
    return [wait for wait in found if wait.run in ("", uid)]


def _activity(record: WorkerRecord) -> str:
    """Return in words what a worker does that waits for nobody, as it last reported."""
    if record.trainer is not None:
        return f"works on step {record.trainer.step}" if record.trainer.run_uid else "is about to take the run"
    if record.policy is not None:
        held = f"serves policy {record.policy.version}" if record.policy.has_version else "holds no policy"
        return f"{held}, {record.policy.num_requests} requests are open"
    return f"plays {record.num_playing} rollouts"


def _chain(found: Sequence[Component], *, owner: str) -> Chain:
    """Return the worst chain of waits of these components that begins at the trainer or at the orchestrator `owner`."""
    return find_chain(found, starts=("trainer", owner))


def _summary(
    view: RunView,
    registry: WorkerRegistry,
    found: Sequence[Component],
    *,
    owner: str,
    name_of: NameOf,
    place: tuple[str, str],
) -> str:
    """Return one line about the run: what is special about its state, then its troubles and its chain of waits.

    `found` are its components; `owner` is this orchestrator; `name_of` gives a run's name for a uid;
    `place` is its place in the queue and why it waits there.
    """
    match view.run.state:
        case run_pb2.RUN_STATE_QUEUED:
            return f"queued: {queued_words(view.record.uid, registry, owner=owner, name_of=name_of, place=place)}"
        case run_pb2.RUN_STATE_DAMAGED:
            return f"damaged, nothing works on it: {view.run.error.message}"
        case run_pb2.RUN_STATE_PAUSED:
            return f"paused: nothing works on it until `millrace run resume {view.record.name}`"
        case _:
            pass
    parts = [_failing(count) for count in view.status.environments.values() if _is_failing(count)]
    stale = {env: found for env, found in sorted(view.status.staleness.items()) if found.is_much}
    parts += [f"environment {env!r} is behind: {found.lost}" for env, found in stale.items()]
    if view.status.resumed is not None:
        parts.append(resumed_words(view.status.resumed))
    if note := stood_still(owner):
        parts.append(note)
    if not any(component.kind == "trainer" for component in found):
        parts.append(f"no trainer is assigned to the run ({_trainers(registry, name_of)})")
    if chain := str(_chain(found, owner=owner)):
        parts.append(chain)
    return "; ".join(parts) if parts else "nobody waits: every service of the run is working"


def _is_failing(count: run_pb2.EnvRollouts) -> bool:
    """Return whether most of the last rollouts of an environment failed."""
    return count.num_recent_failed * 2 > count.num_recent


def _failing(count: run_pb2.EnvRollouts) -> str:
    """Return in words how many of an environment's last rollouts failed, with the first error."""
    return (
        f"{count.num_recent_failed} of the last {count.num_recent} rollouts of environment {count.env!r} failed; the "
        f"first: {count.first_error}"
    )


def queued_words(
    uid: str, registry: WorkerRegistry, *, owner: str, name_of: NameOf, place: tuple[str, str] = ("", "")
) -> str:
    """Return in words where the queued run `uid` is in the queue and why it waits: `place` (`RunQueue.words`), or else
    what this orchestrator, `owner`, waits for before it drives the run, or that no trainer is free.
    """
    where, why = place
    why = _held_up(uid, owner) or why or _why_queued(uid, registry, name_of)
    return f"{where}: {why}" if where else why


def _held_up(uid: str, owner: str) -> str:
    """Return in words what this orchestrator, `owner`, waits for before it drives the queued run `uid`.

    Empty if it waits for nothing.
    """
    own = [wait for wait in waits.snapshot(owner) if wait.run == uid]
    held = max(own, key=lambda wait: wait.age_s, default=None)
    return "" if held is None else f"the orchestrator waits for {held.reason}, {held.age_s:.0f} s"


def _why_queued(uid: str, registry: WorkerRegistry, name_of: NameOf) -> str:
    """Return in words why a queued run does not start: no trainer is free, or no orchestrator has taken it yet."""
    held = [run for record in registry.alive(WorkerKind.TRAINER) if (run := record.run_uid or record.reported) != uid]
    if not all(held) or len(held) < len(registry.alive(WorkerKind.TRAINER)):
        return "a trainer is free, an orchestrator takes the run as soon as its log can be read"
    see = f"; see: millrace run why {name_of(held[0])}" if held and name_of(held[0]) else ""
    return f"no trainer worker is free ({_trainers(registry, name_of)}){see}"


def _trainers(registry: WorkerRegistry, name_of: NameOf) -> str:
    """Return in words the registered trainers, each with the run that it has, and the ids of up to three lost ones."""
    words = []
    for record in registry.alive(WorkerKind.TRAINER):
        run = record.run_uid or record.reported
        name = name_of(run) if run else ""
        words.append(f"{record.worker_id} has {f'run {name}' if name else 'another run' if run else 'no run'}")
    gone = [record.worker_id for record in registry.lost.values() if record.kind is WorkerKind.TRAINER]
    if gone:
        words.append(f"lost: {', '.join(gone[-3:])}")
    return "; ".join(words) or "none is registered"


# Which runs get nowhere because what they need answers and refuses, and for how long: a bound for those who wait.
#
# waits of a run with a refusal ──▶ no new step meanwhile ──▶ HELD_UP_S ──▶ `problem`: WatchRun ends with it
#
# A full disk, a Redis that became a replica, rights that were taken away: somebody has to act. The run itself stays
# as its log has it and goes on once it can. docs/decisions/refusals.md says why it is not ended.

# A failover of Redis takes 10 to 30 seconds, and must not end commands (docs/decisions/refusals.md).
HELD_UP_S = 50.0
"""How long a run may be refused without getting ahead before commands that wait for it fail: with what comes after it,
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
    """Looks at every open run once per second for waits, of this process and of workers, that have a refusal."""

    def __init__(self, registry: WorkerRegistry, *, owner: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Make a watch over the runs of a deployment.

        `owner` names this orchestrator, `clock` gives monotonic seconds.
        """
        self._registry = registry
        self._owner = owner
        self._clock = clock
        self._refused: dict[str, _Refused] = {}
        self._furthest: dict[str, tuple[tuple[bool, int, int], float]] = {}

    async def run(self, views: Callable[[], Iterable[RunView]]) -> None:
        """Look once per second at the runs that `views` returns, until cancelled."""
        # unregistered wait: a periodic look, which awaits nothing else
        while True:
            await asyncio.sleep(LOOK_S)
            self.look(views())

    def look(self, views: Iterable[RunView]) -> None:
        """Note for each open run since when something refuses to let it get ahead; progress begins that time anew.

        Runs that are not in `views`, or have ended, are forgotten.
        """
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
        """Return the error of a run that was refused for `HELD_UP_S` without getting ahead; None for any other run."""
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
        """Note whether the run got ahead, and whether something refuses it, as of `now` (monotonic)."""
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
            # A wait may be older than the run's last progress, which it did not prevent.
            since = max(now - wait.age_s, moved_at) if known is None else known.since
            self._refused[uid] = _Refused(since=since, seen=now, kind=kind, wait=wait)
        elif known is not None and now - known.seen > GAP_S:
            del self._refused[uid]

    def _find(self, uid: str) -> tuple[str, Wait] | None:
        """Return the kind of service that waits, and its longest wait with a refusal; None if nothing refuses the run.

        Of a kind's components all must have such a wait: while one works, the run gets ahead.
        """
        troubled = components(uid, self._registry, owner=self._owner, is_troubled=True)
        # The cheap look first: nearly always nothing is refused, and then not all components are needed.
        if all(wait.refusal is None for component in troubled for wait in component.waits):
            return None
        by_kind: dict[str, list[Wait | None]] = {}
        for component in components(uid, self._registry, owner=self._owner):
            refused = [wait for wait in component.waits if wait.refusal is not None]
            by_kind.setdefault(component.kind, []).append(max(refused, key=lambda wait: wait.age_s, default=None))
        found = [(kind, wait) for kind, waits in by_kind.items() if all(waits) for wait in waits if wait is not None]
        return max(found, key=lambda each: each[1].age_s, default=None)
