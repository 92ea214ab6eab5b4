"""Every ordinal ends once: trained, or dropped with a reason; and each header's frontier says the same."""

from collections import Counter
from itertools import islice

from millrace.errors import CorruptObjectError
from millrace.internal.v1 import batch_pb2
from millrace.rollouts.batch_wire import closes_run
from millrace.runlog.audit.findings import Audit, some
from millrace.runlog.records.frontier import Frontier

_MOST = 1000


class OrdinalCheck:
    """Follows the resolutions of all headers in order."""

    def __init__(self, audit: Audit, start: Frontier) -> None:
        self._findings = audit.findings
        self._frontier = start
        self._is_blind = False
        self.num_trained = 0
        self.dropped: Counter[str] = Counter()

    def skip(self) -> None:
        """A header is missing or not readable: what it resolved is unknown, and the next frontier is believed."""
        self._is_blind = True

    @property
    def num_open(self) -> int:
        """Ordinals below the highest resolved one that are not resolved."""
        above = self._frontier.resolved_above
        return max(above) - self._frontier.resolved_below - (len(above) - 1) if above else 0

    def check_closed(self, step: int) -> None:
        """Behind the closing header no ordinal may be open."""
        if self.num_open:
            first = range(self._frontier.resolved_below, max(self._frontier.resolved_above))
            unresolved = (ordinal for ordinal in first if ordinal not in self._frontier.resolved_above)
            self._findings.violation(
                "OPEN_AFTER_CLOSE",
                f"the closing header {step} leaves ordinals open: {some(list(islice(unresolved, _MOST)))}",
            )

    def add(self, header: batch_pb2.BatchHeader) -> set[int]:
        """Check one header's resolutions and frontier; returns the ordinals that it trains."""
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
        """The header's frontier against the resolutions so far; afterwards the header's is the one that counts."""
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
    """Ordinals that are resolved in `left` and not in `right`, ascending; cheap where the two nearly agree."""
    below = range(right.resolved_below, left.resolved_below)
    above = (ordinal for ordinal in left.resolved_above if not right.is_resolved(ordinal))
    new = (ordinal for ordinal in below if ordinal not in right.resolved_above)
    return sorted({*islice(new, _MOST), *above})  # a damaged header may claim any number
