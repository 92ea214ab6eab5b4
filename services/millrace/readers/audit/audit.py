"""The audit of a run: reads Redis and the store, and says where the log breaks a promise of the architecture.

What is derived (rollouts, events, policies, checkpoints) is read before the headers that it derives from, so that a run
that goes on meanwhile is not accused of what it has just done.

    fast    structure, chain, existence and sizes; every small object against the hash that names it; events against
            headers against policies against checkpoints
    deep    the same, and every byte of the objects of policies and checkpoints, and what `Prove` decodes of them
"""

import asyncio
import contextlib
import hashlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import redis.asyncio as redis_asyncio

from millrace.decoding import MAX_JSON_BYTES, decode_message
from millrace.errors import CorruptObjectError, InvalidStateError, MillraceError, NotFoundError
from millrace.internal.v1 import batch_pb2, policy_pb2
from millrace.readers.audit.events import EventCheck, EventClaims, StepClaims
from millrace.readers.audit.findings import Audit, AuditStopped, RetirementCheck, some
from millrace.readers.audit.headers import ORCHESTRATOR, HeaderCheck
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
from millrace.readers.audit.ranges import AuditRanges, Contents, ContentsHere, ContentsInRanges
from millrace.readers.audit.records import (
    SealCheck,
    check_attestations,
    check_epochs,
    check_generations,
    check_identity,
    read_kept,
)
from millrace.readers.audit.rollouts import RolloutFact, is_trainable
from millrace.rollouts.batch_wire import decode_header
from millrace.rollouts.wire import decode_rollout
from millrace.runlog import catalogue
from millrace.runlog.attest import Attestation, SigningKey
from millrace.runlog.names import Names, Stream
from millrace.runlog.records.known import manifest_digest
from millrace.runlog.records.numbered import GENERATION_ROLE, latest_epoch
from millrace.runlog.records.run_record import EVAL, RunOrigin, RunRecord, parse_origin
from millrace.runlog.redis import connection
from millrace.runlog.redis.connection import as_text
from millrace.runlog.redis.entry import Entry, decode_entry, scan
from millrace.storage import ObjectStore
from millrace.storage.base import newest_revision
from millrace.v1 import audit_pb2

# The copy of the log in Redis: of the newest generation, never ahead of the store, and equal to it byte for byte.

PAGE = {Stream.BATCHES: 4, Stream.ROLLOUTS: 64, Stream.POLICIES: 256, Stream.EVENTS: 256}  # at most some MiB each


class Mirror:
    """Reads the streams of a run from Redis. What is read before the store may lack what the store has, never more."""

    def __init__(self, audit: Audit, redis: redis_asyncio.Redis, meta: dict[str, str]) -> None:
        """Make a reader of the run's streams in Redis; `meta` has the fields of its hash that `open` has read."""
        self._audit = audit
        self._redis = redis
        self._meta = meta

    @classmethod
    async def open(cls, audit: Audit, redis: redis_asyncio.Redis) -> "Mirror | None":
        """Read meta of the run's log in Redis and return the mirror.

        None, with a note, if Redis does not hold the log.
        """
        mirror = cls(audit, redis, {})
        found = await mirror._ask("reading meta", "HGETALL", audit.names.meta)
        meta = mirror._meta = {as_text(name): as_text(value) for name, value in (found or {}).items()}
        if "generation" not in meta:
            audit.findings.not_seen(
                "NOT_IN_REDIS", "Redis does not hold the log of the run: only the store was checked"
            )
            return None
        return mirror

    async def rollouts(self) -> dict[tuple[int, int], list[RolloutFact]]:
        """Read the rollout stream, and return facts of the trainable rollouts in it by (ordinal, member).

        Entries that cannot be decoded are violations.
        """
        facts: defaultdict[tuple[int, int], list[RolloutFact]] = defaultdict(list)
        async for entry in self._entries(Stream.ROLLOUTS):
            try:
                rollout = decode_rollout(entry.d)
            except CorruptObjectError as error:
                self._audit.findings.violation("ENTRY_CORRUPT", f"rollout {entry.id} in Redis: {error.message}")
                continue
            if is_trainable(rollout):
                facts[rollout.ordinal, rollout.member].append(RolloutFact.of(rollout, entry_id=entry.id))
        return dict(facts)

    async def events(self, check: EventCheck) -> None:
        """Add every event in Redis to `check`."""
        async for entry in self._entries(Stream.EVENTS):
            check.add([entry])

    async def compare(self, *, epochs: dict[str, int], installed: int) -> None:
        """Report where meta, batches and policies in Redis differ from the store, or are ahead of it.

        `epochs` are the newest in the store by role, and `installed` is the newest generation marked in the store.
        """
        findings = self._audit.findings
        held = await self._read_generation()  # again: a rebuild may have come in between
        newest = await asyncio.to_thread(latest_epoch, self._audit.store, self._audit.names, GENERATION_ROLE)
        if held is None:
            findings.not_seen(
                "NOT_IN_REDIS", "Redis lost the log of the run during the audit: only the store was checked"
            )
            return
        if not installed <= held <= max(newest, installed):  # the mark of the newest may be still to come
            findings.violation(
                "GENERATION_MISMATCH",
                f"Redis holds generation {held} of the log, the newest that was installed is {installed}",
            )
        for name, value in sorted(self._meta.items()):
            role = name.removeprefix("epoch:")
            if role != name and not value.isdecimal():
                findings.violation("ENTRY_CORRUPT", f"meta in Redis has {name[:80]} = {value[:80]!r}")
            elif role != name and int(value) > epochs.get(role, 0):
                findings.violation(
                    "EPOCH_AHEAD",
                    f"Redis enforces epoch {value} of {role}, the newest in the store is {epochs.get(role, 0)}",
                )
        await self._compare_batches()
        async for entry in self._entries(Stream.POLICIES):
            await asyncio.to_thread(self._compare_policy, entry)

    async def _read_generation(self) -> int | None:
        """Return the generation that Redis holds now; None if it holds none or, with a violation, something else."""
        found = await self._ask("reading the generation", "HGET", self._audit.names.meta, "generation")
        text = as_text(found)
        if found is not None and not text.isdecimal():
            self._audit.findings.violation("ENTRY_CORRUPT", f"meta in Redis has the generation {text[:80]!r}")
            return None
        return None if found is None else int(text)

    async def _ask(self, what: str, *words: Any) -> Any:
        """Run a Redis command and return its answer; None, with a violation, for a key of another type.

        `what` describes the command; `words` are all of it, its name first.
        """
        try:
            return await connection.call(
                self._redis,
                f"{what} of run {self._audit.names.uid}",
                lambda: self._redis.execute_command(*words),
            )
        except CorruptObjectError as error:
            self._audit.findings.violation("ENTRY_CORRUPT", f"{error.message} ({words[1]})")
            return None

    async def _compare_batches(self) -> None:
        """Report headers and chunks in Redis that are not those of the store."""
        header: batch_pb2.BatchHeader | None = None
        async for entry in self._entries(Stream.BATCHES):
            step, number = (int(part) for part in entry.id.split("-"))
            if number == 1:
                self._audit.progress(f"step {step} in Redis")
                header = await asyncio.to_thread(self._compare_header, step, entry)
            elif header is not None and header.step == step:
                self._compare_chunk(header, number - 2, entry)

    def _compare_header(self, step: int, entry: Entry) -> batch_pb2.BatchHeader | None:
        """Report a header in Redis that differs from the store's, or that the store lacks, and return the store's.

        `entry` is Redis' entry of the header of `step`. None if the store has no such header, or one that cannot be
        decoded.
        """
        audit = self._audit
        try:
            revision = decode_header(entry.d).revision
        except CorruptObjectError:
            revision = 0
        key = audit.names.batch_header(step, revision)
        stored = audit.get(key, missing="MIRROR_AHEAD", what=f"Redis holds step {step}, but its header")
        if stored is None:
            return None
        if stored != entry.d:
            audit.findings.violation("MIRROR_DIFFERS", f"header {step} in Redis is not what {audit.uri(key)} holds")
        try:
            return decode_header(stored)
        except CorruptObjectError:
            return None  # the walk over the headers reports it

    def _compare_chunk(self, header: batch_pb2.BatchHeader, index: int, entry: Entry) -> None:
        """Report a chunk in Redis that does not have the hash which chunk `index` has in its header."""
        if index >= len(header.chunks) or hashlib.sha256(entry.d).digest() != header.chunks[index].sha256:
            self._audit.findings.violation(
                "MIRROR_DIFFERS", f"chunk {index} of batch {header.step} in Redis is not the one that its header names"
            )

    def _compare_policy(self, entry: Entry) -> None:
        """Report an entry of the policy stream that cannot be decoded, or that differs from the manifest in the
        store.
        """
        audit = self._audit
        try:
            policy = decode_message(
                policy_pb2.PolicyEntry, entry.d, what=f"policy {entry.id} in Redis", reason="ENTRY_CORRUPT"
            )
        except CorruptObjectError as error:
            audit.findings.violation("ENTRY_CORRUPT", error.message)
            return
        what = f"policy {policy.lineage}-{policy.version} in Redis"
        if entry.id != f"{policy.version}-1":
            audit.findings.violation("MIRROR_DIFFERS", f"{what} has the id {entry.id}")
        if policy.manifest_key != audit.names.policy_manifest(policy.lineage, policy.version):
            audit.findings.violation("MIRROR_DIFFERS", f"{what} names the manifest {policy.manifest_key}")
            return
        key = newest_revision(audit.store, policy.manifest_key)
        stored = audit.get(key, missing="MIRROR_AHEAD", what=f"{what} is announced, but its manifest")
        if stored is None:
            return
        # The announcement names the bytes of the first revision, and a repair writes another one.
        is_announced = key != policy.manifest_key or hashlib.sha256(stored).digest() == policy.manifest_sha256
        if not is_announced or policy.digest != manifest_digest(stored):
            audit.findings.violation("MIRROR_DIFFERS", f"{what} has another digest than {audit.uri(key)}")

    async def _entries(self, stream: Stream) -> AsyncIterator[Entry]:
        """Yield the entries of a stream whose format and hash are right; the others are violations."""
        key, read_page = self._audit.names.stream(stream), partial(self._ask, f"auditing {stream}", "XRANGE")
        async for id_, fields in scan(lambda start, count: read_page(key, start, "+", "COUNT", count), PAGE[stream]):
            try:
                yield decode_entry(key, id_, fields)
            except (CorruptObjectError, InvalidStateError) as error:
                self._audit.findings.violation(_entry_check(error), error.message)


def _entry_check(error: MillraceError) -> str:
    """Return the name of the check that an entry with this error violates."""
    if isinstance(error, InvalidStateError):
        return "ENTRY_TOO_OLD" if error.reason == "FORMAT_TOO_OLD" else "ENTRY_TOO_NEW"
    return "ENTRY_CORRUPT"


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
    """Kept elsewhere: what they say must be so, and the store must have them, too."""


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
    ranges: AuditRanges | None = None,
) -> audit_pb2.AuditReport:
    """Audit a run, without `redis` from the store alone, and return the report with every violation.

    Writes nothing into it. `depth` says how far it looks (None: structure, hashes and sizes). `ranges` says which
    processes read the contents of steps, and what a killed audit leaves; without, this process reads one step after the
    other. `on_progress` gets, from another thread, the part that is being read. `clock` gives seconds since the epoch.
    `NotFoundError` if there is no such run, `UnavailableError` if store or Redis does not answer.
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
            _audit_store, audit, events, rollouts, run=run, depth=depth, now=clock(), ranges=ranges
        )
    except asyncio.CancelledError:
        audit.stopping.set()  # the thread ends at its next step
        raise
    if mirror is not None:
        await mirror.compare(epochs=epochs, installed=installed)
    audit.findings.fill(report)
    # Only now: an audit that is killed before this line goes on from the answers in the file.
    if ranges is not None and ranges.resume is not None:
        await asyncio.to_thread(ranges.resume.unlink, missing_ok=True)
    return report


def _audit_store(
    audit: Audit,
    events: EventCheck,
    rollouts: dict[tuple[int, int], list[RolloutFact]],
    *,
    run: _Run,
    depth: Depth,
    now: float,
    ranges: AuditRanges | None,
) -> tuple[dict[str, int], int]:
    """Check everything against the store (blocking); return the newest epochs by role, and the installed generation.

    `events` has those in Redis and gets the archived ones; `rollouts` are those in Redis, by ordinal and member; `now`
    is in seconds since the epoch. ({}, 0) if the audit was stopped.
    """
    try:
        own_names = check_identity(audit, run.record)
        # Before the headers: what a live run adds meanwhile has its header by the time that headers are read.
        derived = _Derived.read(audit, events, run)
        headers = _check_headers(audit, derived, rollouts, run=run, ranges=ranges)
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
        derived.retired.report_retired()
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
        """Read event archives, retirements, policies and checkpoints of a run, and report what is wrong with each by
        itself.

        `events` gets the archived events.
        """
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
    audit: Audit,
    derived: _Derived,
    rollouts: dict[tuple[int, int], list[RolloutFact]],
    *,
    run: _Run,
    ranges: AuditRanges | None,
) -> HeaderCheck:
    """Check all headers in order, with the contents and the events of each step.

    Return what is known after the last one. `rollouts` are those in Redis, by ordinal and member. `ranges` are as in
    `audit_run`.
    """
    steps = StepClaims(audit, derived.claims)
    with contextlib.ExitStack() as stack:
        contents: Contents = ContentsHere(audit, derived.retired)
        if ranges is not None:
            contents = stack.enter_context(ContentsInRanges(audit, derived.retired, ranges))
        headers = HeaderCheck(
            audit,
            run_hash=run.record.run_hash,
            origin=run.origin,
            contents=contents,
            claims=steps,
            named=derived.named,
        )
        headers.run(rollouts)
    headers.blind.update(steps.finish(base_step=headers.copied_until))
    return headers


def _compare_derived(audit: Audit, derived: _Derived, headers: HeaderCheck, *, run: _Run, now: float) -> None:
    """Report where checkpoints, seals, policies and small objects differ from the headers, or from one another.

    `now` is in seconds since the epoch.
    """
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

    What is left out is noted in the report.
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
        """Compare the checkpoint of a policy's step with the policy's weights, if there is one, and report what
        differs.
        """
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
    """Note in the report what an audit cannot see while the run goes on, or that there was nothing to compare."""
    if headers.closing is None:
        audit.findings.not_seen(
            "SPOOLS",
            "the run is not closed: rollouts that are only in the spools of its env-servers, and events that are not "
            "archived or in Redis yet, were not seen",
        )
    elif not headers.ordinals.num_trained and not headers.ordinals.dropped:
        audit.findings.not_seen("NOTHING_RESOLVED", "no header resolves an ordinal: there was nothing to compare")


def _read_run(audit: Audit) -> _Run:
    """Return what run.json says; if it is missing or damaged, add a violation and return an empty record.

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
        # If only the origin is damaged, the name and the hash still count.
        unreadable = _Run(record=record, origin=RunOrigin())
        return _Run(record=record, origin=parse_origin(data, where=audit.uri(key)))
    except CorruptObjectError as error:
        audit.findings.violation("RUN_JSON_CORRUPT", error.message)
        return unreadable
