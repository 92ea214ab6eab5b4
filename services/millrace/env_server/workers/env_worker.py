"""An environment worker: `python -m millrace.env_server.workers.env_worker --fd N …`, or a fork of `template`.

Hosts one environment: loads it in the main thread, then plays rollouts in one event loop. It exchanges frames over the
socket that it inherits and ends when the socket closes. The worker itself ends a rollout that waits or overruns its
deadline; if the whole loop is blocked, the parent kills the worker.
"""

import argparse
import asyncio
import contextlib
import contextvars
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

from millrace.decoding import decode_object
from millrace.env_server import engine_access
from millrace.env_server.adapters.adapter import EnvAdapter, load_adapter
from millrace.env_server.adapters.failures import describe_error, frames_of, own_line, own_line_of
from millrace.env_server.adapters.outcome import Outcome, demonstrated, failed, make_rollout
from millrace.env_server.interpreters import exec_worker, require_usable
from millrace.env_server.isolation.confinement import Confinement
from millrace.env_server.wire import loaded_to_wire
from millrace.env_server.workers.frames import (
    MAX_FRAME_BYTES,
    decode_frame,
    encode_frame,
    read_frame,
    start_answering,
)
from millrace.errors import CorruptObjectError, InvalidSpecError
from millrace.internal.v1 import env_worker_pb2, rollout_pb2
from millrace.internal.v1.play_pb2 import PlayGroupRequest
from millrace.processes.channel import receive_frame
from millrace.rollouts.requests import is_training
from millrace.rollouts.types import RolloutStatus
from millrace.rollouts.wire import rollout_to_proto
from millrace.telemetry.logging import bind, setup
from millrace.telemetry.startup import without_gc

# How long the code of each play runs in the worker's event loop.
#
# Environments run code that blocks: a reward function of a second blocks every rollout of its worker. A rollout's
# deadline must not count the time of other plays, or no rollout would end in time. So the loop measures each callback,
# and adds its time to the play in whose context it runs.

_PLAY: contextvars.ContextVar[int | None] = contextvars.ContextVar("play", default=None)


class OwnTimeLoop(asyncio.SelectorEventLoop):
    """An event loop that measures how long the callbacks of each play take, steps of tasks included.

    It must be made in the thread that runs it.
    """

    def __init__(self) -> None:
        """Make the loop in the thread that will run it, with no time measured."""
        self.busy_s = 0.0
        """Seconds that all callbacks took, of whichever play."""
        self._own_s: dict[int, float] = {}
        self._num_begun = 0
        self._is_running_one = False
        self._looked_at = -1
        self._lock = threading.Lock()
        self._thread = threading.get_ident()
        super().__init__()

    def call_soon(
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """Schedule a callback whose time is measured; steps of tasks, in which blocking code runs, are scheduled here,
        too.

        A SystemExit or KeyboardInterrupt in a callback does not end the loop, and with it all other plays: the task has
        it.
        """
        return super().call_soon(self._measured, callback, *args, context=context)

    def _measured(self, callback: Callable[..., Any], *args: Any) -> None:
        """Call the callback, and add the time that it takes to the total and to the play in whose context it runs."""
        self._num_begun += 1
        self._is_running_one = True
        began = time.monotonic()
        try:
            callback(*args)
        except (SystemExit, KeyboardInterrupt) as error:  # the task has it, as any other exception
            logger.debug("a task raised what ends a process", exc_info=error)
        finally:
            took = time.monotonic() - began
            self._is_running_one = False
            self.busy_s += took
            # A play's last callbacks run after its time was deleted, which is then not measured any more.
            if (play := _PLAY.get()) in self._own_s:
                self._own_s[play] += took

    def stuck_at(self) -> str | None:
        """Return the line of environment code in which the loop is, if it runs the same callback as at the last call.

        The line is "" if it is in other code. None if the loop has gone on since. May be called by any thread.
        """
        with self._lock:
            before, self._looked_at = self._looked_at, self._num_begun
            is_stuck = self._is_running_one and before == self._looked_at
        return own_line_of(self._thread) if is_stuck else None

    def measure(self, play: int) -> None:
        """Begin to measure the play with this id, until `forget`."""
        self._own_s[play] = 0.0

    def own_s(self, play: int) -> float:
        """Return the seconds that callbacks of the play with this id took so far."""
        return self._own_s.get(play, 0.0)

    def forget(self, play: int) -> None:
        """Delete the time of the play with this id, which is over."""
        self._own_s.pop(play, None)


class OwnTime:
    """The time of one play: the wall time less the time in which other plays' code ran. Made in the play's own task."""

    def __init__(self, play: int) -> None:
        """Begin to measure the play with this id; must be called in the play's own task."""
        loop = asyncio.get_running_loop()
        self._loop = loop if isinstance(loop, OwnTimeLoop) else None
        self._play = play
        self._began = time.monotonic()
        self._busy_s = 0.0 if self._loop is None else self._loop.busy_s
        if self._loop is not None:
            self._loop.measure(play)
        _PLAY.set(play)

    def close(self) -> None:
        """Delete the play's time from the event loop."""
        if self._loop is not None:
            self._loop.forget(self._play)

    @property
    def seconds(self) -> float:
        """Return the wall seconds since the play began, without the time that other plays' callbacks took."""
        passed = time.monotonic() - self._began
        if self._loop is None:
            return passed
        # Time in which no callback ran, such as a wait for the engine, is the play's own.
        others_s = self._loop.busy_s - self._busy_s - self._loop.own_s(self._play)
        return passed - max(0.0, others_s)


logger = logging.getLogger(__name__)

# A rollout that swallows its cancellation is abandoned after this time; it must not delay its answer.
CANCEL_GRACE_S = 2.0
# The libraries hop to threads per turn; two cores' default of six threads would queue them.
_EXECUTOR_THREADS = 32
_EXIT_S = 5.0


def main() -> None:
    """Run a worker in this process, confined as `--confinement` asks; a fork of the template calls `run` instead."""
    parser = argparse.ArgumentParser(description="Millrace environment worker; started by the env-server.")
    parser.add_argument("--fd", type=int, action="append", required=True, help="inherited socket, as of `run`")
    parser.add_argument("--directory", required=True, help="working directory of this worker alone")
    parser.add_argument("--confinement", help="what it may, as JSON; nothing if it is confined already")
    parser.add_argument("--python", default="", help="interpreter that it goes over to, once it is confined")
    args = parser.parse_args()
    with contextlib.suppress(OSError):  # for `top`; only Linux has it
        Path("/proc/self/comm").write_text("env-worker")
    channel_fd, echo_fd, *rest = args.fd
    if args.confinement is not None:
        values = decode_object(args.confinement, what="--confinement", reason="SETTINGS_INVALID")
        confinement = Confinement.from_json(values)
        confinement.enter(args.directory, files=[channel_fd, echo_fd], control=rest[0] if rest else None)
    if args.python:
        _switch_interpreter(args.python, channel_fd, echo_fd, args.directory)
    else:
        run(channel_fd, echo_fd)


def _switch_interpreter(python: str, channel_fd: int, echo_fd: int, directory: str) -> None:
    """Replace this process by a worker in the interpreter `python`, with the same sockets and working directory.

    If that cannot be, wait for the command to load an environment, and answer why.
    """
    try:
        require_usable(python)
        exec_worker(python, [f"--fd={channel_fd}", f"--fd={echo_fd}", f"--directory={directory}"])
    except (InvalidSpecError, OSError) as error:
        channel = socket.socket(fileno=channel_fd)
        if (command := _read_first(channel)) is not None:
            setup("env-worker")
            channel.sendall(encode_frame(_failure(command.load.env.id, error)))


def run(channel_fd: int, echo_fd: int) -> None:
    """Load the environment that the first command on the socket `channel_fd` names, report it, and play until the
    socket closes.

    If it cannot be loaded, the error is reported, and this returns. A thread answers every byte on the socket
    `echo_fd`.
    """
    for inherited in (channel_fd, echo_fd):
        os.set_inheritable(inherited, False)  # what the environment starts does not get them
    channel = socket.socket(fileno=channel_fd)
    running: list[OwnTimeLoop] = []  # made after the environment's loading, which must not see its sockets
    # Before the environment is loaded, so that a long load does not look like a frozen process.
    start_answering(socket.socket(fileno=echo_fd), lambda: running[0].stuck_at() if running else None)
    # What environments print belongs to the log, not to a pipe that nobody reads.
    os.dup2(2, 1)
    setup("env-worker")
    channel.setblocking(True)
    command = _read_first(channel)
    if command is None:
        return
    try:
        with without_gc():
            adapter = load_adapter(command.load.env)
    # The environment is foreign code: whatever it raises, exit included, is the reason why it could not be loaded.
    except BaseException as error:  # noqa: BLE001 - environment code: whatever it raises is the answer
        channel.sendall(encode_frame(_failure(command.load.env.id, error)))
        return
    # Loading a v0 environment installs handlers that start a teardown; here the socket says when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with asyncio.Runner(loop_factory=OwnTimeLoop) as runner:
        running.append(cast("OwnTimeLoop", runner.get_loop()))
        runner.run(_Worker(adapter, channel, env_id=command.load.env.id).run())


def _failure(env_id: str, error: BaseException) -> env_worker_pb2.WorkerReport:
    """Log why an environment could not be loaded, and return the report of it for the env-server."""
    kind, message, remedy = describe_error(error)
    fields = {"env": env_id, "error": f"{kind}: {message}", "frames": frames_of(error)}
    logger.info("environment could not be loaded", extra=fields)  # the process that asked logs it as an error
    logger.debug("its whole traceback", exc_info=error)
    failed = env_worker_pb2.EnvFailed(error_type=kind, error_message=message, error_remedy=remedy)
    return env_worker_pb2.WorkerReport(failed=failed)


def _read_first(channel: socket.socket) -> env_worker_pb2.WorkerCommand | None:
    """Read the first command, LoadEnv, without an event loop, because the environment is loaded outside of one.

    None if the socket was closed.
    """
    data = receive_frame(channel.recv, most=MAX_FRAME_BYTES)
    return None if data is None else decode_frame(env_worker_pb2.WorkerCommand, data)


class EnvironmentExitError(Exception):
    """An environment's code raised SystemExit or KeyboardInterrupt, which would end the process and all that it
    plays.
    """


class _Worker:
    """Plays what the parent sends over the socket."""

    def __init__(self, adapter: EnvAdapter, channel: socket.socket, *, env_id: str) -> None:
        """Take the loaded environment and the socket to the env-server; `run` begins to answer there."""
        self._adapter = adapter
        self._env_id = env_id
        self._channel = channel
        self._plays: dict[int, asyncio.Task[None]] = {}
        self._standings: dict[int, engine_access.Standing] = {}
        self._num_abandoned = 0

    async def run(self) -> None:
        """Start the adapter, report that the environment is loaded, and carry out commands until the socket closes.

        If the adapter cannot start, that is reported, and this returns.
        """
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_EXECUTOR_THREADS, "env"))
        self._channel.setblocking(False)
        reader, self._writer = await asyncio.open_connection(sock=self._channel)
        try:
            await self._adapter.start()
        except asyncio.CancelledError:
            raise
        # What an environment starts with is its own code, and its library's of whatever release.
        except BaseException as error:  # noqa: BLE001 - environment code: whatever it raises is the answer
            await self._send(_failure(self._env_id, error))
            return
        await self._send(env_worker_pb2.WorkerReport(loaded=loaded_to_wire(self._adapter.loaded)))
        while (command := await read_frame(reader, env_worker_pb2.WorkerCommand)) is not None:
            match command.WhichOneof("command"):
                case "play":
                    task = asyncio.create_task(self._play(command.play))
                    self._plays[command.play.play_id] = task
                    task.add_done_callback(lambda _, key=command.play.play_id: self._plays.pop(key, None))
                case "cancel":
                    if playing := self._plays.get(command.cancel.play_id):
                        playing.cancel()
                case None:  # a ping: we are alive, and our loop runs
                    counts = engine_access.places(self._standings.values())
                    await self._send(env_worker_pb2.WorkerReport(standing=env_worker_pb2.Standing(places=counts)))
                case other:
                    logger.error("unknown command", extra={"command": other})
        await self._stop()

    async def _stop(self) -> None:
        """Cancel all plays and close the adapter; after `_EXIT_S` the process exits in any case."""
        # Environment code may refuse to end; this thread is what ends the process then.
        deadline = threading.Timer(_EXIT_S, os._exit, args=(0,))
        deadline.daemon = True
        deadline.start()
        for playing in list(self._plays.values()):
            playing.cancel()
        if self._plays:
            await asyncio.wait(list(self._plays.values()), timeout=_EXIT_S)
        await self._adapter.close()

    async def _send(self, report: env_worker_pb2.WorkerReport) -> None:
        """Send a report to the env-server."""
        self._writer.write(encode_frame(report))
        await self._writer.drain()

    async def _play(self, play: env_worker_pb2.PlayMembers) -> None:
        """Play the request's members and report one rollout for each."""
        request = play.request
        began, own = time.monotonic(), OwnTime(play.play_id)
        self._standings[play.play_id] = engine_access.begin()
        try:
            with bind(run=request.run_uid):
                outcomes = await self._outcomes(request, play, own)
        finally:
            own.close()
            del self._standings[play.play_id]
        seconds = time.monotonic() - began
        task_id = self._adapter.loaded.task_id(request)
        self._writer.write(ended_frame(request, play.play_id, task_id, outcomes, seconds))
        await self._writer.drain()

    async def _played(self, request: PlayGroupRequest, tokenizer_dir: str) -> Sequence[Outcome]:
        """Have the adapter play the request; a SystemExit or KeyboardInterrupt of its code is raised as
        EnvironmentExitError.
        """
        try:
            return await self._adapter.play(request, tokenizer_dir=tokenizer_dir)
        except (SystemExit, KeyboardInterrupt) as error:
            ended = EnvironmentExitError(f"the environment's code raised {type(error).__name__}: {error}")
            raise ended.with_traceback(error.__traceback__) from error

    async def _outcomes(
        self, request: PlayGroupRequest, play: env_worker_pb2.PlayMembers, own: OwnTime
    ) -> list[Outcome]:
        """Play the request and return one outcome per member in any case, by its deadline plus CANCEL_GRACE_S.

        The deadline counts the play's own time (`own`), without that of other plays' code in the loop. What misses it,
        or raises, is a failure.
        """
        playing = asyncio.ensure_future(self._played(request, play.tokenizer_dir))
        count = len(request.members)
        try:
            # Again after each wait: time that other plays took meanwhile has moved the deadline.
            while not playing.done() and (left_s := request.rollout_timeout_seconds - own.seconds) > 0:
                await asyncio.wait({playing}, timeout=left_s)
        except asyncio.CancelledError:
            # The env-server has cancelled the play and waits for no answer.
            playing.cancel()
            await asyncio.wait({playing}, timeout=CANCEL_GRACE_S)
            raise
        if not playing.done():
            # Read before the cancellation, which moves the play elsewhere.
            where = self._standings[play.play_id].describe(own_line(playing))
            playing.cancel()
            await asyncio.wait({playing}, timeout=CANCEL_GRACE_S)
            if not playing.done():
                self._num_abandoned += 1
                logger.warning("a rollout ignores its cancellation", extra={"abandoned": self._num_abandoned})
            message = f"not finished within {request.rollout_timeout_seconds:g} s of its own time; it stood {where}"
            return [failed(RolloutStatus.TIMEOUT, "RolloutTimeout", message)] * count
        if playing.cancelled():
            message = "the environment cancelled its own rollout"
            return [failed(RolloutStatus.ENV_ERROR, "CancelledError", message)] * count
        error = playing.exception()
        if error is None:
            return list(playing.result())
        kind, message, remedy = describe_error(error)
        message = f"{message}; {remedy}" if remedy else message
        logger.warning("a rollout raised", extra={"error": f"{kind}: {message}", "task_index": request.task_index})
        return [failed(RolloutStatus.ENV_ERROR, kind, message, frames=frames_of(error))] * count


def answer_of(
    request: PlayGroupRequest, member: int, task_id: str, outcome: Outcome, seconds: float
) -> rollout_pb2.Rollout:
    """Return the wire message of a member's rollout, made of the request and the outcome.

    `seconds` is how long it was played. A training rollout gets its task's demonstration if the request has a
    `demo_key`. Values that cannot be stored make it a failure.
    """
    try:
        if request.demo_key and is_training(request):
            outcome = demonstrated(outcome, request.demo_key)
        rollout = make_rollout(request, member=member, task_id=task_id, outcome=outcome, seconds=seconds)
        return rollout_to_proto(rollout)
    except CorruptObjectError as error:
        # The columns do not fit together: what the engine returned is not what it sampled.
        refused = failed(RolloutStatus.MISSING_TOKENS, "InvalidTokens", str(error), of=outcome)
    except Exception as error:  # noqa: BLE001 - values of foreign code: whatever is wrong with them is the answer
        problem = f"what the environment says of the rollout cannot be stored: {type(error).__name__}: {error}"
        logger.warning("an outcome cannot be stored", extra={"error": problem, "task_index": request.task_index})
        refused = failed(RolloutStatus.ENV_ERROR, "InvalidOutcome", problem)
    return rollout_to_proto(make_rollout(request, member=member, task_id=task_id, outcome=refused, seconds=seconds))


def ended_frame(
    request: PlayGroupRequest, play_id: int, task_id: str, outcomes: Sequence[Outcome], seconds: float
) -> bytes:
    """Return the frame that reports one rollout for each member of a play that is over.

    `outcomes` are in the order of the request's members. If they are too large for one frame, all rollouts are
    failures: without a report the play would never end.
    """
    ended = env_worker_pb2.PlayEnded(play_id=play_id)
    for member, outcome in zip(request.members, outcomes, strict=True):
        ended.rollouts.append(answer_of(request, member, task_id, outcome, seconds))
    try:
        return encode_frame(env_worker_pb2.WorkerReport(ended=ended))
    except CorruptObjectError as error:
        problem = f"the rollouts of the play are too large to be reported together: {error}"
        logger.warning("a play is too large", extra={"error": problem, "task_index": request.task_index})
        refused = failed(RolloutStatus.ENV_ERROR, "PlayTooLarge", problem)
        del ended.rollouts[:]
        for member in request.members:
            ended.rollouts.append(answer_of(request, member, task_id, refused, seconds))
        return encode_frame(env_worker_pb2.WorkerReport(ended=ended))


if __name__ == "__main__":
    main()
