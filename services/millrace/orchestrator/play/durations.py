"""How long the groups of each environment take, and which of them became too old to be trained on.

Tasks of one environment may take a hundred times as long as those of another. Steps that are cut as soon as enough
quick groups are there would leave the slow ones behind: they are dropped as stale, and the policy learns from quick
tasks alone. What is measured here says how long a cut waits for them.
"""

import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

PATIENCE_QUANTILE = 0.9
"""A group is waited for as long as this share of its environment's groups takes; stragglers beyond are not."""
PATIENCE_SLACK = 1.25
"""Beyond what was measured, because the next ones differ."""
MIN_MEASURED = 16
"""Groups of an environment before their times are trusted: the first to come are the quick ones."""
_SLOW_QUANTILE = 0.75
_MAX_ENVIRONMENTS = 1000


@dataclass(frozen=True, slots=True)
class _Ended:
    env: str
    seconds: float
    is_stale: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleShare:
    """Of one environment's groups of the window, how many were dropped as stale."""

    num_groups: int
    num_stale: int
    num_slow: int
    """The slowest quarter of them."""
    num_slow_stale: int
    median_s: float

    @property
    def share(self) -> float:
        """Stale ones of all, 0 to 1."""
        return self.num_stale / self.num_groups

    @property
    def slow_share(self) -> float:
        """Stale ones of the slowest quarter, 0 to 1."""
        return self.num_slow_stale / self.num_slow


class Durations:
    """The last groups of a run, whichever way they ended; a successor begins anew."""

    def __init__(self, *, window: int) -> None:
        """`window` is how many groups are kept, of all environments together."""
        self._ended: deque[_Ended] = deque(maxlen=window)
        self._by_env: dict[str, deque[float]] = {}
        self._window = window
        self.num_stale: Counter[str] = Counter()
        """By environment, since this process drives the run."""

    def note(self, env: str, seconds: float | None, *, is_stale: bool) -> None:
        """Take a group that was trained, or dropped as stale; `seconds` since it began, None if nobody knows.

        One that was dropped took longer than that, so the figures are lower bounds until the slow ones come.
        """
        self.num_stale[env] += is_stale
        self._ended.append(_Ended(env, math.nan if seconds is None else seconds, is_stale))
        if seconds is None or (env not in self._by_env and len(self._by_env) >= _MAX_ENVIRONMENTS):
            return
        self._by_env.setdefault(env, deque(maxlen=self._window)).append(seconds)

    def patience_s(self, env: str) -> float:
        """Return for how many seconds a group of an environment is waited for; infinite while few have come."""
        measured = self._by_env.get(env, ())
        if len(measured) < MIN_MEASURED:
            return math.inf
        return PATIENCE_SLACK * float(np.quantile(measured, PATIENCE_QUANTILE))

    def stale_shares(self) -> Mapping[str, StaleShare]:
        """Return what became of each environment's groups of the window."""
        found: dict[str, StaleShare] = {}
        for env in sorted({each.env for each in self._ended}):
            mine = [each for each in self._ended if each.env == env]
            seconds = [each.seconds for each in mine if not math.isnan(each.seconds)] or [0.0]
            border = float(np.quantile(seconds, _SLOW_QUANTILE))
            slow = [each for each in mine if each.seconds >= border] or mine
            found[env] = StaleShare(
                num_groups=len(mine),
                num_stale=sum(each.is_stale for each in mine),
                num_slow=len(slow),
                num_slow_stale=sum(each.is_stale for each in slow),
                median_s=float(np.median(seconds)),
            )
        return found
