"""When a process that died is started again, and when that is given up: arithmetic without processes or clocks.

A death counts until a life has lasted `SETTLED_AFTER_S`. One by SIGKILL comes from outside (a person, the kernel
out of memory, our own liveness) and says less about the process than a death of its own: it weighs a quarter.
"""

from dataclasses import dataclass
from enum import Enum

from millrace.backoff import Backoff

BACKOFF = Backoff(0.2, 10.0, factor=3.0)
SETTLED_AFTER_S = 30.0
"""A life that lasted this long after it was ready was a good one: what came before is forgotten."""
CRASH_LOOP = 5.0
"""Weight of the deaths in a row, none of a settled process, that are a crash loop."""


class ExitKind(Enum):
    """How a process ended."""

    ORDERLY = 0.0
    """Exit code 0: somebody sent SIGTERM to have it restarted."""
    KILLED = 0.25
    """SIGKILL."""
    CRASHED = 1.0
    """Another signal or exit code: its own doing."""

    @classmethod
    def of(cls, returncode: int) -> "ExitKind":
        """What a return code says; minus a signal's number for a signal."""
        return {0: cls.ORDERLY, -9: cls.KILLED}.get(returncode, cls.CRASHED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartDecision:
    """What to do about one death."""

    is_hopeless: bool
    """A crash loop: starting it again would not help."""
    delay_s: float
    """Seconds until the next start."""
    short_lives: int
    """Deaths in a row before it had settled, this one included."""


class Lives:
    """The lives of one process, one after the other. Times are monotonic seconds."""

    def __init__(self, *, settled_after_s: float = SETTLED_AFTER_S) -> None:
        """`settled_after_s` is longer for what answers long before it is at work."""
        self._settled_after_s = settled_after_s
        self.restarts = 0
        """How often it was started again."""
        self.ready_at: float | None = None
        """When this life became ready; None before."""
        self._short = 0
        self._weight = 0.0

    def begin(self) -> None:
        """It was started again."""
        self.restarts += 1
        self.ready_at = None

    def ready(self, now: float) -> None:
        """It serves."""
        if self.ready_at is None:
            self.ready_at = now

    def end(self, now: float, exit_kind: ExitKind) -> RestartDecision:
        """It died."""
        lived_s = None if self.ready_at is None else now - self.ready_at
        self.ready_at = None
        if exit_kind is ExitKind.ORDERLY:
            if lived_s is not None:
                return RestartDecision(is_hopeless=False, delay_s=0.0, short_lives=self._short)
            exit_kind = ExitKind.CRASHED  # nobody restarts what is not up yet: it gave up by itself
        if lived_s is not None and lived_s >= self._settled_after_s:
            self._short, self._weight = 0, 0.0
        self._short, self._weight = self._short + 1, self._weight + exit_kind.value
        delay_s = BACKOFF.after(self._weight)
        return RestartDecision(is_hopeless=self._weight >= CRASH_LOOP, delay_s=delay_s, short_lives=self._short)
