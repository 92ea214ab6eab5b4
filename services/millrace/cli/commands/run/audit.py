"""`millrace run audit`: check the promises of a run against its log, by its server or from the store itself."""

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from millrace.cli.connection import ask_server
from millrace.cli.errors import EXIT_FAILED
from millrace.cli.offline.audit_here import AuditRequest, audit_here
from millrace.cli.options import FORMAT, RUN, SERVER, options

if TYPE_CHECKING:
    from millrace.client import Client
    from millrace.v1 import audit_pb2


_FROM_HERE = options(
    click.option("--store", metavar="URL", help="Audit this object store from here, without any server."),
    click.option(
        "--redis",
        metavar="URL|FILE",
        help="From here: also compare this Redis with the store; a file that holds its URL keeps a password out of the "
        "command line, such as redis/redis.url of a stack's directory.",
    ),
    click.option("--prefix", metavar="NAME", help="From here: the deployment; else MILLRACE_PREFIX, else millrace."),
    click.option("--deep", "is_deep", is_flag=True, help="From here: read every byte, and decode every policy."),
    click.option(
        "--replay",
        "num_replays",
        metavar="N",
        type=click.IntRange(min=1),
        default=None,
        help="With --deep: also compute N steps again, spread over the run; needs the trainer's packages.",
    ),
    click.option(
        "--attestation",
        "attestations",
        metavar="FILE",
        multiple=True,
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="From here: what `run attest --out` wrote must be so. May be given several times.",
    ),
    click.option(
        "--attest-key",
        "key",
        metavar="FILE",
        envvar="MILLRACE_ATTEST_KEY_FILE",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="From here: the key that attestations are signed with; else MILLRACE_ATTEST_KEY_FILE.",
    ),
)


def _from_here(command: Callable[..., int]) -> Callable[..., int]:
    """Add the options of an audit by this process, and hand them on as one `AuditRequest`."""

    @functools.wraps(command)
    def with_request(name: str, as_json: bool, form: str, server: str | None, **options: Any) -> int:
        return command(AuditRequest(name=name, **options), as_json=as_json or form == "json", server=server)

    return _FROM_HERE(with_request)


@click.command()
@RUN
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
@FORMAT
@SERVER
@_from_here
def audit(request: AuditRequest, *, as_json: bool, server: str | None) -> int:
    """Check that nothing of a run was lost, counted twice, or changed.

    Reads everything that the run has written, in Redis and in the object store, and changes nothing. Exits 0 if the log
    keeps every promise, 1 with each violation if not, and says what it could not see.

    A server audits without reading the bytes of weights. --deep, --attestation and --store audit from here: the store
    is --store, else outputs/RUN/store, MILLRACE_STORE_URL, outputs/local/store.
    """
    if not request.is_here and (request.redis is not None or request.prefix is not None):
        raise click.UsageError("--redis and --prefix belong to --store, --deep or --attestation")
    if request.is_here and server is not None:
        raise click.UsageError("--store, --deep and --attestation audit without a server: leave --server out")
    if request.num_replays and not request.is_deep:
        raise click.UsageError("--replay belongs to --deep")
    with _patience(request.name) as say:
        report = audit_here(request, say) if request.is_here else _by_server(request.name, server)
    _print(report, as_json=as_json)
    return EXIT_FAILED if report.violations else 0


def _print(report: "audit_pb2.AuditReport", *, as_json: bool) -> None:
    if as_json:
        from google.protobuf.json_format import MessageToDict

        document = MessageToDict(report, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        click.echo(json.dumps(document, indent=2))
    else:
        from millrace.cli.offline.audit_report import report_lines

        click.echo("\n".join(report_lines(report)))


def _by_server(name: str, server: str | None) -> "audit_pb2.AuditReport":
    from millrace.cli.names import resolve

    async def ask(client: "Client") -> "audit_pb2.AuditReport":
        found = await resolve(client.runs, name)
        return await client.runs.audit(found.name)

    return ask_server(server, ask, run=name)


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
