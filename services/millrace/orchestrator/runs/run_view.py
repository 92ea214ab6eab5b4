"""What a run looks like from outside: its record in the store, folded with the events of its log.

Nothing here is stored: any orchestrator replica computes the same view from `run.json` and the event stream.
"""

from millrace.errors import MillraceError
from millrace.runlog.events.run_status import TERMINAL, RunStatus
from millrace.runlog.records.run_record import RunRecord
from millrace.v1 import event_pb2, run_pb2


class RunView:
    """A run, and how far its log was read."""

    def __init__(self, record: RunRecord) -> None:
        self.record = record
        self.cursor = ""
        self.log_instance = ""
        """Which copy of the log the events were read from; empty before the first look."""
        self.is_closed = False
        """Known to be committed to its closing header: events that said so may be lost with Redis."""
        self.num_reopened = 0
        """How often it was reopened, at the last look."""
        self.damage: MillraceError | None = None
        """Why the run cannot be read at the moment."""
        self._run = record.describe()
        self.status = RunStatus.begin(self._run)

    @property
    def run(self) -> run_pb2.Run:
        """The resource; DAMAGED, with the reason and the remedy, while the run cannot be read."""
        self.status.fill(self._run)
        if self.damage is None:
            return self._run
        run = run_pb2.Run()
        run.CopyFrom(self._run)
        run.state = run_pb2.RUN_STATE_DAMAGED
        message = str(self.damage)
        if self.record.uid:
            message += f"; `millrace run repair {self.record.name}` says what can be restored from what"
        run.error.CopyFrom(run_pb2.RunError(reason=self.damage.reason, message=message, component="orchestrator"))
        return run

    @property
    def is_terminal(self) -> bool:
        """Whether the run has ended, and can be read."""
        return self.damage is None and self.status.state in TERMINAL

    @property
    def has_failed(self) -> bool:
        """Whether the run has ended as FAILED, which can be reopened."""
        return self.status.state == run_pb2.RUN_STATE_FAILED

    def reopen(self) -> None:
        """The run that had failed goes on; its state is that of the event that comes next."""
        self.is_closed = False
        self.status.reopen()

    def apply(self, event: event_pb2.Event) -> None:
        """Fold one event in; events come in the order of their cursors."""
        self.cursor = event.cursor
        self.status.apply(event)
