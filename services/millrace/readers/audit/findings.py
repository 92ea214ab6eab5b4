"""What an audit finds: violations break a promise, notes break none. All are collected; nothing is raised."""

import contextlib
import hashlib
import threading
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from millrace.decoding import require_key
from millrace.errors import CorruptObjectError, InvalidSpecError, NotFoundError
from millrace.runlog.catalogue import DENSE, RETIREMENT, KeptAs, ObjectKind, kind_at
from millrace.runlog.names import Names
from millrace.runlog.records.retirement import Retired, Retirement
from millrace.storage import ObjectStore
from millrace.v1 import audit_pb2

MAX_PER_CHECK = 100
"""Findings of one check that are written out; the others are counted, so that a report stays readable."""


class AuditFindings:
    """Collects findings by check, an UPPER_SNAKE name."""

    def __init__(self) -> None:
        self._violations: list[tuple[str, str]] = []
        self._notes: list[tuple[str, str]] = []
        self._not_seen: list[tuple[str, str]] = []
        self._counts: Counter[tuple[str, bool]] = Counter()

    def violation(self, check: str, message: str) -> None:
        """Add a finding that breaks a promise; `check` is its UPPER_SNAKE name."""
        self._add(check, message, is_violation=True)

    def note(self, check: str, message: str) -> None:
        """Add a finding that is worth knowing and breaks no promise; `check` is its UPPER_SNAKE name."""
        self._add(check, message, is_violation=False)

    def not_seen(self, check: str, message: str) -> None:
        """Note what was not examined, so that silence is not taken for a result; the same text is noted once.

        `check` is the note's UPPER_SNAKE name.
        """
        if (check, message) not in self._not_seen:
            self._not_seen.append((check, message))

    def fill(self, report: audit_pb2.AuditReport) -> None:
        """Write the findings into a report, in the order in which they were found.

        Of each check with more than `MAX_PER_CHECK` findings, the first are written, and how many more there are.
        """
        for check, message in self._violations:
            report.violations.add(check=check, message=message)
        for check, message in self._notes:
            report.notes.add(check=check, message=message)
        for check, message in self._not_seen:
            report.not_seen.add(check=check, message=message)
        for (check, is_violation), count in self._counts.items():
            if count > MAX_PER_CHECK:
                found = report.violations if is_violation else report.notes
                found.add(check=check, message=f"and {count - MAX_PER_CHECK} more")

    def _add(self, check: str, message: str, *, is_violation: bool) -> None:
        """Count a finding, and keep it unless its check has `MAX_PER_CHECK` already."""
        message = as_utf8(message)
        self._counts[check, is_violation] += 1
        if self._counts[check, is_violation] <= MAX_PER_CHECK:
            (self._violations if is_violation else self._notes).append((check, message))


_PIECE_BYTES = 16 << 20
_SHOWN = 8


def as_utf8(text: str) -> str:
    """Return a text that can be encoded: what cannot be is written as escapes, as names of files may be any bytes."""
    return text.encode(errors="backslashreplace").decode()


def gaps(known: Iterable[int], first: int, end: int) -> Iterator[range]:
    """Yield the numbers from `first` to `end` (exclusive) that are not in `known`, as ranges without a gap.

    A foreign object may claim any number, so none is listed by itself.
    """
    expected = first
    # Only what is there is visited: the numbers between may be billions.
    for number in sorted({number for number in known if first <= number < end}):
        if number > expected:
            yield range(expected, number)
        expected = number + 1
    if expected < end:
        yield range(expected, end)


def some(numbers: Sequence[int]) -> str:
    """Return the first eight numbers of a list as text, and how many more there are."""
    shown = ", ".join(map(str, numbers[:_SHOWN]))
    return f"{shown} and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else shown


def between(before: int, after: int) -> str:
    """Return the numbers between two as text, such as `4` or `4 to 7`; there must be at least one."""
    return f"{before + 1}" if after == before + 2 else f"{before + 1} to {after - 1}"


class Stored(NamedTuple):
    """One object of a kind: the fields of its key, the whole key, its bytes, and what they say if they can be read."""

    place: Mapping[str, int | str]
    key: str
    data: bytes
    content: Any | None


class AuditStopped(Exception):
    """Nobody waits for the audit any more. Never leaves the package."""


@dataclass(kw_only=True)
class Audit:
    """What every part of an audit works on."""

    store: ObjectStore
    names: Names
    report: audit_pb2.AuditReport
    findings: AuditFindings = field(default_factory=AuditFindings)
    on_progress: Callable[[str], None] = lambda text: None
    """Hears what is being looked at, in words ("step 12 of 340"); from another thread."""
    stopping: threading.Event = field(default_factory=threading.Event)
    named: set[str] = field(default_factory=set)
    """Keys of objects that something names which counts."""
    is_deep: bool = False
    """Every byte of every object is read."""

    def progress(self, text: str) -> None:
        """Report the part that is being read, in words; raise AuditStopped if nobody waits for the audit any more."""
        if self.stopping.is_set():
            raise AuditStopped
        self.on_progress(text)

    def uri(self, key: str) -> str:
        """Return the URI of the object with this whole key, for findings."""
        return self.store.uri(key)

    def get(self, key: str, *, missing: str = "", what: str = "") -> bytes | None:
        """Return an object's bytes; None, with a violation, if it is missing or cannot be read.

        `key` is whole. The violation for a missing one is of the check `missing`, none if that is empty; for a damaged
        one it is OBJECT_CORRUPT. `what` names the object in it.
        """
        try:
            return self.store.get(key)
        except NotFoundError:
            if missing:
                self.findings.violation(missing, f"{what or 'object'} {self.uri(key)} does not exist")
        except CorruptObjectError as error:
            self.findings.violation("OBJECT_CORRUPT", f"{what or 'object'} {self.uri(key)}: {error.message}")
        return None

    def read_each(self, prefix: str, what: str, *, missing: str = "") -> Iterator[tuple[str, bytes]]:
        """Yield whole key and bytes of every object under a whole prefix.

        One that cannot be read is left out, with a violation. `what` and `missing` are those of `get`.
        """
        for info in self.store.list(prefix):
            data = self.get(info.key, missing=missing, what=what)
            if data is not None:
                yield info.key, data

    def read_kind(self, kind: ObjectKind) -> Iterator[Stored]:
        """Yield every object of a kind, in order of keys; one that cannot be decoded has no content.

        What is in its folder and of another kind, or cannot be decoded, is a violation. So is a gap, where the kind is
        numbered without one.
        """
        numbers: defaultdict[str, list[int]] = defaultdict(list)
        for info in self.store.list(self.names.root + kind.folder):
            what = f"{kind.name} {self.uri(info.key)}"
            if (place := kind.parse(info.key.removeprefix(self.names.root))) is None:
                self.findings.violation(f"{kind.finding}_CORRUPT", f"{self.uri(info.key)} is no {kind.name}")
                continue
            # Each text in the keys, such as a role, has numbers of its own.
            if kind.numbering == DENSE:
                of = "".join(f" of {value}" for value in place.values() if isinstance(value, str))
                numbers[of].append(int(place["number"]))
            data, content = self.get(info.key, missing=f"{kind.finding}_MISSING", what=kind.name), None
            with self.reading(f"{kind.finding}_CORRUPT", what):
                content = None if data is None else kind.decode(data, where=what)
            yield Stored(place, info.key, data or b"", content)
        for of, found in numbers.items():
            # From 0, so that a missing first one is found as well.
            for before, after in pairwise([0, *sorted(found)]):
                if after != before + 1:
                    message = f"{kind.name}s{of}: {between(before, after)} does not exist, but {after} does"
                    self.findings.violation(f"{kind.finding}_MISSING", message)

    @contextlib.contextmanager
    def reading(self, check: str, what: str) -> Iterator[None]:
        """Turn the errors of reading a stored document in the block into a violation of `check`; the block ends there.

        `what` names the document.
        """
        try:
            yield
        except CorruptObjectError as error:
            self.findings.violation(check, f"{what}: {error.message}")
        # Damaged documents fail in any way; the audit has to go on with the next one.
        except (ArithmeticError, AttributeError, InvalidSpecError, LookupError, TypeError, ValueError) as error:
            self.findings.violation(check, f"{what} is not readable: {error!r}"[:1000])

    def object_violation(self, kind: str, what: str, problem: str) -> None:
        """Add a violation for a `problem` that `object_problem` returned of the object that `what` names.

        Its check is {kind}_OBJECT_CORRUPT for a wrong hash, else {kind}_OBJECT_MISSING; `kind` is such as "POLICY".
        """
        # Only the comparison of hashes has these words; in all other cases nothing usable is there.
        is_corrupt = " has sha256 " in problem
        self.findings.violation(f"{kind}_OBJECT_{'CORRUPT' if is_corrupt else 'MISSING'}", f"{what}: {problem}")

    def object_problem(self, key: object, size_bytes: object, sha256: object) -> str:
        """Return in words what is wrong with an object that a manifest names; empty if it is as the manifest says.

        The parameters are the manifest's: whole key, size and sha256 (hex), of any type in a damaged one. Only a deep
        audit reads the bytes. The key is noted as named.
        """
        # Manifests may hold anything; `type`, because True is an int as well.
        if not isinstance(key, str) or type(size_bytes) is not int or not isinstance(sha256, str):
            return f"{key!r} of {size_bytes!r} bytes with sha256 {sha256!r} is named, which is no object"
        if not self.is_own(key):
            return f"{key[:200]!r} is named, which is no object of this run"
        problem = self._size_problem(key, size_bytes)
        if problem or not self.is_deep:
            return problem
        self.progress(f"{size_bytes / 1e6:.1f} MB of {key.removeprefix(self.names.root)}")
        found = self.sha256(key, size_bytes)
        if found == sha256:
            return ""
        return f"{self.uri(key)} has sha256 {found or 'unknown: it is gone'}, its manifest says {sha256}"

    def is_own(self, key: str) -> bool:
        """Return whether a whole key that something names is legal and below the run's prefix.

        A legal key is noted as named, also if it is not of this run.
        """
        try:
            require_key(key, what="key")
        except ValueError:
            return False
        self.named.add(key)
        return key.startswith(self.names.root)

    def sha256(self, key: str, size_bytes: int) -> str:
        """Read the first `size_bytes` of an object in pieces and return their sha256 (hex); `key` is whole.

        Empty if it is gone or shorter. The bytes are counted in the report.
        """
        digest = hashlib.sha256()
        try:
            # In pieces: an object may be larger than memory, and the audit may be stopped in between.
            for start in range(0, size_bytes, _PIECE_BYTES):
                digest.update(self.store.get_range(key, start, min(_PIECE_BYTES, size_bytes - start)))
                self.progress(f"{start / 1e6:.0f} of {size_bytes / 1e6:.0f} MB of {key.removeprefix(self.names.root)}")
        except (NotFoundError, CorruptObjectError):
            return ""
        self.report.num_bytes_verified += size_bytes
        return digest.hexdigest()

    def _size_problem(self, key: str, size_bytes: int) -> str:
        """Return in words that an object is missing or has another size than its manifest says.

        Empty if it has that size.
        """
        found = self.store.head(key)
        if found is None:
            return f"{self.uri(key)} does not exist"
        if found.size_bytes != size_bytes:
            return f"{self.uri(key)} has {found.size_bytes} bytes, its manifest says {size_bytes}"
        return ""


# Distinguishes what retention has removed from what was lost: a missing object must be covered by a record.


class RetirementCheck:
    """Validates the records of retention, decides whether one covers a missing object, and reports what was retired."""

    def __init__(self, audit: Audit) -> None:
        """Make a check of what retention removed; `read` reads its records."""
        self._audit = audit
        self._records: list[Retirement] = []
        self._gone: defaultdict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
        """Step or version, and number of the record, of every missing object, by its kind and why."""
        self._counted: set[str] = set()

    def read(self) -> None:
        """Read and keep every record of what retention removed, and report those that are wrong.

        Each must be of this run, and retire at least what the one before it retires. One that is damaged, or of another
        run or number, is not kept.
        """
        findings = self._audit.findings
        for place, key, _, record in self._audit.read_kind(RETIREMENT):
            if record is None:
                continue
            where = self._audit.uri(key)
            if (record.run_uid, record.number) != (self._audit.names.uid, place["number"]):
                findings.violation(
                    "RETIREMENT_MISNAMED", f"{where} is retirement {record.number} of run {record.run_uid[:80]!r}"
                )
                continue
            if self._records:
                self._compare(where, self._records[-1], record)
            self._records.append(record)

    def has(self, kept: KeptAs) -> bool:
        """Return whether a record that was read retires anything of a class."""
        return any(kept in record.retired for record in self._records)

    def covers(self, key: str) -> bool:
        """Return whether an object that is missing was retired, and count it; `key` is its whole key.

        If no record covers it, those that were written since `read` are read, too: a live run may have retired it
        meanwhile.
        """
        own = key.removeprefix(self._audit.names.root)
        kind = kind_at(own)
        if kind is None or kind.kept is KeptAs.RUN:
            return False
        place, is_read = kind.parse(own) or {}, False
        # Each record retires at least what the one before it retires, so the first that covers `own` is found by
        # bisection.
        while (number := bisect_left(self._records, True, key=lambda record: record.covers(own))) == len(self._records):
            if is_read or not self._read_on():
                return False
            is_read = True
        record = self._records[number]
        if own not in self._counted:
            self._counted.add(own)
            at = int(place.get("step", place.get("version", 0)))
            self._gone[kind.name, record.of(kind.kept).why].append((at, record.number))
        return True

    def report_retired(self) -> None:
        """Note for each kind of object how many missing ones `covers` has found to be retired, and by which records.

        Also noted is that what these held was not compared.
        """
        for (name, why), found in sorted(self._gone.items()):
            steps, numbers = [at for at, _ in found], [number for _, number in found]
            first = self._audit.uri(self._audit.names.retirement(min(numbers)))
            until = f" to {max(numbers):08d}.json" if max(numbers) > min(numbers) else ""
            what = "versions" if name.startswith("policy") else "steps"
            self._audit.findings.note(
                "RETIRED",
                f"{len(found)} objects ({name}) of the {what} {min(steps)} to {max(steps)} were retired by "
                f"{first}{until}, as {why} says",
            )
            self._audit.findings.not_seen(
                "RETIRED", f"what {len(found)} objects ({name}) held was not compared: they were retired"
            )

    def _compare(self, where: str, before: Retirement, record: Retirement) -> None:
        """Report a violation if `record`, at the place `where`, does not retire all that the record `before` it
        retires.
        """
        for kept, earlier in before.retired.items():
            if not record.of(kept).includes(earlier):
                self._audit.findings.violation(
                    "RETIREMENT_BACK",
                    f"{where} brings back {kept.name.lower()} that retirement {before.number} had retired",
                )

    def _read_on(self) -> bool:
        """Read the records that were written since the last one was read.

        Return whether there was one that is readable.
        """
        audit, number = self._audit, len(self._records)
        while (data := audit.get(key := audit.names.retirement(len(self._records) + 1), what="retirement")) is not None:
            try:
                self._records.append(Retirement.decode(data, where=audit.uri(key)))
            except CorruptObjectError:  # the next audit reports it
                break
        return len(self._records) > number


def retires_checkpoints_only(audit: Audit, own: str) -> bool:
    """Return whether a retirement adds checkpoints and nothing else; `own` is its key without the run's prefix.

    Such a record may come after the seal of a run that did not succeed: its trainer still finishes a checkpoint. False
    for another key, or a damaged record.
    """
    place = RETIREMENT.parse(own)
    if place is None:
        return False
    found = list[dict[KeptAs, Retired]]()
    for key in (audit.names.retirement(int(place["number"]) - 1), audit.names.root + own):
        data = audit.get(key, what="retirement")
        try:
            retired = {} if data is None else Retirement.decode(data, where=key).retired
        except CorruptObjectError:  # reported where retirements are read
            return False
        found.append({kept: each for kept, each in retired.items() if kept is not KeptAs.CHECKPOINTS})
    return found[0] == found[1]
