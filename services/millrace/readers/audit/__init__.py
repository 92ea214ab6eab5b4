"""The audit of a run: where its log breaks a promise of the architecture (`audit.py`)."""

from millrace.readers.audit.audit import Depth, audit_run

__all__ = ["Depth", "audit_run"]
