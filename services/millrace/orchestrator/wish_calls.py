"""CancelRun, PauseRun and ResumeRun: a wish is durable before it is acknowledged."""

from collections.abc import Awaitable, Callable

from millrace.errors import InvalidStateError
from millrace.orchestrator.run_view import RunView
from millrace.orchestrator.wishes import Wish
from millrace.runlog import Names
from millrace.runlog.intents import read_intents, write_intent
from millrace.storage import ObjectStore
from millrace.v1 import run_pb2


class WishCalls:
    """Writes the wishes of users as intents, each once however often it is repeated."""

    def __init__(self, *, store: ObjectStore, prefix: str, on_wish: Callable[[str], Awaitable[None]]) -> None:
        """`on_wish` hears the uid of a run with a new wish."""
        self._store = store
        self._prefix = prefix
        self._on_wish = on_wish

    async def cancel(self, view: RunView, *, reason: str, request_id: str) -> None:
        """Ask the run to end."""
        if view.run.state == run_pb2.RUN_STATE_CANCELLED:
            return
        _require_open(view, "cancel")
        if not (await self._wish(view)).is_cancelled:
            await self._write(view, "cancel", {"reason": reason, "request_id": request_id})

    async def pause(self, view: RunView, *, reason: str, request_id: str) -> None:
        """Ask the run to pause."""
        _require_open(view, "pause")
        wish = await self._wish(view)
        if wish.is_cancelled or view.run.state == run_pb2.RUN_STATE_STOPPING:
            why = "it is being cancelled" if wish.is_cancelled else "every step is done"
            raise InvalidStateError(
                f"run {view.record.name!r} is about to end: {why}",
                reason="RUN_STOPPING",
                remedy="nothing is left to pause",
            )
        if not wish.is_paused:
            await self._write(view, "pause", {"reason": reason, "request_id": request_id})

    async def resume(self, view: RunView, *, request_id: str) -> None:
        """Let the run go on."""
        _require_open(view, "resume")
        if (await self._wish(view)).is_paused:
            await self._write(view, "resume", {"request_id": request_id})

    async def _wish(self, view: RunView) -> Wish:
        """What the run shall do, with every intent that was acknowledged by now."""
        return Wish().then(await read_intents(self._store, Names(self._prefix, view.record.uid)))

    async def _write(self, view: RunView, kind: str, payload: dict[str, str]) -> None:
        await write_intent(self._store, Names(self._prefix, view.record.uid), kind, payload)
        await self._on_wish(view.record.uid)


def _require_open(view: RunView, verb: str) -> None:
    if view.is_terminal:
        state = run_pb2.RunState.Name(view.run.state).removeprefix("RUN_STATE_")
        raise InvalidStateError(
            f"run {view.record.name!r} has already ended as {state}",
            reason="RUN_ENDED",
            remedy=f"nothing is left to {verb}",
            metadata={"state": state},
        )
