"""The trainer as a worker: waits for an assignment, trains that run, and notices a silent orchestrator.

    IDLE --assigned--> WORKING --closing header--> FINISHED --assignment ends--> IDLE
                          |------error------------> FAILED ---assignment ends--> IDLE
                          '------fenced, log gone, store away, stop asked------> IDLE (and again while assigned)

Rank 0 gets the orchestrator's answers and passes orders on to the gang. An error that a run's owner has to see (a model
path that does not exist, a digest that differs) is reported and the run not tried again; in a gang rank 0 reports the
error of any rank. An error that may be caused by a dead peer ends the process instead, so that torchrun restarts the
gang: other ranks may be blocked in a collective.
"""

import asyncio
import contextlib
import gc
import logging
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Protocol, TypeVar

from millrace.backoff import Backoff
from millrace.errors import FencedError, InternalError, MillraceError, is_of_storage
from millrace.internal.v1.policy_pb2 import PolicyEntry
from millrace.internal.v1.worker_service_pb2 import Assignment, HeartbeatRequest, HeartbeatResponse, TrainerStatus
from millrace.rpc.health import PROCESS, HealthBoard
from millrace.rpc.worker import Silence
from millrace.telemetry import waits
from millrace.trainer import meters
from millrace.trainer.log.background import StopRequested
from millrace.v1 import event_pb2

# A silent orchestrator, reported by the trainer of its run, because a frozen process cannot report itself.

Write = Callable[[event_pb2.Event], Awaitable[None]]


class SilenceReporter:
    """Writes an event into the trainer's current run, if any, when the orchestrator is silent or answers again."""

    def __init__(self) -> None:
        self._write: Write | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.contextmanager
    def reporting_to(self, write: Write) -> Iterator[None]:
        """Let `on_silence` write events with `write` during the block; `write` is awaited on the background loop."""
        self._write = write
        try:
            yield
        finally:
            self._write = None

    def on_silence(self, silence: Silence) -> None:
        """Start to write an event that the orchestrator is silent or answers again, and return at once.

        Does nothing without a current run. The worker agent calls it on the background loop.
        """
        if self._write is None:
            return
        reason = "ORCHESTRATOR_BACK" if silence.is_over else "ORCHESTRATOR_SILENT"
        event = event_pb2.Event(warning=event_pb2.Warning(reason=reason, message=silence.describe()))
        task = asyncio.get_running_loop().create_task(_report(self._write, event), name="report a silent orchestrator")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _report(write: Write, event: event_pb2.Event) -> None:
    """Write an event with `write`; log an error of the run's log instead of raising it."""
    try:
        await write(event)
    except MillraceError as error:  # the run's log is gone or closed: the process log has it
        logger.warning("a silent orchestrator is not in the run's events", extra={"error": str(error)})


logger = logging.getLogger(__name__)

T = TypeVar("T")

RunJob = Callable[[str], None]

IDLE_LOOK_S = 0.2
"""How often an idle trainer checks whether a paused run goes on, which no new assignment says."""
_POLL_S = 0.2
_RETRY = Backoff(1.0, 60.0)
_SHOWN_S = 60.0
"""How long a gang that is refused what it needs shows that before it ends: longer than commands wait for its run."""
# An orchestrator that restarted knows no assignments until it has claimed its runs again; the run is kept meanwhile.
_UNASSIGNED_GRACE_S = 30.0
# The other ranks outwait rank 0, whose end torchrun turns into a SIGTERM for them: if one of them ended first, torchrun
# would end rank 0 before it has reported.
_PEER_GRACE_S = _UNASSIGNED_GRACE_S + 15.0
# Seconds within which health expects the next step. The first one comes after the model is loaded and perhaps compiled;
# later ones are judged by the slowest so far.
_FIRST_STEP_WITHIN_S = 1800.0
_LATER_STEPS_WITHIN_S = 300.0
_SLOWEST_STEP_FACTOR = 10.0


def is_over(status: TrainerStatus) -> bool:
    """Return whether the status says that the trainer has finished the run or given it up with an error."""
    return status.is_finished or bool(status.error_reason)


class PeerFailure(Protocol):
    """The error with which another rank gave up the run; `agreement.Failure` is one."""

    @property
    def rank(self) -> int:
        """Return the rank that failed."""
        ...

    @property
    def reason(self) -> str:
        """Return the error's reason."""
        ...

    @property
    def message(self) -> str:
        """Return the error's message with the remedy."""
        ...


class Peers(Protocol):
    """The part of `distributed.Gang` that is needed here; importing that module would import torch, which is slow."""

    @property
    def is_leader(self) -> bool:
        """Return whether this process is rank 0."""
        ...

    @property
    def is_alone(self) -> bool:
        """Return whether the gang is this process only."""
        ...

    def from_leader(self, work: Callable[[], T]) -> T:
        """Run `work` at rank 0 only, and return its result at every rank. Collective."""
        ...

    def show_failure(self, *, reason: str, message: str) -> None:
        """Send rank 0, which may be in a collective, the error with which this rank gives up the run."""
        ...

    def watch_failures(self, on_failure: Callable[[PeerFailure], None]) -> None:
        """Set the function that rank 0 calls, in another thread, with the failures of other ranks."""
        ...


class TrainerWorker:
    """The state machine. The worker agent calls `report` and `on_answer` on its thread; the main thread is in `run`."""

    def __init__(self, *, board: HealthBoard, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin idle. `board` gets the process's progress for health checks; `clock` returns seconds."""
        self._board = board
        self._clock = clock
        self.stopping = threading.Event()
        self._status = TrainerStatus()
        """What the heartbeat says; replaced as a whole, so that a reader in another thread sees no half of a change."""
        self._changing = threading.Lock()
        self._assigned = ""
        self._assigned_at = clock()
        self._damage: tuple[PolicyEntry, int] | None = None
        self._unwanted: frozenset[str] = frozenset()  # runs to release at once
        self._last_progress = clock()
        self._slowest_step_s = 0.0
        self._idle = waits.LastingWait()
        self._tries = waits.LastingWait()
        self._tried = ""  # the run that was worked on last
        self._furthest = -1  # its newest version
        self._num_refused = 0  # tries in a row that were refused what they need
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()  # its `put` may interrupt itself in a signal handler
        self._num_turns = self._own_turn = 0
        self._turn_heard = threading.Event()
        self.heartbeat_soon: Callable[[], None] = lambda: None
        """Makes the agent send a heartbeat at once; may be called from any thread."""
        self.free_devices: Callable[[], None] = lambda: None
        """Releases the memory that the allocator keeps after a failed job; raises nothing."""

    @property
    def is_working(self) -> bool:
        """Return whether the trainer has a run that it has neither finished nor given up."""
        status = self._status
        return bool(status.run_uid) and not is_over(status)

    # Called by the agent.

    def report(self) -> HeartbeatRequest:
        """Make the next heartbeat: the status of the current run, and whether this process leaves."""
        return HeartbeatRequest(
            is_leaving=self.stopping.is_set(),
            trainer=self._status,
        )

    def on_answer(self, response: HeartbeatResponse) -> None:
        """Store the orchestrator's answer to a heartbeat, and wake the main thread if another run is assigned.

        The answer has the assigned run, if any, runs to release, damaged policies, and the number of the granted device
        turn.
        """
        self._unwanted = frozenset(response.let_go)
        assignment = response.assignments[0] if response.assignments else Assignment()
        is_new, self._assigned = assignment.run_uid != self._assigned, assignment.run_uid
        self._damage = (assignment.damaged_policy, assignment.num_damage_reports)
        self._own_turn = assignment.device_turn
        # After the values that the waiting thread reads.
        self._turn_heard.set()
        if self._assigned:
            self._assigned_at = self._clock()
        if is_new:
            self._news.put(None)

    # From signal handlers and from the job.

    def stop(self) -> None:
        """Make the job release its run, and `run` return; may be called from a signal handler."""
        self.stopping.set()
        self._news.put(None)

    def should_stop(self) -> bool:
        """Return whether the job has to release the run; a call counts as progress for health.

        It has to if this process is to stop, if the run is to be released, if another run is assigned, or after 30 s
        without any assignment.
        """
        self._board.touch(PROCESS)
        if self.stopping.is_set():
            return True
        working_on = self._status.run_uid
        # An orchestrator that does not know of the pause yet may still assign the run: the release counts.
        if working_on in self._unwanted:
            return True
        if self._assigned:
            return self._assigned != working_on
        return self._clock() - self._assigned_at > _UNASSIGNED_GRACE_S

    def why_stopped(self) -> str:
        """Return in words why `should_stop` returns True; call it only then."""
        if self.stopping.is_set():
            return "its process was asked to end"
        if self._status.run_uid in self._unwanted:
            return "the run was paused, cancelled or over"
        if self._assigned:
            return "the orchestrator gave it another run"
        return f"the orchestrator had no work for it for {_UNASSIGNED_GRACE_S:.0f} s"

    def damage(self) -> tuple[PolicyEntry, int] | None:
        """Return the policy of the current run that replicas last reported damaged, and the number of such reports.

        None if there is no report, or if it is about another run.
        """
        damage = self._damage
        return damage if damage is not None and damage[1] and self._assigned == self._status.run_uid else None

    def on_epoch(self, epoch: int) -> None:
        """Put the epoch with which the job holds the run's lease into the heartbeats."""
        self._change(epoch=epoch)

    def on_progress(self, version: int) -> None:
        """Record that the job has made policy version `version`, for heartbeats and health.

        Health then allows the next step ten times the duration of the slowest one so far, at least 300 s.
        """
        if version > self._furthest:  # an attempt that replays earlier steps makes no progress
            self._furthest = version
            self._num_refused = 0
            self._tries.over()
        now = self._clock()
        self._slowest_step_s = max(self._slowest_step_s, now - self._last_progress)
        self._last_progress = now
        self._change(step=version)
        self._board.expect_progress(
            PROCESS, within_s=max(_LATER_STEPS_WITHIN_S, _SLOWEST_STEP_FACTOR * self._slowest_step_s)
        )

    # Devices that replicas share (`inference.sleep_while_training`).

    def request_devices(self) -> None:
        """Ask the orchestrator for a turn on the shared devices, under a new number, with a heartbeat at once."""
        self._num_turns += 1
        self._change(device_turn=self._num_turns)
        self.heartbeat_soon()

    def has_devices(self, *, timeout_s: float) -> bool:
        """Return whether the orchestrator has granted the turn that was asked for.

        If not, wait up to `timeout_s` for the next answer to a heartbeat first.
        """
        if self._own_turn != self._num_turns and self._turn_heard.wait(timeout_s):
            # Before the comparison: an answer that comes after it sets the event again.
            self._turn_heard.clear()
        return self._own_turn == self._num_turns

    def return_devices(self) -> None:
        """End the turn on the shared devices, with a heartbeat at once, so that the orchestrator wakes the engines."""
        self._change(device_turn=0)
        self.heartbeat_soon()

    def _change(self, **changes: Any) -> None:
        """Replace fields of the status by `changes`, all at once.

        The main thread and the one that reads failures call it.
        """
        with self._changing:
            status = TrainerStatus()
            status.CopyFrom(self._status)
            for name, value in changes.items():
                setattr(status, name, value)
            self._status = status

    def _begin_status(self, run_uid: str = "") -> None:
        """Reset the status to one that has only a run, or, for the empty uid, nothing."""
        with self._changing:
            self._status = TrainerStatus(run_uid=run_uid)

    # The main thread.

    def run(self, run_job: RunJob, *, gang: Peers) -> None:
        """Train assigned runs with `run_job`, one after the other, until `stop`.

        Collective in a gang, where rank 0 decides. `run_job` trains the run with the uid that it gets, and raises
        StopRequested if it was asked to stop.
        """
        self._gang = gang
        gang.watch_failures(self._note_peer_failure)
        while True:
            match self._gang.from_leader(self._next_order).partition(" "):
                case ("exit", _, _):
                    return
                case ("work", _, uid):
                    self._work(uid, run_job)
                case _:
                    continue

    def _next_order(self) -> str:
        """Return what all ranks do next: `exit`, `work UID` or, after a short wait for an assignment, `idle`."""
        if self.stopping.is_set():
            self._idle.over()
            self._tries.over()
            return "exit"
        assigned = self._assigned
        if self._status.run_uid and self._status.run_uid != assigned:
            self._begin_status()  # the orchestrator has noted the end of the run, or given it to another trainer
        if assigned and assigned not in self._unwanted and not is_over(self._status):
            self._idle.over()
            return f"work {assigned}"
        reason = f"note to be taken of the end of run {assigned}" if assigned else "a run to be assigned (it is idle)"
        if not assigned:
            self._tries.over()
        self._idle.on(reason, waits_on="orchestrator", key=assigned)
        with contextlib.suppress(queue.Empty):
            self._news.get(timeout=IDLE_LOOK_S)
        return "idle"

    def _work(self, uid: str, run_job: RunJob) -> None:
        """Run the job of a run, free what it held, and put its end into the status."""
        if uid != self._tried:
            self._tries.over()
            self._furthest = -1
            self._num_refused = 0
        self._tried = uid
        self._begin_status(uid)
        self._slowest_step_s, self._last_progress = 0.0, self._clock()
        self._board.expect_progress(PROCESS, within_s=_FIRST_STEP_WITHIN_S)
        with waits.of_run(uid):
            try:
                end = self._end_of(uid, run_job)
            finally:
                gc.collect()  # models are cycles (a block knows the forward that knows it), and the next run needs room
                self._board.expect_progress(PROCESS, within_s=None)
            if self._status.device_turn:  # an error ended the job in its turn; what its frames held is free by now
                self.free_devices()
                self.return_devices()
            end()

    def _end_of(self, uid: str, run_job: RunJob) -> Callable[[], None]:
        """Run the job; return a function that reports how it ended, to be called once its resources are free.

        In a gang raises errors that may be caused by a dead peer, and all others once they are reported.
        """
        try:
            logger.info("run begins")
            run_job(uid)
            return self._finish
        except StopRequested:
            return lambda: self._release("asked to release the run")
        except MillraceError as error:
            # Nothing is wrong with the run: another trainer has it, or what it needs is missing or closed for a while.
            if isinstance(error, FencedError) or is_of_storage(error):
                if not self._gang.is_alone:
                    self._show_refusal(uid, error)
                    raise
                # Plain values: the error would keep the frames of the job alive, and with them the model that has to be
                # freed first.
                why, refusal = str(error), waits.Refusal.of(error)
                # A refusal is answered at once, and each try loads the model and takes an epoch.
                self._num_refused = self._num_refused + 1 if refusal is not None else 0
                retry_s = error.retry_after_s or _RETRY.after(self._num_refused)
                return lambda: self._try_again(uid, why, retry_s=retry_s, refusal=refusal)
            if not self._gang.is_alone:
                self._fail_gang(error)
            reason, message, remedy = error.reason, error.message, error.remedy or ""
            return lambda: self._fail(reason, message, remedy)
        except Exception as error:  # a process edge: whatever a job raises must reach the run's owner
            if not self._gang.is_alone and isinstance(error, RuntimeError | OSError):
                raise  # perhaps torch's error about a peer that died: torchrun restarts the gang, and the run resumes
            logger.exception("the run failed with an unexpected error")
            message = f"{type(error).__name__}: {error}"
            if not self._gang.is_alone:
                self._fail_gang(InternalError(message, remedy="see the trainer's log"))
            return lambda: self._fail("INTERNAL", message, "see the trainer's log")

    def _finish(self) -> None:
        """Put into the status that the run is finished."""
        self._tries.over()
        self._change(is_finished=True)
        logger.info("run finished", extra={"step": self._status.step})

    def _try_again(self, uid: str, why: str, *, retry_s: float, refusal: waits.Refusal | None) -> None:
        """Release the run, and wait `retry_s` seconds before the next attempt; `why` is the error that ended this one.

        Attempts that make no new step are registered as one wait. `refusal` is the server's refusal, if it was one.
        """
        self._release(why)
        with waits.of_run(uid):
            reason = f"a try of run {uid} that makes a step; the last one ended: {why}"
            self._tries.on(reason, key=uid, refusal=refusal)
        self.stopping.wait(retry_s)

    def _release(self, why: str) -> None:
        """Log that the run is released and why, and reset the status to one without a run."""
        logger.info("run released", extra={"why": why, "step": self._status.step})
        self._begin_status()

    def _fail(self, reason: str, message: str, remedy: str = "") -> None:
        """Put an error into the status, so that heartbeats have it until the assignment ends; log and count it.

        An earlier error of the same run is kept.
        """
        self._tries.over()
        # The first error is the cause: later ones come from ranks that were waiting for the failed one.
        if self._status.error_reason:
            return
        logger.error("run given up", extra={"reason": reason, "error": message})
        meters.run_failed()
        self._change(error_reason=reason, error_message=message, error_remedy=remedy)

    def _show_refusal(self, uid: str, error: MillraceError) -> None:
        """Register what refuses the run for `_SHOWN_S`, or until asked to stop; do nothing for what may pass by itself.

        A gang ends after it and is started again: without the pause nobody would learn why, and its restarts would be
        used up within minutes.
        """
        if (refusal := waits.Refusal.of(error)) is not None:
            with waits.of_run(uid), waits.waiting(f"a try of run {uid}: {error}", refusal=refusal):
                self.stopping.wait(_SHOWN_S)

    def _note_peer_failure(self, failure: PeerFailure) -> None:
        """Fail the current run with another rank's error; do nothing without a current run."""
        if self.is_working:
            self._fail(failure.reason, f"rank {failure.rank}: {failure.message}")

    def _fail_gang(self, error: MillraceError) -> None:
        """Report the error until the orchestrator has noted it, then raise it, at every rank.

        Rank 0 reports it in heartbeats. Other ranks send it to rank 0, and wait longer than rank 0 does, at most 45 s.
        """
        is_leader = self._gang.is_leader
        if is_leader:
            self._fail(error.reason, str(error))
        else:
            fields = {"reason": error.reason, "error": str(error)}
            logger.error("run given up at this rank; rank 0 reports", extra=fields)
            self._gang.show_failure(reason=error.reason, message=str(error))
        ends = self._clock() + (_UNASSIGNED_GRACE_S if is_leader else _PEER_GRACE_S)
        with waits.waiting("note to be taken of why the run is given up", waits_on="orchestrator"):
            while self._clock() < ends and (not is_leader or self._assigned == self._status.run_uid):
                if self.stopping.wait(_POLL_S):
                    break
        raise error
