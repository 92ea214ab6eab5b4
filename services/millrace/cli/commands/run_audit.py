"""`millrace run audit`: check the promises of a run against its log, by its server or from the store itself."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

from millrace.cli.defaults import DEFAULT_LISTEN
from millrace.cli.errors import EXIT_FAILED

if TYPE_CHECKING:
    from millrace.v1 import audit_pb2


@click.command()
@click.argument("name", metavar="RUN")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option(
    "--server",
    metavar="ADDR",
    help=f"host:port of the orchestrator; else MILLRACE_SERVER, else {DEFAULT_LISTEN} (millrace up).",
)
@click.option("--store", metavar="URL", help="Audit this object store from here, without any server.")
@click.option(
    "--redis",
    metavar="URL|FILE",
    help="With --store: also compare this Redis with it; a file that holds its URL keeps a password out of the command "
    "line, such as redis/redis.url of a stack's directory.",
)
@click.option("--prefix", metavar="NAME", help="With --store: the deployment; else MILLRACE_PREFIX, else millrace.")
def audit(
    name: str, as_json: bool, server: str | None, store: str | None, redis: str | None, prefix: str | None
) -> int:
    """Check that nothing of a run was lost or counted twice.

    Reads everything that the run has written, in Redis and in the object store, and changes nothing. Exits 0 if the log
    keeps every promise, 1 with each violation if not.
    """
    if store is None and (redis is not None or prefix is not None):
        raise click.UsageError("--redis and --prefix belong to --store")
    if store is not None and server is not None:
        raise click.UsageError("--store audits without a server: leave --server out")
    from millrace.cli.audit_report import report_lines

    with _patience(name) as say:
        report = _by_server(name, server) if store is None else _offline(name, store, redis, prefix, say)
    if as_json:
        from google.protobuf.json_format import MessageToDict

        document = MessageToDict(report, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        click.echo(json.dumps(document, indent=2))
    else:
        click.echo("\n".join(report_lines(report)))
    return EXIT_FAILED if report.violations else 0


def _by_server(name: str, server: str | None) -> "audit_pb2.AuditReport":
    from millrace.cli import interrupts
    from millrace.cli.address import explain_unreachable, server_address
    from millrace.cli.connection import open_client
    from millrace.cli.names import resolve

    address, origin = server_address(server)

    async def work(_: interrupts.Interrupts) -> "audit_pb2.AuditReport":
        async with open_client(address) as client:
            found = await resolve(client.runs, name)
            return await client.runs.audit(found.name)

    with explain_unreachable(origin, address):
        return interrupts.run(work)


def _offline(
    name: str, store: str, redis: str | None, prefix: str | None, say: Callable[[str], None]
) -> "audit_pb2.AuditReport":
    from millrace.cli import interrupts
    from millrace.cli.run_store import find_uid, naming, open_run_store, redis_url, store_prefix
    from millrace.runlog import open_redis
    from millrace.runlog.audit import audit_run

    objects, deployment = open_run_store(store), store_prefix(prefix)
    uid = find_uid(objects, deployment, name)

    async def work(_: interrupts.Interrupts) -> "audit_pb2.AuditReport":
        with naming("--redis"):
            client = open_redis(redis_url(redis)) if redis is not None else None
        try:
            return await audit_run(client, objects, prefix=deployment, uid=uid, on_progress=say)
        finally:
            if client is not None:
                await client.aclose()

    return interrupts.run(work)


@contextlib.contextmanager
def _patience(name: str) -> Iterator[Callable[[str], None]]:
    """What is being looked at, and for how long, on a terminal's standard error; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"auditing {name}", total=None)
        yield lambda text: progress.update(task, description=f"auditing {name}: {text}")
