"""`millrace run compare` and `lineage`: runs side by side, and where a sample or a policy version comes from."""

import os
from typing import TYPE_CHECKING

import click

from millrace.cli.connection import ask_server
from millrace.cli.errors import CliError
from millrace.cli.options import FORMAT, RUN, SERVER_OR_STORE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from millrace.cli.offline.run_store import RunSnapshot
    from millrace.client import Client
    from millrace.v1 import run_service_pb2 as rs

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
    """Compare curves, last values and configs of runs.

    RUN is a name, the beginning of one, a uid, - for the most recent run, or the directory that `millrace rl` has
    written; such a directory is read without a server. Two to eight runs; docs/metrics.md lists metrics.
    """
    if not 2 <= len(set(names)) <= MAX_RUNS:
        raise CliError(
            f"name two to {MAX_RUNS} different runs (got {len(set(names))})", hint="millrace run compare A B"
        )
    if store is not None and server is not None:
        raise CliError("--server asks a server and --store reads a store", hint="leave one out")
    from millrace.cli.view.records import chosen_metrics, compare_json, compare_lines, config_differences
    from millrace.telemetry.logging import secrets_of

    runs = _snapshots(tuple(dict.fromkeys(names)), server=server, store=store, prefix=prefix)
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


def _snapshots(
    names: tuple[str, ...], *, server: str | None, store: str | None, prefix: str | None
) -> "Sequence[RunSnapshot]":
    """Return snapshots of the runs, in the order of `names`.

    They are read from the object store, and only runs that are not found there are asked of a server. If `server` is
    given, all are asked of that server. `store` and `prefix` are the values of the options.
    """
    from millrace.cli.offline.run_store import snapshots_here, snapshots_of_server

    found = {} if server is not None else snapshots_here(names, store=store, prefix=prefix, note=_note)
    if others := [name for name in names if name not in found]:
        found |= ask_server(server, lambda client: snapshots_of_server(client, others, note=_note), run=others[0])
    return [found[name] for name in names]


def _note(text: str) -> None:
    click.echo(text, err=True)


# `millrace run lineage`: from a sample or a policy version back to what made it, and forward to what came of it.

_MAX_VERSION = (1 << 31) - 1


@click.command()
@RUN
@click.option("--sample", default=None, metavar="ID", help="A sample, such as 12-3; `millrace run samples` lists them.")
@click.option("--version", type=click.IntRange(0, _MAX_VERSION), default=None, metavar="N", help="A policy version.")
@FORMAT
@SERVER_OR_STORE
def lineage(
    name: str,
    sample: str | None,
    version: int | None,
    form: str,
    server: str | None,
    store: str | None,
    prefix: str | None,
) -> int:
    """Show where a sample or a policy version comes from, and what came of it.

    Of a sample: the policy versions that made its tokens, with their batches and checkpoints, the step that trained on
    it, and the version that came of it. Of a version: the batch that it was made from, and what was sampled with it.

    RUN is a name, the beginning of one, a uid, - for the most recent run, or the directory that `millrace rl` has
    written; such a directory is read without a server.
    """
    from millrace.cli.offline.run_store import directory_of

    if (sample is None) == (version is None):
        raise CliError(
            "say what to trace: one of --sample and --version",
            hint="--sample 12-3 (`millrace run samples` lists ids), or --version 12",
        )
    if store is not None and server is not None:
        raise CliError("--server asks a server and --store reads a store", hint="leave one out")
    is_here = store is not None or (server is None and directory_of(name) is not None)
    found = _here(name, sample, version, store, prefix) if is_here else _there(name, sample, version, server)
    if form == "json":
        from millrace.cli.view.output import message_json

        click.echo(message_json(found))
        return 0
    from millrace.cli.view.records import lineage_lines

    click.echo("\n".join(lineage_lines(found)))
    return 0


def _lineage_note(text: str) -> None:
    click.echo(text, err=True)


def _here(
    name: str, sample: str | None, version: int | None, store: str | None, prefix: str | None
) -> "rs.GetLineageResponse":
    """Return the lineage of a sample or of a policy version, read from the object store; the other one is None."""
    from millrace.cli.offline.run_store import open_log, open_run
    from millrace.readers.dashboard import answers

    objects, deployment, uid = open_run(name, store, prefix)
    asked = {"sample": sample} if sample is not None else {"version": str(version)}
    with open_log(objects, deployment, uid, note=_lineage_note) as log:
        return answers.lineage(log.ask("get-lineage", asked), run=log.record.name)


def _there(name: str, sample: str | None, version: int | None, server: str | None) -> "rs.GetLineageResponse":
    """Return the lineage of a sample or of a policy version, asked of a server; the other one is None."""
    from millrace.cli.options import resolve

    async def ask(client: "Client") -> "rs.GetLineageResponse":
        run = await resolve(client.runs, name)
        return await client.runs.lineage(run.name, rollout=sample, version=version, on_note=_lineage_note)

    return ask_server(server, ask, run=name)
