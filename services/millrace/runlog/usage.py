"""Accelerator seconds of a run, counted from what its log says it had and for how long."""

from dataclasses import dataclass, field

MAX_SPANS = 256
"""Spans that are kept apart; beyond it the two oldest are joined, which keeps their sum."""


@dataclass(slots=True)
class AcceleratorUsage:
    """How many accelerators a run has, and has had. All times are seconds on one clock."""

    held: int = 0
    """Accelerators since the last change."""
    _since: float = 0.0
    spans: list[tuple[float, float, float]] = field(default_factory=list)
    """Begin, end and accelerator seconds of what is over, in order."""

    def change(self, accelerators: int, at: float) -> None:
        """Note that the run has so many accelerators from `at` on. A time before the last change counts as that."""
        at = max(at, self._since)
        if self.held and at > self._since:
            self.spans.append((self._since, at, self.held * (at - self._since)))
            if len(self.spans) > MAX_SPANS:
                (begin, _, first), (_, end, second) = self.spans[:2]
                self.spans[:2] = [(begin, end, first + second)]
        self.held, self._since = accelerators, at

    def seconds(self, now: float, *, since: float = 0.0) -> float:
        """Return the accelerator seconds from `since` to `now`; all there are if `since` is left out.

        Of a span that began before `since` the part after it counts.
        """
        current = [(self._since, now, self.held * (now - self._since))] if self.held and now > self._since else []
        return sum(
            used * (end - max(begin, since)) / (end - begin)
            for begin, end, used in (*self.spans, *current)
            if end > since
        )
