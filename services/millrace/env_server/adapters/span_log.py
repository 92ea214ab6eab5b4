"""Which policy versions produced which completion: kept beside `verifiers`, whose records have no place for it.

The engine returns `policy_spans` in the body of a completion. Neither generation of `verifiers` carries unknown fields
of a response into its records, so the HTTP layer notes them here under the rollout's id (v0: `trajectory_id`, v1: the
trace id, which its clients send as `X-Session-ID`), and the adapter takes them when the rollout is over. A completion
is found again by its token ids, in the order of the calls.
"""

from collections import OrderedDict
from collections.abc import Sequence

from millrace.rollouts.types import PolicySpan

# Rollouts that failed half-way never take their notes; the oldest ones are forgotten beyond this number. It is far
# above the rollouts that one worker plays at once.
MAX_ROLLOUTS = 8192


class SpanLog:
    """Notes of one worker, by rollout."""

    def __init__(self) -> None:
        self._notes: OrderedDict[str, list[tuple[tuple[int, ...], tuple[PolicySpan, ...]]]] = OrderedDict()

    def note(self, rollout_id: str, completion_ids: Sequence[int], spans: tuple[PolicySpan, ...]) -> None:
        """Remember the spans of one completion."""
        self._notes.setdefault(rollout_id, []).append((tuple(completion_ids), spans))
        while len(self._notes) > MAX_ROLLOUTS:
            self._notes.popitem(last=False)

    def take(self, rollout_id: str) -> "Spans":
        """The notes of one rollout; they are forgotten here."""
        return Spans(self._notes.pop(rollout_id, []))


class Spans:
    """The notes of one rollout, used up completion by completion."""

    def __init__(self, notes: list[tuple[tuple[int, ...], tuple[PolicySpan, ...]]]) -> None:
        self._notes = list(notes)

    def find(self, completion_ids: Sequence[int]) -> tuple[PolicySpan, ...]:
        """The spans of the first unused completion with these ids, else of one that begins with them, cut to them.

        The environment may have cut it short; but calls may also end in another order than they are recorded in.
        """
        wanted = tuple(completion_ids)
        index = next((at for at, (ids, _) in enumerate(self._notes) if ids == wanted), None)
        if index is None:
            index = next((at for at, (ids, _) in enumerate(self._notes) if ids[: len(wanted)] == wanted), None)
        if index is None:
            return ()
        _, spans = self._notes.pop(index)
        return tuple(_clip(span, len(wanted)) for span in spans if span.start < len(wanted))


def _clip(span: PolicySpan, end: int) -> PolicySpan:
    return PolicySpan(lineage=span.lineage, version=span.version, start=span.start, end=min(span.end, end))


# One per process: a worker hosts one environment.
SPANS = SpanLog()
