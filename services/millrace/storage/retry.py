"""Bounded, visible retries of a store's operations (blocking)."""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from millrace.backoff import Backoff
from millrace.errors import MillraceError, UnavailableError
from millrace.telemetry import waits

logger = logging.getLogger(__name__)

T = TypeVar("T")

ATTEMPT_S = 60.0
"""How long one attempt takes at most while nothing is wrong but the time; large objects may take longer."""
QUIET_S = 1.0
"""Operations that are over sooner are no wait worth showing."""
_BACKOFF = Backoff(0.1, 5.0, spread=(0.5, 1.0))


class TransientError(Exception):
    """An attempt failed in a way that another one may mend: 5xx, throttling, time-out, lost connection, no room."""

    def __init__(self, message: str, *, final: MillraceError | None = None, is_answer: bool = False) -> None:
        """Make one; `final` is what to raise when no attempt is left, instead of UnavailableError.

        `is_answer` says that the server itself runs, and fails.
        """
        super().__init__(message)
        self.final = final
        self.is_answer = is_answer


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How long to try: no attempt begins `deadline_s` seconds behind the first failure, or after `max_attempts`.

    A large object takes longer than that; the failure of its first attempt must not be the last one for it.
    """

    deadline_s: float = 60.0
    max_attempts: int = 12

    def run(self, what: str, where: str, attempt: Callable[[int], T]) -> T:
        """Call `attempt(number)` until it returns; `UnavailableError` naming `where` when the policy is exhausted.

        The whole time is one wait, whose reason says what failed last.
        """
        began = time.monotonic()
        number, failing_since = 0, math.inf
        reason = f"object store {where}: {what}"
        deadline_s = self.deadline_s + ATTEMPT_S
        with waits.waiting(reason, waits_on="object store", deadline_s=deadline_s, quiet_s=QUIET_S) as wait:
            while True:
                try:
                    result = attempt(number)
                except TransientError as error:
                    last = error
                else:
                    if number:
                        logger.info("object store answers again: %s", what)
                    return result
                number += 1
                failing_since = min(failing_since, time.monotonic())
                if number == 1:
                    logger.warning("object store fails, retrying: %s at %s: %s", what, where, last)
                delay_s = _BACKOFF.after(number)
                if number >= self.max_attempts or time.monotonic() - failing_since + delay_s > self.deadline_s:
                    break
                tried = f"{reason}, attempt {number + 1} of at most {self.max_attempts} after {last}"
                wait.update(reason=tried, refusal=waits.Refusal.of(last.final))
                time.sleep(delay_s)
        if last.final is not None:
            raise last.final from last
        raise UnavailableError(
            f"the object store {where} failed {number} times in {time.monotonic() - began:.1f} s ({what}): {last}",
            reason="STORE_FAILING" if last.is_answer else "STORE_UNREACHABLE",
            remedy="see its log, it answers with an error each time; or correct MILLRACE_STORE_URL"
            if last.is_answer
            else "check that it runs and that MILLRACE_STORE_URL names its endpoint and bucket",
            metadata={"store": where, "operation": what},
        ) from last
