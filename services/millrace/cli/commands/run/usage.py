"""`millrace run usage`: what runs have used, by tenant."""

from typing import TYPE_CHECKING

import click

from millrace.cli.connection import ask_server
from millrace.cli.options import FORMAT, SERVER

if TYPE_CHECKING:
    from millrace.client import Client
    from millrace.v1 import run_service_pb2 as rs

_HEADER = ("TENANT", "RUNS", "ACCELERATOR HOURS", "PROMPT TOKENS", "SAMPLED TOKENS", "STORED BYTES")


@click.command()
@click.option("--tenant", default="", help="Only this tenant's runs.")
@FORMAT
@SERVER
def usage(tenant: str, form: str, server: str | None) -> None:
    """Show what runs have used, by tenant. Deleted runs are not counted.

    Tokens are those of committed rollouts, trained on or not. Accelerator hours of operators' runs are counted where
    there are queue groups.
    """
    from millrace.cli.view.output import message_json
    from millrace.cli.view.text import table
    from millrace.v1 import run_service_pb2 as rs

    async def show(client: "Client") -> None:
        """Print the table, or the answer as JSON."""
        found = await client.runs.usage(tenant=tenant)
        if form == "json":
            click.echo(message_json(rs.ListUsageResponse(tenants=found)))
        else:
            click.echo(table([_row(each) for each in found], header=_HEADER))

    ask_server(server, show)


def _row(each: "rs.TenantUsage") -> tuple[str, ...]:
    """Return the cells of a tenant's line."""
    counts = (each.prompt_tokens, each.sampled_tokens, each.stored_bytes)
    return (each.tenant or "–", str(each.num_runs), f"{each.accelerator_seconds / 3600:.2f}", *map(str, counts))
