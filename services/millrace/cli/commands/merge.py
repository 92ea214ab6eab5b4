"""`millrace merge`: the model that an adapter of PEFT makes of its base."""

from pathlib import Path

import click

from millrace.cli.errors import CliError

_DIRECTORY = click.Path(path_type=Path, exists=True, file_okay=False)


@click.command()
@click.argument("adapter", type=_DIRECTORY)
@click.option("--base", type=_DIRECTORY, required=True, help="Directory of the model that it was trained on.")
@click.option("--to", "directory", type=click.Path(path_type=Path), required=True, help="Directory, new or empty.")
def merge(adapter: Path, base: Path, directory: Path) -> int:
    """Merge an adapter that PEFT has saved into its base, as PEFT does, and write the model.

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
