"""What identifies one drive of a run, and what it works with: the same for all of its parts."""

from dataclasses import dataclass, field

from millrace.custom_code import CustomCode
from millrace.orchestrator.events import RunEvents
from millrace.orchestrator.workers import WorkerRegistry
from millrace.runlog import Epoch, Lease, RunLog
from millrace.runlog.records.run_record import RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """A claimed run: its record, its log under one epoch and lease, its events, the workers to choose from, and what
    of the user's code may be loaded for it."""

    record: RunRecord
    log: RunLog
    epoch: Epoch
    lease: Lease
    registry: WorkerRegistry
    events: RunEvents
    custom_code: CustomCode = field(default_factory=CustomCode)
