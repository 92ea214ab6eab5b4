"""What was asked and which policy versions answered, by completion: `verifiers` has no place for it in its records.

The engine returns `policy_spans` in the body of a completion. Neither generation of `verifiers` carries unknown fields
of a response into its records, so the HTTP layer notes them here under the rollout's id (v0: `trajectory_id`, v1: the
trace id, which its clients send as `X-Session-ID`), and the adapter takes them when the rollout is over. A completion
is found again by its token ids, in the order of the calls; what the request said of the sampling is noted with it.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from millrace.rollouts.types import PolicySpan

# Rollouts that failed half-way never take their notes; the oldest ones are forgotten beyond this number. It is far
# above the rollouts that one worker plays at once.
MAX_ROLLOUTS = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A model call: the tokens that came of it, the versions that made them, and what its request said."""

    completion_ids: tuple[int, ...] = ()
    spans: tuple[PolicySpan, ...] = ()
    sent: Mapping[str, Any] | None = None


NO_CALL = Call()


class SpanLog:
    """Notes of one worker, by rollout."""

    def __init__(self) -> None:
        self._notes: OrderedDict[str, list[Call]] = OrderedDict()

    def note(
        self,
        rollout_id: str,
        completion_ids: Sequence[int],
        spans: tuple[PolicySpan, ...],
        sent: Mapping[str, Any] | None = None,
    ) -> None:
        """Remember one completion. Without tokens it is a request that the engine refused."""
        self._notes.setdefault(rollout_id, []).append(
            Call(completion_ids=tuple(completion_ids), spans=spans, sent=sent)
        )
        while len(self._notes) > MAX_ROLLOUTS:
            self._notes.popitem(last=False)

    def take(self, rollout_id: str) -> "Spans":
        """The notes of one rollout; they are forgotten here."""
        return Spans(self._notes.pop(rollout_id, []))


class Spans:
    """The notes of one rollout, used up completion by completion."""

    def __init__(self, notes: Sequence[Call]) -> None:
        self.calls = tuple(notes)
        """All of them, in order."""
        self._notes = [note for note in notes if note.completion_ids]
        self.refused = [note.sent for note in notes if not note.completion_ids]
        """What requests said that the engine refused."""

    def find(self, completion_ids: Sequence[int]) -> Call:
        """The first unused call with these ids, else one whose ids begin with them, with its spans cut to them.

        The environment may have cut it short; but calls may also end in another order than they are recorded in.
        """
        wanted = tuple(completion_ids)
        index = next((at for at, call in enumerate(self._notes) if call.completion_ids == wanted), None)
        if index is None:
            begins = (at for at, call in enumerate(self._notes) if call.completion_ids[: len(wanted)] == wanted)
            index = next(begins, None)
        if index is None:
            return NO_CALL
        call = self._notes.pop(index)
        return replace(call, spans=clipped(call.spans, len(wanted)))


def clipped(spans: Sequence[PolicySpan], end: int) -> tuple[PolicySpan, ...]:
    """Return the spans of the first `end` tokens."""
    if not spans or spans[-1].end <= end:
        return tuple(spans)
    return tuple(replace(span, end=min(span.end, end)) for span in spans if span.start < end)


# One per process: a worker hosts one environment.
SPANS = SpanLog()
