"""The audit of a run: where its log breaks a promise of the architecture (`audit.py`)."""

from millrace.readers.audit.audit import Depth, audit_run
from millrace.readers.audit.ranges import AuditRanges

__all__ = ["AuditRanges", "Depth", "audit_run"]
