"""One run on a `ChaosStack`: its events as they come, how long it stood still, and its audit."""

import contextlib
import itertools
import math
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from millrace.client import Client
from millrace.client.runs import is_terminal
from millrace.errors import MillraceError, UnavailableError
from millrace.v1 import event_pb2, run_pb2
from millrace_testing.chaos import loop as chaos_loop
from millrace_testing.patience import patient

PROGRESS = ("step_completed", "batch_committed", "policy_published", "policy_served", "checkpoint_saved")
"""Events that say that the run has moved on."""
GIVE_UP_S = 300.0
WAITS_S = 240.0
"""How long something that happens within seconds is waited for: a busy machine is many times slower."""
RECOVERS_WITHIN_S = 15.0
"""From a kill, or the end of an outage, to progress."""
STALLS_S = 150.0
"""A run without any progress event for so long goes on no more, however slow the machine is."""

Event = event_pb2.Event
T = TypeVar("T")


def longest_gap(times: Sequence[float], *, since: float, until: float = math.inf) -> float:
    """Return the longest time without any of `times` (sorted) that begins at `since` or later, and before `until`."""
    marks = [since, *(at for at in times if at > since)]
    return max((later - earlier for earlier, later in itertools.pairwise(marks) if earlier < until), default=0.0)


@dataclass(eq=False)
class ChaosRun:
    """A submitted run that is followed in the background, through reconnects, to its end."""

    address: str
    name: str
    uid: str
    events: list[Event] = field(default_factory=list)
    heard: list[float] = field(default_factory=list)
    """When each event came here, as `time.time()`: writers' clocks may be wrong."""
    reconnects: list[str] = field(default_factory=list)
    """What the watch stream said whenever it was lost."""
    error: str = ""
    """Why following ended before the run did."""

    def __post_init__(self) -> None:
        self._news = threading.Condition()
        self._over = False
        chaos_loop.begin(self._follow())

    # What has happened.

    @property
    def state(self) -> run_pb2.RunState:
        """Return the state after the events received so far."""
        states = [e.state_changed.new_state for e in list(self.events) if e.HasField("state_changed")]
        return states[-1] if states else run_pb2.RUN_STATE_QUEUED

    @property
    def is_over(self) -> bool:
        """Return whether the last event was received, or following the run was given up."""
        return self._over

    def of(self, kind: str) -> list[Event]:
        """Return the events of one kind so far, such as `step_completed`."""
        return [event for event in list(self.events) if event.WhichOneof("body") == kind]

    def steps(self) -> list[int]:
        """Return the completed steps, in the order of their events."""
        return [event.step_completed.step for event in self.of("step_completed")]

    def warnings(self) -> list[tuple[str, str]]:
        """Return (reason, message) of every warning."""
        return [(event.warning.reason, event.warning.message) for event in self.of("warning")]

    # What a test waits for.

    def wait_event(self, matches: Callable[[Event], bool], *, timeout_s: float = WAITS_S, what: str = "") -> Event:
        """Return the first event (also of the past) that matches; AssertionError after `timeout_s`, or if the run
        ends.
        """
        ends = time.monotonic() + timeout_s
        seen = 0
        with self._news:
            while True:
                for event in self.events[seen:]:
                    if matches(event):
                        return event
                seen = len(self.events)
                if self._over or not self._news.wait(max(0.0, ends - time.monotonic())):
                    why = f"the run ended as {self._state_name()}" if self._over else f"{timeout_s:g} s passed"
                    raise AssertionError(f"no {what or 'such event'}: {why}. {self.describe()}")

    def wait_step(self, step: int, *, timeout_s: float = WAITS_S) -> Event:
        """Wait until the optimizer step `step` (from 0) or a later one is completed, and return its event."""
        return self.wait_event(
            lambda e: e.HasField("step_completed") and e.step_completed.step >= step,
            timeout_s=timeout_s,
            what=f"step {step}",
        )

    def wait_done(self, *, stalls_s: float = STALLS_S) -> None:
        """Wait until the run has SUCCEEDED by itself; raise AssertionError if it ends otherwise or stands still for
        `stalls_s`.

        How long it takes in all is the machine's affair, and the test's own limit.
        """
        with self._news:
            moved = -1
            while not self._over and moved != (moved := len(self.progress_times())):
                self._news.wait_for(lambda before=moved: self._over or len(self.progress_times()) > before, stalls_s)
        if self.state != run_pb2.RUN_STATE_SUCCEEDED:
            ended = f"is {self._state_name()}" if self._over else f"made no progress for {stalls_s:g} s"
            raise AssertionError(f"{self.name} {ended}. {self.describe()}")

    def wait_state(self, state: run_pb2.RunState, *, timeout_s: float = WAITS_S, times: int = 1) -> Event:
        """Wait for the `times`-th change to this state, and return its event."""
        seen = 0

        def matches(event: Event) -> bool:
            nonlocal seen
            seen += event.HasField("state_changed") and event.state_changed.new_state == state
            return seen == times

        return self.wait_event(matches, timeout_s=timeout_s, what=run_pb2.RunState.Name(state))

    def pause(self) -> None:
        """Pause the run, and wait until it is paused."""
        paused = sum(event.state_changed.new_state == run_pb2.RUN_STATE_PAUSED for event in self.of("state_changed"))
        self.ask(lambda client: client.runs.pause(self.name, reason="the test wants the workers"))
        self.wait_state(run_pb2.RUN_STATE_PAUSED, times=paused + 1)

    def resume(self) -> None:
        """Resume the run."""
        self.ask(lambda client: client.runs.resume(self.name))

    def cancel(self) -> None:
        """Cancel the run, and wait until it has ended."""
        self.ask(lambda client: client.runs.cancel(self.name, reason="the test has seen enough"))
        with self._news:
            self._news.wait_for(lambda: self._over, GIVE_UP_S)
        assert self.state == run_pb2.RUN_STATE_CANCELLED, self.describe()

    # Figures.

    def progress_times(self) -> list[float]:
        """Return when each progress event was written, by the writers' clocks, as `time.time()` has it."""
        found = [event for event in list(self.events) if event.WhichOneof("body") in PROGRESS]
        return sorted(event.time.seconds + event.time.nanos / 1e9 for event in found)

    def heard_standstill_s(self, since: float) -> float:
        """Return the longest standstill like `standstill_s`, by when events arrived here instead of by their
        writers' clocks.
        """
        events = zip(list(self.events), list(self.heard), strict=False)
        times = [at for event, at in events if event.WhichOneof("body") in PROGRESS]
        return longest_gap(times, since=since)

    def recovery_s(self, killed_at: float) -> float:
        """Return the seconds from a kill to the next progress event, of whichever service."""
        later = [at for at in self.progress_times() if at > killed_at]
        if not later:
            raise AssertionError(f"no progress after the kill. {self.describe()}")
        return later[0] - killed_at

    def require_recovery(self, broken_at: float) -> str:
        """Assert that the run stood still for no longer than promised from then on; describe how long it did."""
        next_s, most_s = self.recovery_s(broken_at), self.standstill_s(broken_at)
        assert most_s <= patient(RECOVERS_WITHIN_S), f"{most_s:.1f} s without progress. {self.describe()}"
        return f"next progress after {next_s:.1f} s, {most_s:.1f} s standstill"

    def standstill_s(self, killed_at: float) -> float:
        """Return the longest time without progress from a kill on: what is committed already may hide the loss
        for a while.
        """
        return longest_gap(self.progress_times(), since=killed_at)

    def describe(self) -> str:
        """Return the newest events and the current waits of the services, for the message of a failure."""
        lines = [str(event).replace("\n", " ")[:300] for event in self.events[-8:]]
        return "\n".join(["The newest events:", *lines, f"reconnects: {self.reconnects[-3:]}", self.error, self._why()])

    def _state_name(self) -> str:
        return run_pb2.RunState.Name(self.state).removeprefix("RUN_STATE_")

    def _why(self) -> str:
        try:
            return f"millrace run why: {self.ask(lambda client: client.runs.explain(self.name)).summary}"
        except (MillraceError, TimeoutError) as error:
            return f"millrace run why: {error}"

    def ask(self, question: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
        """Call `question` with a client of the run's orchestrator, and return the result."""

        async def ask() -> T:
            async with Client(self.address) as client:
                return await question(client)

        return chaos_loop.call(ask())

    # On the harness's loop.

    async def _follow(self) -> None:
        try:
            await self._watch()
        except MillraceError as error:
            self.error = str(error)
        with self._news:
            self._over = True
            self._news.notify_all()

    async def _watch(self) -> None:
        def lost(error: UnavailableError, _: float) -> None:
            self.reconnects.append(f"{error.message}; {error.remedy}")

        async with (
            Client(self.address) as client,
            contextlib.aclosing(client.runs.watch(self.name, on_reconnect=lost, give_up_s=GIVE_UP_S)) as events,
        ):
            async for event in events:
                with self._news:
                    self.heard.append(time.time())
                    self.events.append(event)
                    changed = event.HasField("state_changed")
                    state = event.state_changed.new_state
                    # FAILED is the end only if the stream ends: the run may have been reopened since.
                    self._over = changed and is_terminal(state) and state != run_pb2.RUN_STATE_FAILED
                    self._news.notify_all()
