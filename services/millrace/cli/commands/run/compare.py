"""`millrace run compare`: curves, last values and configs of several runs side by side."""

import os
from typing import TYPE_CHECKING

import click

from millrace.cli.connection import ask_server
from millrace.cli.errors import CliError
from millrace.cli.options import FORMAT, SERVER_OR_STORE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from millrace.cli.offline.look import RunLook

MAX_RUNS = 8


@click.command()
@click.argument("names", metavar="RUN RUN ...", nargs=-1)
@click.option("--metric", "metrics", multiple=True, metavar="NAME", help="Only this metric; may be repeated.")
@FORMAT
@SERVER_OR_STORE
def compare(
    names: tuple[str, ...],
    metrics: tuple[str, ...],
    form: str,
    server: str | None,
    store: str | None,
    prefix: str | None,
) -> int:
    """Compare runs: curves on one scale, last values, and the keys in which their configs differ.

    RUN is a name, the beginning of one, a uid, - for the most recent run, or the directory that `millrace rl` has
    written; such a directory is read without a server. Two to eight runs; docs/metrics.md lists metrics.
    """
    if not 2 <= len(set(names)) <= MAX_RUNS:
        raise CliError(
            f"name two to {MAX_RUNS} different runs (got {len(set(names))})", hint="millrace run compare A B"
        )
    if store is not None and server is not None:
        raise CliError("--server asks a server and --store reads a store", hint="leave one out")
    from millrace.cli.view.compare import chosen_metrics, compare_json, compare_lines, config_differences
    from millrace.telemetry.redact import secrets_of

    runs = _looks(tuple(dict.fromkeys(names)), server=server, store=store, prefix=prefix)
    there = {name for run in runs for name in run.metrics}
    if unknown := [name for name in metrics if name not in there]:
        raise CliError(
            f"none of these runs has a metric {unknown[0]!r}",
            hint=f"they have {', '.join(sorted(there - {'step'})[:40]) or 'none yet'}",
        )
    chosen = chosen_metrics(runs, metrics)
    differing = config_differences(runs, secrets_of(os.environ))
    if form == "json":
        click.echo(compare_json(runs, chosen, differing))
    else:
        click.echo("\n".join(compare_lines(runs, chosen, differing)))
    return 0


def _looks(names: tuple[str, ...], *, server: str | None, store: str | None, prefix: str | None) -> "Sequence[RunLook]":
    """The runs, in the order in which they were named."""
    from millrace.cli.offline.look import looks_here, looks_there

    found = {} if server is not None else looks_here(names, store=store, prefix=prefix, note=_note)
    if others := [name for name in names if name not in found]:
        found |= ask_server(server, lambda client: looks_there(client, others, note=_note), run=others[0])
    return [found[name] for name in names]


def _note(text: str) -> None:
    click.echo(text, err=True)
