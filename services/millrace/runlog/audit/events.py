"""Events: gapless per writer over what survived, no number used twice, progress that only goes forward.

Events of the archive and of Redis overlap, and a writer repeats its newest ones after Redis lost them, under new ids:
an event is known by (writer, writer_sequence), and nothing here depends on the order in which events are added.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from millrace.decoding import decode_message
from millrace.errors import CorruptObjectError
from millrace.internal.v1 import batch_pb2
from millrace.runlog.audit.findings import MAX_PER_CHECK, Audit, between, gaps, some
from millrace.runlog.audit.told import Told
from millrace.runlog.redis.entry import Entry, id_order
from millrace.v1 import event_pb2


@dataclass(slots=True)
class _Writer:
    """What is known of one writer's events."""

    seen: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    """sequence → generation of its id, first bytes of its hash: about 200 bytes an event."""
    committed: dict[int, int] = field(default_factory=dict)
    """sequence → step, of its batch_committed events."""


class EventCheck:
    """Takes every event of the archive and of Redis, then looks for what is not there."""

    def __init__(self, audit: Audit) -> None:
        self._findings = audit.findings
        self._report = audit.report
        self._writers: defaultdict[str, _Writer] = defaultdict(_Writer)
        self.told = Told()
        """What events say of batches, versions, checkpoints and the end."""
        self.newest_generation = 1
        """The newest generation of the Redis copy that an archived event is of."""

    def add(self, entries: Iterable[Entry], *, archived: bool = False) -> None:
        """Take entries of the event stream or of its archive, in any order."""
        for entry in entries:
            try:
                event = decode_message(event_pb2.Event, entry.d, what=f"event {entry.id}", reason="EVENT_CORRUPT")
                generation = id_order(entry.id)[0]
            except (CorruptObjectError, ValueError) as error:  # ValueError: its id is none
                self._findings.violation("EVENT_CORRUPT", f"event {entry.id[:80]!r}: {error}")
                continue
            self._add(entry, event)
            if archived:
                self.newest_generation = max(self.newest_generation, generation)

    def finish(
        self,
        *,
        base_step: int,
        next_step: int,
        closing: batch_pb2.BatchHeader | None,
        copied_until: int,
        takeovers: dict[str, bool],
    ) -> None:
        """Compare what was added with the committed steps.

        `takeovers`: whether another orchestrator or trainer took the run over; steps below `copied_until` are those of
        the parent of a fork, which its own events do not tell of.
        """
        lost = sum([self._check_gaps(name, writer) for name, writer in sorted(self._writers.items())])
        self._check_progress()
        self._report.num_events = sum(len(writer.seen) for writer in self._writers.values())
        self._report.num_writers = len(self._writers)
        if closing is None or closing.outcome != batch_pb2.RUN_OUTCOME_SUCCEEDED:
            return
        for check, steps, first, was_taken_over in (
            ("STEP_NOT_REPORTED", self.told.completed, base_step, takeovers["trainer"]),
            ("COMMIT_NOT_REPORTED", self.told.committed, copied_until, takeovers["orchestrator"]),
        ):
            silent = [step for missing in gaps(steps, first, next_step) for step in missing[:MAX_PER_CHECK]]
            if not silent:
                continue
            word = "completed" if check == "STEP_NOT_REPORTED" else "committed"
            message = f"no event says that the steps {some(silent)} were {word}"
            if lost or self._report.num_generations > 1 or was_taken_over:
                # What a killed process had not sent yet, or a wiped Redis held alone, cannot be said any more.
                self._findings.note(check, message)
            else:
                self._findings.violation(check, message)

    def _add(self, entry: Entry, event: event_pb2.Event) -> None:
        at = id_order(entry.id)
        generation = at[0]
        digest = bytes.fromhex(entry.h)[:8]
        writer = self._writers[event.writer]
        known = writer.seen.get(event.writer_sequence)
        if known is not None:
            if known[1] != digest:
                self._findings.violation(
                    "EVENT_NUMBER_REUSED",
                    f"event {event.writer_sequence} of {event.writer} exists with different contents (one at "
                    f"{entry.id})",
                )
            writer.seen[event.writer_sequence] = min(known[0], generation), known[1]
            return
        writer.seen[event.writer_sequence] = generation, digest
        self.told.add(event, at)
        if event.HasField("batch_committed"):
            writer.committed[event.writer_sequence] = event.batch_committed.step

    def _check_gaps(self, name: str, writer: _Writer) -> int:
        """Missing numbers of one writer; returns how many a rebuild of Redis may have taken along."""
        lost = 0
        for before, after in pairwise([0, *sorted(writer.seen)]):
            if after == before + 1:
                continue
            missing = between(before, after)
            generation_before = writer.seen[before][0] if before else 1
            if writer.seen[after][0] > generation_before:
                lost += after - before - 1
                self._findings.note(
                    "EVENTS_LOST_WITH_REDIS",
                    f"events {missing} of {name} are gone: Redis lost them before they were archived",
                )
            else:
                self._findings.violation("EVENT_GAP", f"events {missing} of {name} are missing")
        return lost

    def _check_progress(self) -> None:
        committers: defaultdict[int, list[str]] = defaultdict(list)
        for name, writer in self._writers.items():
            steps = [step for _, step in sorted(writer.committed.items())]
            for before, after in pairwise(steps):
                if after <= before:
                    self._findings.violation(
                        "PROGRESS_BACK", f"{name} reports batch {after} as committed behind batch {before}"
                    )
            for step in set(steps):
                committers[step].append(name)
        for step, names in sorted(committers.items()):
            if len(names) > 1:
                self._findings.violation(
                    "COMMITTED_TWICE", f"batch {step} is reported as committed by {', '.join(sorted(names))}"
                )
