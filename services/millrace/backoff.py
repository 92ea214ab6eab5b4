"""How long to wait before the next try: longer after each failure, up to a limit."""

import random
from dataclasses import KW_ONLY, dataclass

_MAX_EXPONENT = 64
"""A larger power would overflow, and is longer than every limit long before."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delays between tries: `first_s` seconds, `factor` times longer after each failure, at most `longest_s`.

    The number of failures so far is counted by the caller.
    """

    first_s: float
    longest_s: float
    _: KW_ONLY
    factor: float = 2.0
    spread: tuple[float, float] = (1.0, 1.0)
    """Each delay is multiplied by a random number between these: what failed together should not come back together."""

    def after(self, num_failures: float) -> float:
        """Return the seconds to wait after `num_failures` failures in a row, randomly spread.

        1 or less gives the first delay.
        """
        return self.limited(self.first_s * self.factor ** min(max(num_failures - 1, 0), _MAX_EXPONENT))

    def limited(self, delay_s: float) -> float:
        """Return `delay_s`, at most the longest delay of this backoff, times a random number from its range `spread`.

        It is for a delay in seconds that another party asks for.
        """
        return min(delay_s, self.longest_s) * random.uniform(*self.spread)
