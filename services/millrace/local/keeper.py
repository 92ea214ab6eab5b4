"""Keeps a started stack alive: probes its processes, kills what no longer answers, and starts again what died.

    keeper = Keeper(supervisor, probes, ...)
    await keeper.run()          # returns never; ProcessDiedError when a process is in a crash loop

It begins when every process was ready once: an earlier death is an error of the start, which a restart would hide.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import BinaryIO, NoReturn

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millrace.backoff import Backoff
from millrace.errors import first_error
from millrace.local.redis import EmbeddedRedis
from millrace.processes.supervisor import Child, Supervisor, describe_death
from millrace.processes.table import is_stopped
from millrace.rpc.access import ClientAccess
from millrace.rpc.channel import open_channel
from millrace.storage.clean_up import remove
from millrace.telemetry import waits

_READY_POLL_S = 0.1
_REPORT_READY_AFTER_S = 1.0


# Whether a process that is alive still answers: probes, and the arithmetic of their failures.
#
# One failed health check means little on a busy laptop. A process is reported after `NAME_AFTER_S` and killed after
# `KILL_AFTER_S` without an answer, and only if `LEAST_FAILURES` checks failed in a row, if the supervisor itself was on
# time meanwhile, and if the machine is not the reason: another process answered, or the kernel reports that this one
# is stopped.

PERIOD_S = 5.0
CHECK_TIMEOUT_S = 2.0
NAME_AFTER_S = 10.0
KILL_AFTER_S = 30.0
KILL_SICK_AFTER_S = 60.0
"""The same for a process that answers that it is not healthy: it has waited itself before it answered so."""
LEAST_FAILURES = 4
_LATE_S = 3 * PERIOD_S


class Answer(Enum):
    """The result of a probe."""

    SERVING = auto()
    SICK = auto()
    """It answers that it does not serve."""
    SILENT = auto()


class LivenessAction(Enum):
    """What to do after an answer."""

    FINE = auto()
    NAME = auto()
    """Report it to the user, once."""
    KILL = auto()


Probe = Callable[[], Awaitable[Answer]]


def probe_service(address: str, access: ClientAccess | None = None) -> Probe:
    """Return a function that checks the health of the process at a gRPC address, on a new connection each time.

    An old connection may be backing off. `access` is how to call it; None is plain text, as on loopback.
    """
    how = ClientAccess.plain() if access is None else access

    async def ask() -> Answer:
        """Return what the process's health service answers within `CHECK_TIMEOUT_S`."""
        async with open_channel(address, access=how) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined] - set by its constructor
            try:
                answer = await check(health_pb2.HealthCheckRequest(service=""), timeout=CHECK_TIMEOUT_S)
            except grpc.aio.AioRpcError:
                return Answer.SILENT
        return Answer.SERVING if answer.status == health_pb2.HealthCheckResponse.SERVING else Answer.SICK

    return ask


def probe_redis(redis: EmbeddedRedis) -> Probe:
    """Return a function that checks the embedded Redis by a PING."""

    async def ask() -> Answer:
        """Return whether the server answers PING within `CHECK_TIMEOUT_S`."""
        is_ready = await asyncio.to_thread(redis.is_ready, timeout_s=CHECK_TIMEOUT_S)
        return Answer.SERVING if is_ready else Answer.SILENT

    return ask


class AnswerHistory:
    """The answers of one life of a process. Times are monotonic seconds."""

    def __init__(self, now: float) -> None:
        """Begin the history of a process that serves at `now`, in monotonic seconds."""
        self.failures = 0
        self.answer = Answer.SERVING
        self._well_at = now
        self._asked_at = now
        self._is_named = False

    def silent_s(self, now: float) -> float:
        """Return for how many seconds before `now` (monotonic) the process has not served.

        Times in which the supervisor itself was not running are left out (see `hear`).
        """
        return now - self._well_at

    def hear(self, answer: Answer, now: float, *, is_certain: bool) -> LivenessAction:
        """Record an answer that came at `now` (monotonic), and return what to do about the process.

        NAME is returned once per silence, KILL after a longer one; a process that cannot be reached or reports that it
        does not serve counts as silent. A silence ends with SERVING, and with an answer that comes much later than the
        one before: then the supervisor itself did not run. `is_certain` says that the machine is not the cause of a
        silence; without it KILL is never returned.
        """
        was_late = now - self._asked_at > _LATE_S  # the machine slept, or we did not get the processor either
        self._asked_at, self.answer = now, answer
        if answer is Answer.SERVING or was_late:
            self._well_at, self.failures, self._is_named = now, 0, False
            return LivenessAction.FINE
        self.failures += 1
        bound_s = KILL_SICK_AFTER_S if answer is Answer.SICK else KILL_AFTER_S
        if self.silent_s(now) >= bound_s and self.failures >= LEAST_FAILURES and is_certain:
            return LivenessAction.KILL
        if self.silent_s(now) >= NAME_AFTER_S and not self._is_named:
            self._is_named = True
            return LivenessAction.NAME
        return LivenessAction.FINE


class Keeper:
    """Keeps the processes of one supervisor alive."""

    def __init__(
        self,
        supervisor: Supervisor,
        probes: Mapping[str, Probe],
        *,
        note: Callable[[str], None],
        on_change: Callable[[], None],
        ready_deadline_s: float,
        is_restarting: bool = True,
        has_liveness: bool = True,
        settled_after_s: Mapping[str, float] | None = None,
    ) -> None:
        """Make the keeper of a supervisor's children; `probes` checks each by its name, and all serve now.

        `note` gets messages for the user; `on_change` is called when pids have changed. A restarted process that does
        not serve within `ready_deadline_s` is killed, which counts as a death. Without `is_restarting` no process is
        started again, and without `has_liveness` none is probed. `settled_after_s`, by name, is for those that need
        longer than others to show that a life is a good one.
        """
        self._supervisor = supervisor
        self.probes = probes
        self._note = note
        self._on_change = on_change
        self._ready_deadline_s = ready_deadline_s
        self._has_liveness = has_liveness
        settled = settled_after_s or {}
        self.lives = {name: RestartHistory(settled_after_s=settled.get(name, SETTLED_AFTER_S)) for name in probes}
        self._is_restarting = is_restarting
        self._heard_at: dict[str, float] = {}
        self.logs: Path | None = None
        """A directory whose logs are rotated while `run` runs."""

    def restarts(self) -> dict[str, int]:
        """Return how often each process was started again, by name."""
        return {name: lives.restarts for name, lives in self.lives.items()}

    async def run(self) -> NoReturn:
        """Keep the processes alive until cancelled.

        Raise ProcessDiedError for one in a crash loop, or not to be restarted.
        """
        now = time.monotonic()
        for lives in self.lives.values():
            lives.ready(now)
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._has_liveness:
                    for name in self.probes:
                        tasks.create_task(self._check(name), name=f"liveness of {name}")
                if self.logs is not None:
                    tasks.create_task(keep_bounded(self.logs, note=self._note), name="rotation of logs")
                while True:
                    child = await self._supervisor.next_death()
                    tasks.create_task(self._revive(child), name=f"restart of {child.spec.name}")
        # A task group raises groups, and callers expect the error of one process.
        except BaseExceptionGroup as group:
            raise first_error(group) from None

    async def _revive(self, child: Child) -> None:
        """Start a dead process again, after a pause, and wait until it serves.

        Raise ProcessDiedError if it is given up.
        """
        name, lives = child.spec.name, self.lives[child.spec.name]
        exit_kind = ExitKind.of(await child.exited)
        decision = lives.end(time.monotonic(), exit_kind)
        given_up = decision.short_lives if self._is_restarting else None
        # In a thread: it reads the end of a log, and the other processes are watched meanwhile.
        error = await asyncio.to_thread(describe_death, child, given_up_after=given_up)
        # Before the new life: what the old one has left may hold what that needs, such as its port.
        await self._supervisor.end_rest(child)
        if decision.is_hopeless or not self._is_restarting:
            self._note(f"{name} died: {error.how}; it is not started again")
            raise error
        await asyncio.sleep(decision.delay_s)
        lives.begin()
        again = await self._supervisor.start(child.spec)
        self._on_change()
        ended = "ended" if exit_kind is ExitKind.ORDERLY else "died"
        self._note(f"{name} {ended}: {error.how}; started again (restart {lives.restarts})")
        await self._until_ready(name, again)

    async def _until_ready(self, name: str, child: Child) -> None:
        """Wait until the process serves or has died again; kill it if it does neither within the deadline."""
        began = time.monotonic()
        ends = began + self._ready_deadline_s
        with waits.waiting(f"{name} to be ready again", waits_on=name, deadline_s=self._ready_deadline_s):
            while child.is_alive and time.monotonic() < ends:
                if await self.probes[name]() is Answer.SERVING and child.is_alive:
                    now = time.monotonic()
                    self.lives[name].ready(now)
                    if now - began > _REPORT_READY_AFTER_S or name == "redis":  # everybody waits for Redis
                        self._note(f"{name} is ready again after {now - began:.1f} s")
                    return
                await asyncio.sleep(_READY_POLL_S)
        if child.is_alive:
            self._note(f"{name} is not ready {self._ready_deadline_s:.0f} s after its start: killing it")
            await self._supervisor.end_rest(child)

    async def _check(self, name: str) -> None:
        """Check the health of the process `name`, in each of its lives, until cancelled.

        Kill a life that stops answering.
        """
        # unregistered wait: a periodic look; what it awaits is registered where it is awaited
        while True:
            await asyncio.sleep(PERIOD_S)
            child = self._supervisor.children[name]
            if self._is_serving(child):  # else it is between two lives: nothing is expected of it
                await self._check_life(child)

    async def _check_life(self, child: Child) -> None:
        """Probe a process until it ends or is replaced, and kill it if it is silent for too long."""
        name, history = child.spec.name, AnswerHistory(time.monotonic())
        # unregistered wait: a periodic look; what it awaits is registered where it is awaited
        while self._is_serving(child):
            answer = await self.probes[name]()
            now = time.monotonic()
            if answer is not Answer.SILENT:
                self._heard_at[name] = now
            is_certain = answer is Answer.SICK or is_stopped(child.pid) or self._others_answer(name, now)
            action = history.hear(answer, now, is_certain=is_certain)
            message = f"{name} {_what(answer)} for {history.silent_s(now):.0f} s{_why(child)}"
            if action is LivenessAction.NAME:
                self._note(message)
            elif action is LivenessAction.KILL and child.is_alive:
                self._note(f"{message}: killing it")
                await self._supervisor.end_rest(child)
                return
            await asyncio.sleep(PERIOD_S)

    def _is_serving(self, child: Child) -> bool:
        """Return whether this is the newest life of a process, is alive, and was ready once."""
        name = child.spec.name
        is_newest = child is self._supervisor.children[name]
        return is_newest and child.is_alive and self.lives[name].ready_at is not None

    def _others_answer(self, name: str, now: float) -> bool:
        """Return whether another process than `name` has answered within `NAME_AFTER_S` before `now` (monotonic)."""
        recent = now - NAME_AFTER_S
        return any(at > recent for other, at in self._heard_at.items() if other != name)


def _what(answer: Answer) -> str:
    """Return what a process did instead of serving, in words."""
    return "says that it is not healthy" if answer is Answer.SICK else "has not answered its health check"


def _why(child: Child) -> str:
    """Return why a process does not answer, as the end of a sentence; "" if that is not known."""
    return " (it is stopped by a signal or a debugger)" if is_stopped(child.pid) else ""


# When a process that died is started again, and when that is given up: arithmetic without processes or clocks.
#
# A death counts until a life has lasted `SETTLED_AFTER_S`. A SIGKILL comes from outside (a person, the kernel out of
# memory, our own liveness check) and means less about the process than a death of its own: it weighs a quarter.

BACKOFF = Backoff(0.2, 10.0, factor=3.0)
SETTLED_AFTER_S = 30.0
"""A life that lasted this long after it was ready was a good one: earlier deaths are forgotten."""
CRASH_LOOP = 5.0
"""Total weight of deaths in a row, none of a settled process, that makes a crash loop."""


class ExitKind(Enum):
    """How a process ended."""

    ORDERLY = 0.0
    """Exit code 0: a SIGTERM to have it restarted."""
    KILLED = 0.25
    """SIGKILL."""
    CRASHED = 1.0
    """Another signal or exit code: a fault of its own."""

    @classmethod
    def of(cls, returncode: int) -> "ExitKind":
        """Return how a process ended, by its return code: minus the number of the signal that ended it, or its exit
        code.
        """
        return {0: cls.ORDERLY, -9: cls.KILLED}.get(returncode, cls.CRASHED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartDecision:
    """What to do about one death."""

    is_hopeless: bool
    """A crash loop: starting it again would not help."""
    delay_s: float
    """Seconds until the next start."""
    short_lives: int
    """Deaths in a row before it had settled, this one included."""


class RestartHistory:
    """The lives of one process. Times are monotonic seconds."""

    def __init__(self, *, settled_after_s: float = SETTLED_AFTER_S) -> None:
        """Begin with a process that has not been ready.

        A life that has served for `settled_after_s` seconds ends the count of deaths in a row. A process that answers
        long before it works gets a larger number.
        """
        self._settled_after_s = settled_after_s
        self.restarts = 0
        """How often the process was started again."""
        self.ready_at: float | None = None
        """When its present life became ready; None before."""
        self._short = 0
        self._weight = 0.0

    def begin(self) -> None:
        """Record that the process was started again, and is not ready yet."""
        self.restarts += 1
        self.ready_at = None

    def ready(self, now: float) -> None:
        """Record that the process serves since `now` (monotonic), unless it did already."""
        if self.ready_at is None:
            self.ready_at = now

    def end(self, now: float, exit_kind: ExitKind) -> RestartDecision:
        """Record that the process died at `now` (monotonic), and return whether and when to start it again.

        A process that ended in an orderly way after it was ready is started at once, and that does not count as a
        death.
        """
        lived_s = None if self.ready_at is None else now - self.ready_at
        self.ready_at = None
        if exit_kind is ExitKind.ORDERLY:
            if lived_s is not None:
                return RestartDecision(is_hopeless=False, delay_s=0.0, short_lives=self._short)
            exit_kind = ExitKind.CRASHED  # nobody restarts what is not up yet: it gave up by itself
        if lived_s is not None and lived_s >= self._settled_after_s:
            self._short, self._weight = 0, 0.0
        self._short, self._weight = self._short + 1, self._weight + exit_kind.value
        delay_s = BACKOFF.after(self._weight)
        return RestartDecision(is_hopeless=self._weight >= CRASH_LOOP, delay_s=delay_s, short_lives=self._short)


# Rotation of the logs of a stack's processes: a file that has grown too large becomes `NAME.log.1`.
#
# The processes keep their files open to append, foreign programs among them, so a file is copied and then emptied;
# text that is written between the last read and that moment is lost. A reader that follows a file
# (`millrace.cli.log_files`) sees by a new `NAME.log.1` that it was rotated.
MAX_BYTES = 64 << 20
"""The most bytes of one file; with the older one, a process keeps twice as much."""
ROTATION_PERIOD_S = 5.0
_CHUNK_BYTES = 1 << 20
_LOOKS, _LOOK_AGAIN_S = 10, 0.001
"""How often a file is read again if the copy ends within a line: then the write is done, or the line is a prompt."""


def old_of(path: Path) -> Path:
    """Return the path of the file to which the older lines of the log at `path` are moved."""
    return path.with_name(f"{path.name}.1")


def rotate(path: Path, *, max_bytes: int = MAX_BYTES) -> bool:
    """Move the lines of a log larger than `max_bytes` to its old file, replacing that; return whether it was larger.

    Raises OSError if the disk is full.
    """
    try:
        if path.stat().st_size <= max_bytes:
            return False
    except FileNotFoundError:
        return False
    fresh = path.with_name(f"{path.name}.new")
    try:
        with path.open("rb") as source, fresh.open("wb") as target:
            _copy_lines(source, target)
    except OSError:  # raised on: half a copy takes the last room of a disk
        remove(fresh, what="log file")
        raise
    # Emptied, not replaced: the process goes on appending to the file that it has open.
    os.truncate(path, 0)
    fresh.replace(old_of(path))
    return True


def _copy_lines(source: BinaryIO, target: BinaryIO) -> None:
    """Copy a file up to its end, reading again for a moment if that is within a line.

    A reader may see only the first half of a write.
    """
    last = b"\n"
    # unregistered wait: 10 ms at most, for a write that is under way
    for _ in range(_LOOKS):
        while chunk := source.read(_CHUNK_BYTES):
            target.write(chunk)
            last = chunk[-1:]
        if last == b"\n":
            return
        time.sleep(_LOOK_AGAIN_S)


async def keep_bounded(
    directory: Path, *, note: Callable[[str], None], max_bytes: int = MAX_BYTES, period_s: float = ROTATION_PERIOD_S
) -> NoReturn:
    """Rotate the logs of a directory that grow beyond `max_bytes`, every `period_s` seconds, until cancelled.

    `note` gets each that cannot be rotated, once.
    """
    noted: set[str] = set()
    # unregistered wait: a periodic look at files of this machine
    while True:
        for path in await asyncio.to_thread(_logs, directory):
            try:
                await asyncio.to_thread(rotate, path, max_bytes=max_bytes)
                noted.discard(path.name)
            except OSError as error:
                if path.name not in noted:
                    noted.add(path.name)
                    note(f"{path} cannot be rotated and goes on growing: {error}")
        await asyncio.sleep(period_s)


def _logs(directory: Path) -> list[Path]:
    """Return the paths of the logs of a directory, in order of name."""
    return sorted(directory.glob("*.log"))
