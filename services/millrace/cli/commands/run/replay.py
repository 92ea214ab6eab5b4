"""`millrace run replay`: recompute a step of a run from its log, in this process."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from millrace.cli.errors import CliError
from millrace.cli.options import RUN, STORE

if TYPE_CHECKING:
    from millrace.readers.replay.report import ReplayReport

_INSTALL = "pip install 'millrace[trainer]'"
OnStep = Callable[[int, int], None]


@click.command()
@RUN
@click.option(
    "--step",
    type=click.IntRange(min=1),
    required=True,
    metavar="K",
    help="The step, counted from 1: it makes version K.",
)
@click.option(
    "--loss",
    metavar="MODULE:FUNCTION",
    default=None,
    help="Also show the metrics of the step under this loss, written like millrace.trainer.losses.policy_losses: "
    "(LossInputs, LossConfig) -> TokenLosses.",
)
@STORE
def replay(name: str, step: int, loss: str | None, store: str | None, prefix: str | None) -> int:
    """Recompute a step of a run from its log and compare the policy with the published one, bit for bit.

    Begins at the newest kept checkpoint at or before the step. Reads the object store only, writes nothing into it, and
    needs neither Redis nor a server. Exits 0 if the digests are equal, else 1 with the tensors that differ.
    """
    if loss == "":
        raise click.BadParameter("is empty; name a MODULE:FUNCTION or leave it out", param_hint="--loss")
    from millrace.cli.offline.run_store import open_run
    from millrace.readers.replay.report import report_lines
    from millrace.runlog.names import Names

    objects, deployment, uid = open_run(name, store, prefix)
    names = Names(deployment, uid)
    recompute = _recompute()
    with _progress(name) as on_step:
        report = recompute(objects, names, step=step - 1, loss=loss or "", on_step=on_step)
    click.echo("\n".join(report_lines(report)))
    return report.exit_code


def _recompute() -> Callable[..., "ReplayReport"]:
    """`millrace.readers.replay.steps.replay`, by name: the command line works without torch, which only this needs."""
    try:
        return importlib.import_module("millrace.readers.replay.steps").replay
    except ModuleNotFoundError as error:
        raise CliError(f"replay computes with {error.name}, which is not installed here", hint=_INSTALL) from error


@contextmanager
def _progress(name: str) -> Iterator[OnStep]:
    """A bar on a terminal, else a line per step; both on standard error."""
    if not sys.stderr.isatty():
        yield lambda done, total: click.echo(f"replaying {name}: {done} of {total} steps", err=True)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"replaying {name}", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
