"""When a process that died is started again, and when that is given up: arithmetic without processes or clocks."""

from dataclasses import dataclass

FIRST_BACKOFF_S = 0.2
BACKOFF_FACTOR = 3.0
LONGEST_BACKOFF_S = 10.0
SETTLED_AFTER_S = 30.0
"""A life that lasted this long after it was ready was a good one: what came before is forgotten."""
MOST_SHORT_LIVES = 5
"""Deaths in a row, none of a settled process, that are a crash loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What to do about one death."""

    is_hopeless: bool
    """A crash loop: starting it again would not help."""
    delay_s: float
    """Seconds until the next start."""
    short_lives: int
    """Deaths in a row before it had settled, this one included."""


class Lives:
    """The lives of one process, one after the other. Times are monotonic seconds."""

    def __init__(self, *, most_short_lives: int = MOST_SHORT_LIVES) -> None:
        """`most_short_lives`: the crash loop's length; 1 gives up at the first death of an unsettled process."""
        self.restarts = 0
        """How often it was started again."""
        self.ready_at: float | None = None
        """When this life became ready; None before."""
        self._most = most_short_lives
        self._short = 0

    def begin(self) -> None:
        """It was started again."""
        self.restarts += 1
        self.ready_at = None

    def ready(self, now: float) -> None:
        """It serves."""
        if self.ready_at is None:
            self.ready_at = now

    def end(self, now: float, *, is_orderly: bool) -> Verdict:
        """It died; `is_orderly`: exit code 0 after it was ready, a restart that somebody asked for by SIGTERM."""
        lived_s = None if self.ready_at is None else now - self.ready_at
        self.ready_at = None
        if is_orderly and lived_s is not None:
            return Verdict(is_hopeless=False, delay_s=0.0, short_lives=self._short)
        self._short = 1 if lived_s is not None and lived_s >= SETTLED_AFTER_S else self._short + 1
        delay_s = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * BACKOFF_FACTOR ** (self._short - 1))
        return Verdict(is_hopeless=self._short >= self._most, delay_s=delay_s, short_lives=self._short)
