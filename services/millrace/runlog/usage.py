"""Accelerator seconds of a run, counted from what its log says it had and for how long.

Who drives a run says what it has, and says it again every `SEEN_S`. The time until it spoke next counts; after its last
words nothing does, if it was silent for `LAPSE_S` or if another process speaks next. So nothing is counted while a
deployment is down, and a death costs at most `SEEN_S` that were used and are not counted.
"""

from dataclasses import dataclass, field

MAX_SPANS = 256
"""Spans that are kept apart; beyond it the two oldest are joined, which keeps their sum."""
SEEN_S = 30.0
"""How often what a run has is written again."""
LAPSE_S = 90.0
"""Silence after which a run has no accelerators any more."""


@dataclass(slots=True)
class AcceleratorUsage:
    """How many accelerators a run has, and has had. All times are seconds on one clock."""

    held: int = 0
    """Accelerators since the last change."""
    _since: float = 0.0
    _seen: float = 0.0
    _by: str = ""
    """Who spoke last."""
    spans: list[tuple[float, float, float]] = field(default_factory=list)
    """Begin, end and accelerator seconds of what is over, in order."""

    def change(self, accelerators: int, at: float, *, by: str = "") -> None:
        """Note that the run has so many accelerators at `at`, as the process `by` says, which may be as many as before.

        A time before the last one counts as that.
        """
        at = max(at, self._seen)
        is_seen = by == self._by and at - self._seen <= LAPSE_S
        if is_seen and accelerators == self.held:
            self._seen = at
            return
        end = at if is_seen else self._seen
        if self.held and end > self._since:
            self.spans.append((self._since, end, self.held * (end - self._since)))
            if len(self.spans) > MAX_SPANS:
                (begin, _, first), (_, end, second) = self.spans[:2]
                self.spans[:2] = [(begin, end, first + second)]
        self.held, self._since, self._seen, self._by = accelerators, at, at, by

    def seconds(self, now: float, *, since: float = 0.0) -> float:
        """Return the accelerator seconds from `since` to `now`; all there are if `since` is left out.

        Of a span that began before `since` the part after it counts.
        """
        end = now if now - self._seen <= LAPSE_S else self._seen
        current = [(self._since, end, self.held * (end - self._since))] if self.held and end > self._since else []
        return sum(
            used * (end - max(begin, since)) / (end - begin)
            for begin, end, used in (*self.spans, *current)
            if end > since
        )
