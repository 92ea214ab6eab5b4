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
from millrace.readers.audit.findings import MAX_PER_CHECK, Audit, between, gaps, some
from millrace.rollouts.batch_wire import closes_run
from millrace.runlog.redis.entry import Entry, id_order
from millrace.v1 import event_pb2, run_pb2


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
        """Make a check of a run's events, before any is added; findings and counts go to `audit`."""
        self._findings = audit.findings
        self._report = audit.report
        self._writers: defaultdict[str, _Writer] = defaultdict(_Writer)
        self.claims = EventClaims()
        """What events say of batches, versions, checkpoints and the end."""
        self.newest_generation = 1
        """The newest generation of the Redis copy that an archived event is of."""

    def add(self, entries: Iterable[Entry], *, archived: bool = False) -> None:
        """Add entries of the event stream, or of its archive (`archived`), in any order.

        One that cannot be decoded is a violation. Those of the archive raise `newest_generation` to that of their ids.
        """
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
        """Report gaps in the events that were added, and steps of a run that succeeded which no event names.

        The numbers of events and writers are written into the report. The run's batches are those from `base_step` to
        `next_step` (exclusive): events must say that each was committed and completed. What a takeover, or a rebuild of
        Redis, may have lost of them is a note. `closing` is the closing header, None while the run goes on. `takeovers`
        has by role whether another orchestrator or trainer took the run over. Steps below `copied_until` are those of a
        fork's parent, of which the fork has no event of a commit.
        """
        lost = sum([self._check_gaps(name, writer) for name, writer in sorted(self._writers.items())])
        self._check_progress()
        self._report.num_events = sum(len(writer.seen) for writer in self._writers.values())
        self._report.num_writers = len(self._writers)
        if closing is None or closing.outcome != batch_pb2.RUN_OUTCOME_SUCCEEDED:
            return
        for check, steps, first, was_taken_over in (
            ("STEP_NOT_REPORTED", self.claims.completed, base_step, takeovers["trainer"]),
            ("COMMIT_NOT_REPORTED", self.claims.committed, copied_until, takeovers["orchestrator"]),
        ):
            silent = [step for missing in gaps(steps, first, next_step) for step in missing[:MAX_PER_CHECK]]
            if not silent:
                continue
            word = "completed" if check == "STEP_NOT_REPORTED" else "committed"
            message = f"no event says that the steps {some(silent)} were {word}"
            if lost or self._report.num_generations > 1 or was_taken_over:
                # No event can report what a killed process had not sent yet, or a wiped Redis held alone.
                self._findings.note(check, message)
            else:
                self._findings.violation(check, message)

    def _add(self, entry: Entry, event: event_pb2.Event) -> None:
        """Add one event with its entry: note its number and claims; a number with two contents is a violation."""
        at = id_order(entry.id)
        generation = at[0]
        # Eight bytes distinguish two events well enough, and a run may have millions.
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
            # A rebuild copies events: the oldest generation says when this one was written.
            writer.seen[event.writer_sequence] = min(known[0], generation), known[1]
            return
        writer.seen[event.writer_sequence] = generation, digest
        self.claims.add(event, at)
        if event.HasField("batch_committed"):
            writer.committed[event.writer_sequence] = event.batch_committed.step

    def _check_gaps(self, name: str, writer: _Writer) -> int:
        """Report the numbers that are missing among the events of the writer called `name`.

        Return how many of them a rebuild of Redis may have lost.
        """
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
        """Report a writer that says that batches were committed out of order, and a batch that two writers say they
        committed.
        """
        committers: defaultdict[int, list[str]] = defaultdict(list)
        for name, writer in self._writers.items():
            steps = [step for _, step in sorted(writer.committed.items())]
            for before, after in pairwise(steps):
                if after <= before:
                    self._findings.violation(
                        "PROGRESS_BACK", f"{name} reports batch {after} as committed after batch {before}"
                    )
            for step in set(steps):
                committers[step].append(name)
        for step, names in sorted(committers.items()):
            if len(names) > 1:
                self._findings.violation(
                    "COMMITTED_TWICE", f"batch {step} is reported as committed by {', '.join(sorted(names))}"
                )


# What the events of a run say of its batches, versions, checkpoints and its end, against what is there.
#
# Orchestrator and trainer write their events apart from the objects, and each event names the hash of what it
# reports: a header, a manifest or a checkpoint that was taken away or changed contradicts them.

TERMINAL = {
    run_pb2.RUN_STATE_SUCCEEDED: batch_pb2.RUN_OUTCOME_SUCCEEDED,
    run_pb2.RUN_STATE_FAILED: batch_pb2.RUN_OUTCOME_FAILED,
    run_pb2.RUN_STATE_CANCELLED: batch_pb2.RUN_OUTCOME_CANCELLED,
}
"""States in which a run has ended, and how the closing header says so."""

_MAX_STEP = 1 << 62  # what is above was never counted up to


@dataclass(slots=True)
class EventClaims:
    """Collected from events, in any order."""

    committed: dict[int, event_pb2.BatchCommitted] = field(default_factory=dict)
    completed: dict[int, set[str]] = field(default_factory=dict)
    """Chain hashes (hex) by step."""
    published: defaultdict[tuple[int, int], set[tuple[str, str]]] = field(default_factory=lambda: defaultdict(set))
    """Digest and sha256 of the manifest (hex) by lineage and version."""
    saved: defaultdict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    """sha256 (hex) of manifests of checkpoints by step."""
    token_logs: defaultdict[str, set[tuple[str, int]]] = field(default_factory=lambda: defaultdict(set))
    """sha256 (hex) and bytes by key, of the trainer's log-probs."""
    newest_at: float = 0.0
    """The latest time of any event (seconds since the epoch, on the clock of its writer)."""
    ends: list[tuple[event_pb2.StateChanged, float, tuple[int, int]]] = field(default_factory=list)
    """Changes to a terminal state, when (seconds since the epoch, on the writer's clock), and where in the stream."""

    def add(self, event: event_pb2.Event, at: tuple[int, int]) -> None:
        """Collect what an event that was not added before says; `at` are the two numbers of its entry's id."""
        self.newest_at = max(self.newest_at, event.time.seconds + event.time.nanos / 1e9)
        match event.WhichOneof("body"):
            case "batch_committed":
                self.committed[event.batch_committed.step] = event.batch_committed
            case "step_completed":
                self.completed.setdefault(event.step_completed.step, set()).add(event.step_completed.chain_hash)
            case "policy_published":
                body = event.policy_published
                self.published[body.lineage, body.version].add((body.digest, body.manifest_sha256))
            case "checkpoint_saved":
                self.saved[event.checkpoint_saved.step].add(event.checkpoint_saved.manifest_sha256)
            case "token_log_stored":
                body = event.token_log_stored
                self.token_logs[body.key].add((body.sha256, body.size_bytes))
            case "state_changed" if event.state_changed.new_state in TERMINAL:
                self.ends.append((event.state_changed, event.time.seconds + event.time.nanos / 1e9, at))
            case _:
                pass

    @property
    def end(self) -> tuple[event_pb2.StateChanged, float] | None:
        """Return the newest event of the run's end and its time; None without one.

        The order of entries counts, since clocks may jump.
        """
        newest = max(self.ends, key=lambda end: end[2], default=None)
        return None if newest is None else newest[:2]


class StepClaims:
    """Compares events of batches with headers, one header after the other, so that none is kept."""

    def __init__(self, audit: Audit, claims: EventClaims) -> None:
        """Make a check of headers against events; `claims` are what all events of the run say."""
        self._findings = audit.findings
        self._claims = claims
        self._seen: set[int] = set()
        self._closing: dict[str, batch_pb2.RunOutcome] = {}
        """The outcome in each closing header, by the chain hash after it."""

    def check(self, header: batch_pb2.BatchHeader, step: int, chain: bytes) -> None:
        """Compare a header of batch `step` with what events say of it; differences are violations.

        `chain` is the chain hash after the header.
        """
        if closes_run(header):
            self._closing[chain.hex()] = header.outcome
            return
        self._seen.add(step)
        hashes = {*self._claims.completed.get(step, ())}
        event = self._claims.committed.get(step)
        if event is not None:
            hashes.add(event.chain_hash)
            self._compare_counts(header, step, event)
        for claimed in sorted(hashes - {chain.hex(), ""}):
            self._findings.violation(
                "EVENT_CHAIN_MISMATCH",
                f"an event says that the chain after step {step} is {claimed[:16]}…, the headers give "
                f"{chain.hex()[:16]}…: a header up to this one, or run.json, was changed",
            )

    def finish(self, *, base_step: int) -> list[int]:
        """Report the steps and ends that events name and no header shows; return these steps, from `base_step` on."""
        claimed = {step for step in (*self._claims.committed, *self._claims.completed) if base_step <= step < _MAX_STEP}
        lost = sorted(claimed - self._seen)
        if lost:
            self._findings.violation(
                "HEADER_MISSING", f"events say that the steps {some(lost)} were committed, and no header can be read"
            )
        for end, *_ in self._claims.ends:
            state = run_pb2.RunState.Name(end.new_state).removeprefix("RUN_STATE_")
            outcome = self._closing.get(end.chain_hash)
            if not self._closing:
                self._findings.violation(
                    "CLOSING_HEADER_MISSING", f"an event says that the run ended as {state}, and no header closes it"
                )
            elif outcome is None and end.chain_hash:
                self._findings.violation(
                    "EVENT_CHAIN_MISMATCH",
                    f"the event of the end ({state}) names the chain {end.chain_hash[:16]}…, the closing header gives "
                    f"{', '.join(chain[:16] for chain in self._closing)}…",
                )
            elif outcome not in (None, TERMINAL[end.new_state]):
                self._findings.violation(
                    "OUTCOME_MISMATCH",
                    f"an event says that the run ended as {state}, the closing header says "
                    f"{batch_pb2.RunOutcome.Name(outcome) if outcome in range(4) else outcome}",
                )
        return lost

    def _compare_counts(self, header: batch_pb2.BatchHeader, step: int, event: event_pb2.BatchCommitted) -> None:
        """Report an event of a batch that counts other trained or dropped ordinals than the batch's header."""
        dropped: defaultdict[str, int] = defaultdict(int)
        num_trained = 0
        for item in header.resolutions:
            if item.outcome == batch_pb2.ORDINAL_OUTCOME_DROPPED:
                dropped[item.reason] += 1
            else:
                num_trained += 1
        claimed = (event.num_trained, dict(event.dropped))
        if claimed != (num_trained, dict(dropped)):
            self._findings.violation(
                "EVENT_DIFFERS",
                f"the event of batch {step} says {claimed[0]} trained, dropped {claimed[1]}; its header says "
                f"{num_trained} trained, dropped {dict(dropped)}",
            )
