"""`millrace config`, `token`, `merge` and `version`: commands that need no service."""

import importlib.metadata
import platform
from pathlib import Path

import click

import millrace
from millrace.cli.errors import CliError


@click.group(name="config", context_settings={"help_option_names": ["-h", "--help"]})
def config() -> None:
    """Work with config files."""


@config.command(name="import")
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(dir_okay=False))
@click.option(
    "--as",
    "kind",
    type=click.Choice(["rl", "sft", "eval", "trainer", "orchestrator", "inference"]),
    help="What the files are, where their keys and names do not tell.",
)
@click.option("--out", "-o", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path), help="Write it here.")
def import_files(files: tuple[str, ...], kind: str | None, out: Path | None) -> int:
    """Translate config files of prime-rl or TRL into one of Millrace.

    Files of prime-rl are those of September 2025 to October 2026. Files of TRL's GRPO or SFT trainer are YAML, JSON, or
    a script that calls GRPOConfig or SFTConfig, which is read and not run; TRL's defaults are written out.

    Several files are parts of one run, as in `rl --trainer @ … --orchestrator @ …`. The result is printed, or written
    to --out; standard error says of every key what became of it. Nothing is written if a key has no meaning here.
    """
    from millrace.cli.errors import CliError
    from millrace.cli.session.config_file import import_config, print_notes

    if out is not None and out.exists():
        raise CliError(f"{out} exists", hint="name another file with --out: nothing is overwritten")
    text, notes, how = import_config(files, kind=kind, out=out)
    print_notes(notes)
    if out is None:
        click.echo(text, nl=False)
    else:
        out.write_text(text, encoding="utf-8")
    click.echo(f"run it: {how}", err=True)
    return 0


# `millrace token`: make bearer tokens for the public API and for the workers of a deployment.


@click.group()
def token() -> None:
    """Make bearer tokens. Servers keep only hashes, so a token cannot be shown again."""


@token.command()
@click.option("--name", required=True, help="Who will have it; servers log this name, never the token.")
@click.option("--expires", metavar="DURATION", help="How long it is valid, such as 30d or 12h; for ever if left out.")
@click.option("--read-only", is_flag=True, help="It may look at what it opens and change nothing.")
@click.option("--tenant", metavar="TENANT", default="", help="It opens this tenant's runs only; if left out, all.")
def new(name: str, expires: str | None, read_only: bool, tenant: str) -> None:
    """Print a fresh token, once, and the line that makes a server accept it.

    The token goes to standard output, so it can go straight into a file:

        millrace token new --name alice --expires 30d > alice.token

    The line goes to standard error; append it to the file that MILLRACE_TOKENS_FILE of the orchestrator names. Servers
    read the file again when it changes: to revoke a token, delete its line.
    """
    import datetime

    from millrace.rpc.tokens import is_tenant, new_token, parse_duration, token_line

    try:
        ends = None if expires is None else datetime.datetime.now(datetime.UTC) + parse_duration(expires)
    except (ValueError, OverflowError) as error:
        raise click.BadParameter(str(error), param_hint="--expires") from None
    made = new_token()
    if not is_tenant(tenant):
        wrong = "must be 1 to 20 lower-case letters, digits or -, begin with a letter and not end with -"
        raise click.BadParameter(f"{tenant!r} {wrong}", param_hint="--tenant")
    try:
        line = token_line(made, name, expires=ends, may_write=not read_only, tenant=tenant)
    except ValueError:
        wrong = "must be 1 to 64 letters, digits or ._@- and begin with a letter or digit"
        raise click.BadParameter(f"{name!r} {wrong}", param_hint="--name") from None
    click.echo("the server's line (MILLRACE_TOKENS_FILE):", err=True)
    click.echo(f"  {line}", err=True)
    click.echo("the token, which is shown only now (MILLRACE_TOKEN_FILE of the client):", err=True)
    click.echo(made)


# `millrace merge`: the model that an adapter of PEFT makes of its base.

_DIRECTORY = click.Path(path_type=Path, exists=True, file_okay=False)


@click.command()
@click.argument("adapter", type=_DIRECTORY)
@click.option("--base", type=_DIRECTORY, required=True, help="Directory of the model that it was trained on.")
@click.option("--to", "directory", type=click.Path(path_type=Path), required=True, help="Directory, new or empty.")
def merge(adapter: Path, base: Path, directory: Path) -> int:
    """Merge an adapter of PEFT into its base, as PEFT does.

    Kinds of adapters that are not known are refused by their field: docs/adapters.md.
    """
    from millrace.policies.peft.directory import open_adapter

    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CliError(f"{directory} exists and is not an empty directory", hint="name a new directory with --to")
    opened = open_adapter(adapter, base)
    for note in opened.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(opened.merge(directory).resolve())
    return 0


# `millrace version`.

_PACKAGES = ("grpcio", "protobuf", "pydantic", "redis", "verifiers", "torch", "transformers", "vllm")


@click.command()
def version() -> None:
    """Show the versions of Millrace and of its libraries."""
    click.echo(f"millrace {millrace.__version__}   python {platform.python_version()} on {platform.platform()}")
    for name in _PACKAGES:
        try:
            click.echo(f"  {name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            click.echo(f"  {name} (not installed)")
