"""Where the time of an update goes: the part in which the engine stands still, and the one in which answers wait."""

import logging
import time
from collections.abc import Iterable

logger = logging.getLogger(__name__)


class UpdateTimes:
    """Notes when each part of an update ends, and logs them together.

    `standstill_s` is from the order to pause, which waits for the running step, until vLLM goes on. `held_s` is from
    the same moment until the version is proved and the gate opens: so long no request begins and no answer leaves.
    `busy_s` is what decoding stood still for while the version was staged, in many parts of `longest_busy_s` at most.
    """

    def __init__(self) -> None:
        self.prepare_s = self.busy_s = self.longest_busy_s = 0.0
        self.standstill_s: float | None = None
        self._began: float | None = None
        self._last = 0.0
        self._parts: dict[str, float] = {}

    def begin_staging(self) -> None:
        """The workers are about to be given a version."""
        self.busy_s = self.longest_busy_s = 0.0

    def count_busy(self, seconds: Iterable[float]) -> None:
        """The workers took so long for a call, side by side, in which they did not decode."""
        longest = max(seconds, default=0.0)
        self.busy_s += longest
        self.longest_busy_s = max(self.longest_busy_s, longest)

    def begin(self) -> None:
        """The engine is about to be paused."""
        self._began = self._last = time.monotonic()
        self.standstill_s, self._parts = None, {}

    def mark(self, part: str) -> None:
        """A part of the update has ended."""
        now = time.monotonic()
        self._parts[f"{part}_s"] = self._parts.get(f"{part}_s", 0.0) + now - self._last
        self._last = now

    def go_on(self) -> None:
        """The engine goes on, if it had not before."""
        if self._began is not None and self.standstill_s is None:
            self.standstill_s = time.monotonic() - self._began

    def end(self) -> None:
        """The update is over, well or not."""
        self.go_on()
        self._began = None

    def report(self, version: int) -> None:
        """The gate is open; logs everything."""
        if self._began is None:  # a load, during which nothing was served
            return
        held_s = time.monotonic() - self._began
        parts = {name: round(seconds, 4) for name, seconds in self._parts.items()}
        whole = {"held_s": round(held_s, 4), "standstill_s": round(self.standstill_s or 0.0, 4)}
        extra = {"version": version, **whole, "prepare_s": round(self.prepare_s, 4), **parts}
        extra |= {"busy_s": round(self.busy_s, 4), "longest_busy_s": round(self.longest_busy_s, 4)}
        logger.info("policy applied and proved", extra=extra)
