"""Follow a run to its end: each event goes to the progress, the view and the metrics file."""

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
"""How long a local stack is kept while exports write the rest of an ended run. Exports have 60 s for it."""
_LOOK_S = 0.1
_SHOWN_S = 1.0
_METRIC_KINDS = {"step_completed": "step", "eval_completed": "eval", "score_completed": "score"}


class MetricsFile:
    """Writes `metrics.jsonl`: one JSON object per step, evaluation and score, at once."""

    def __init__(self, path: Path) -> None:
        """Create the file, or empty it: the events are read from the first one again."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("w")

    def write(self, event: event_pb2.Event) -> None:
        """Append the numbers of an event; do nothing if it is not a step, an evaluation or a score."""
        body = event.WhichOneof("body") or ""
        if body not in _METRIC_KINDS:
            return
        # Zeros are figures, too, and JSON of protobuf leaves them out otherwise.
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
    """Follow the run `progress.name` until it has ended or is held up. Cancelling this does not affect the run.

    Each event is applied to `progress`, shown in `view`, and written to `metrics`.
    """

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
    """Wait until the orchestrator has released an ended run; exports, such as that to W&B, write the rest meanwhile.

    Return after two minutes at most, or if the server does not answer. Reasons for a longer wait are reported with
    `note`.
    """
    ends, last = time.monotonic() + GIVEN_BACK_S, ""
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
            if reason != last and time.monotonic() > shown_from:
                last = reason
                note(f"the run has ended; waiting for {reason} (Ctrl-C leaves it undone)")
            await asyncio.sleep(_LOOK_S)


def require_success(progress: Progress, *, logs: Path | None = None) -> None:
    """Raise CliError (exit code 1) with cause, place and remedy unless the run has succeeded.

    `logs` is the log directory of the run's own stack, which has ended; None if a server has the run.
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
    """Return the error for a run that makes no progress. The run has not ended, and nothing of it is lost.

    `logs` is the log directory of the run's own stack; None if a server has the run.
    """
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
    """Redraw the view four times a second during the block, and once at its end."""
    ticker = asyncio.create_task(_tick(view), name="refresh of the view")
    try:
        yield
    finally:
        ticker.cancel()
        await asyncio.gather(ticker, return_exceptions=True)
        view.refresh()


async def _tick(view: ProgressView) -> None:
    """Redraw the view four times a second, until cancelled."""
    while True:
        await asyncio.sleep(REFRESH_S)
        view.refresh()
