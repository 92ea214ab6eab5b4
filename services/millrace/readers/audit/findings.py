"""What an audit finds: violations break a promise, notes break none. All are collected; nothing is raised."""

import contextlib
import hashlib
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from millrace.decoding import require_key
from millrace.errors import CorruptObjectError, InvalidSpecError, NotFoundError
from millrace.runlog.catalogue import DENSE, ObjectKind
from millrace.runlog.names import Names
from millrace.storage import ObjectStore
from millrace.v1 import audit_pb2

MAX_PER_CHECK = 100
"""AuditFindings of one check that are written out; the others are counted, so that a report stays readable."""


class AuditFindings:
    """Collects findings by check, an UPPER_SNAKE name."""

    def __init__(self) -> None:
        self._violations: list[tuple[str, str]] = []
        self._notes: list[tuple[str, str]] = []
        self._not_seen: list[tuple[str, str]] = []
        self._counts: Counter[tuple[str, bool]] = Counter()

    def violation(self, check: str, message: str) -> None:
        """Add a finding that breaks a promise."""
        self._add(check, message, is_violation=True)

    def note(self, check: str, message: str) -> None:
        """Add a finding that is worth knowing and breaks no promise."""
        self._add(check, message, is_violation=False)

    def not_seen(self, check: str, message: str) -> None:
        """Note what was not examined, so that silence is not taken for a result; the same text is noted once."""
        if (check, message) not in self._not_seen:
            self._not_seen.append((check, message))

    def fill(self, report: audit_pb2.AuditReport) -> None:
        """Write the findings into a report, in the order in which they were found."""
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
        message = as_utf8(message)
        self._counts[check, is_violation] += 1
        if self._counts[check, is_violation] <= MAX_PER_CHECK:
            (self._violations if is_violation else self._notes).append((check, message))


_PIECE_BYTES = 16 << 20
_SHOWN = 8


def as_utf8(text: str) -> str:
    """Return the text, with what could not be encoded written out: names of files may be any bytes."""
    return text.encode(errors="backslashreplace").decode()


def gaps(known: Iterable[int], first: int, end: int) -> Iterator[range]:
    """Yield the numbers from `first` to `end` (exclusive) that are not known, as ranges.

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
    """Return the first numbers of a list as text, and how many more there are."""
    shown = ", ".join(map(str, numbers[:_SHOWN]))
    return f"{shown} and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else shown


def between(before: int, after: int) -> str:
    """Return the numbers that are missing between two as text, such as `4` or `4 to 7`."""
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
        """Report the part that is being read; raise AuditStopped if nobody waits for the audit any more."""
        if self.stopping.is_set():
            raise AuditStopped
        self.on_progress(text)

    def uri(self, key: str) -> str:
        """Return the URI of an object, for findings."""
        return self.store.uri(key)

    def get(self, key: str, *, missing: str = "", what: str = "") -> bytes | None:
        """Return an object's bytes; None, with a violation, if it is missing or cannot be read.

        The violation is of the check `missing`, none if that is empty, or OBJECT_CORRUPT; `what` names the
        object.
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
        """Yield key and bytes of every object under a prefix; one that cannot be read is a violation, as in `get`."""
        for info in self.store.list(prefix):
            data = self.get(info.key, missing=missing, what=what)
            if data is not None:
                yield info.key, data

    def read_kind(self, kind: ObjectKind) -> Iterator[Stored]:
        """Yield every object of a kind.

        What is in its folder and of another kind, or cannot be decoded, is a violation. So is a gap, where the
        kind is numbered without one. An object that cannot be read has no content.
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
        """Turn the errors of reading a stored document in the block into a violation of `check`.

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
        """Add a violation for a `problem` of `object_problem`.

        It is {kind}_OBJECT_CORRUPT for a wrong hash, else {kind}_OBJECT_MISSING; `what` names the object.
        """
        # Only the comparison of hashes has these words; in all other cases nothing usable is there.
        is_corrupt = " has sha256 " in problem
        self.findings.violation(f"{kind}_OBJECT_{'CORRUPT' if is_corrupt else 'MISSING'}", f"{what}: {problem}")

    def object_problem(self, key: object, size_bytes: object, sha256: object) -> str:
        """Return in words what is wrong with an object that a manifest names; empty if it is as the manifest says.

        Only a deep audit reads the bytes. The key is noted as named.
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
        """Return whether a key that something names could be that of an object of this run.

        A legal key is noted as named.
        """
        try:
            require_key(key, what="key")
        except ValueError:
            return False
        self.named.add(key)
        return key.startswith(self.names.root)

    def sha256(self, key: str, size_bytes: int) -> str:
        """Read the first `size_bytes` of an object in pieces and return their sha256 (hex).

        Empty if it is gone or shorter.
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
        found = self.store.head(key)
        if found is None:
            return f"{self.uri(key)} does not exist"
        if found.size_bytes != size_bytes:
            return f"{self.uri(key)} has {found.size_bytes} bytes, its manifest says {size_bytes}"
        return ""
