"""Starts processes, notices when one dies, and ends all of them with everything that they started.

Who is started again is not decided here, see `millrace.local.keeper`.

Each process leads a session of its own, so the order of the shutdown is ours: TERM in reverse order of `tier`, KILL to
the process groups after the grace, then a sweep for descendants that left their group (see `reaper`, which also does
this when the supervisor is killed). Each process inherits the read end of a pipe that only the supervisor and the
reaper could write to: its end says that both are gone (see `lifeline`).
"""

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Self

from millrace.errors import InternalError, NotFoundError
from millrace.processes import lifeline, reaper, sessions, table
from millrace.processes.forked import ForkedProcess, ForkServerClient, ForkServerError
from millrace.processes.table import KILL_WAIT_S
from millrace.race import first_of
from millrace.telemetry import waits

logger = logging.getLogger(__name__)

TERM_GRACE_S = 6.0  # a service drains (0 s here), ends calls under way (3 s) and closes its connections
SWEEP_WAIT_S = 2.0
FIRST_FORK_S = 120.0
"""Longest wait for an answer of the fork server while it imports for the first time."""
FORK_S = 5.0
"""Later: a fork takes milliseconds, on a busy machine the turn of the server more."""
TAIL_LINES = 15
_TAIL_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """What to start: `argv` with the environment `env` alone; standard output and error go to `log_path`."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    log_path: Path | None
    """None: the supervisor's own output."""
    cwd: Path | None = None
    module: str | None = None
    """The main module that `argv` runs, if the fork server may do so instead."""
    tier: int = 1
    """Higher tiers are stopped first: what others need (Redis) has a lower one."""


@dataclass(slots=True, kw_only=True)
class Child:
    """A started process."""

    spec: ProcessSpec
    process: sessions.Process
    started_s: float
    start_ticks: int
    mark: str
    """In the environment of everything that this life starts."""
    exited: asyncio.Task[int] = field(repr=False)
    ended_s: float | None = None
    """When it ended (monotonic); None while it lives."""

    @property
    def pid(self) -> int:
        """Return the process id, which is also the id of its process group and session."""
        return self.process.pid

    @property
    def is_alive(self) -> bool:
        """Return whether the process has not ended yet."""
        return self.process.returncode is None


class ProcessDiedError(InternalError):
    """A supervised process ended although nobody asked it to."""

    default_reason = "PROCESS_DIED"

    def __init__(
        self, name: str, *, how: str, age_s: float, log_path: Path | None, last_lines: Sequence[str], deaths: int = 1
    ) -> None:
        """Create the error; `how` is `exit code 1` or `signal SIGKILL`, `age_s` the seconds that the process lived.

        `last_lines` are the end of its log. `deaths` counts deaths in a row: above 1 they are why it is not started
        again.
        """
        self.process_name = name
        self.how = how
        self.last_lines = list(last_lines)
        shown = "\n".join(f"  | {line}" for line in self.last_lines) or "  | (it wrote nothing)"
        again = f", for the {deaths}th time in a row, so it is not started again" if deaths > 1 else ""
        super().__init__(
            f"{name} died: {how}, {age_s:.1f} s after its start{again}. The last lines of its log:\n{shown}",
            remedy=f"read {log_path}" if log_path else "read its output above",
            metadata={"process": name, "how": how, "log": str(log_path or "")},
        )


class Supervisor:
    """The processes of one stack. Use as `async with Supervisor(...) as s`: leaving the block stops everything."""

    def __init__(
        self,
        *,
        stack_id: str | None = None,
        term_grace_s: float = TERM_GRACE_S,
        note: Callable[[str], None] = logger.warning,
    ) -> None:
        """Create the supervisor of a stack; it starts nothing before its block is entered.

        `stack_id` marks all its processes (None: a new one), `term_grace_s` is the time between TERM and KILL in
        seconds, `note` gets a line of text when a reaper has died.
        """
        self.stack_id = stack_id or uuid.uuid4().hex
        self.lock: int | None = None
        """An open file that everything that is started keeps open, too: its lock is held until all of it is gone."""
        self.fork_server: ForkServerClient | None = None
        """Starts processes whose spec has a `module`, if it is ready."""
        self._fork_environ: Mapping[str, str] = {}
        self.skip_grace = asyncio.Event()
        """Set it to skip the rest of the grace (a second Ctrl-C)."""
        self._term_grace_s = term_grace_s
        self._children: dict[str, Child] = {}
        self._numbers = itertools.count(1)
        self._is_stopping = False
        self._died: asyncio.Queue[Child] = asyncio.Queue()
        self._note = note
        self._reaper: WatchedReaper | None = None
        self._lifeline: tuple[int, int] | None = None

    @property
    def children(self) -> Mapping[str, Child]:
        """Return every process that was started, by name, also those that have ended; of a restarted one the newest
        life.
        """
        return self._children

    async def __aenter__(self) -> Self:
        # The reaper alone gets the write end, too: a service that held it would keep its own lifeline from ending.
        self._lifeline = os.pipe()
        kept = (self._lifeline[1],) if self.lock is None else (self._lifeline[1], self.lock)
        self._reaper = WatchedReaper(self.stack_id, groups=self._groups, note=self._note, kept_open=kept)
        await self._reaper.start()  # before the first child
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop_for_sure()

    async def start(self, spec: ProcessSpec) -> Child:
        """Start a process, forked if possible, and return it; from now on its end is noticed (`next_death`).

        Raises NotFoundError if its program is missing, and RuntimeError outside the supervisor's block.
        """
        if self._is_stopping or self._reaper is None or self._lifeline is None:
            raise RuntimeError("the supervisor is not running")
        # The number tells the lives of one name apart: what the last life has left is ended by its mark (`end_rest`).
        mark = f"{self.stack_id}/{spec.name}/{next(self._numbers)}"
        ties = {name: str(number) for name, number in self._inherited().items()}
        env = {**spec.env, **ties, table.STACK_MARK: self.stack_id, table.PROCESS_MARK: mark}
        with _sink(spec.log_path) as sink:
            process = await self._fork(spec, env, sink) or await self._execute(spec, env, sink)
        exited = asyncio.create_task(process.wait(), name=f"exit of {spec.name}")
        child = Child(
            spec=spec,
            process=process,
            started_s=time.monotonic(),
            start_ticks=table.start_ticks(process.pid),
            mark=mark,
            exited=exited,
        )
        exited.add_done_callback(lambda _: self._note_exit(child))
        self._children[spec.name] = child
        # Until here the reaper would find it by the mark in its environment.
        self._reaper.send(f"add {child.pid} {child.start_ticks}")
        return child

    def start_fork_server(self, server: ForkServerClient, *, env: Mapping[str, str]) -> None:
        """Start the fork server in the environment `env`.

        From now on processes whose spec has a `module` are forked by it.
        """
        self.fork_server, self._fork_environ = server, {**env, table.STACK_MARK: self.stack_id}
        self._start_fork_server(server)

    def _start_fork_server(self, server: ForkServerClient) -> None:
        """Start the fork server unless it runs. The files that every process keeps open have the same numbers there."""
        server.start(self._fork_environ, pass_fds=tuple(self._inherited().values()))

    def _inherited(self) -> dict[str, int]:
        """Return the numbers of the open files that every process of the stack keeps open, by the variable that
        names each.
        """
        assert self._lifeline is not None, "the supervisor is not running"
        return {lifeline.PIPE: self._lifeline[0], **({} if self.lock is None else {lifeline.LOCK: self.lock})}

    async def _fork(self, spec: ProcessSpec, env: Mapping[str, str], sink: IO[bytes] | None) -> ForkedProcess | None:
        """Have the fork server start the process, which writes to `sink`; return None if it cannot, and log why.

        It cannot for specs without a module or log, or with a directory. A dead server is started again, for later
        ones.
        """
        server = self.fork_server
        # A forked process has the server's directory, and needs a file to write to.
        if server is None or spec.module is None or spec.cwd is not None or sink is None:
            return None
        timeout_s = FORK_S if server.is_loaded else FIRST_FORK_S
        process = None
        if server.can_fork(spec.module):
            try:
                with waits.waiting(f"{spec.module} to be forked", waits_on="fork server", deadline_s=timeout_s):
                    process = await server.fork(
                        spec.module,
                        spec.argv,
                        env=env,
                        marks={name: env[name] for name in (table.STACK_MARK, table.PROCESS_MARK)},
                        files={1: sink.fileno(), 2: sink.fileno()},
                        timeout_s=timeout_s,
                    )
            except ForkServerError as error:
                logger.warning("a process is started by itself, not forked", extra={"of": spec.name, "why": str(error)})
        if not self._is_stopping:
            self._start_fork_server(server)
        return process

    async def _execute(
        self, spec: ProcessSpec, env: Mapping[str, str], sink: IO[bytes] | None
    ) -> asyncio.subprocess.Process:
        """Start the process as a program of its own, with output to `sink` (None: where this process's output goes).

        Raises NotFoundError if there is no such program.
        """
        try:
            return await sessions.start(
                spec.argv,
                env=env,
                cwd=spec.cwd,
                stdout=sink,
                stderr=None if sink is None else subprocess.STDOUT,
                pass_fds=tuple(self._inherited().values()),
            )
        except FileNotFoundError as error:
            raise NotFoundError(
                f"cannot start {spec.name}: {error.filename} does not exist",
                reason="PROGRAM_NOT_FOUND",
                remedy="install millrace[local]",
            ) from error

    async def wait_death(self) -> ProcessDiedError:
        """Wait until a process ends that was not stopped, and return (not raise) the error that says so to the user.

        If the call is cancelled meanwhile, the death is returned by the next call.
        """
        child = await self.next_death()
        try:
            return await asyncio.to_thread(describe_death, child)
        except asyncio.CancelledError:
            self._died.put_nowait(child)
            raise

    async def next_death(self) -> Child:
        """Wait until a process ends that was not stopped, and return it; each is returned once. May be cancelled."""
        return await self._died.get()

    async def end_rest(self, child: Child) -> None:
        """Kill what is left of a process: itself, its group, and descendants that left the group.

        Log those that do not end.
        """
        # The start ticks protect a process that has been given the pid of the dead leader.
        groups = {child.pid: child.start_ticks}
        left = await asyncio.to_thread(
            table.end_all,
            child.mark,
            groups,
            term_grace_s=0.0,
            kill_wait_s=SWEEP_WAIT_S,
            variable=table.PROCESS_MARK,
        )
        if left:
            logger.error("descendants of %s would not end: pids %s", child.spec.name, sorted(left))

    async def stop_for_sure(self) -> None:
        """Do `stop` to its end, also if this task is cancelled meanwhile (Ctrl-C): that only skips the grace.

        The cancellation is raised afterwards.
        """
        # A task of its own: a cancellation ends the wait for the stop and never the stop itself, which would leave
        # processes running.
        stopping = asyncio.create_task(self.stop(), name="stop of all processes")
        is_cancelled = False
        while not stopping.done():
            try:
                await asyncio.shield(stopping)
            except asyncio.CancelledError:
                is_cancelled = True
                self.skip_grace.set()
        stopping.result()
        if is_cancelled:
            raise asyncio.CancelledError

    async def stop(self) -> None:
        """End all processes and all that they started, highest tier first, and then the reaper.

        Log those that are left. Each tier gets TERM and, after `term_grace_s`, KILL. Nothing can be started afterwards.
        Idempotent.
        """
        self._is_stopping = True
        # Highest tier first: a service that drains still uses Redis, which is in tier 0.
        for tier in sorted({child.spec.tier for child in self._children.values()}, reverse=True):
            group = [child for child in self._children.values() if child.spec.tier == tier]
            # What the others need (tier 0) has nothing left to do once they are gone.
            await self._stop_group(group, self._term_grace_s if tier else self._term_grace_s / 3)
        # After its children: only the fork server, which is their parent, can report how they ended.
        if self.fork_server is not None:
            self.fork_server.stop()
        # What left its process group, or was started during the stop, is found by the mark in its environment.
        left = await asyncio.to_thread(
            table.end_all, self.stack_id, self._groups(), term_grace_s=0.0, kill_wait_s=SWEEP_WAIT_S
        )
        if left:
            logger.error("processes would not end: pids %s", sorted(left))
        if self._reaper is not None:
            # Without `done` the reaper tries to end what is left.
            await self._reaper.end(is_done=not left)
        # Last: a service that sees the lifeline end starts a reaper for itself.
        for end in self._lifeline or ():
            os.close(end)
        self._reaper = self._lifeline = None

    def _groups(self) -> dict[int, int]:
        """Return the start ticks of every process that was started, by its pid, which is its process group's."""
        return {child.pid: child.start_ticks for child in self._children.values()}

    async def _stop_group(self, group: Sequence[Child], grace_s: float) -> None:
        """Send TERM to these processes, wait until they have ended, then kill what is left of their process groups.

        The wait ends after `grace_s` seconds, or as soon as the event `skip_grace` is set.
        """
        alive = [child for child in group if child.is_alive]
        for child in alive:
            with contextlib.suppress(ProcessLookupError):
                child.process.send_signal(signal.SIGTERM)
        if not alive:
            return
        names = ", ".join(child.spec.name for child in alive)
        with waits.waiting(f"{names} to stop", waits_on=names, deadline_s=grace_s):
            gone = asyncio.gather(*(child.exited for child in alive))
            await first_of(gone, self.skip_grace.wait(), timeout_s=grace_s)
        # Also those that ended in time: what they have started may still run in their groups.
        for child in alive:
            if child.is_alive:
                logger.warning("%s did not stop within %.0f s: killing it", child.spec.name, grace_s)
            sessions.kill_group(child.pid)
        # Bounded: a process in an uninterruptible system call outlives SIGKILL.
        await asyncio.wait({child.exited for child in alive}, timeout=SWEEP_WAIT_S)

    def _note_exit(self, child: Child) -> None:
        """Record when the process ended, and queue it for `next_death` unless all are being stopped."""
        child.ended_s = time.monotonic()
        if not self._is_stopping:
            self._died.put_nowait(child)


@contextlib.contextmanager
def _sink(path: Path | None) -> Iterator[IO[bytes] | None]:
    """Provide the file at `path` opened to append, its directory created; None for None, which is our own output."""
    if path is None:
        yield None
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as sink:
        yield sink


def describe_death(child: Child, *, given_up_after: int | None = None) -> ProcessDiedError:
    """Make (not raise) the error of a process that has ended, with the last lines of its log; RuntimeError if it lives.

    `given_up_after` is the number of deaths in a row after which it is not started again; None if it is.
    """
    if child.is_alive:
        raise RuntimeError(f"{child.spec.name} has not exited")
    return ProcessDiedError(
        child.spec.name,
        how=sessions.describe_exit(child.process.returncode),
        age_s=(child.ended_s or time.monotonic()) - child.started_s,
        deaths=given_up_after or 1,
        log_path=child.spec.log_path,
        last_lines=tail(child.spec.log_path) if child.spec.log_path else [],
    )


def tail(path: Path, lines: int = TAIL_LINES, *, after: int = 0) -> list[str]:
    """Return up to `lines` last lines of a file that are not blank; empty if it does not exist.

    Lines before byte `after`, and before the last 64 KiB, are not read.
    """
    try:
        with path.open("rb") as source:
            source.seek(0, os.SEEK_END)
            source.seek(max(after, source.tell() - _TAIL_BYTES))
            text = source.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return list(deque((line.rstrip() for line in text.splitlines() if line.strip()), maxlen=lines))


# The reaper's process, seen from the supervisor: started before anything else, and replaced when it dies.

_AGAIN_S = 1.0
"""Pause before the next reaper if the last one lived for a shorter time."""


class WatchedReaper:
    """Keeps one reaper running that knows every process group. A dead one is replaced at once."""

    def __init__(
        self,
        stack_id: str,
        *,
        groups: Callable[[], dict[int, int]],
        note: Callable[[str], None],
        kept_open: Sequence[int],
    ) -> None:
        """Take what reapers need; `start` starts the first one.

        `groups` returns the start ticks of each process group's leader by its pid, for a new reaper. `note` is called
        with a message about each death of a reaper. `kept_open` are files that reapers keep open: the directory's lock,
        and the write end of the lifeline.
        """
        self._stack_id = stack_id
        self._groups = groups
        self._note = note
        self._kept_open = tuple(kept_open)
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Return the reaper's process id; None before `start` and after `end`."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start the reaper's process, and replace it whenever it dies, until `end`."""
        self._process = await self._spawn()
        self._watch = asyncio.create_task(self._replace(), name="watch of the reaper")

    def send(self, line: str) -> None:
        """Send the reaper `line`, which has no end of line: `add PID TICKS` for a new process group, or `done`.

        A reaper that has just died is replaced by one that gets all groups.
        """
        # Not drained: asyncio buffers what the pipe does not take, and a reaper that is stopped must not hold up a
        # start.
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(f"{line}\n".encode())

    async def end(self, *, is_done: bool) -> None:
        """End the reaper and wait for its end, for a bounded time. Idempotent.

        With `is_done` it ends at once. Otherwise it first ends the processes that are left of the stack.
        """
        # The watch ends first: it would take this end of the reaper for a death, and start another one.
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        if is_done:
            process.stdin.write(b"done\n")
        process.stdin.close()
        # As long as `end_all` may take in the reaper, and a second for its exit.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(reaper.TERM_GRACE_S + KILL_WAIT_S + 1):
                await process.wait()

    async def _spawn(self) -> asyncio.subprocess.Process:
        """Start a reaper's process, and send it all process groups that there are; return it."""
        process = await sessions.start(
            [sys.executable, "-I", reaper.__file__, self._stack_id],
            env=None,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=self._kept_open,
        )
        assert process.stdin is not None
        for leader, ticks in self._groups().items():
            process.stdin.write(f"add {leader} {ticks}\n".encode())
        return process

    async def _replace(self) -> None:
        """Start another reaper whenever the current one has ended, and note it; runs until it is cancelled."""
        loop = asyncio.get_running_loop()
        # unregistered wait: a pause between two reapers of which the first died at once; it is noted
        while self._process is not None:
            began = loop.time()
            code = await self._process.wait()
            how = sessions.describe_exit(code)
            if loop.time() - began < _AGAIN_S:
                await asyncio.sleep(_AGAIN_S)
            try:
                self._process = await self._spawn()
            except OSError as error:  # out of processes or memory: until it works, only the services watch
                self._note(f"the reaper died: {how}, and cannot be started again: {error.strerror}")
                await asyncio.sleep(_AGAIN_S)
                continue
            self._note(f"the reaper died: {how}; another one runs (pid {self._process.pid})")
