"""The committed headers in order: no gap, one chain, one run, and everything that they name."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, pairwise

from millrace.decoding import decode_object
from millrace.errors import CorruptObjectError
from millrace.internal.v1 import batch_pb2
from millrace.readers.audit.events import StepClaims
from millrace.readers.audit.findings import Audit, between, some
from millrace.readers.audit.named import ReferencedObjects
from millrace.readers.audit.ranges import Contents
from millrace.readers.audit.rollouts import RolloutFact, RolloutsInRedis, StepContents
from millrace.rollouts.batch_wire import closes_run, decode_header
from millrace.runlog.catalogue import REOPENING
from millrace.runlog.records.frontier import Frontier, chain_hash
from millrace.runlog.records.revisions import is_failed_closing, list_headers
from millrace.runlog.records.run_record import RunOrigin

_AHEAD = 16  # headers fetched at once
_PROGRESS_EVERY = 16
_MOST = (1 << 63) - 1
_MOST_BLIND = 1 << 20

ORCHESTRATOR = "orchestrator"
"""Role whose epochs headers carry."""


class HeaderCheck:
    """Walks the headers of a run once; afterwards it knows the chain hash of every step."""

    def __init__(
        self,
        audit: Audit,
        *,
        run_hash: str,
        origin: RunOrigin,
        contents: Contents,
        claims: StepClaims,
        named: ReferencedObjects,
    ) -> None:
        """Prepare the check of a run's headers; `run` does it.

        `run_hash` is that of run.json, `origin` where the log begins. `contents` reads chunks and archives; `contents`,
        `claims` and `named` get every header.
        """
        self._audit = audit
        self._claims = claims
        self._named = named
        self._run_hash = run_hash
        self._origin = origin
        self._contents = contents
        self.ordinals = OrdinalCheck(audit, origin.frontier)
        self.chains: dict[int, bytes] = {origin.base_step - 1: origin.chain_hash}
        """H(step) by step."""
        self.closing: batch_pb2.BatchHeader | None = None
        self.closings: list[bytes] = []
        """Chain hashes after the closing headers."""
        self.copied_until = origin.base_step
        """For a fork: the first step that its own orchestrator committed."""
        self.next_step = origin.base_step
        """After the last training step."""
        self._chain: bytes | None = origin.chain_hash
        self._last_epoch = 0
        self._records: dict[str, str] = {}
        """Where the record is, by the sha256 of the closing header that was reopened."""
        self._superseded: set[str] = set()
        self._reopened: tuple[int, int] | None = None
        self.blind: set[int] = set()
        """Steps whose headers are missing or cannot be read."""
        self._scored_whole: frozenset[str] = frozenset()
        self._duplicates, self._last_duplicates = 0, 0

    def run(self, in_redis: dict[tuple[int, int], list[RolloutFact]]) -> None:
        """Check all headers in order, and all that they name, and write the sums into the report.

        `in_redis` are the rollouts in Redis, by (ordinal, member).
        """
        audit, report = self._audit, self._audit.report
        steps = self._steps()
        self._read_records()
        self._contents.begin(len(steps))
        held = RolloutsInRedis(audit, in_redis)
        for number, (step, revision, data) in enumerate(self._load(steps)):
            if number % _PROGRESS_EVERY == 0:
                audit.progress(f"step {step} of {steps[-1][0]}")
            self._check(step, revision, data, held)
        for sha256 in self._records.keys() - self._superseded:
            audit.findings.violation(
                "REOPENING_CORRUPT", f"{audit.uri(self._records[sha256])} reopens a header that did not end as FAILED"
            )
        self._contents.finish()
        held.check_rest(self._scored_whole)
        audit.findings.note(
            "CHUNKS_VERIFIED", f"{self._contents.counts.chunks} chunks have the sha256 that their header names"
        )
        self._summarize()
        report.chain_hash = (self._chain or b"").hex()

    @property
    def closing_key(self) -> str:
        """Return the whole key of the closing header in force; empty if there is none."""
        if self.closing is None:
            return ""
        return self._audit.names.batch_header(self.closing.step, self.closing.revision)

    def check_epoch(self, newest: int) -> None:
        """Report a violation if a header has a later epoch than `newest`, the newest that was taken.

        Read `newest` after the headers, because an epoch may be taken meanwhile.
        """
        if self._last_epoch > newest:
            self._audit.findings.violation(
                "WRITER_EPOCH_UNKNOWN",
                f"a header names orchestrator epoch {self._last_epoch}, the newest that was taken is {newest}",
            )

    def _summarize(self) -> None:
        """Write what was counted into the report, and report ordinals that a closing header leaves open."""
        counts, report, ordinals = self._contents.counts, self._audit.report, self.ordinals
        report.is_closed = self.closing is not None
        report.first_step = self._origin.base_step
        report.num_steps = self.next_step - self._origin.base_step
        report.num_trained, report.num_open = ordinals.num_trained, ordinals.num_open
        for reason, count in ordinals.dropped.items():
            report.dropped[reason] = count
        report.num_rollouts = counts.rollouts
        report.num_duplicates = min(max(self._duplicates, counts.duplicates), _MOST)
        if self.closing is not None:
            ordinals.check_closed(self.closing.step)

    def _read_records(self) -> None:
        """Read the records of reopenings: which closing headers do not end the run.

        Two of one header are a violation.
        """
        audit = self._audit
        for _, key, _, record in audit.read_kind(REOPENING):
            if record is not None and (other := self._records.setdefault(record.closing_sha256, key)) != key:
                audit.findings.violation(
                    "REOPENING_CORRUPT", f"{audit.uri(key)} reopens the same header as {audit.uri(other)}"
                )

    def _steps(self) -> list[tuple[int, int]]:
        """Return (step, revision) of every header object from the log's origin on, ascending.

        Gaps and earlier ones are violations; the steps in gaps are noted in `blind`.
        """
        audit, names = self._audit, self._audit.names
        found = list_headers(audit.store, names)
        audit.named.update(names.batch_header(*at) for at in found)
        base = self._origin.base_step
        for step in sorted({step for step, _ in found if step < base}):
            audit.findings.violation("HEADER_BEFORE_ORIGIN", f"step {step} is committed, but the log begins at {base}")
        found = [at for at in found if at[0] >= base]
        # A revision presupposes the one before it, of the same step.
        for before, (step, revision) in pairwise([(base - 1, 0), *found]):
            if revision and before != (step, revision - 1):
                audit.findings.violation(
                    "HEADER_MISSING",
                    f"revision {revision - 1} of header {step} does not exist, but revision {revision} does "
                    f"({audit.uri(names.batch_header(step, revision - 1))})",
                )
        for before, step in pairwise([base - 1, *sorted({step for step, _ in found})]):
            if step != before + 1:
                # Nothing can be claimed about steps whose headers are missing; the bound limits what a forged step
                # number costs.
                self.blind.update(islice(range(before + 1, step), _MOST_BLIND))
                missing = f"header{'s' if step > before + 2 else ''} {between(before, step)}"
                uri = audit.uri(names.batch_header(before + 1))
                audit.findings.violation(
                    "HEADER_MISSING", f"{missing} do not exist, but step {step} is committed ({uri})"
                )
        return found

    def _load(self, steps: list[tuple[int, int]]) -> Iterator[tuple[int, int, bytes | None]]:
        """Yield step, revision and bytes of each header in order, fetched in advance.

        The bytes are None, with a violation, if they cannot be read.
        """
        audit = self._audit

        def fetch(at: tuple[int, int]) -> tuple[int, int, bytes | None]:
            """Return step, revision and bytes of one header."""
            what = f"header {at[0]}"
            return *at, audit.get(audit.names.batch_header(*at), missing="HEADER_MISSING", what=what)

        with ThreadPoolExecutor(_AHEAD, thread_name_prefix="audit-headers") as pool:
            for first in range(0, len(steps), _AHEAD):
                yield from pool.map(fetch, steps[first : first + _AHEAD])

    def _check(self, step: int, revision: int, data: bytes | None, in_redis: RolloutsInRedis) -> None:
        """Check one header, whose stored bytes are `data` (None: it cannot be read), and hand what it names to be
        checked.

        The rollouts of the ordinals that it resolves are taken from `in_redis`.
        """
        if step - 1 not in self.chains:  # the header before is missing: nothing to compare with
            self._chain = None
            self.ordinals.skip()
        header = self._decode(step, revision, data)
        if data is None or header is None:
            self.blind.add(step)
            # Bytes that cannot be decoded still continue the chain, so that the headers after them can be compared.
            self._chain = None if data is None or self._chain is None else chain_hash(self._chain, data)
            if self._chain is not None:
                self.chains[step] = self._chain
            self.ordinals.skip()
            return
        self._check_chain(step, data, header)
        self._check_identity(step, revision, header)
        if self.closing is not None:
            self._audit.findings.violation(
                "HEADER_BEHIND_CLOSING",
                f"step {step} is committed after the closing header {self.closing.step} "
                f"({self._audit.uri(self._audit.names.batch_header(step, revision))})",
            )
        if revision and self._reopened != (step, revision - 1):
            self._audit.findings.violation(
                "REOPENED_WITHOUT_RECORD",
                f"revision {revision} of header {step} is committed, but no record says that the failed closing header "
                "before it was reopened",
            )
        is_closing = closes_run(header)
        trained = self.ordinals.add(header)
        if is_failed_closing(header) and hashlib.sha256(data).hexdigest() in self._records:
            self._reopened = step, revision
            self._superseded.add(hashlib.sha256(data).hexdigest())
        elif is_closing:
            self.closing = header
        else:
            check_samples(self._audit, header, trained)
            self.next_step = step + 1
            if not header.writer_epoch:
                self.copied_until = step + 1
        self._claims.check(header, step, self.chains[step])
        self._named.add_header(header)
        if is_closing:
            self.closings.append(self.chains[step])
        self._read_state(step, header)
        self._contents.add(
            StepContents(
                header=header, trained=trained, scored_whole=self._scored_whole, in_redis=in_redis.take(header)
            )
        )

    def _decode(self, step: int, revision: int, data: bytes | None) -> batch_pb2.BatchHeader | None:
        """Return the header in the bytes; None for no bytes or, with a violation, for damaged ones."""
        if data is None:
            return None
        try:
            return decode_header(data)
        except CorruptObjectError as error:
            where = self._audit.uri(self._audit.names.batch_header(step, revision))
            self._audit.findings.violation("HEADER_CORRUPT", f"header {step} ({where}): {error.message}")
            return None

    def _check_chain(self, step: int, data: bytes, header: batch_pb2.BatchHeader) -> None:
        """Report a header that does not continue the chain hash before it, and compute the hash after it."""
        claimed = header.previous_chain_hash
        if self._chain is not None and claimed != self._chain:
            self._audit.findings.violation(
                "CHAIN_BROKEN",
                f"header {step} continues the chain {claimed.hex()[:16]}…, but the headers before it give "
                f"{self._chain.hex()[:16]}…: one of them, or run.json, was replaced or damaged",
            )
        if len(claimed) != 32:
            self._audit.findings.violation("CHAIN_BROKEN", f"header {step} has a chain hash of {len(claimed)} bytes")
            claimed = self._chain or bytes(32)
        # Go on from what this header says, so that one break is one finding.
        self._chain = self.chains[step] = chain_hash(claimed, data)

    def _check_identity(self, step: int, revision: int, header: batch_pb2.BatchHeader) -> None:
        """Report a header that names another step, revision, run or config, or an older epoch than the one before."""
        findings = self._audit.findings
        expected = {
            "HEADER_STEP_WRONG": ("step", header.step, step),
            "HEADER_REVISION_WRONG": ("revision", header.revision, revision),
            "HEADER_OF_OTHER_RUN": ("run_uid", header.run_uid, self._audit.names.uid),
            "RUN_HASH_MISMATCH": ("run_hash", header.run_hash, self._run_hash),
        }
        for check, (name, found, wanted) in expected.items():
            if found != wanted:
                findings.violation(check, f"header {step} has {name} {found!r}, not {wanted!r}")
        if header.writer_epoch < self._last_epoch:
            findings.violation(
                "WRITER_EPOCH_BACK",
                f"header {step} was committed under orchestrator epoch {header.writer_epoch}, after one of epoch "
                f"{self._last_epoch}: a fenced writer got through",
            )
        self._last_epoch = max(self._last_epoch, header.writer_epoch)

    def _read_state(self, step: int, header: batch_pb2.BatchHeader) -> None:
        """Read the orchestrator's state in a header: add up the duplicates it counts, and collect environments
        scored by group.
        """
        duplicates = 0
        with self._audit.reading("STATE_CORRUPT", f"header {step}: orchestrator_state"):
            what = "it"
            state = decode_object(header.orchestrator_state or b"{}", what=what, reason="STATE_CORRUPT")
            duplicates = int(state.get("num_duplicates", 0))
            self._scored_whole |= frozenset(map(str, state.get("scored_whole", ())))
        if header.writer_epoch:  # else it was copied: what it counts was the parent's
            grown = duplicates - self._last_duplicates
            self._duplicates += grown if grown >= 0 else duplicates
        self._last_duplicates = duplicates


# Every ordinal ends once: trained, or dropped with a reason; and each header's frontier says the same.

_ORDINALS_MOST = 1000


class OrdinalCheck:
    """Follows the resolutions of all headers in order."""

    def __init__(self, audit: Audit, start: Frontier) -> None:
        """Make a check of resolutions; `start` are the ordinals that are resolved before the first header."""
        self._findings = audit.findings
        self._frontier = start
        self._is_blind = False
        self.num_trained = 0
        self.dropped: Counter[str] = Counter()

    def skip(self) -> None:
        """Note that a header is missing or cannot be read: the frontier of the next one is not compared."""
        self._is_blind = True

    @property
    def num_open(self) -> int:
        """Return the number of ordinals below the highest resolved one that are not resolved."""
        above = self._frontier.resolved_above
        return max(above) - self._frontier.resolved_below - (len(above) - 1) if above else 0

    def check_closed(self, step: int) -> None:
        """Report a violation if ordinals are open after the closing header `step`."""
        if self.num_open:
            first = range(self._frontier.resolved_below, max(self._frontier.resolved_above))
            unresolved = (ordinal for ordinal in first if ordinal not in self._frontier.resolved_above)
            self._findings.violation(
                "OPEN_AFTER_CLOSE",
                f"the closing header {step} leaves ordinals open: {some(list(islice(unresolved, _ORDINALS_MOST)))}",
            )

    def add(self, header: batch_pb2.BatchHeader) -> set[int]:
        """Check one header's resolutions and frontier against those before it; return the ordinals that it trains."""
        trained: set[int] = set()
        fresh: set[int] = set()
        for item in header.resolutions:
            if item.ordinal in fresh or self._frontier.is_resolved(item.ordinal):
                self._findings.violation(
                    "ORDINAL_RESOLVED_TWICE", f"step {header.step} resolves ordinal {item.ordinal} again"
                )
                continue
            fresh.add(item.ordinal)
            self._count(header, item, trained)
        self._frontier = self._frontier.resolve(fresh)
        self._compare(header)
        self._is_blind = False
        return trained

    def _count(self, header: batch_pb2.BatchHeader, item: batch_pb2.Resolution, trained: set[int]) -> None:
        """Count one ordinal's outcome, and add it to `trained` if it was trained.

        An outcome that cannot be is a violation.
        """
        where = f"step {header.step}, ordinal {item.ordinal}"
        match item.outcome:
            case batch_pb2.ORDINAL_OUTCOME_TRAINED:
                self.num_trained += 1
                trained.add(item.ordinal)
                if closes_run(header):
                    self._findings.violation("TRAINED_BY_CLOSING_HEADER", f"{where}: a closing header trains nothing")
            case batch_pb2.ORDINAL_OUTCOME_DROPPED:
                self.dropped[item.reason or "(none)"] += 1
                if not item.reason:
                    self._findings.violation("DROPPED_WITHOUT_REASON", f"{where} is dropped without a reason")
            case _:
                self._findings.violation("ORDINAL_WITHOUT_OUTCOME", f"{where} has the outcome {item.outcome}")

    def _compare(self, header: batch_pb2.BatchHeader) -> None:
        """Report where a header's frontier differs from the resolutions so far; from here on the header's counts."""
        try:
            claimed = Frontier.from_header(header)
        except CorruptObjectError as error:
            self._findings.violation("FRONTIER_CORRUPT", f"step {header.step}: {error.message}")
            return
        if not self._is_blind:
            lost = _difference(claimed, self._frontier)
            if lost:
                self._findings.violation(
                    "ORDINAL_LOST",
                    f"step {header.step} says that ordinals {some(lost)} are resolved, but no header resolves them",
                )
            lacking = _difference(self._frontier, claimed)
            if lacking:
                self._findings.violation(
                    "FRONTIER_LACKS_ORDINALS",
                    f"step {header.step} says that ordinals {some(lacking)} are open, but they are resolved",
                )
        self._frontier = claimed


def _difference(left: Frontier, right: Frontier) -> list[int]:
    """Return the ordinals that are resolved in `left` and not in `right`, ascending; of a long range the first ones."""
    below = range(right.resolved_below, left.resolved_below)
    above = (ordinal for ordinal in left.resolved_above if not right.is_resolved(ordinal))
    new = (ordinal for ordinal in below if ordinal not in right.resolved_above)
    return sorted({*islice(new, _ORDINALS_MOST), *above})  # a damaged header may claim any number


# What a header says of its samples: they belong to ordinals that it trains.


def check_samples(audit: Audit, header: batch_pb2.BatchHeader, trained: set[int]) -> None:
    """Report violations unless each sample of a header is of a trained ordinal, and each of these has a sample.

    `trained` are the ordinals that the header trains. The samples of one member must be of one attempt.
    """
    attempts: dict[tuple[int, int], int] = {}
    strangers: set[int] = set()
    for sample in header.samples:
        if sample.ordinal not in trained:
            strangers.add(sample.ordinal)
        first = attempts.setdefault((sample.ordinal, sample.member), sample.attempt)
        if first != sample.attempt:
            audit.findings.violation(
                "MEMBER_TRAINED_TWICE",
                f"step {header.step} trains member {sample.member} of ordinal {sample.ordinal} from attempts {first} "
                f"and {sample.attempt}",
            )
    for ordinal in sorted(strangers):
        audit.findings.violation(
            "SAMPLE_NOT_TRAINED", f"step {header.step} has samples of ordinal {ordinal}, which it does not train"
        )
    for ordinal in sorted(trained - {ordinal for ordinal, _ in attempts}):
        audit.findings.violation(
            "TRAINED_WITHOUT_SAMPLE", f"step {header.step} trains ordinal {ordinal} and has no sample of it"
        )
