"""The present waits of this process: every wait has a reason, an age and a deadline.

`millrace run why` prints the waits of all services, so every wait that can last longer than a moment is wrapped:


    with waits.waiting("batch 12", waits_on="orchestrator", deadline_s=60) as wait:
        ...
        wait.update(reason="batch 12, chunk 3 of 7")

A wait that is ordinary for a moment (a Redis command, a call to another service) is registered with `quiet_s` and shown
only once it is older; thousands of equal waits (for answers of the engine) are one wait with a count (`shared`).
Registering costs a few microseconds, works from any thread and needs no event loop. The conversion to the wire is in
`millrace.rpc.worker`, because this package imports no protobuf.
"""

import asyncio
import contextlib
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from millrace.errors import MillraceError, is_refusal
from millrace.telemetry.logging import bind

COUNT = "{n}"
"""Is replaced, in the reason of a shared wait, by the number of waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The refusal of something that is waited for: it answers with an error that time alone may never end."""

    reason: str
    """UPPER_SNAKE."""
    message: str
    remedy: str = ""

    @classmethod
    def of(cls, error: BaseException | None) -> "Refusal | None":
        """Return the refusal that an error is; None for an error that may pass with time, and if `error` is None."""
        if not isinstance(error, MillraceError) or not is_refusal(error):
            return None
        return cls(reason=error.reason, message=error.message, remedy=error.remedy or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One wait as it was when the snapshot was taken."""

    owner: str
    """The service instance that waits."""
    reason: str
    """A description of what is waited for ("batch 12")."""
    waits_on: str = ""
    """The component that it waits on ("trainer", "env-server", ...); empty if none is known."""
    age_s: float = 0.0
    """Seconds since the wait began, without times in which this process itself did not run."""
    deadline_s: float = 0.0
    """Seconds after which the owner gives up or acts; 0 is a wait without a limit, which is never overdue."""
    run: str = ""
    """Uid of the run that waits; empty if it concerns the whole process."""
    refusal: Refusal | None = None
    """The last refusal, if what is waited for answers and refuses; time alone may never end such a wait."""

    @property
    def is_overdue(self) -> bool:
        """Return whether the wait is older than its deadline, which means that its owner is stuck."""
        return 0 < self.deadline_s < self.age_s


AgeOf = Callable[[float], float]
"""Seconds since a moment on the registry's clock."""


class Registered(Protocol):
    """A wait in a registry."""

    def describe(self, owner: str, age_of: "AgeOf") -> Wait | None:
        """Return the wait as it is now, for a snapshot of `owner`'s waits; None while it is too young to be shown.

        `age_of` returns the seconds since a moment on the registry's clock.
        """
        ...


class Waiting:
    """A wait, in progress while its `with` block runs. Not reentrant: one object is one wait."""

    __slots__ = (
        "_ahead",
        "_began",
        "_deadline_s",
        "_key",
        "_quiet_s",
        "_reason",
        "_refusal",
        "_registry",
        "_run",
        "_waits_on",
    )

    def __init__(
        self,
        registry: "WaitRegistry",
        reason: str,
        waits_on: str,
        deadline_s: float,
        quiet_s: float = 0.0,
        refusal: Refusal | None = None,
    ) -> None:
        """Make a wait that begins with its `with` block.

        `reason` says what is waited for, `waits_on` which component must act. The wait is overdue once it is older than
        `deadline_s` (0: never), and is not shown while it is younger than `quiet_s`. `refusal` is the last refusal by
        what is waited for; None if it has refused nothing.
        """
        self._registry = registry
        self._reason = reason
        self._waits_on = waits_on
        self._deadline_s = deadline_s
        self._quiet_s = quiet_s
        self._refusal = refusal
        self._run = ""
        self._ahead: Ahead | None = None
        self._began = 0.0
        self._key = 0

    def update(
        self,
        *,
        reason: str | None = None,
        waits_on: str | None = None,
        deadline_s: float | None = None,
        refusal: Refusal | None = None,
    ) -> None:
        """Change the wait's reason, component or deadline (None: as they are); its age goes on.

        `refusal` None clears the last refusal.
        """
        with self._registry.lock:
            self._refusal = refusal
            self._reason = self._reason if reason is None else reason
            self._waits_on = self._waits_on if waits_on is None else waits_on
            self._deadline_s = self._deadline_s if deadline_s is None else deadline_s

    def __enter__(self) -> Self:
        """Register the wait, which begins now and is of the run that `of_run` names, and of the work done `ahead`."""
        self._began = self._registry.clock()
        self._run = _RUN.get()
        self._ahead = _AHEAD.get()
        self._key = self._registry.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Forget the wait, however the block ended."""
        self._registry.remove(self._key)

    def describe(self, owner: str, age_of: AgeOf) -> Wait | None:
        """Return the wait as it is now, for a snapshot of `owner`'s waits; None while it is too young to be shown.

        None also for a wait of work done ahead whose result nobody needs yet. `age_of` returns the seconds since a
        moment on the registry's clock.
        """
        began = self._began
        if self._ahead is not None:
            if self._ahead.needed_since is None:
                return None
            began = max(began, self._ahead.needed_since)
        age_s = age_of(began)
        if age_s < self._quiet_s:
            return None
        return Wait(
            owner=owner,
            reason=self._reason,
            waits_on=self._waits_on,
            age_s=age_s,
            deadline_s=self._deadline_s,
            run=self._run,
            refusal=self._refusal,
        )


@dataclass(slots=True, kw_only=True)
class SharedWait:
    """Several equal waits as one, whose age is that of the longest."""

    reason: str
    waits_on: str
    deadline_s: float
    quiet_s: float
    run: str
    key: int = 0
    refusal: Refusal | None = None
    began: dict[int, float] = field(default_factory=dict)
    """When each of the waits began, oldest first."""

    def show(self, reason: str = "", refusal: Refusal | None = None) -> None:
        """Show the wait from now on, however young, because it is known to be unusual.

        An empty `reason`, or no `refusal`, leaves what the wait has.
        """
        self.quiet_s = 0.0
        self.refusal = refusal or self.refusal
        self.reason = reason or self.reason

    def describe(self, owner: str, age_of: AgeOf) -> Wait | None:
        """Return the waits as one, as old as the oldest, for a snapshot of `owner`'s waits; None while too young to be
        shown.

        `age_of` returns the seconds since a moment on the registry's clock. The caller has the registry's lock.
        """
        count = len(self.began)
        if count == 0 or (age_s := age_of(next(iter(self.began.values())))) < self.quiet_s:
            return None
        if COUNT in self.reason:
            reason = self.reason.replace(COUNT, str(count))
        else:
            reason = self.reason if count == 1 else f"{self.reason} ({count} at once)"
        return Wait(
            owner=owner,
            reason=reason,
            waits_on=self.waits_on,
            age_s=age_s,
            deadline_s=self.deadline_s,
            run=self.run,
            refusal=self.refusal,
        )


class WaitRegistry:
    """The waits of one process. The module functions use one shared registry; tests make their own."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        stood_still: Callable[[float, float], float] = lambda began, ended: 0.0,
    ) -> None:
        """Make an empty registry; `clock` returns monotonic seconds.

        `stood_still` returns for how many seconds between two moments this process did not run.
        """
        self.clock = clock
        self._stood_still = stood_still
        self.lock = threading.Lock()
        self._keys = itertools.count(1)
        self._waits: dict[int, Registered] = {}
        self._crowds: dict[tuple[str, str, str], SharedWait] = {}

    def waiting(
        self,
        reason: str,
        *,
        waits_on: str = "",
        deadline_s: float = 0.0,
        quiet_s: float = 0.0,
        refusal: Refusal | None = None,
    ) -> Waiting:
        """Return a context manager that registers a wait while its block runs.

        `reason` says what is waited for, `waits_on` which component has to act. The wait counts as overdue once it is
        older than `deadline_s` (0: never), and is shown once it is `quiet_s` old. `refusal` is the last refusal by what
        is waited for; None if it has refused nothing.
        """
        return Waiting(self, reason, waits_on, deadline_s, quiet_s, refusal)

    @contextlib.contextmanager
    def shared(
        self, reason: str, *, waits_on: str = "", deadline_s: float = 0.0, quiet_s: float = 0.0
    ) -> Iterator[SharedWait]:
        """Register one of many equal waits while the block runs: those of one reason, component and run are shown as
        one.

        "{n}" in the reason becomes their number; the age is that of the oldest. `waits_on` is the component that has to
        act. `deadline_s` is the age from which the wait counts as overdue, 0 for never; it is shown once it is
        `quiet_s` old. The first of the equal waits sets both.
        """
        # The run is part of the name: `run why` shows only the waits of one run.
        name = (reason, waits_on, _RUN.get())
        with self.lock:
            crowd = self._crowds.get(name)
            if crowd is None:
                crowd = SharedWait(
                    reason=reason, waits_on=waits_on, deadline_s=deadline_s, quiet_s=quiet_s, run=name[2]
                )
                crowd.key = next(self._keys)
                self._crowds[name] = self._waits[crowd.key] = crowd
            member = next(self._keys)
            crowd.began[member] = self.clock()
        try:
            yield crowd
        finally:
            with self.lock:
                del crowd.began[member]
                if not crowd.began:
                    del self._crowds[name], self._waits[crowd.key]

    def add(self, wait: Registered) -> int:
        """Register a wait and return the key by which `remove` knows it."""
        with self.lock:
            key = next(self._keys)
            self._waits[key] = wait
            return key

    def remove(self, key: int) -> None:
        """Forget the wait with this key."""
        with self.lock:
            self._waits.pop(key, None)

    def snapshot(self, owner: str, *, min_age_s: float = 0.0) -> list[Wait]:
        """Return the present waits that are at least `min_age_s` seconds old, longest first; each names `owner` as who
        waits.
        """
        now = self.clock()

        def age_of(began: float) -> float:
            return max(0.0, now - began - self._stood_still(began, now))

        # Under the lock: a wait is not read in the middle of an `update`.
        with self.lock:
            found = [wait.describe(owner, age_of) for wait in self._waits.values()]
        shown = (wait for wait in found if wait is not None and wait.age_s >= min_age_s)
        return sorted(shown, key=lambda wait: -wait.age_s)


class LastingWait:
    """One wait of a loop that polls: its age counts from the first poll that waited for the same thing.

    wait = LastingWait()
    while not done:
        wait.on("2 of 8 groups for batch 3", waits_on="env-server", key="groups 3")
        await tick()
    wait.over()
    """

    def __init__(self, registry: WaitRegistry | None = None) -> None:
        """Make a wait that has not begun, in a registry; None is that of this process."""
        self._registry = registry or REGISTRY
        self._key = ""
        self._waiting: Waiting | None = None

    def on(
        self,
        reason: str,
        *,
        waits_on: str = "",
        key: str,
        deadline_s: float = 0.0,
        refusal: Refusal | None = None,
    ) -> None:
        """Wait, or go on waiting, for the thing that `key` names; another key ends the present wait and begins a new
        one.

        `reason` describes what is waited for, in words that may change meanwhile; `waits_on` says which component must
        act. The wait is overdue once it is older than `deadline_s` (0: never). `refusal` is that of the last try, None
        if it was not refused.
        """
        if self._waiting is not None and self._key == key:
            self._waiting.update(reason=reason, waits_on=waits_on, deadline_s=deadline_s, refusal=refusal)
            return
        self.over()
        self._key = key
        self._waiting = self._registry.waiting(reason, waits_on=waits_on, deadline_s=deadline_s, refusal=refusal)
        self._waiting.__enter__()

    def over(self) -> None:
        """End the wait, if there is one."""
        if self._waiting is not None:
            self._waiting.__exit__(None, None, None)
            self._waiting = None


class Ahead:
    """Work that is done before anyone needs its result, such as a read of the next batch during a step.

    Its waits hold nobody up: they are hidden until `need` is called, and their ages count from that call. Those of
    `shared` are shown all the same: that Redis does not answer concerns others, too. Used as a context manager around
    the work, in the task that does it.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Make it of work whose result nobody needs yet; `clock` is that of the registry of its waits."""
        self._clock = clock
        self._token: Token[Ahead | None] | None = None
        self.needed_since: float | None = None
        """Moment on the clock at which `need` was first called; None if it was not."""

    def need(self) -> None:
        """Show the waits of the work from now on. Later calls change nothing."""
        if self.needed_since is None:
            self.needed_since = self._clock()

    def __enter__(self) -> Self:
        """Make the waits that this task and the tasks that it starts register those of this work."""
        self._token = _AHEAD.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Let later waits of this task be shown as usual."""
        assert self._token is not None
        _AHEAD.reset(self._token)


# When this process itself did not run: stopped by a signal, its event loop blocked, or its machine overloaded.
#
# The monotonic clock goes on meanwhile, so that every deadline seems to be over and every neighbour seems to have been
# silent, although this process did not listen. Code that measures how long another process took subtracts these times.
#
#     waits.watch()                       # on the event loop whose gaps count
#     ...
#     took_s = now - began - waits.METER.within(began, now)

TICK_S = 0.5
LEAST_S = 1.0
"""Shorter gaps are an ordinary busy moment."""
_REMEMBERED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Standstill:
    """A past time in which this process did not run, on its monotonic clock."""

    began: float
    ended: float

    @property
    def seconds(self) -> float:
        """Return the duration in seconds."""
        return self.ended - self.began


class Meter:
    """Finds gaps between the ticks of an event loop, which ticks as long as the process runs."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Make a meter that knows of no time yet; `clock` gives monotonic seconds."""
        self._clock = clock
        self._ticked: float | None = None
        self._due_s = TICK_S
        self._is_ticking: Callable[[], bool] = lambda: True
        self.found: deque[Standstill] = deque(maxlen=_REMEMBERED)
        """The newest standstills, oldest first."""

    def begin(self, *, is_ticking: Callable[[], bool] = lambda: True) -> None:
        """Expect ticks from now on, while `is_ticking` returns true; nothing is known of earlier times."""
        self._is_ticking = is_ticking
        self._ticked = self._clock()

    def tick(self, *, due_s: float = TICK_S) -> None:
        """Record a tick, and a standstill if it came late; the next one is due in `due_s` seconds."""
        gap = self._gap(self._clock())
        if gap is not None:
            self.found.append(gap)
        self._ticked, self._due_s = self._clock(), due_s

    def within(self, began: float, ended: float) -> float:
        """Return for how many of the seconds between the moments `began` and `ended` (monotonic) this process did not
        run.

        A gap that is not over yet, because no tick has come since, counts up to now.
        """
        gap = self._gap(self._clock()) if self._is_ticking() else None
        gaps = [*self.found, gap] if gap is not None else self.found
        return sum(max(0.0, min(ended, each.ended) - max(began, each.began)) for each in gaps)

    def _gap(self, now: float) -> Standstill | None:
        """Return the standstill from the moment at which the last tick was due until `now`; None if it is at most
        `LEAST_S` long.
        """
        if self._ticked is None or now - self._ticked - self._due_s <= LEAST_S:
            return None
        return Standstill(began=self._ticked + self._due_s, ended=now)


METER = Meter()
"""The meter of this process."""
_watched: "weakref.ref[asyncio.AbstractEventLoop] | None" = None


def watch() -> None:
    """Have the running event loop tick for `METER` until it is closed; does nothing if it does so already."""
    global _watched
    loop = asyncio.get_running_loop()
    if _watched is not None and _watched() is loop:
        return
    # Weak: a loop that is closed and dropped must not be kept alive by its last tick.
    _watched = weakref.ref(loop)
    METER.begin(is_ticking=loop.is_running)
    _tick(_watched)


def _tick(watched: "weakref.ref[asyncio.AbstractEventLoop]") -> None:
    """Tick for `METER`, and again every `TICK_S` on the same event loop, until the loop is gone or another one is
    watched.
    """
    loop = watched()
    if loop is None or watched is not _watched:  # another loop of this process has begun to tick
        return
    METER.tick()
    loop.call_later(TICK_S, _tick, watched)


REGISTRY = WaitRegistry(stood_still=METER.within)
_RUN: ContextVar[str] = ContextVar("millrace_waits_run", default="")
_AHEAD: ContextVar[Ahead | None] = ContextVar("millrace_waits_ahead", default=None)


@contextlib.contextmanager
def of_run(uid: str) -> Iterator[None]:
    """Assign the waits and log lines of this block, and of tasks that it starts, to the run with this uid."""
    token = _RUN.set(uid)
    try:
        with bind(run=uid):
            yield
    finally:
        _RUN.reset(token)


def waiting(
    reason: str,
    *,
    waits_on: str = "",
    deadline_s: float = 0.0,
    quiet_s: float = 0.0,
    refusal: Refusal | None = None,
) -> Waiting:
    """Return a context manager that registers a wait of this process while its block runs.

    `reason` says what is waited for, `waits_on` which component has to act. The wait counts as overdue once it is older
    than `deadline_s` (0: never), and is shown once it is `quiet_s` old. `refusal` is the last refusal by what is waited
    for; None if it has refused nothing.
    """
    return REGISTRY.waiting(reason, waits_on=waits_on, deadline_s=deadline_s, quiet_s=quiet_s, refusal=refusal)


def shared(
    reason: str, *, waits_on: str = "", deadline_s: float = 0.0, quiet_s: float = 0.0
) -> contextlib.AbstractContextManager[SharedWait]:
    """Return a context manager that registers one of many equal waits of this process, which are shown as one.

    Equal are those of one reason, component (`waits_on`) and run. "{n}" in the reason becomes their number; the age is
    that of the oldest. `deadline_s` is the age from which the wait counts as overdue, 0 for never; it is shown once it
    is `quiet_s` old.
    """
    return REGISTRY.shared(reason, waits_on=waits_on, deadline_s=deadline_s, quiet_s=quiet_s)


def snapshot(owner: str, *, min_age_s: float = 0.0) -> list[Wait]:
    """Return the waits of this process that are at least `min_age_s` seconds old, longest first.

    Each names `owner` as who waits.
    """
    return REGISTRY.snapshot(owner, min_age_s=min_age_s)
