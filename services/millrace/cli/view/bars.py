"""Progress of long work: bars on a terminal, lines every few seconds elsewhere. Both go to standard error."""

import contextlib
from collections.abc import Iterator

import click
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from millrace.telemetry import progress

_WIDTH = 30


@contextlib.contextmanager
def shown_work(console: Console | None = None) -> Iterator[None]:
    """Show the progress of this process's long work during the block."""
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
