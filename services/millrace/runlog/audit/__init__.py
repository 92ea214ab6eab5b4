"""The audit of a run: reads Redis and the store, and says where the log breaks a promise of the architecture.

What is derived (rollouts, events, policies, checkpoints) is read before the headers that it derives from, so that a run
that goes on meanwhile is not accused of what it has just done.
"""

import asyncio
import json
from collections.abc import Callable

import redis.asyncio as redis_asyncio

from millrace.errors import CorruptObjectError, NotFoundError
from millrace.runlog.audit.checkpoints import check_checkpoints, compare_chains
from millrace.runlog.audit.epochs import check_epochs, newest_generation
from millrace.runlog.audit.events import EventCheck
from millrace.runlog.audit.findings import Audit, AuditStopped
from millrace.runlog.audit.headers import ORCHESTRATOR, HeaderCheck
from millrace.runlog.audit.mirror import Mirror
from millrace.runlog.audit.policies import PolicyCheck
from millrace.runlog.audit.rollouts import RolloutFact
from millrace.runlog.entry import Entry
from millrace.runlog.event_archive import load_archived_events
from millrace.runlog.names import Names
from millrace.runlog.origin import Origin, parse_origin
from millrace.storage import ObjectStore
from millrace.v1 import audit_pb2

_TRAINER = "trainer"


async def audit_run(
    redis: redis_asyncio.Redis | None,
    store: ObjectStore,
    *,
    prefix: str,
    uid: str,
    on_progress: Callable[[str], None] = lambda text: None,
) -> audit_pb2.AuditReport:
    """Audit a run, without `redis` from the store alone. Reads only; every violation is in the report.

    `on_progress` hears, from another thread, what is being looked at. `NotFoundError` if there is no such run,
    `UnavailableError` if store or Redis does not answer.
    """
    names = Names(prefix, uid)
    audit = Audit(store=store, names=names, report=audit_pb2.AuditReport(run_uid=uid), on_progress=on_progress)
    name, run_hash, origin = await asyncio.to_thread(_read_run, audit)
    audit.report.run = f"runs/{name}"
    events, rollouts = EventCheck(audit), {}
    mirror = None if redis is None else await Mirror.open(audit, redis)
    if mirror is not None:
        rollouts = await mirror.rollouts()
        await mirror.events(events)
    try:
        epochs, installed = await asyncio.to_thread(
            _audit_store, audit, events, rollouts, run_hash=run_hash, origin=origin
        )
    except asyncio.CancelledError:
        audit.stopping.set()  # the thread ends at its next step
        raise
    if mirror is not None:
        await mirror.compare(epochs=epochs, installed=installed)
    audit.findings.fill(audit.report)
    return audit.report


def _audit_store(
    audit: Audit,
    events: EventCheck,
    rollouts: dict[tuple[int, int], list[RolloutFact]],
    *,
    run_hash: str,
    origin: Origin,
) -> tuple[dict[str, int], int]:
    """Everything that is checked against the store (blocking); returns the newest epochs by role, and generation."""
    try:
        events.add(_archived(audit))
        policies = PolicyCheck(audit)
        policies.scan()
        checkpoints = check_checkpoints(audit, run_hash=run_hash)
        kept_from = checkpoints[0].step if checkpoints else origin.base_step
        headers = HeaderCheck(audit, run_hash=run_hash, origin=origin, kept_from=kept_from)
        headers.run(rollouts)
        epochs = check_epochs(audit)
        generation = newest_generation(audit)
        headers.check_epoch(epochs.get(ORCHESTRATOR, 0))
        compare_chains(audit, checkpoints, headers.chains)
        if not _is_evaluation(audit):  # which publishes nothing
            policies.compare(first=origin.base_step, next_step=headers.next_step, closing=headers.closing)
        events.finish(
            base_step=origin.base_step,
            next_step=headers.next_step,
            closing=headers.closing,
            trainer_epochs=epochs.get(_TRAINER, 0),
        )
    except AuditStopped:
        return {}, 0  # nobody reads the report
    return epochs, generation


def _archived(audit: Audit) -> list[Entry]:
    """The archived events, if they are readable."""
    try:
        return load_archived_events(audit.store, audit.names)
    except CorruptObjectError as error:
        audit.findings.violation("EVENT_ARCHIVE_CORRUPT", error.message)
        return []


def _is_evaluation(audit: Audit) -> bool:
    """Whether the run trains nothing, as its run.json says; one that cannot be read is told of elsewhere."""
    try:
        return json.loads(audit.store.get(audit.names.run_json)).get("kind") == "EVAL"
    except (ValueError, AttributeError):
        return False


def _read_run(audit: Audit) -> tuple[str, str, Origin]:
    """Name, run_hash and origin from run.json."""
    key = audit.names.run_json
    try:
        data = audit.store.get(key)
    except NotFoundError as error:
        raise NotFoundError(
            f"there is no run {audit.names.uid}: {audit.uri(key)} does not exist",
            reason="RUN_NOT_FOUND",
            remedy="`millrace run list` shows the runs",
        ) from error
    try:
        document = json.loads(data)
        name, run_hash = str(document["name"]), str(document["run_hash"])
    except (ValueError, KeyError, TypeError) as error:
        audit.findings.violation("RUN_JSON_CORRUPT", f"{audit.uri(key)} is not readable: {error!r}")
        return audit.names.uid, "", Origin()
    try:
        return name, run_hash, parse_origin(data, where=audit.uri(key))
    except CorruptObjectError as error:
        audit.findings.violation("RUN_JSON_CORRUPT", error.message)
        return name, run_hash, Origin()
