"""Work in the background of a training: one piece at a time, on a thread of its own."""

import concurrent.futures
import contextvars
import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from millrace.errors import FencedError, LogGoneError
from millrace.telemetry import waits
from millrace.trainer.gang.distributed import Gang

logger = logging.getLogger(__name__)

_QUIET_S = 1.0  # a wait for the previous piece of work is reported from then on
_DEADLINE_S = 300.0  # when that wait counts as overdue; the store's own deadlines end it
_ENDS_WITHIN_S = 30.0  # how long an error of the training waits for what is under way
_GANG_ENDS_WITHIN_S = 5.0  # the same in a gang, where another rank may be dead
_ABANDONED_S = 2.0  # and for a thread that was asked to stop


class BackgroundWork:
    """Work on a thread of its own, one piece at a time; `finish` waits for it and raises what it raised."""

    def __init__(self, *, gang: Gang) -> None:
        self.is_abandoned = threading.Event()
        """Set when the work has to stop as soon as it can, because its result is not used any more."""
        self._gang = gang
        self._under_way: concurrent.futures.Future[None] | None = None
        self._what = ""
        self._is_given_up = False

    def begin(self, what: str, work: Callable[[], None]) -> None:
        """Start `work` on a daemon thread, with the caller's context variables, and return at once.

        `what` names the work in the registered wait for it ("policy 3 to be published"). Call `finish` first: work that
        is still under way would be forgotten.
        """
        future: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._under_way, self._what = future, what

        def run() -> None:
            """Do the work, and put its end or its error into the future."""
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - a thread's edge: raised by `finish`
                if self._is_given_up:
                    logger.warning("given up while waiting", extra={"awaited": what, "error": str(error)})
                future.set_exception(error)
            else:
                future.set_result(None)

        # The run that waits and log lines are of is a context variable, which a new thread does not inherit.
        context = contextvars.copy_context()
        # A daemon: where another rank died, a collective here may hang, and the process has to end all the same.
        threading.Thread(target=context.run, args=(run,), name=what, daemon=True).start()

    def raise_failure(self) -> None:
        """Raise what the background work raised, if it has ended, without waiting.

        In a gang only some ranks may raise.
        """
        if self._under_way is not None and self._under_way.done():
            self.finish()

    def finish_if_done(self) -> None:
        """Raise what the background work raised if it has ended at every rank; otherwise do nothing.

        Collective in a gang while work is under way.
        """
        if self._under_way is not None and self._gang.sum([self._under_way.done()])[0] == self._gang.world_size:
            self.finish()

    def finish(self) -> None:
        """Wait until the background work has ended, and raise what it raised.

        Return at once if nothing is under way.
        """
        # Forgotten before the wait, so that an error is raised once.
        future, self._under_way = self._under_way, None
        if future is None:
            return
        with waits.waiting(self._what, deadline_s=_DEADLINE_S, quiet_s=_QUIET_S):
            future.result()  # bounded by the store's deadlines, and by what the log waits for until asked to stop

    def give_up(self, error: BaseException) -> None:
        """Give up the background work because the training failed with `error`; raise nothing.

        The work has some seconds to end by itself (30, 5 in a gang), unless `error` says that another trainer has the
        run or that the log is gone. Then `is_abandoned` is set, and the thread is given up if it does not stop.
        """
        self._is_given_up = True
        if self._under_way is None:
            return
        if not isinstance(error, FencedError | LogGoneError):
            concurrent.futures.wait([self._under_way], _ENDS_WITHIN_S if self._gang.is_alone else _GANG_ENDS_WITHIN_S)
        self.is_abandoned.set()
        concurrent.futures.wait([self._under_way], _ABANDONED_S)


class BackgroundWriter:
    """A writer in the background of a training: its `with` block ends when all is written, or abandons the work."""

    _work: BackgroundWork

    def finish(self) -> None:
        """Wait until nothing is under way in the background, and raise what the work raised. Collective in a gang."""
        self._work.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        else:
            self._work.give_up(error)
