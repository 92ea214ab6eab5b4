"""What an audit finds: violations break a promise, notes break none. All are collected; nothing is raised."""

import json
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from millrace.errors import CorruptObjectError, NotFoundError
from millrace.runlog.names import Names
from millrace.storage import ObjectStore
from millrace.v1 import audit_pb2

MAX_PER_CHECK = 100
"""Findings of one check that are written out; the others are counted, so that a report stays readable."""


class Findings:
    """Collects findings by check, an UPPER_SNAKE name."""

    def __init__(self) -> None:
        self._violations: list[tuple[str, str]] = []
        self._notes: list[tuple[str, str]] = []
        self._counts: Counter[tuple[str, bool]] = Counter()

    def violation(self, check: str, message: str) -> None:
        """Something that breaks a promise."""
        self._add(check, message, is_violation=True)

    def note(self, check: str, message: str) -> None:
        """Something that is worth knowing and breaks no promise."""
        self._add(check, message, is_violation=False)

    def fill(self, report: audit_pb2.AuditReport) -> None:
        """Write the findings into a report, in the order in which they were found."""
        for check, message in self._violations:
            report.violations.add(check=check, message=message)
        for check, message in self._notes:
            report.notes.add(check=check, message=message)
        for (check, is_violation), count in self._counts.items():
            if count > MAX_PER_CHECK:
                found = report.violations if is_violation else report.notes
                found.add(check=check, message=f"and {count - MAX_PER_CHECK} more")

    def _add(self, check: str, message: str, *, is_violation: bool) -> None:
        self._counts[check, is_violation] += 1
        if self._counts[check, is_violation] <= MAX_PER_CHECK:
            (self._violations if is_violation else self._notes).append((check, message))


class AuditStopped(Exception):
    """Whoever asked for the audit is gone. Never leaves the package."""


@dataclass(kw_only=True)
class Audit:
    """What every part of an audit works on."""

    store: ObjectStore
    names: Names
    report: audit_pb2.AuditReport
    findings: Findings = field(default_factory=Findings)
    on_progress: Callable[[str], None] = lambda text: None
    """Hears what is being looked at, in words ("step 12 of 340"); from another thread."""
    stopping: threading.Event = field(default_factory=threading.Event)

    def progress(self, text: str) -> None:
        """Say how far the audit is; ends it if nobody waits for it any more."""
        if self.stopping.is_set():
            raise AuditStopped
        self.on_progress(text)

    def uri(self, key: str) -> str:
        """Where an object lies, for findings."""
        return self.store.uri(key)

    def get(self, key: str, *, missing: str = "", what: str = "") -> bytes | None:
        """An object's bytes, or None with a violation: the check `missing` (none if empty), or OBJECT_CORRUPT."""
        try:
            return self.store.get(key)
        except NotFoundError:
            if missing:
                self.findings.violation(missing, f"{what or 'object'} {self.uri(key)} does not exist")
        except CorruptObjectError as error:
            self.findings.violation("OBJECT_CORRUPT", f"{what or 'object'} {self.uri(key)}: {error.message}")
        return None

    def get_json(self, key: str, *, missing: str, corrupt: str, what: str) -> dict[str, Any] | None:
        """A JSON object, or None with a violation."""
        data = self.get(key, missing=missing, what=what)
        if data is None:
            return None
        try:
            document = json.loads(data)
            if not isinstance(document, dict):
                raise ValueError("it is no JSON object")
        except ValueError as error:  # also UnicodeDecodeError
            self.findings.violation(corrupt, f"{what} {self.uri(key)} is not readable: {error}")
            return None
        return document

    def object_problem(self, key: str, size_bytes: int) -> str:
        """What is wrong with an object that a manifest names, in words; empty if it exists with its size."""
        found = self.store.head(key)
        if found is None:
            return f"{self.uri(key)} does not exist"
        if found.size_bytes != size_bytes:
            return f"{self.uri(key)} has {found.size_bytes} bytes, its manifest says {size_bytes}"
        return ""
