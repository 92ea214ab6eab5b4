"""`millrace run delete`: what a run has in the store, and its removal."""

import getpass
import sys
from typing import TYPE_CHECKING

import click

from millrace.cli.errors import EXIT_FAILED, CliError
from millrace.cli.options import RUN

if TYPE_CHECKING:
    from millrace.runlog.deletion import Deletion
    from millrace.runlog.names import Names
    from millrace.storage import ObjectStore


@click.command()
@RUN
@click.option("--dry-run", is_flag=True, help="Only show what would be deleted, and who needs it.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--even-open", is_flag=True, help="Also a run that has not ended: nothing may drive it any more.")
@click.option("--even-needed", is_flag=True, help="Also a run whose forks have their history in it.")
@click.option("--store", metavar="URL", help="The object store; else outputs/RUN/store, MILLRACE_STORE_URL, …")
@click.option("--redis", metavar="URL", help="Also delete its copy in this Redis, and its place in the list of runs.")
@click.option("--prefix", metavar="NAME", help="The deployment; else MILLRACE_PREFIX, else millrace.")
def delete(
    name: str,
    dry_run: bool,
    yes: bool,
    even_open: bool,
    even_needed: bool,
    store: str | None,
    redis: str | None,
    prefix: str | None,
) -> int:
    """Delete every object of a run, for good. RUN is a name, or a uid.

    Shows first what goes, and how many bytes, and asks. Works on the store alone; where an orchestrator runs, name its
    Redis, too, else the run stays in its list. A deletion that was interrupted goes on when it is asked for again.
    """
    from millrace.runlog.deletion import delete_run, plan_deletion, require_unneeded

    objects, names = _find(name, store, prefix)
    deletion = plan_deletion(objects, names)
    click.echo("\n".join(_lines(deletion)))
    if dry_run:
        return 0
    require_unneeded(deletion, may_be_open=even_open, may_be_needed=even_needed)
    if not yes:
        if not sys.stdin.isatty():
            raise CliError("nothing was deleted: nobody can be asked here", hint="add --yes")
        click.confirm(f"Delete run {deletion.name or names.uid} for good?", abort=True)
    if redis is not None:
        _forget(redis, deletion)
    left = delete_run(objects, deletion, by=getpass.getuser())
    if left:
        click.echo("\n".join([*map(str, left), "the rest of the run stays: delete it again"]), err=True)
        return EXIT_FAILED
    click.echo(f"run {deletion.name or names.uid} is deleted: {sum(deletion.counts.values())} objects")
    return 0


def _find(text: str, store: str | None, prefix: str | None) -> "tuple[ObjectStore, Names]":
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


def _forget(url: str, deletion: "Deletion") -> None:
    from millrace.cli import interrupts
    from millrace.cli.offline.run_store import naming, redis_url
    from millrace.runlog import open_redis
    from millrace.runlog.deletion import forget_run

    async def work(_: interrupts.Interrupts) -> None:
        with naming("--redis"):
            client = open_redis(redis_url(url))
        try:
            await forget_run(client, deletion)
        finally:
            await client.aclose()

    interrupts.run(work)


def _lines(deletion: "Deletion") -> list[str]:
    from millrace.cli.view.text import table

    rows = [
        (kind, str(count), f"{deletion.sizes[kind] / 1e6:,.1f} MB") for kind, count in sorted(deletion.counts.items())
    ]
    total = (f"{sum(deletion.counts.values())}", f"{sum(deletion.sizes.values()) / 1e6:,.1f} MB")
    lines = [f"run {deletion.name or '(without a name)'}, uid {deletion.names.uid}"]
    lines.append(table([*rows, ("all", *total)], header=("OBJECTS", "COUNT", "BYTES")))
    lines += ["it has not ended"] if deletion.is_open else []
    lines += [f"its forks: {', '.join(deletion.needed_by)}"] if deletion.needed_by else []
    return lines
