"""The trainer's process: gang, background loop, heartbeats, health server, signals.

torch is imported while the process already registers, so this module must not import anything that needs torch.
"""

import concurrent.futures
import logging
import os
import signal
import threading
import uuid
from collections.abc import Callable
from types import FrameType
from typing import Any

from millrace.custom_code import CustomCode
from millrace.errors import MillraceError
from millrace.internal.v1.worker_service_pb2 import WORKER_KIND_TRAINER, Worker
from millrace.rpc.health import HealthBoard
from millrace.rpc.metrics_server import metrics_server
from millrace.rpc.reach import worker_slot
from millrace.rpc.serve import RegisteredWorker
from millrace.rpc.worker import new_worker_id
from millrace.runlog.redis.log import FORMAT_MAJOR
from millrace.storage import open_store
from millrace.telemetry import waits
from millrace.telemetry.settings import Settings
from millrace.telemetry.startup import without_gc
from millrace.trainer import meters
from millrace.trainer.log.background import BackgroundLoop
from millrace.trainer.publish.executor import Executor
from millrace.trainer.worker import SilenceReporter, TrainerWorker

logger = logging.getLogger(__name__)

_END_S = 15.0
_QUIET_S = 5.0


def run(settings: Settings, *, train: Callable[[Any], None] | None = None) -> int:
    """Register as a worker and train assigned runs until a signal; return the exit code, 0 or 130 for SIGINT.

    `train` replaces the training loop; it gets the `Training`. If registration, health or metrics server ends by
    itself, the worker stops: their MillraceError is raised (a port in use, a refused registration), else the code is 1.
    """
    executor = Executor.chosen()
    is_leader = os.environ.get("RANK", "0") == "0"
    board = HealthBoard()
    worker = TrainerWorker(board=board)
    signals = _Signals(worker)
    slot, silence = worker_slot(settings.advertise or settings.listen or ""), SilenceReporter()
    worker_id = new_worker_id("trainer") if is_leader else f"rank-{os.environ['RANK']}-{uuid.uuid4().hex[:8]}"
    description = Worker(
        worker_id=worker_id,
        kind=WORKER_KIND_TRAINER,
        min_log_format=FORMAT_MAJOR,
        max_log_format=FORMAT_MAJOR,
        custom_modules=CustomCode.parse(settings.custom_code).modules,
        num_ranks=int(os.environ.get("WORLD_SIZE", "1")),
    )
    with BackgroundLoop() as background:
        registered = RegisteredWorker(
            settings,
            description,
            worker.report,
            on_assignments=worker.on_answer,
            on_silence=silence.on_silence,
            is_held=True,
        )
        worker.heartbeat_soon = lambda: background.soon(registered.heartbeat_soon)
        companions = _Companions(settings, background, worker, registered)
        if is_leader:
            companions.start(board)
        try:
            _work(
                settings,
                worker,
                background,
                owner=worker_id,
                slot=slot,
                silence=silence,
                executor=executor,
                train=train,
            )
        finally:
            companions.stop()
        companions.raise_failure()
        if companions.have_failed:
            return 1
    return 130 if signals.was_interrupted else 0


def _work(
    settings: Settings,
    worker: TrainerWorker,
    background: BackgroundLoop,
    *,
    owner: str,
    slot: str,
    silence: SilenceReporter,
    executor: Executor,
    train: Callable[[Any], None] | None,
) -> None:
    """Import torch, join the gang, and train assigned runs until the worker is stopped.

    `owner` is the worker's id in leases, `slot` the address that one process at a time can have, and `train` replaces
    the training loop unless None.
    """
    # The imports take seconds, in which this trainer already registers and is assigned a run.
    # Unless their objects are frozen, the interpreter's end walks through all of them: 2 s of CPU, which is longer than
    # a supervisor waits when everything stops at once.
    with waits.waiting("torch and transformers to be loaded", quiet_s=_QUIET_S), without_gc():
        from millrace.trainer.gang.distributed import Gang, release_after_failure
        from millrace.trainer.job import JobContext, run_job
        from millrace.trainer.model.pretrained import load_code

        load_code()
    gang = Gang.join()
    worker.free_devices = lambda: release_after_failure(gang.device)
    try:
        context = JobContext(
            background=background,
            store=open_store(settings.require("store_url")),
            store_url=settings.require("store_url"),
            executor=executor,
            redis_url=settings.require("redis_url"),
            prefix=settings.prefix,
            gang=gang,
            owner=owner,
            slot=slot,
            silence=silence,
            should_stop=worker.should_stop,
            why_stopped=worker.why_stopped,
            on_epoch=worker.on_epoch,
            on_progress=worker.on_progress,
            damage=worker.damage,
            lender=worker,
            custom_code=CustomCode.parse(settings.custom_code),
            train=train,
        )
        worker.run(lambda uid: run_job(context, uid), gang=gang)
    finally:
        gang.leave()


class _Signals:
    """SIGTERM and SIGINT let the current step end; a second one exits at once."""

    def __init__(self, worker: TrainerWorker) -> None:
        """Install handlers of SIGTERM and SIGINT that stop `worker`, if this is the main thread."""
        self._worker = worker
        self._count = 0
        self.was_interrupted = False
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGTERM, signal.SIGINT):
                signal.signal(signum, self._handle)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        """Stop the worker at the first signal, and end the process at once at the second."""
        self._count += 1
        if self._count > 1:
            os._exit(128 + signum)
        self.was_interrupted = signum == signal.SIGINT
        self._worker.stop()


class _Companions:
    """Background tasks at rank 0: registration and, if addresses are set, the servers of health and metrics."""

    def __init__(
        self, settings: Settings, background: BackgroundLoop, worker: TrainerWorker, registered: RegisteredWorker
    ) -> None:
        """Keep what the background tasks need; start nothing."""
        self._settings = settings
        self._background = background
        self._worker = worker
        self._registered = registered
        self._future: concurrent.futures.Future[None] | None = None

    @property
    def have_failed(self) -> bool:
        """Return whether the background tasks ended with an error or were cancelled."""
        future = self._future
        return future is not None and future.done() and bool(future.cancelled() or future.exception())

    def start(self, board: HealthBoard) -> None:
        """Start registration and the servers of health and metrics on the background loop.

        `board` is what health reports. If one ends, all end, the error is logged and the worker stopped.
        """
        self._future = self._background.submit(self._run(board))
        self._future.add_done_callback(self._ended)

    def stop(self) -> None:
        """End the background tasks, which deregisters this trainer, and wait for their end for a bounded time.

        Does nothing if they were not started.
        """
        if self._future is None:
            return
        # On the loop, because an asyncio.Event is not safe to set from another thread.
        self._background.call(self._ask_to_stop(), what="stopping", timeout_s=_END_S)
        concurrent.futures.wait([self._future], self._settings.drain_s + self._settings.grace_s + _END_S)

    def raise_failure(self) -> None:
        """Raise the error that ended the background tasks, if it is a MillraceError; otherwise do nothing."""
        future = self._future
        if future is not None and future.done() and not future.cancelled():
            error = future.exception()
            if isinstance(error, MillraceError):
                raise error

    def _ended(self, future: concurrent.futures.Future[None]) -> None:
        """Log the error that ended the background tasks, if any, and stop the worker.

        Called on the background thread.
        """
        if future.cancelled():
            logger.error("a companion of the trainer was cancelled")
        elif (error := future.exception()) is not None:
            is_ours = isinstance(error, MillraceError)
            logger.error(
                "a companion of the trainer ended", extra={"error": repr(error)}, exc_info=None if is_ours else error
            )
        self._worker.stop()

    async def _run(self, board: HealthBoard) -> None:
        """Serve registration, health and metrics until the registration ends."""
        exported = meters.registry_of(lambda: self._worker.is_working)
        async with metrics_server(self._settings.metrics_listen, exported):
            await self._registered.serve(None, health_board=board, handle_signals=False)

    async def _ask_to_stop(self) -> None:
        """Ask the registration to deregister and end, which ends the background tasks."""
        self._registered.stopping.set()
