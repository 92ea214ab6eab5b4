"""A silent orchestrator, told by the trainer of its run: itself it cannot tell while it is frozen or gone."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator

from millrace.errors import MillraceError
from millrace.rpc.worker import Silence
from millrace.v1 import event_pb2

logger = logging.getLogger(__name__)

Write = Callable[[event_pb2.Event], Awaitable[None]]


class SilenceTeller:
    """Hears the worker agent on the background loop, and writes into the run that the trainer works on, if any."""

    def __init__(self) -> None:
        self._write: Write | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.contextmanager
    def reporting_to(self, write: Write) -> Iterator[None]:
        """While the block runs, silences are events; `write` is awaited on the background loop."""
        self._write = write
        try:
            yield
        finally:
            self._write = None

    def hear(self, silence: Silence) -> None:
        """The worker agent's `on_silence`; returns at once."""
        if self._write is None:
            return
        reason = "ORCHESTRATOR_BACK" if silence.is_over else "ORCHESTRATOR_SILENT"
        event = event_pb2.Event(warning=event_pb2.Warning(reason=reason, message=silence.describe()))
        task = asyncio.get_running_loop().create_task(_tell(self._write, event), name="tell of a silent orchestrator")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _tell(write: Write, event: event_pb2.Event) -> None:
    try:
        await write(event)
    except MillraceError as error:  # the run's log is gone or closed: the process log has it
        logger.warning("a silent orchestrator is not in the run's events", extra={"error": str(error)})
