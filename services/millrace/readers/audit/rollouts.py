"""The chunks and the archives of steps: whole, holding what was trained, and proof that nothing was generated again.

**No regeneration.** A rollout says how far the orchestrator had read the stream when it asked for it
(`dispatched_after`), and the archive says where each rollout is in it (`entry_id`). A play of a member that was
asked for when a finished one of the same member had been read is a broken promise. Ids are times, so they compare
across generations of the log.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from millrace.errors import CorruptObjectError, NotFoundError
from millrace.internal.v1 import batch_pb2
from millrace.readers.audit.findings import Audit
from millrace.rollouts.batch_wire import closes_run
from millrace.rollouts.types import Purpose, Rollout, RolloutStatus
from millrace.rollouts.wire import decode_archive
from millrace.runlog.records.revisions import read_chunk

_SHOWN = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFact:
    """What the audit keeps of an OK rollout."""

    env: str
    attempt: int
    num_samples: int
    entry_id: str
    dispatched_after: str
    is_duplicate: bool = False

    @classmethod
    def of(cls, rollout: Rollout, *, entry_id: str = "") -> "RolloutFact":
        """Return the facts of a rollout.

        `entry_id` is its entry in the stream, by default the one that the archive says.
        """
        return cls(
            env=rollout.env,
            attempt=rollout.attempt,
            num_samples=len(rollout.samples),
            entry_id=entry_id or rollout.entry_id,
            dispatched_after=rollout.dispatched_after,
            is_duplicate=rollout.is_duplicate,
        )


def is_trainable(rollout: Rollout) -> bool:
    """Return whether a rollout ended OK and was played for training."""
    return rollout.status is RolloutStatus.OK and rollout.purpose is Purpose.TRAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContents:
    """A step whose chunks and archive are to be read: what the walk over the headers knows of it."""

    header: batch_pb2.BatchHeader
    trained: Set[int]
    """Ordinals that the step trains, without those that an earlier step has resolved."""
    scored_whole: frozenset[str]
    """Environments whose groups must come from one attempt."""
    in_redis: Mapping[tuple[int, int], Sequence[RolloutFact]]
    """Rollouts of the ordinals that the step resolves and that Redis still holds, by ordinal and member."""


class RolloutsInRedis:
    """The rollouts that Redis still holds, until a header resolves their ordinals."""

    def __init__(self, audit: Audit, facts: Mapping[tuple[int, int], Sequence[RolloutFact]]) -> None:
        """Keep the rollouts in Redis, `facts`, by ordinal and member, until `take` returns them."""
        self._audit = audit
        self._facts = facts
        self._by_ordinal: defaultdict[int, set[int]] = defaultdict(set)
        for ordinal, member in facts:
            self._by_ordinal[ordinal].add(member)

    def take(self, header: batch_pb2.BatchHeader) -> dict[tuple[int, int], Sequence[RolloutFact]]:
        """Return the rollouts in Redis of the ordinals that a header resolves, by ordinal and member.

        Each is returned once.
        """
        resolved = {item.ordinal for item in header.resolutions} if self._by_ordinal else set[int]()
        return {
            (ordinal, member): self._facts[ordinal, member]
            for ordinal in resolved
            for member in self._by_ordinal.pop(ordinal, ())
        }

    def check_rest(self, scored_whole: frozenset[str]) -> None:
        """Report regenerated rollouts in Redis whose ordinal no header resolves yet.

        `scored_whole` are the environments whose groups must come from one attempt.
        """
        for ordinal, members in self._by_ordinal.items():
            for member in members:
                check_regeneration(self._audit, ordinal, member, self._facts[ordinal, member], scored_whole)


class ContentCheck:
    """Reads the chunks and archives of steps, and compares them with the headers. Steps do not depend on another."""

    def __init__(self, audit: Audit, *, on_missing: Callable[[str, str, str], None]) -> None:
        """Make a check of chunks and archives.

        `on_missing` gets whole key, check and message for each object that does not exist.
        """
        self._audit = audit
        self._on_missing = on_missing
        self.num_chunks = 0
        """Chunks that have the sha256 that their header names."""
        self.num_rollouts = 0
        self.num_duplicates = 0

    def check(self, step: StepContents) -> None:
        """Read a step's chunks and archive, count what is right, and report what is wrong.

        In an archive that is strangers, trained rollouts that it lacks, and regenerated ones.
        """
        self._check_chunks(step.header)
        self._check_archive(step)

    def _check_chunks(self, header: batch_pb2.BatchHeader) -> None:
        """Read every chunk, and compare its size and sha256 with the header."""
        audit = self._audit
        for index, chunk in enumerate(header.chunks):
            where = f"chunk {index} of batch {header.step} ({audit.uri(chunk.key) if chunk.key else 'without a key'})"
            if not chunk.key:
                audit.findings.violation("CHUNK_MISSING", f"{where}: the header names no object")
                continue
            if not audit.is_own(chunk.key):
                audit.findings.violation("CHUNK_MISSING", f"{where}: the key is not that of an object of this run")
                continue
            try:
                read_chunk(audit.store, header, index)
                self.num_chunks += 1
            except NotFoundError:
                self._on_missing(chunk.key, "CHUNK_MISSING", f"{where} does not exist")
            except CorruptObjectError as error:
                audit.findings.violation("CHUNK_CORRUPT", f"{where}: {error.message}")

    def _check_archive(self, step: StepContents) -> None:
        """Report what is wrong with the rollouts that a step archives, together with those of its ordinals in Redis."""
        header, trained = step.header, step.trained
        rollouts = self._load(header, trained)
        found: defaultdict[tuple[int, int], list[RolloutFact]] = defaultdict(list)
        if rollouts is not None:
            self._take(header, rollouts, found)
            self._check_trained(header, found)
            self._check_whole(header, [rollout for rollout in rollouts if rollout.ordinal in trained])
        for place, facts in step.in_redis.items():
            found[place] += facts
        for (ordinal, member), facts in found.items():
            check_regeneration(self._audit, ordinal, member, facts, step.scored_whole)

    def _take(
        self,
        header: batch_pb2.BatchHeader,
        rollouts: Iterable[Rollout],
        found: defaultdict[tuple[int, int], list[RolloutFact]],
    ) -> None:
        """Count the rollouts of an archive, report strangers, and add the trainable ones to `found`."""
        resolved = {item.ordinal for item in header.resolutions}
        for rollout in rollouts:
            self.num_rollouts += 1
            self.num_duplicates += rollout.is_duplicate
            if rollout.purpose is Purpose.EVAL:
                continue  # an evaluation run archives what it played; it has no ordinals
            if rollout.ordinal not in resolved:
                self._audit.findings.violation(
                    "ARCHIVE_STRANGER",
                    f"the archive of batch {header.step} has a rollout of ordinal {rollout.ordinal}, which it does not "
                    "resolve",
                )
            elif is_trainable(rollout):
                found[rollout.ordinal, rollout.member].append(RolloutFact.of(rollout))

    def _load(self, header: batch_pb2.BatchHeader, trained: Set[int]) -> list[Rollout] | None:
        """Return the rollouts of a header's archive; None if there is none, which is reported unless it may be.

        `trained` are the ordinals that the header trains: without any, it needs no archive.
        """
        what = f"archive of batch {header.step}"
        if not header.rollouts_key:
            if trained:
                self._audit.findings.violation(
                    "ARCHIVE_MISSING", f"step {header.step} names no archive of its rollouts"
                )
            return None
        if not self._audit.is_own(header.rollouts_key):
            self._audit.findings.violation(
                "ARCHIVE_MISSING", f"{what} is {header.rollouts_key!r}, which is no object of this run"
            )
            return None
        data = self._audit.get(header.rollouts_key)
        if data is None:
            # One that is there and cannot be read was reported by `get`.
            if self._audit.store.head(header.rollouts_key) is None:
                where = self._audit.uri(header.rollouts_key)
                self._on_missing(header.rollouts_key, "ARCHIVE_MISSING", f"{what} {where} does not exist")
            return None
        where = f"{what} ({self._audit.uri(header.rollouts_key)})"
        if hashlib.sha256(data).digest() != header.rollouts_sha256:
            self._audit.findings.violation("ARCHIVE_CORRUPT", f"{where} has not the sha256 that the header names")
            return None
        try:
            return decode_archive(data)
        except CorruptObjectError as error:
            self._audit.findings.violation("ARCHIVE_CORRUPT", f"{where}: {error.message}")
            return None

    def _check_trained(self, header: batch_pb2.BatchHeader, found: dict[tuple[int, int], list[RolloutFact]]) -> None:
        """Report each trained member that is not archived as OK from the trained attempt, with all of its samples."""
        if closes_run(header):
            return  # its samples are those of the final evaluation
        trained = Counter((sample.ordinal, sample.member, sample.attempt) for sample in header.samples)
        for (ordinal, member, attempt), count in trained.items():
            facts = [fact for fact in found.get((ordinal, member), ()) if fact.attempt == attempt]
            where = f"step {header.step} trains member {member} of ordinal {ordinal} (attempt {attempt})"
            if not facts:
                self._audit.findings.violation(
                    "TRAINED_NOT_ARCHIVED", f"{where}, but its archive has no such rollout that ended OK"
                )
            elif count > max(fact.num_samples for fact in facts):
                self._audit.findings.violation(
                    "SAMPLE_TRAINED_TWICE", f"{where} with {count} samples, its rollout has fewer"
                )

    def _check_whole(self, header: batch_pb2.BatchHeader, rollouts: Iterable[Rollout]) -> None:
        """Report each trained group that has not every member once; rollouts marked as duplicates do not count."""
        groups: defaultdict[int, Counter[int]] = defaultdict(Counter)
        sizes: dict[int, int] = {}
        for rollout in rollouts:
            if is_trainable(rollout) and not rollout.is_duplicate:
                groups[rollout.ordinal][rollout.member] += 1
                sizes[rollout.ordinal] = max(rollout.group_size, sizes.get(rollout.ordinal, 0))
        for ordinal, members in groups.items():
            found = sorted(members.elements())
            if len(found) != sizes[ordinal] or found != list(range(len(found))):
                self._audit.findings.violation(
                    "GROUP_NOT_WHOLE",
                    f"step {header.step} trains ordinal {ordinal} with the members {found[:_SHOWN]}, its "
                    f"group has {sizes[ordinal]}",
                )


def check_regeneration(
    audit: Audit, ordinal: int, member: int, facts: Iterable[RolloutFact], scored_whole: frozenset[str]
) -> None:
    """Report rollouts of one member that were requested when the orchestrator had read a finished one of that member.

    `facts` are the member's rollouts. `scored_whole` are the environments whose groups must come from one attempt,
    which may be generated again.
    """
    known = {fact.entry_id: fact for fact in facts if fact.entry_id}
    for later in known.values():
        if later.env in scored_whole or not later.dispatched_after:
            continue  # where members are compared, all of them must come from one attempt
        asked_at = entry_key(later.dispatched_after)
        seen = [fact for fact in known.values() if fact is not later and entry_key(fact.entry_id) <= asked_at]
        if seen:
            first = min(seen, key=lambda fact: entry_key(fact.entry_id))
            audit.findings.violation(
                "ROLLOUT_REGENERATED",
                f"member {member} of ordinal {ordinal} was generated again as attempt {later.attempt} (entry "
                f"{later.entry_id}), dispatched after entry {later.dispatched_after}, although entry "
                f"{first.entry_id} holds it finished",
            )


def entry_key(entry_id: str) -> tuple[int, int]:
    """Return the two numbers of a stream entry's id, which compare as times; (0, 0) if the text is no id."""
    milliseconds, _, sequence = entry_id.partition("-")
    if not milliseconds.isdecimal() or not (sequence or "0").isdecimal():
        return 0, 0
    return int(milliseconds[:40]), int((sequence or "0")[:40])
