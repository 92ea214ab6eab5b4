"""The live picture of a run. `render` depends on the progress alone; `LiveView` redraws it four times a second."""

import contextlib
import time
from collections.abc import Iterator
from typing import Self

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from millrace.cli.view.lines import LONG_WAIT_S, progress_line, reward, wait_line
from millrace.cli.view.progress import Progress
from millrace.cli.view.text import count, duration, printable, sparkline
from millrace.runlog.run_status import state_name
from millrace.telemetry import progress
from millrace.v1 import event_pb2, run_pb2

# Progress of long work: bars on a terminal, lines every few seconds elsewhere. Both go to standard error.

_WIDTH = 30


@contextlib.contextmanager
def shown_work(console: Console | None = None) -> Iterator[None]:
    """Show the progress of this process's long work during the block on `console` (None: standard error).

    On a terminal there is a bar for each piece of work; elsewhere its lines are printed.
    """
    target = console or Console(stderr=True)
    if not target.is_terminal:
        with progress.send_lines_to(lambda line: click.echo(line, file=target.file)):
            yield
        return
    live = Live(get_renderable=bars, console=target, transient=True, refresh_per_second=4)
    with live, progress.send_lines_to(lambda line: None):
        yield


def bars() -> Table:
    """Return a table with a row for each piece of work: title, bar, amount."""
    rows = Table.grid(padding=(0, 1))
    for work in progress.active():
        share = work.share
        bar = ProgressBar(total=1.0, completed=share or 0.0, width=_WIDTH, pulse=share is None)
        rows.add_row(work.title, bar, work.amount)
    return rows


_STATE_STYLES = {
    run_pb2.RUN_STATE_RUNNING: "bold green",
    run_pb2.RUN_STATE_SUCCEEDED: "bold green",
    run_pb2.RUN_STATE_FAILED: "bold red",
    run_pb2.RUN_STATE_CANCELLED: "bold yellow",
}


def render(progress: Progress, *, elapsed_s: float) -> RenderableType:
    """Return the picture: header, bar, measures with sparklines, pipeline, long waits, last events.

    `elapsed_s` is the time since the view began.
    """
    parts: list[RenderableType] = [_header(progress, elapsed_s)]
    if progress.max_steps:
        bar = Table.grid()  # a bare bar ends without a newline
        bar.add_row(ProgressBar(total=progress.max_steps, completed=progress.step, width=60))
        parts.append(bar)
    if progress.steps or progress.evals:
        parts.append(_measures(progress))
    parts.append(_pipeline(progress))
    if progress.place:
        parts.append(Text(progress.place, style="dim", no_wrap=True, overflow="ellipsis"))
    late = [wait for wait in progress.waits.values() if wait.age_seconds >= LONG_WAIT_S]
    parts += [Text(printable(wait_line(wait)), style="yellow") for wait in late]
    parts += [Text(line, style="dim", no_wrap=True, overflow="ellipsis") for line in progress.last_lines]
    return Group(*parts)


def _header(progress: Progress, elapsed_s: float) -> Text:
    """Return the first line: name, state, step, time since the view began, and time that is left."""
    header = Text(no_wrap=True, overflow="ellipsis")
    header.append(progress.name, style="bold")
    header.append(f"  {state_name(progress.state)}", style=_STATE_STYLES.get(progress.state, "bold cyan"))
    of = f"/{progress.max_steps}" if progress.max_steps else ""
    header.append(f"  step {progress.step}{of}  {duration(elapsed_s)}")
    if progress.eta_s is not None and progress.state == run_pb2.RUN_STATE_RUNNING:
        header.append(f"  eta {duration(progress.eta_s)}")
    return header


def _measures(progress: Progress) -> Table:
    """Return rows with the last value and the curve of each measure, and with the rewards of evaluations."""
    table = Table.grid(padding=(0, 2))
    steps = progress.steps
    if steps:
        last = steps[-1]
        bound = "" if progress.staleness_bound is None else f"/{progress.staleness_bound}"
        tokens = count(last.tokens_per_s)
        table.add_row("reward", reward(last), sparkline([point.reward for point in steps]))
        table.add_row("staleness", f"{last.staleness_mean:.1f}{bound}", sparkline([p.staleness_mean for p in steps]))
        table.add_row("tokens/s", tokens, sparkline([point.tokens_per_s for point in steps]))
        waited = f"{last.step_s:.2f}s, trainer waited {last.wait_ratio:.0%}"
        table.add_row("step time", waited, sparkline([point.step_s for point in steps]))
    for env in dict.fromkeys(point.env for point in progress.evals):
        points = [point for point in progress.evals if point.env == env]
        # A single evaluation is shown once.
        ends = dict.fromkeys((points[0], points[-1]))
        shown = " → ".join(reward(p) + (f" (v{p.version})" if progress.has_versions else "") for p in ends)
        table.add_row(f"eval {env}", shown, "")
    return table


def _pipeline(progress: Progress) -> Text:
    """Return the line that shows how far each stage is, from batches to the served policy.

    A large difference between two stages shows which one is slow.
    """
    queued = max(0, progress.committed - progress.step)
    waited = f", waited {progress.steps[-1].wait_ratio:.0%}" if progress.steps else ""
    version = "–" if progress.policy is None else f"v{progress.policy.version}"
    served = "–" if progress.inference_version is None else f"v{progress.inference_version}"
    dropped = f", {sum(progress.dropped.values())} tasks dropped" if progress.dropped else ""
    return Text(
        f"batches {progress.committed} committed{dropped} → {queued} queued → trainer step {progress.step}{waited}"
        f" → policy {version} → inference {served}",
        style="cyan",
        no_wrap=True,
        overflow="ellipsis",
    )


class LiveView:
    """Draws `render` on a terminal, always in the same place."""

    def __init__(self, console: Console, progress: Progress) -> None:
        self._progress = progress
        self._begun = time.monotonic()
        self._live = Live(console=console, auto_refresh=False, transient=False, get_renderable=self._render)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._live.stop()

    def show(self, event: event_pb2.Event) -> None:
        """Add the event's line to the last events. Steps have no line, because the picture shows them anyway."""
        line = progress_line(event, self._progress)
        if line is not None and not event.HasField("step_completed"):
            self._progress.last_lines.append(line)

    def note(self, text: str) -> None:
        """Add a line that does not come from an event."""
        self._progress.last_lines.append(text)
        self.refresh()

    def refresh(self) -> None:
        """Redraw the picture."""
        self._live.refresh()

    def _render(self) -> RenderableType:
        return render(self._progress, elapsed_s=time.monotonic() - self._begun)
