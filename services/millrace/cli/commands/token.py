"""`millrace token`: make bearer tokens for the public API and for the workers of a deployment."""

import click


@click.group()
def token() -> None:
    """Make bearer tokens. Servers keep only their hashes; nobody can show a token again."""


@token.command()
@click.option("--name", required=True, help="Who will have it; servers log this name, never the token.")
@click.option("--expires", metavar="DURATION", help="How long it is valid, such as 30d or 12h; for ever if left out.")
@click.option("--read-only", is_flag=True, help="It may look at everything and change nothing.")
def new(name: str, expires: str | None, read_only: bool) -> None:
    """Print a fresh token, once, and the line that makes a server accept it.

    The token goes to standard output, so it can go straight into a file:

        millrace token new --name alice --expires 30d > alice.token

    The line goes to standard error; append it to the file that MILLRACE_TOKENS_FILE of the orchestrator names. Servers
    read the file again when it changes: to revoke a token, delete its line.
    """
    import datetime

    from millrace.rpc.tokens import new_token, parse_duration, token_line

    try:
        ends = None if expires is None else datetime.datetime.now(datetime.UTC) + parse_duration(expires)
    except (ValueError, OverflowError) as error:
        raise click.BadParameter(str(error), param_hint="--expires") from None
    made = new_token()
    try:
        line = token_line(made, name, expires=ends, may_write=not read_only)
    except ValueError:
        wrong = "must be 1 to 64 letters, digits or ._@- and begin with a letter or digit"
        raise click.BadParameter(f"{name!r} {wrong}", param_hint="--name") from None
    click.echo("the server's line (MILLRACE_TOKENS_FILE):", err=True)
    click.echo(f"  {line}", err=True)
    click.echo("the token, which is shown only now (MILLRACE_TOKEN_FILE of the client):", err=True)
    click.echo(made)
