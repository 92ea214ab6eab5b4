"""`millrace doctor`."""

import click


@click.command()
@click.option(
    "--server", metavar="ADDR", help="host:port of the orchestrator; else MILLRACE_SERVER, else 127.0.0.1:50051."
)
def doctor(server: str | None) -> int:
    """Check that the API, Redis and the object store are there and fit for runs.

    Redis and the object store are looked at where MILLRACE_REDIS_URL and MILLRACE_STORE_URL name them, as in the
    containers of a deployment. Writes and removes a few small objects. Exits 0 if all is well, else 5.
    """
    import asyncio

    from millrace.cli.address import server_address
    from millrace.cli.doctor import examine

    findings = asyncio.run(examine(*server_address(server)))
    marks = {True: "ok", False: "FAILED", None: "–"}
    for finding in findings:
        click.echo(f"{marks[finding.is_good]:<7} {finding.what:<13} {finding.text}")
        if finding.remedy and finding.is_good is False:
            click.echo(f"{'':<21} remedy: {finding.remedy}")
    return 5 if any(finding.is_good is False for finding in findings) else 0
