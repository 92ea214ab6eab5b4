"""What identifies one drive of a run, and what it works with: the same for all of its parts."""

from dataclasses import dataclass

from millrace.orchestrator.events import RunEvents
from millrace.orchestrator.workers import WorkerRegistry
from millrace.runlog import Epoch, Lease, RunLog
from millrace.runlog.records.run_record import RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """A claimed run: its record, its log under one epoch and lease, its events, and the workers to choose from."""

    record: RunRecord
    log: RunLog
    epoch: Epoch
    lease: Lease
    registry: WorkerRegistry
    events: RunEvents
