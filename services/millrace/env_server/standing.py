"""Where each play of this worker stands: at the engine, at a tool, at a reward function, or in other code.

A rollout that runs into its deadline says so, and so does the env-server of what it waits for.
"""

import contextlib
import contextvars
import itertools
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

ENGINE = "the engine"
ELSEWHERE = "the environment's own code"
_NUMBERS = itertools.count()


@dataclass(slots=True)
class Standing:
    """What one play does now: several things at once, where it plays several members."""

    _now: dict[int, tuple[str, float]] = field(default_factory=dict)

    @contextlib.contextmanager
    def at(self, place: str) -> Iterator[None]:
        """Note that something of the play stands there for the length of the block."""
        number = next(_NUMBERS)
        self._now[number] = (place, time.monotonic())
        try:
            yield
        finally:
            self._now.pop(number, None)

    @property
    def longest(self) -> tuple[str, float] | None:
        """The place where something has stood longest, and for how many seconds; None if nothing is noted."""
        found = min(self._now.values(), key=lambda entry: entry[1], default=None)
        return None if found is None else (found[0], time.monotonic() - found[1])

    @property
    def place(self) -> str:
        """Where it has stood longest."""
        longest = self.longest
        return ELSEWHERE if longest is None else longest[0]

    def describe(self, own_line: str) -> str:
        """`for 18.2 s at reward function 'slow'`; where nothing is noted, a line of the environment's own code."""
        if (longest := self.longest) is not None:
            return f"for {longest[1]:.1f} s at {longest[0]}"
        return f"in {own_line or ELSEWHERE}"


_STANDING: contextvars.ContextVar[Standing | None] = contextvars.ContextVar("millrace_standing", default=None)


def begin() -> Standing:
    """Note from here on, in this task and those that it starts, where the play stands."""
    standing = Standing()
    _STANDING.set(standing)
    return standing


def at(place: str) -> contextlib.AbstractContextManager[None]:
    """The block is at that place; nothing is noted outside of a play."""
    standing = _STANDING.get()
    return contextlib.nullcontext() if standing is None else standing.at(place)


def places(standings: Iterable[Standing]) -> Counter[str]:
    """How many plays stand where."""
    return Counter(standing.place for standing in standings)


def noting_engine() -> aiohttp.TraceConfig:
    """Return what makes every request of a session count as time at the engine."""
    config = aiohttp.TraceConfig()

    async def start(_: Any, context: Any, __: Any) -> None:
        context.block = at(ENGINE)
        context.block.__enter__()

    async def end(_: Any, context: Any, __: Any) -> None:
        context.block.__exit__(None, None, None)

    config.on_request_start.append(start)
    config.on_request_end.append(end)
    config.on_request_exception.append(end)
    return config
