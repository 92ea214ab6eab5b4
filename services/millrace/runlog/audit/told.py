"""What the events of a run say of its batches, versions, checkpoints and its end, against what is there.

Orchestrator and trainer write their events apart from the objects, and each event names the hash of what it tells of:
a header, a manifest or a checkpoint that was taken away or changed contradicts them.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from millrace.internal.v1 import batch_pb2
from millrace.rollouts.batch_wire import closes_run
from millrace.runlog.audit.findings import Audit, some
from millrace.v1 import event_pb2, run_pb2

TERMINAL = {
    run_pb2.RUN_STATE_SUCCEEDED: batch_pb2.RUN_OUTCOME_SUCCEEDED,
    run_pb2.RUN_STATE_FAILED: batch_pb2.RUN_OUTCOME_FAILED,
    run_pb2.RUN_STATE_CANCELLED: batch_pb2.RUN_OUTCOME_CANCELLED,
}
"""States in which a run has ended, and how the closing header says so."""

_MAX_STEP = 1 << 62  # what is above was never counted up to


@dataclass(slots=True)
class Told:
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
        """Take an event that was not taken before; `at` are the numbers of its entry's id."""
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
        """The newest end and its time; entries tell the order, clocks may jump."""
        newest = max(self.ends, key=lambda end: end[2], default=None)
        return None if newest is None else newest[:2]


class ToldSteps:
    """Compares events of batches with headers, one header after the other, so that none is kept."""

    def __init__(self, audit: Audit, told: Told) -> None:
        self._findings = audit.findings
        self._told = told
        self._seen: set[int] = set()
        self._closing: dict[str, batch_pb2.RunOutcome] = {}
        """How each closing header says that the run ended, by the chain hash behind it."""

    def check(self, header: batch_pb2.BatchHeader, step: int, chain: bytes) -> None:
        """Compare what is told of a header; `chain` is the chain hash behind it."""
        if closes_run(header):
            self._closing[chain.hex()] = header.outcome
            return
        self._seen.add(step)
        hashes = {*self._told.completed.get(step, ())}
        event = self._told.committed.get(step)
        if event is not None:
            hashes.add(event.chain_hash)
            self._compare_counts(header, step, event)
        for told in sorted(hashes - {chain.hex(), ""}):
            self._findings.violation(
                "EVENT_CHAIN_MISMATCH",
                f"an event says that the chain behind step {step} is {told[:16]}…, the headers give "
                f"{chain.hex()[:16]}…: a header up to this one, or run.json, was changed",
            )

    def finish(self, *, base_step: int) -> list[int]:
        """Steps and ends that events tell of and no header shows; returns these steps."""
        told = {step for step in (*self._told.committed, *self._told.completed) if base_step <= step < _MAX_STEP}
        lost = sorted(told - self._seen)
        if lost:
            self._findings.violation(
                "HEADER_MISSING", f"events say that the steps {some(lost)} were committed, and no header can be read"
            )
        for end, *_ in self._told.ends:
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
        dropped: defaultdict[str, int] = defaultdict(int)
        num_trained = 0
        for item in header.resolutions:
            if item.outcome == batch_pb2.ORDINAL_OUTCOME_DROPPED:
                dropped[item.reason] += 1
            else:
                num_trained += 1
        told = (event.num_trained, dict(event.dropped))
        if told != (num_trained, dict(dropped)):
            self._findings.violation(
                "EVENT_DIFFERS",
                f"the event of batch {step} says {told[0]} trained, dropped {told[1]}; its header says {num_trained} "
                f"trained, dropped {dict(dropped)}",
            )
