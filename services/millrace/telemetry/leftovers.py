"""What could not be removed in this process: how many there are by kind, which are known, and when each is tried again.

A removal that fails must not be tried at every turn, nor told of at every try: the pauses grow, and of many leftovers
of one kind those whose number is a power of two are warned of.
"""

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from millrace.backoff import Backoff

logger = logging.getLogger(__name__)

_PAUSES = Backoff(60.0, 3600.0)
_MAX_KNOWN = 4096
"""Of those that are remembered; one that is forgotten is tried, and told of, as if it were new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """One thing that stays, though nobody needs it."""

    what: str
    """Its kind, for people and as the label of the metric: `checkpoint`, `log file`."""
    name: str
    """Its path or URI."""
    why: str
    """What was answered to the last try."""
    num_tries: int
    retry_at: float
    """Before that time of the monotonic clock it is not tried again."""
    number: int
    """How many of its kind could not be removed by then, this one included."""

    def __str__(self) -> str:
        count = f"; {self.number} such by now" if self.number > 1 else ""
        return f"{self.what} {self.name} cannot be removed and is left for later: {self.why}{count}"

    @property
    def is_to_be_told(self) -> bool:
        """Return whether to report the failure: at its first try, and then at each doubling of the tries."""
        return self.num_tries == 1 and self.number & (self.number - 1) == 0


class Leftovers:
    """Those of one process. Thread-safe."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: OrderedDict[str, Leftover] = OrderedDict()
        self._failed: Counter[str] = Counter()
        self._numbers: Counter[str] = Counter()
        self._lock = threading.Lock()

    def is_paused(self, name: str) -> Leftover | None:
        """Return the state of one whose next try is not due; None if it may be tried."""
        with self._lock:
            known = self._known.get(name)
            return known if known is not None and self._clock() < known.retry_at else None

    def failed(self, what: str, name: str, why: str) -> Leftover:
        """Note a try that failed, and warn."""
        with self._lock:
            before = self._known.pop(name, None)
            num_tries = 1 if before is None else before.num_tries + 1
            self._failed[what] += 1
            self._numbers[what] += before is None
            known = self._known[name] = Leftover(
                what=what,
                name=name,
                why=why,
                num_tries=num_tries,
                retry_at=self._clock() + _PAUSES.after(num_tries),
                number=self._numbers[what] if before is None else before.number,
            )
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        if known.is_to_be_told:
            logger.warning(str(known))
        else:
            logger.info("still not removed", extra={"object": name, "error": why, "tries": num_tries})
        return known

    def removed(self, name: str) -> None:
        """Record that a leftover is gone."""
        with self._lock:
            self._known.pop(name, None)

    def failures(self) -> Mapping[str, int]:
        """Return tries that failed, by kind."""
        with self._lock:
            return dict(self._failed)


LEFTOVERS = Leftovers()
"""Those of this process."""
