"""The audit of a run: reads Redis and the store, and says where the log breaks a promise of the architecture.

What is derived (rollouts, events, policies, checkpoints) is read before the headers that it derives from, so that a run
that goes on meanwhile is not accused of what it has just done.

    fast    structure, chain, existence and sizes; every small object against the hash that names it; events against
            headers against policies against checkpoints
    deep    the same, and every byte of the objects of policies and checkpoints, and what `Prove` decodes of them
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis.asyncio as redis_asyncio

from millrace.decoding import MAX_JSON_BYTES
from millrace.errors import CorruptObjectError, NotFoundError
from millrace.readers.audit.events import EventCheck, EventClaims, StepClaims
from millrace.readers.audit.findings import Audit, AuditStopped, some
from millrace.readers.audit.headers import ORCHESTRATOR, HeaderCheck
from millrace.readers.audit.mirror import Mirror
from millrace.readers.audit.named import ReferencedObjects, check_other_names, check_unnamed
from millrace.readers.audit.objects import (
    CheckpointFact,
    PolicyCheck,
    check_checkpoints,
    check_points,
    check_token_logs,
    compare_chains,
    compare_saved,
    read_archives,
)
from millrace.readers.audit.records import (
    SealCheck,
    check_attestations,
    check_epochs,
    check_generations,
    check_identity,
    read_kept,
)
from millrace.readers.audit.retired import RetirementCheck
from millrace.readers.audit.rollouts import RolloutFact
from millrace.runlog import catalogue
from millrace.runlog.attest import Attestation, SigningKey
from millrace.runlog.names import Names
from millrace.runlog.records.run_record import EVAL, RunOrigin, RunRecord, parse_origin
from millrace.storage import ObjectStore
from millrace.v1 import audit_pb2

_TRAINER = "trainer"
_READ_ELSEWHERE = {catalogue.EPOCH, catalogue.REOPENING, catalogue.RETIREMENT, catalogue.ATTESTATION}

Weights = Mapping[str, tuple[str, Any]]
"""Number format and flat bits of a policy's tensors, by name."""
Prove = Callable[
    [ObjectStore, Sequence[str], Callable[[str], None], Callable[[int, int, Weights], None]], Iterable[str]
]
"""Decodes the policies with these manifests, in order, and yields what is wrong.

It reports its progress in words, and hands over lineage, version and weights of every one that is right.
"""
Compare = Callable[[ObjectStore, Mapping[str, tuple[str, int]], Weights], Iterable[str]]
"""Compares the files of a checkpoint (key and bytes by name) with the policy of its step; yields what differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """How far an audit looks beyond what it always looks at."""

    is_deep: bool = False
    prove: Prove | None = None
    """Decodes policies in a deep audit."""
    compare: Compare | None = None
    """Compares checkpoints with policies in a deep audit that decodes them."""
    key: SigningKey | None = None
    """Checks the signatures of attestations."""
    attestations: tuple[Attestation, ...] = ()
    """KeptAs elsewhere: what they say must be so, and the store must have them, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What run.json says."""

    record: RunRecord
    origin: RunOrigin


async def audit_run(
    redis: redis_asyncio.Redis | None,
    store: ObjectStore,
    *,
    prefix: str,
    uid: str,
    depth: Depth | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.time,
) -> audit_pb2.AuditReport:
    """Audit a run, without `redis` from the store alone, and return the report with every violation. Writes nothing.

    `on_progress` gets, from another thread, the part that is being read. `NotFoundError` if there is no such run,
    `UnavailableError` if store or Redis does not answer.
    """
    names, depth = Names(prefix, uid), depth or Depth()
    report = audit_pb2.AuditReport(run_uid=uid, is_deep=depth.is_deep)
    audit = Audit(store=store, names=names, report=report, on_progress=on_progress, is_deep=depth.is_deep)
    run = await asyncio.to_thread(_read_run, audit)
    report.run = f"runs/{run.record.name}"
    events, rollouts = EventCheck(audit), {}
    mirror = None if redis is None else await Mirror.open(audit, redis)
    if redis is None:
        audit.findings.not_seen("REDIS", "no Redis was named: its copy was not compared with the store")
    if mirror is not None:
        rollouts = await mirror.rollouts()
        await mirror.events(events)
    try:
        epochs, installed = await asyncio.to_thread(
            _audit_store, audit, events, rollouts, run=run, depth=depth, now=clock()
        )
    except asyncio.CancelledError:
        audit.stopping.set()  # the thread ends at its next step
        raise
    if mirror is not None:
        await mirror.compare(epochs=epochs, installed=installed)
    audit.findings.fill(report)
    return report


def _audit_store(
    audit: Audit,
    events: EventCheck,
    rollouts: dict[tuple[int, int], list[RolloutFact]],
    *,
    run: _Run,
    depth: Depth,
    now: float,
) -> tuple[dict[str, int], int]:
    """Check everything against the store (blocking); return the newest epochs by role, and the installed generation.

    `rollouts` are those in Redis, by ordinal and member; `now` is in seconds since the epoch.
    """
    try:
        own_names = check_identity(audit, run.record)
        # Before the headers: what a live run adds meanwhile has its header by the time that headers are read.
        derived = _Derived.read(audit, events, run)
        headers = _check_headers(audit, derived, rollouts, run=run)
        epochs = check_epochs(audit)
        for kind in catalogue.KINDS:
            if kind.numbering == catalogue.DENSE and kind not in _READ_ELSEWHERE:
                list(audit.read_kind(kind))
        generation = check_generations(audit, events.newest_generation)
        headers.check_epoch(epochs.get(ORCHESTRATOR, 0))
        _compare_derived(audit, derived, headers, run=run, now=now)
        takeovers = {role: epochs.get(role, 0) > 1 for role in (_TRAINER, ORCHESTRATOR)}
        events.finish(
            base_step=run.origin.base_step,
            next_step=headers.next_step,
            closing=headers.closing,
            copied_until=headers.copied_until,
            takeovers=takeovers,
        )
        check_attestations(audit, headers.chains, headers.closings, key=depth.key, kept=depth.attestations)
        check_unnamed(
            audit, seal=derived.seals.in_force, key=derived.seals.key, blind=headers.blind, closing=headers.closing
        )
        if depth.is_deep:
            check_other_names(audit, own=own_names)
        _look_deeper(audit, derived, depth)
        derived.retired.tell()
        _note_unseen(audit, headers)
    except AuditStopped:
        return {}, 0  # nobody reads the report
    return epochs, generation


@dataclass(frozen=True, slots=True, kw_only=True)
class _Derived:
    """What follows from the headers, as it was read before them."""

    claims: EventClaims
    named: ReferencedObjects
    seals: SealCheck
    policies: PolicyCheck
    checkpoints: list[CheckpointFact]
    retired: RetirementCheck

    @classmethod
    def read(cls, audit: Audit, events: EventCheck, run: _Run) -> "_Derived":
        events.add(read_archives(audit), archived=True)
        retired = RetirementCheck(audit)
        retired.read()
        policies = PolicyCheck(audit, retired)
        policies.scan()
        checkpoints = check_checkpoints(audit, run_hash=run.record.run_hash)
        return cls(
            claims=events.claims,
            named=ReferencedObjects(audit),
            seals=SealCheck(audit),
            policies=policies,
            checkpoints=checkpoints,
            retired=retired,
        )


def _check_headers(
    audit: Audit, derived: _Derived, rollouts: dict[tuple[int, int], list[RolloutFact]], *, run: _Run
) -> HeaderCheck:
    """Walk the headers, with the rollouts in Redis and the events of each step, and return what the walk knows then."""
    steps = StepClaims(audit, derived.claims)
    headers = HeaderCheck(
        audit,
        run_hash=run.record.run_hash,
        origin=run.origin,
        retired=derived.retired,
        claims=steps,
        named=derived.named,
    )
    headers.run(rollouts)
    headers.blind.update(steps.finish(base_step=headers.copied_until))
    return headers


def _compare_derived(audit: Audit, derived: _Derived, headers: HeaderCheck, *, run: _Run, now: float) -> None:
    """Compare checkpoints, seals, policies and all small objects with the headers, and with one another."""
    claims, named, seals = derived.claims, derived.named, derived.seals
    checkpoints, base_step = derived.checkpoints, run.origin.base_step
    compare_chains(audit, checkpoints, headers.chains)
    seals.scan(named)
    seals.compare(claims, closings=headers.closings, closing_key=headers.closing_key, now=now)
    saved = {step: frozenset(hashes - {""}) for step, hashes in claims.saved.items()}
    saved |= {step: saved.get(step, frozenset()) | {sha256} for step, sha256 in seals.saved.items()}
    removed = compare_saved(
        audit, checkpoints, saved, kept=read_kept(run.record), base_step=base_step, retired=derived.retired
    )
    manifest = audit.names.checkpoint_manifest
    named.pruned = {manifest(step).removeprefix(audit.names.root) for step in removed}
    repaired = {fact.step for fact in checkpoints if fact.is_repaired}
    named.repaired |= {manifest(step).removeprefix(audit.names.root) for step in repaired}
    if run.record.kind != EVAL:  # which publishes nothing
        derived.policies.compare(first=base_step, next_step=headers.next_step, closing=headers.closing)
    derived.policies.compare_claims(claims.published, named)
    check_token_logs(audit, claims, headers.chains, derived.retired)
    check_points(audit, headers.chains, named)
    named.compare()


def _look_deeper(audit: Audit, derived: _Derived, depth: Depth) -> None:
    """Decode the policies in a deep audit, and compare the checkpoints of the same steps with them.

    What is left out is noted.
    """
    findings, policies = audit.findings, derived.policies
    if not depth.is_deep:
        findings.not_seen(
            "LARGE_OBJECTS", "of the objects of policies and checkpoints only the sizes were compared (--deep)"
        )
        return
    if depth.prove is None:
        findings.not_seen("POLICIES_NOT_DECODED", "the policies were not decoded")
        return
    waiting = {(fact.lineage, fact.step): fact for fact in derived.checkpoints if fact.files}

    def compare(lineage: int, version: int, weights: Weights) -> None:
        fact = waiting.pop((lineage, version), None) if depth.compare is not None else None
        if fact is not None and depth.compare is not None:
            audit.progress(f"weights of checkpoint {version}")
            for problem in depth.compare(audit.store, fact.files, weights):
                findings.violation(
                    "CHECKPOINT_DIFFERS", f"checkpoint {version} is not policy {lineage}-{version}: {problem}"
                )

    keys = [policies.facts[place].key for place in sorted(policies.facts.keys() - policies.retired)]
    for problem in depth.prove(audit.store, keys, audit.progress, compare):
        findings.violation("POLICY_WEIGHTS_CORRUPT", problem)
    if waiting:
        steps = some(sorted(step for _, step in waiting))
        findings.not_seen("CHECKPOINTS_NOT_COMPARED", f"no policy was compared with the checkpoints {steps}")


def _note_unseen(audit: Audit, headers: HeaderCheck) -> None:
    """Note what an audit cannot see while the run goes on, or that there was nothing to compare."""
    if headers.closing is None:
        audit.findings.not_seen(
            "SPOOLS",
            "the run is not closed: rollouts that lie only in the spools of its env-servers, and events that are not "
            "archived or in Redis yet, were not seen",
        )
    elif not headers.ordinals.num_trained and not headers.ordinals.dropped:
        audit.findings.not_seen("NOTHING_RESOLVED", "no header resolves an ordinal: there was nothing to compare")


def _read_run(audit: Audit) -> _Run:
    """Read run.json; if it is missing or damaged, add a violation and return an empty one.

    NotFoundError if nothing of the run exists.
    """
    key = audit.names.run_json
    unreadable = _Run(record=RunRecord(name=audit.names.uid), origin=RunOrigin())
    try:
        data = audit.store.get(key, max_bytes=MAX_JSON_BYTES)
    except CorruptObjectError as error:
        audit.findings.violation("RUN_JSON_CORRUPT", error.message)
        return unreadable
    except NotFoundError as error:
        if next(iter(audit.store.list(audit.names.root)), None) is not None:
            audit.findings.violation("RUN_JSON_MISSING", f"{audit.uri(key)} does not exist, but objects of the run do")
            return unreadable
        raise NotFoundError(
            f"there is no run {audit.names.uid}: {audit.uri(key)} does not exist",
            reason="RUN_NOT_FOUND",
            remedy="`millrace run list` shows the runs",
        ) from error
    try:
        record = RunRecord.parse(data, where=audit.uri(key), needs=["name", "run_hash"])
        unreadable = _Run(record=record, origin=RunOrigin())
        return _Run(record=record, origin=parse_origin(data, where=audit.uri(key)))
    except CorruptObjectError as error:
        audit.findings.violation("RUN_JSON_CORRUPT", error.message)
        return unreadable
