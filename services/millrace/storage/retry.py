"""Bounded, visible retries of a store's operations (blocking)."""

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from millrace.errors import UnavailableError
from millrace.telemetry import waits

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_DELAY_S = 0.1
_MAX_DELAY_S = 5.0


class TransientError(Exception):
    """An attempt failed in a way that another one may mend: 5xx, throttling, time-out, lost connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How long to try: at most `deadline_s` seconds and `max_attempts` attempts, whichever ends first."""

    deadline_s: float = 60.0
    max_attempts: int = 12

    def run(self, what: str, where: str, attempt: Callable[[int], T]) -> T:
        """Call `attempt(number)` until it returns; `UnavailableError` naming `where` when the policy is exhausted."""
        try:
            return attempt(0)
        except TransientError as error:
            last = error
        ends = time.monotonic() + self.deadline_s
        delay_s = _FIRST_DELAY_S
        number = 1
        logger.warning("object store fails, retrying: %s at %s: %s", what, where, last)
        with waits.waiting(f"object store {where}: {what}", waits_on="store", deadline_s=self.deadline_s):
            while number < self.max_attempts and time.monotonic() + delay_s < ends:
                time.sleep(delay_s * random.uniform(0.5, 1.0))
                delay_s = min(2 * delay_s, _MAX_DELAY_S)
                try:
                    result = attempt(number)
                except TransientError as error:
                    last = error
                    number += 1
                else:
                    logger.info("object store answers again: %s", what)
                    return result
        raise UnavailableError(
            f"the object store {where} failed {number} times in {self.deadline_s:g} s at most ({what}): {last}",
            reason="STORE_UNREACHABLE",
            remedy="check that it runs and that MILLRACE_STORE_URL names its endpoint and bucket",
            metadata={"store": where},
        ) from last
