"""Objects that this process failed to remove: their number by kind, and when each may be tried again.

A failed removal must not be tried at every turn, nor be reported at every try: the pauses grow, and of many leftovers
of one kind a warning is logged for those whose number is a power of two.
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
"""The most leftovers that are remembered; one that is forgotten is tried, and reported, as if it were new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """An object that is not needed and could not be removed."""

    what: str
    """Its kind, in messages and as the label of the metric: `checkpoint`, `log file`."""
    name: str
    """Its path or URI."""
    why: str
    """The error of the last try."""
    num_tries: int
    retry_at: float
    """The monotonic time before which it is not tried again."""
    number: int
    """How many of its kind had failed when it was first tried, this one included."""

    def __str__(self) -> str:
        count = f"; {self.number} such by now" if self.number > 1 else ""
        return f"{self.what} {self.name} cannot be removed and is left for later: {self.why}{count}"

    @property
    def is_reportable(self) -> bool:
        """Return whether this failure is logged as a warning: it is the first try to remove the object, and `number` is
        a power of 2.
        """
        return self.num_tries == 1 and self.number & (self.number - 1) == 0


class Leftovers:
    """The leftovers of one process. Thread-safe."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Make an empty record; `clock` gives monotonic seconds."""
        self._clock = clock
        self._known: OrderedDict[str, Leftover] = OrderedDict()
        self._failed: Counter[str] = Counter()
        self._numbers: Counter[str] = Counter()
        self._lock = threading.Lock()

    def is_paused(self, name: str) -> Leftover | None:
        """Return the record of the object `name` if it could not be removed and must not be tried again yet; otherwise
        None.

        The record has the error of the last try, and the time of the next one.
        """
        with self._lock:
            known = self._known.get(name)
            return known if known is not None and self._clock() < known.retry_at else None

    def failed(self, what: str, name: str, why: str) -> Leftover:
        """Record that an object could not be removed, and return the record, which has the time of the next try.

        `what` is its kind, `name` its path or URI, `why` the error. A warning is logged at the first failure of an
        object, and of many of one kind only at each power of two; other failures are logged as information.
        """
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
        if known.is_reportable:
            logger.warning(str(known))
        else:
            logger.info("still not removed", extra={"object": name, "error": why, "tries": num_tries})
        return known

    def removed(self, name: str) -> None:
        """Forget that the object `name` could not be removed, because now it was."""
        with self._lock:
            self._known.pop(name, None)

    def failures(self) -> Mapping[str, int]:
        """Return the number of tries to remove an object that failed, by kind."""
        with self._lock:
            return dict(self._failed)


LEFTOVERS = Leftovers()
"""The leftovers of this process."""
