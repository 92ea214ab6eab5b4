"""Follows a run to its end: events into the progress, the view and the metrics file."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from google.protobuf.json_format import MessageToDict

from millrace.cli.errors import EXIT_FAILED, CliError
from millrace.cli.view.progress import Progress
from millrace.cli.view.text import printable, shortened
from millrace.cli.view.view import ProgressView
from millrace.client import Client
from millrace.errors import HELD_UP, MillraceError, RefusedError, UnavailableError
from millrace.runlog.run_status import state_name
from millrace.storage.scratch import io_errors
from millrace.telemetry import waits
from millrace.v1 import event_pb2, run_pb2

REFRESH_S = 0.25
GIVEN_BACK_S = 120.0
"""How long a stack of our own stays for what is still written of a run that has ended; exports have 60 s."""
_LOOK_S = 0.1
_SHOWN_S = 1.0
_METRIC_KINDS = {"step_completed": "step", "eval_completed": "eval", "score_completed": "score"}


class MetricsFile:
    """`metrics.jsonl`: one JSON object per step, evaluation and score, written as they come."""

    def __init__(self, path: Path) -> None:
        """Begin the file anew: a follower reads the events from the first one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("w")

    def write(self, event: event_pb2.Event) -> None:
        """Append the event's numbers to the file, if the event has any."""
        body = event.WhichOneof("body") or ""
        if body not in _METRIC_KINDS:
            return
        numbers = MessageToDict(
            getattr(event, body), preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        # JSON of protobuf writes 64-bit integers as strings.
        values = {
            key: int(value) if isinstance(value, str) and value.isdigit() else value for key, value in numbers.items()
        }
        line = {"kind": _METRIC_KINDS[body], "time": event.time.ToJsonString(), "writer": event.writer, **values}
        with io_errors(self.path, "write", setting="--output-dir"):
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        with io_errors(self.path, "write", setting="--output-dir"):
            self._file.close()


async def follow(
    client: Client,
    progress: Progress,
    view: ProgressView,
    *,
    metrics: MetricsFile | None = None,
) -> None:
    """Follow `progress.name` until its terminal state, or until it is held up. A cancellation leaves the run alone."""

    def reconnecting(error: UnavailableError, delay_s: float) -> None:
        view.note(f"reconnecting in {delay_s:.1f}s: {error.message}")

    try:
        async with contextlib.aclosing(client.runs.watch(progress.name, on_reconnect=reconnecting)) as events:
            async for event in events:
                progress.apply(event)
                view.show(event)
                if metrics is not None:
                    metrics.write(event)
    except RefusedError as error:
        if error.reason != HELD_UP:
            raise
        progress.held_up = error


async def until_given_back(client: Client, name: str, *, note: Callable[[str], None]) -> None:
    """Stay until the orchestrator has given back a run that has ended: exports, as to W&B, write the rest meanwhile.

    What they wait for is noted once it lasts. Returns after two minutes at most, and where nobody answers.
    """
    ends, said = time.monotonic() + GIVEN_BACK_S, ""
    shown_from = time.monotonic() + _SHOWN_S
    with waits.waiting("the orchestrator to give the run back", waits_on="orchestrator", deadline_s=GIVEN_BACK_S):
        while time.monotonic() < ends:
            try:
                found = await client.runs.explain(name)
            except MillraceError as error:  # the run has ended, and how is known
                note(f"what the run's exports still had to write is not known: {error.message}")
                return
            if not found.waits:
                return
            reason = found.waits[0].reason
            if reason != said and time.monotonic() > shown_from:
                said = reason
                note(f"the run has ended; waiting for {reason} (Ctrl-C leaves it undone)")
            await asyncio.sleep(_LOOK_S)


def require_success(progress: Progress, *, logs: Path | None = None) -> None:
    """Raise CliError (exit 1) with cause, place and remedy unless the run ended well.

    `logs` is the directory of process logs of a stack that was the run's own and is gone: no server answers any more.
    """
    if progress.state == run_pb2.RUN_STATE_SUCCEEDED:
        return
    name, error = progress.name.removeprefix("runs/"), progress.error
    if progress.held_up is not None:
        raise _held_up(name, progress.held_up, logs=logs)
    if progress.state != run_pb2.RUN_STATE_FAILED or error is None:
        raise CliError(f"{progress.name} ended as {state_name(progress.state)}", exit_code=EXIT_FAILED)
    if logs is None:
        look, go_on = f"details: millrace run why {name}", f"`millrace run resume {name}` goes on with the run"
    else:
        log = logs / f"{error.component}.log"
        look = f"its log: {log}" if log.exists() else f"process logs: {logs}"
        go_on = f"the same command with --name {name} --resume goes on with the run"
    raise CliError(
        f"{progress.name} failed: {printable(shortened(error.message))}",
        place=f"{error.component or 'unknown'} [{error.reason}], {look}",
        hint=f"{error.remedy}; then {go_on}" if error.remedy else go_on,
        exit_code=EXIT_FAILED,
    )


def _held_up(name: str, error: RefusedError, *, logs: Path | None) -> CliError:
    """Return the error for a run without progress: nothing of the run is lost, and its log has no end."""
    component = error.metadata.get("component", "orchestrator")
    if logs is None:
        look, go_on = f"details: millrace run why {name}", f"the run goes on by itself (millrace run watch {name})"
    else:
        look = f"its log: {logs / component}.log"
        go_on = f"the same command with --name {name} --resume goes on with the run"
    return CliError(
        f"runs/{name} cannot go on: {printable(shortened(error.message))}",
        place=f"{component} [{error.metadata.get('cause', error.reason)}], {look}",
        hint=f"{error.remedy}; then {go_on}" if error.remedy else go_on,
        exit_code=error.exit_code,
    )


@contextlib.asynccontextmanager
async def ticking(view: ProgressView) -> AsyncIterator[None]:
    """Draw the view four times a second while the block runs, and once at its end."""
    ticker = asyncio.create_task(_tick(view), name="refresh of the view")
    try:
        yield
    finally:
        ticker.cancel()
        await asyncio.gather(ticker, return_exceptions=True)
        view.refresh()


async def _tick(view: ProgressView) -> None:
    while True:
        await asyncio.sleep(REFRESH_S)
        view.refresh()
