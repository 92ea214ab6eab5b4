"""`millrace run delete`: what a run has in the store, and its removal."""

import getpass
import sys
from typing import TYPE_CHECKING

import click

from millrace.cli.errors import EXIT_FAILED, CliError
from millrace.cli.options import RUN

if TYPE_CHECKING:
    from millrace.client import Client
    from millrace.runlog.deletion import Deletion
    from millrace.runlog.names import Names
    from millrace.storage import ObjectStore
    from millrace.v1 import run_service_pb2 as rs


@click.command()
@RUN
@click.option("--dry-run", is_flag=True, help="Only show what would be deleted, and who needs it.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option(
    "--even-open",
    is_flag=True,
    help="Also a run that has not ended; refused while an orchestrator or a trainer holds it. Needs --redis.",
)
@click.option("--even-needed", is_flag=True, help="Also a run whose forks have their history in it.")
@click.option("--server", metavar="ADDR", help="Have this orchestrator (host:port) delete it, and name no store.")
@click.option("--store", metavar="URL", help="The object store; else outputs/RUN/store, MILLRACE_STORE_URL, …")
@click.option("--redis", metavar="URL", help="Also delete its copy in this Redis, and its place in the list of runs.")
@click.option("--prefix", metavar="NAME", help="The deployment; else MILLRACE_PREFIX, else millrace.")
def delete(
    name: str,
    dry_run: bool,
    yes: bool,
    even_open: bool,
    even_needed: bool,
    **places: str | None,
) -> int:
    """Delete every object of a run, for good. RUN is a name, or a uid.

    Shows first what goes, and how many bytes, and asks. With --server an orchestrator deletes an ended run in its own
    store and Redis. Else the command works on the store alone; where an orchestrator runs, name its Redis, too, else
    the run stays in its list. A deletion that was interrupted goes on when it is asked for again.
    """
    if places["server"] is not None:
        if even_open or any(places[each] is not None for each in ("store", "redis", "prefix")):
            raise click.UsageError("--server goes without --store, --redis, --prefix and --even-open")
        return _by_server(name, places["server"], dry_run=dry_run, yes=yes, even_needed=even_needed)
    # After it, because a client that asks a server does not have what reads a store.
    from millrace.runlog.deletion import delete_run, plan_deletion, require_unneeded

    redis = places["redis"]
    objects, names = _find(name, places["store"], places["prefix"])
    deletion = plan_deletion(objects, names)
    click.echo("\n".join(_lines(deletion)))
    if dry_run:
        return 0
    require_unneeded(deletion, may_be_open=even_open, may_be_needed=even_needed)
    if deletion.is_open and redis is None:
        raise click.UsageError("--even-open needs --redis: its leases say whether something still drives the run")
    _confirm(deletion.name or names.uid, yes=yes)
    by = getpass.getuser()
    if redis is not None:
        # Before an object is deleted: it ends with an error if a process holds the run.
        _forget(redis, objects, deletion, by=by)
    left = delete_run(objects, deletion, by=by)
    if left:
        click.echo("\n".join([*map(str, left), "the rest of the run stays: delete it again"]), err=True)
        return EXIT_FAILED
    click.echo(f"run {deletion.name or names.uid} is deleted: {sum(deletion.counts.values())} objects")
    return 0


def _confirm(run: str, *, yes: bool) -> None:
    """Ask whether a run shall be deleted, unless `yes`; raise CliError if nobody can be asked, Abort if not."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise CliError("nothing was deleted: nobody can be asked here", hint="add --yes")
    click.confirm(f"Delete run {run} for good?", abort=True)


def _by_server(name: str, server: str, *, dry_run: bool, yes: bool, even_needed: bool) -> int:
    """Show what a run has on the orchestrator at `server`, ask, and have it deleted there; return the exit code 0.

    With `dry_run` nothing is deleted, with `yes` nobody is asked. `even_needed` also deletes a run that forks need.
    """
    from millrace.cli.connection import ask_server

    async def plan(client: "Client") -> "rs.DeleteRunResponse":
        return await client.runs.delete(name, validate_only=True)

    async def work(client: "Client") -> "rs.DeleteRunResponse":
        # By its uid: while the user was asked, the name may have become another run's.
        return await client.runs.delete(found.uid, even_needed=even_needed)

    found = ask_server(server, plan, run=name)
    click.echo("\n".join(_answered_lines(name, found)))
    if dry_run:
        return 0
    _confirm(name, yes=yes)
    deleted = ask_server(server, work, run=name)
    click.echo(f"run {name} is deleted: {sum(each.count for each in deleted.objects)} objects")
    return 0


def _find(text: str, store: str | None, prefix: str | None) -> "tuple[ObjectStore, Names]":
    """Return the store and the names of the run that `text` refers to, also of one whose deletion was interrupted.

    The store is tested first, because it will be written to. Raises NotFoundError if there is no such run.
    """
    from millrace.cli.offline.run_store import find_uid, store_of, store_prefix
    from millrace.errors import NotFoundError
    from millrace.runlog.deletion import find_tombstone
    from millrace.runlog.names import Names
    from millrace.storage.self_test import require_tested

    (objects, meant), deployment = store_of(text, store), store_prefix(prefix)
    require_tested(objects, prefix=deployment).result()
    try:
        uid = find_uid(objects, deployment, meant)
    except NotFoundError:
        uid = find_tombstone(objects, deployment, meant.removeprefix("runs/"))
        if uid is None:
            raise
    return objects, Names(deployment, uid)


def _forget(url: str, objects: "ObjectStore", deletion: "Deletion", *, by: str) -> None:
    """Mark the run as deleted, and remove it from the Redis at `url`; raise InvalidStateError if a process holds it.

    `url` is a URL, or a file that holds one. `by` says who deletes the run.
    """
    from millrace.cli import interrupts
    from millrace.cli.offline.run_store import naming, redis_url
    from millrace.runlog import open_redis
    from millrace.runlog.deletion import begin_deletion

    async def work(_: interrupts.Interrupts) -> None:
        with naming("--redis"):
            client = open_redis(redis_url(url))
        try:
            await begin_deletion(client, objects, deletion, by=by)
        finally:
            await client.aclose()

    interrupts.run(work)


def _lines(deletion: "Deletion") -> list[str]:
    rows = [(kind, count, deletion.sizes[kind]) for kind, count in sorted(deletion.counts.items())]
    lines = [f"run {deletion.name or '(without a name)'}, uid {deletion.names.uid}", _table(rows)]
    lines += ["it has not ended"] if deletion.is_open else []
    lines += [f"its forks: {', '.join(deletion.needed_by)}"] if deletion.needed_by else []
    return lines


def _answered_lines(name: str, found: "rs.DeleteRunResponse") -> list[str]:
    rows = [(each.kind, each.count, each.size_bytes) for each in found.objects]
    lines = [f"run {name}, uid {found.uid}", _table(rows)]
    return lines + ([f"its forks: {', '.join(found.needed_by)}"] if found.needed_by else [])


def _table(rows: list[tuple[str, int, int]]) -> str:
    """Return kinds of objects, with their counts and bytes, as a table that ends with the sums."""
    from millrace.cli.view.text import table

    total = ("all", sum(count for _, count, _ in rows), sum(size for *_, size in rows))
    cells = [(kind, f"{count}", f"{size / 1e6:,.1f} MB") for kind, count, size in [*rows, total]]
    return table(cells, header=("OBJECTS", "COUNT", "BYTES"))
