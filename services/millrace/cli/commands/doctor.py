"""`millrace doctor`."""

from pathlib import Path

import click


@click.command()
@click.option(
    "--server", metavar="ADDR", help="host:port of the orchestrator; else MILLRACE_SERVER, else 127.0.0.1:50051."
)
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    help="Directory of the stack that listens there; else it is looked for below outputs.",
)
def doctor(server: str | None, directory: Path | None) -> int:
    """Check that the API, Redis and the object store are there and fit for runs.

    Redis and the object store are those of MILLRACE_REDIS_URL and MILLRACE_STORE_URL, as in the containers of a
    deployment, or those of the stack that runs here. Writes and removes a few small objects.
    Exits 0 if all is well, else 5.
    """
    import asyncio

    from millrace.cli.connection import server_address
    from millrace.cli.doctor import examine

    findings = asyncio.run(examine(*server_address(server), directory=directory))
    marks = {True: "ok", False: "FAILED", None: "–"}
    for finding in findings:
        click.echo(f"{marks[finding.is_good]:<7} {finding.what:<13} {finding.text}")
        if finding.remedy and finding.is_good is False:
            click.echo(f"{'':<21} remedy: {finding.remedy}")
    return 5 if any(finding.is_good is False for finding in findings) else 0
